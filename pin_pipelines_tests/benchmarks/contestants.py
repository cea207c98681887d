"""Who takes part: the engine, a row-by-row version of the specification, and one statement for a whole table.

Each does the same job from the same state, retention and ANALYZE included, with the session settings of the
engine, in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from uuid import UUID, uuid4

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.decay import SCORE_QUANTUM, decay_weights
from pin_pipelines.catalog.recompute import Parameters, recompute
from pin_pipelines.catalog.tables import SCORED_STATUSES, SNAPSHOTS, CardKind
from pin_pipelines_tests.benchmarks.catalogue import PARAMETERS, RUN_DATE
from pin_pipelines_tests.benchmarks.measuring import BatchTimes, Memory, MemorySampler, TimedConnection

_OLDEST = RUN_DATE - timedelta(days=PARAMETERS.window_days)
_KEEP_FROM = RUN_DATE - timedelta(days=PARAMETERS.window_days + 2)
_WEIGHTS = decay_weights(PARAMETERS.window_days, PARAMETERS.decay_half_life_days)
_EXACT = Context(prec=4 * PARAMETERS.window_days + 40)
_SCORED = f"status IN {SCORED_STATUSES}"


@dataclass(frozen=True)
class Run:
    """What a contestant took. Times are seconds."""

    pass_seconds: float
    maintenance_seconds: float
    held: Sequence[float]
    """How long each transaction of the pass held its locks."""
    memory: Memory
    cpu_seconds: float
    """Of the Python process."""
    updated: int

    @property
    def seconds(self) -> float:
        return self.pass_seconds + self.maintenance_seconds


# Does the pass (and, if that is its own affair, the maintenance); returns how many scores it changed.
Job = Callable[[str, BatchTimes], int]


def ready() -> None:
    """Do nothing: whoever calls it has this module's imports behind it."""


def measure(job: Job, url: str) -> Run:
    """Do a job from beginning to end; to be called in a process that does nothing else."""
    times = BatchTimes()
    began, cpu_began = time.perf_counter(), time.process_time()
    with MemorySampler() as sampler:
        updated = job(url, times)
    ended = time.perf_counter()
    assert times.maintenance_at is not None
    return Run(
        pass_seconds=times.maintenance_at - began,
        maintenance_seconds=ended - times.maintenance_at,
        held=times.held,
        memory=sampler.memory,
        cpu_seconds=time.process_time() - cpu_began,
        updated=updated,
    )


# The engine


def run_engine(url: str, times: BatchTimes, *, workers: int) -> int:
    summary = recompute(
        partial(TimedConnection.open, url, times),
        run_id=str(uuid4()),
        run_date=RUN_DATE,
        parameters=Parameters(workers=workers),
    )
    return summary.property_object_cards_updated + summary.project_cards_updated


def engine(workers: int) -> Job:
    return partial(run_engine, workers=workers)


# (a) Row by row: the specification, step by step, as a good programmer would write it down. The window of a batch
# is one query, the weights are made once, days without views cost no multiplication, and the driver pipelines
# the row statements.

_LOCK_BATCH = f"""
SELECT id, popularity_views, popularity_score FROM {{table}}
WHERE id > %s AND {_SCORED}
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"""

_READ_WINDOW = f"""
SELECT card_id, run_date, cumulative_views FROM {SNAPSHOTS}
WHERE card_kind = %s AND card_id = ANY(%s) AND run_date >= %s AND run_date < %s
ORDER BY card_id, run_date"""

_UPSERT_SNAPSHOT = f"""
INSERT INTO {SNAPSHOTS} (id, card_kind, card_id, run_date, cumulative_views, created_at)
VALUES (%s, %s, %s, %s, %s, clock_timestamp())
ON CONFLICT (card_kind, card_id, run_date)
DO UPDATE SET cumulative_views = excluded.cumulative_views, created_at = excluded.created_at"""

_UPDATE_SCORE = "UPDATE {table} SET popularity_score = %s, updated_at = clock_timestamp() WHERE id = %s"

Snapshot = tuple[date, int]


def row_by_row(url: str, times: BatchTimes) -> int:
    updated = 0
    with _session(url, times) as connection:
        # Its row statements are planned once, whatever is best for the engine.
        connection.execute("SET plan_cache_mode = auto")
        connection.commit()
        for kind in CardKind:
            after = UUID(int=0)
            while True:
                with connection.transaction():
                    cards = connection.execute(
                        _LOCK_BATCH.format(table=kind.table), [after, PARAMETERS.batch_size]
                    ).fetchall()
                    if not cards:
                        break
                    updated += _score_batch(connection, kind, cards)
                after = cards[-1][0]
    return updated


def _score_batch(connection: TimedConnection, kind: CardKind, cards: Sequence[tuple[UUID, int, Decimal]]) -> int:
    ids = [card_id for card_id, _, _ in cards]
    # Planned for its values: a generic plan would expect ten cards.
    rows = connection.execute(_READ_WINDOW, [kind, ids, _OLDEST, RUN_DATE], prepare=False)
    windows = {
        card_id: [(run_date, views) for _, run_date, views in window]
        for card_id, window in groupby(rows, key=itemgetter(0))
    }
    scores = _changed_scores(cards, windows)
    with connection.cursor() as cursor:
        cursor.executemany(_UPSERT_SNAPSHOT, [(uuid4(), kind, card_id, RUN_DATE, views) for card_id, views, _ in cards])
        cursor.executemany(
            _UPDATE_SCORE.format(table=kind.table), [(score, card_id) for card_id, score in scores.items()]
        )
    return len(scores)


