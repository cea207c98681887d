"""How fast the ranking recompute is, beside one set-based statement over all posts.

    python -m pin_pipelines_tests.benchmarks.ranking --posts 200000

Both get a copy of the same database (``posts`` says how it is laid out), begin after a checkpoint, and run in a process
of their own; nothing else runs on the server, autovacuum included. What they leave must be identical. The statement is
the limit: it locks every row until its commit, knows no token and no end before the end, and asks nobody for views.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from rich.console import Console
from rich.table import Table

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.news import statements
from pin_pipelines.news.affinity import MAX_BLOCK_KINDS, MAX_PROJECT_IDS
from pin_pipelines.news.ranking import LONG_WINDOW_DAYS, SHORT_WINDOW_DAYS, RankingParameters, recency_decays
from pin_pipelines.news.recompute import Progress, recompute
from pin_pipelines.news.tables import POST_BLOCKS, POST_DAILY_VIEWS, POST_PROJECT_REFS, POSTS, SIGNALS
from pin_pipelines_tests.benchmarks.catalogue import copy_database, drop_database
from pin_pipelines_tests.benchmarks.measuring import Memory, MemorySampler, server_cpu_seconds
from pin_pipelines_tests.benchmarks.posts import AS_OF, Fingerprint, build, fingerprint
from pin_pipelines_tests.benchmarks.processes import fresh_process
from pin_pipelines_tests.benchmarks.report import Target, figures_table, milliseconds, targets_table

ENGINE, LIMIT = "engine", "limit, one statement"

_MOST_OF_LIMIT = 1.5
# As for a production server, whose memory holds the tables.
_SERVER_SETTINGS = {"shared_buffers": "3GB", "effective_cache_size": "6GB", "max_wal_size": "16GB"}
_TEMPLATE, _COPY = "benchmark_template", "benchmark_copy"

console = Console(width=120)


@dataclass(frozen=True)
class Run:
    """What a contestant took."""

    seconds: float
    transactions: Sequence[float]
    """How long each of its transactions took, in seconds."""
    memory: Memory
    cpu_seconds: float
    """Of the Python process."""


@dataclass(frozen=True)
class Result:
    """A run, and what the server says of it."""

    run: Run
    cpu_seconds: float
    """Of the server and of the Python process: less sensitive to what else the machine does than the time."""
    fingerprint: Fingerprint


# Does all there is to do; returns the seconds of each transaction.
Job = Callable[[str], Sequence[float]]


def ready() -> None:
    """Do nothing: whoever calls it has this module's imports behind it."""


def measure(job: Job, url: str) -> Run:
    """Do a job from beginning to end; to be called in a process that does nothing else."""
    began, cpu_began = time.perf_counter(), time.process_time()
    with MemorySampler() as sampler:
        transactions = job(url)
    return Run(time.perf_counter() - began, transactions, sampler.memory, time.process_time() - cpu_began)


def engine(url: str) -> Sequence[float]:
    ends = [time.perf_counter()]

    def note(_: Progress) -> None:
        ends.append(time.perf_counter())

    recompute(lambda: psycopg.connect(url), as_of=AS_OF, on_progress=note)
    return [end - before for before, end in pairwise(ends)]


_ONE_STATEMENT = f"""
INSERT INTO {SIGNALS} AS s (id, views_7d, views_30d, likes, comments_rate, recency_decay, score, affinity_inputs,
                            recomputed_at)
SELECT p.id, coalesce(viewed.views_7d, 0), coalesce(viewed.views_30d, 0), p.likes_count, rate.value, decay.value,
       round(CASE WHEN decay.value > 0
                  THEN %(w1)s * ln(round(coalesce(viewed.views_30d, 0)::numeric + 1, 20)) * decay.value ELSE 0 END
             + %(w2)s * p.likes_count + %(w3)s * rate.value
             + round(%(w4)s * least(greatest(p.promotion_boost, 0), %(full_boost)s), 30) / %(full_boost)s
             + %(w4)s * coalesce(trusted.trust, 0), 6),
       jsonb_build_object(
           'ContractVersion', 1, 'CategoryId', p.category_id, 'BlockKinds', to_jsonb(coalesce(blocks.kinds, '{{}}')),
           'ProjectIds', to_jsonb(coalesce(projects.ids, '{{}}')), 'AuthorType', p.author_type),
       clock_timestamp()
FROM {POSTS} p
LEFT JOIN (
    SELECT post_id, sum(views) FILTER (WHERE day >= %(first_of_short)s)::bigint AS views_7d,
           sum(views)::bigint AS views_30d
    FROM {POST_DAILY_VIEWS} WHERE day BETWEEN %(first_of_long)s AND %(as_of)s GROUP BY post_id
) viewed ON viewed.post_id = p.id
LEFT JOIN (
    SELECT post_id, (array_agg(DISTINCT kind ORDER BY kind))[:{MAX_BLOCK_KINDS}] AS kinds
    FROM (SELECT post_id, kind COLLATE "C" FROM {POST_BLOCKS}) block GROUP BY post_id
) blocks ON blocks.post_id = p.id
LEFT JOIN (
    SELECT post_id, (array_agg(project_id ORDER BY project_id))[:{MAX_PROJECT_IDS}] AS ids
    FROM {POST_PROJECT_REFS} GROUP BY post_id
) projects ON projects.post_id = p.id
LEFT JOIN unnest(%(trusted_types)s::text[], %(trusts)s::numeric[]) AS trusted (author_type, trust)
     ON trusted.author_type = p.author_type
CROSS JOIN LATERAL (
    SELECT round(round(p.comments_count, 30) / greatest(coalesce(viewed.views_30d, 0), 1), 4) AS value
) rate
CROSS JOIN LATERAL (
    SELECT round(coalesce((%(decays)s::int[])[
               greatest(%(as_of)s::date - (p.published_at AT TIME ZONE 'UTC')::date, 0) + 1], 0) * 0.00001, 5) AS value
) decay
ORDER BY p.id
ON CONFLICT (id) DO UPDATE SET
    views_7d = excluded.views_7d, views_30d = excluded.views_30d, likes = excluded.likes,
    comments_rate = excluded.comments_rate, recency_decay = excluded.recency_decay, score = excluded.score,
    affinity_inputs = excluded.affinity_inputs, recomputed_at = excluded.recomputed_at"""