def _changed_scores(
    cards: Iterable[tuple[UUID, int, Decimal]], windows: Mapping[UUID, list[Snapshot]]
) -> dict[UUID, Decimal]:
    changed = {}
    for card_id, views, stored_score in cards:
        score = _score([*windows.get(card_id, ()), (RUN_DATE, views)])
        if score != stored_score:
            changed[card_id] = score
    return changed


def _score(snapshots: Sequence[Snapshot]) -> Decimal:
    score = Decimal(0)
    for (_, before), (run_date, views) in pairwise(snapshots):
        if views > before:
            score = _EXACT.fma(_WEIGHTS[(RUN_DATE - run_date).days], views - before, score)
    return score.quantize(SCORE_QUANTUM, rounding=ROUND_HALF_UP, context=_EXACT)


# (b) The limit: one statement a table, both in one transaction. It locks every card until its commit, and knows no
# other instance, no poison and no end before the end.

_LIMIT = f"""
WITH page AS MATERIALIZED (
    SELECT id, popularity_views, popularity_score, ctid AS place FROM {{table}} WHERE {_SCORED} ORDER BY id FOR UPDATE
), snapshot AS (
    INSERT INTO {SNAPSHOTS} (id, card_kind, card_id, run_date, cumulative_views, created_at)
    SELECT (%(id_prefix)s || lpad(to_hex(row_number() OVER ()), 12, '0'))::uuid,
           %(card_kind)s, id, %(run_date)s, popularity_views, clock_timestamp()
    FROM page
    ON CONFLICT (card_kind, card_id, run_date)
    DO UPDATE SET cumulative_views = excluded.cumulative_views, created_at = excluded.created_at
), scored AS ({{scored}}
)
UPDATE {{table}} c SET popularity_score = scored.score, updated_at = clock_timestamp()
FROM scored WHERE scored.place = c.ctid AND scored.score <> scored.stored_score"""

_SUM = """round(coalesce(sum(day.delta * (%(weights)s::numeric[])[%(run_date)s::date - day.credited_to + 1])
           FILTER (WHERE day.delta > 0), 0), 4) AS score"""

_IN_WINDOW = "s.card_kind = %(card_kind)s AND s.run_date >= %(oldest)s AND s.run_date < %(run_date)s"

# Card by card, as the engine does it: the counters in two arrays, one shifted by a night.
_SCORED_CARD_BY_CARD = f"""
    SELECT page.id, page.place, page.popularity_score AS stored_score, decayed.score
    FROM page CROSS JOIN LATERAL (
        SELECT array_agg(s.cumulative_views ORDER BY s.run_date) AS views,
               array_agg(s.run_date ORDER BY s.run_date) AS dates
        FROM {SNAPSHOTS} s WHERE {_IN_WINDOW} AND s.card_id = page.id
    ) known CROSS JOIN LATERAL (
        SELECT {_SUM}
        FROM (
            SELECT credited_to, views - views_before AS delta
            FROM unnest(known.views, known.views[2:] || page.popularity_views, known.dates[2:] || %(run_date)s::date)
                 AS pair (views_before, views, credited_to)
        ) day
    ) decayed"""

# One window over all cards.
_SCORED_AT_ONCE = f"""
    SELECT page.id, page.place, page.popularity_score AS stored_score, coalesce(decayed.score, 0) AS score
    FROM page LEFT JOIN (
        SELECT day.id, {_SUM}
        FROM (
            SELECT page.id,
                   lead(s.run_date, 1, %(run_date)s::date) OVER by_date AS credited_to,
                   lead(s.cumulative_views, 1, page.popularity_views) OVER by_date - s.cumulative_views AS delta
            FROM page JOIN {SNAPSHOTS} s ON s.card_id = page.id
            WHERE {_IN_WINDOW}
            WINDOW by_date AS (PARTITION BY page.id ORDER BY s.run_date)
        ) day
        GROUP BY day.id
    ) decayed ON decayed.id = page.id"""


def one_statement_card_by_card(url: str, times: BatchTimes) -> int:
    return _one_statement(url, times, _SCORED_CARD_BY_CARD)


def one_statement_at_once(url: str, times: BatchTimes) -> int:
    return _one_statement(url, times, _SCORED_AT_ONCE)


def _one_statement(url: str, times: BatchTimes, scored: str) -> int:
    updated = 0
    with _session(url, times) as connection:
        connection.execute("SET statement_timeout = 0")
        connection.commit()
        with connection.transaction():
            for kind in CardKind:
                updated += connection.execute(
                    _LIMIT.format(table=kind.table, scored=scored),
                    {
                        "id_prefix": f"{time.time_ns() // 1_000_000:012x}70008000",
                        "card_kind": kind,
                        "run_date": RUN_DATE,
                        "oldest": _OLDEST,
                        "weights": _WEIGHTS,
                    },
                ).rowcount
    return updated


@contextmanager
def _session(url: str, times: BatchTimes) -> Iterator[TimedConnection]:
    """The engine's session around the pass of a peer, and the engine's maintenance after it."""
    with TimedConnection.open(url, times) as connection:
        connection.execute(statements.WORKER_SESSION, {"application_name": "benchmark"})
        connection.commit()
        yield connection
        connection.execute(statements.MAINTENANCE_SESSION)
        connection.execute(statements.PRUNE, {"keep_from": _KEEP_FROM})
        connection.commit()
        connection.execute(statements.ANALYZE)