def one_statement(url: str) -> Sequence[float]:
    parameters = RankingParameters()
    began = time.perf_counter()
    with psycopg.connect(url) as connection:
        connection.execute(statements.WORKER_SESSION)
        connection.execute("SET statement_timeout = 0")
        connection.execute(
            _ONE_STATEMENT,
            {
                **{name: getattr(parameters, name) for name in ("w1", "w2", "w3", "w4", "full_boost")},
                "trusted_types": list(parameters.author_trust),
                "trusts": list(parameters.author_trust.values()),
                "decays": [int(decay.scaleb(5)) for decay in recency_decays(parameters.half_life_days)],
                "as_of": AS_OF,
                "first_of_short": AS_OF - timedelta(days=SHORT_WINDOW_DAYS - 1),
                "first_of_long": AS_OF - timedelta(days=LONG_WINDOW_DAYS - 1),
            },
        )
        connection.commit()
        committed = time.perf_counter()
        connection.execute(statements.ANALYZE)
    return [committed - began]


JOBS: Mapping[str, Job] = {ENGINE: engine, LIMIT: one_statement}


class Arena:
    """The server, and a template of one size on it."""

    def __init__(self, server: EmbeddedPostgres, data_dir: Path) -> None:
        self._server = server
        self._data_dir = data_dir

    def build(self, posts: int) -> None:
        with console.status(f"making {posts:,} posts"):
            build(self._server, _TEMPLATE, posts)

    def round(self) -> dict[str, Result]:
        """Every contestant once."""
        results = {name: self.run(name) for name in JOBS}
        if len({result.fingerprint for result in results.values()}) > 1:
            lines = "\n".join(f"  {name}: {result.fingerprint}" for name, result in results.items())
            raise SystemExit(f"the contestants disagree about the signals:\n{lines}")
        return results

    def run(self, name: str) -> Result:
        url = copy_database(self._server, _TEMPLATE, _COPY)
        with console.status(name), fresh_process(ready) as process:
            cpu_before = server_cpu_seconds(self._data_dir)
            run = process.submit(measure, JOBS[name], url).result()
            cpu_seconds = server_cpu_seconds(self._data_dir) - cpu_before + run.cpu_seconds
            result = Result(run, cpu_seconds, fingerprint(url))
        drop_database(self._server, _COPY)
        console.print(f"{name}: {run.seconds:.1f} s", highlight=False)
        return result


def main(
    posts: Annotated[int, typer.Option(help="Posts to rank.", min=1)] = 200_000,
    repeat: Annotated[int, typer.Option(help="Rounds; of each contestant the median round counts.", min=1)] = 3,
) -> None:
    """Compare the ranking recompute with its limit."""
    with _server() as (server, data_dir):
        arena = Arena(server, data_dir)
        arena.build(posts)
        # Whoever comes first would pay for the first touch of the server's memory.
        arena.run(LIMIT)
        rounds = [arena.round() for _ in range(repeat)]
    results = {name: _median([each[name] for each in rounds]) for name in JOBS}
    console.print(_table(results, posts))
    ratio = results[ENGINE].run.seconds / results[LIMIT].run.seconds
    console.print(targets_table([Target("engine: time, of the limit's", _MOST_OF_LIMIT, ratio, "x")]))


@contextmanager
def _server() -> Iterator[tuple[EmbeddedPostgres, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="pin-benchmark-")).resolve()
    data_dir = folder / "postgres"
    try:
        # Autovacuum would come over one contestant and not over another.
        with EmbeddedPostgres(data_dir, _SERVER_SETTINGS | {"autovacuum": "off"}) as server:
            yield server, data_dir
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _median(results: Sequence[Result]) -> Result:
    return sorted(results, key=lambda result: result.run.seconds)[(len(results) - 1) // 2]


def _table(results: Mapping[str, Result], posts: int) -> Table:
    table = figures_table(
        f"{posts:,} posts: seconds, ratios to the limit, milliseconds of a transaction, MB",
        *("total", "CPU", "posts/s", "of limit", "CPU of limit", "longest", "p99", "median", "peak memory"),
    )
    limit = results[LIMIT]
    for name, result in results.items():
        run = result.run
        table.add_row(
            name,
            f"{run.seconds:.1f}",
            f"{result.cpu_seconds:.1f}",
            f"{posts / run.seconds:,.0f}",
            f"{run.seconds / limit.run.seconds:.2f}",
            f"{result.cpu_seconds / limit.cpu_seconds:.2f}",
            *milliseconds(run.transactions),
            f"{run.memory.peak:.0f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
