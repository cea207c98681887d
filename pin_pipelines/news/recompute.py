"""RankingRecomputeJob: signals of every post, batch by batch (spec, «Согласованность пересчёта»).

One transaction a batch: read the next posts by id and the tokens of their signals, ask for their views, upsert. The
upsert is complete and depends on nothing but its sources, so a run that is repeated, or that goes on where another
broke off, comes to the same signals.

The token is the row's ``xmin``. A row that somebody else wrote between the reading and the upsert is not covered: it is
read again, with everything it is made of. A like moves the counter of its post alone and waits for no batch; the upsert
reads the counter as it stands at that moment, and a like that comes later is in the next run's score.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg

from pin_pipelines import tracing
from pin_pipelines.database import Connect, Connection, fetch_one
from pin_pipelines.news import statements
from pin_pipelines.news.ranking import RankingParameters, recency_decays
from pin_pipelines.news.tables import check_ranking_tables
from pin_pipelines.news.views import PostgresPostViews, PostViews, ViewTotals

# How often a batch is tried after a deadlock, a lock time-out or the like.
MAX_ATTEMPTS = 5
MAX_BATCH_SIZE = 10_000

# A post that goes at the moment when its first signals are written breaks their foreign key.
_RETRIABLE = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.ForeignKeyViolation,
)
_NO_VIEWS = ViewTotals(0, 0)

_RUN_SPAN = "news.ranking_recompute"
_BATCH_SPAN = f"{_RUN_SPAN}.batch"


class StopReason(StrEnum):
    """Why a run ended."""

    COMPLETED = "completed"
    STOP_SIGNAL = "stop_signal"


@dataclass(frozen=True)
class Progress:
    """How far a run is, after a batch."""

    posts_done: int
    posts_total: int
    posts_per_second: float


@dataclass(frozen=True)
class Summary:
    """The run's figures, and how it ended.

    Attributes:
        as_of: D.
        posts_ranked: signals written.
        signals_created: of these, for posts that had none before.
        conflicts: rows that somebody else wrote meanwhile; they were read again.
        retries: batches that were tried again.
    """

    as_of: date
    stopped_reason: StopReason
    posts_total: int
    posts_ranked: int
    signals_created: int
    conflicts: int
    retries: int
    duration_ms: int


def recompute(
    connect: Connect,
    *,
    as_of: date,
    run_id: str | None = None,
    parameters: RankingParameters | None = None,
    batch_size: int = 1000,
    open_views: Callable[[Connection], PostViews] = PostgresPostViews,
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    logger: logging.Logger | None = None,
) -> Summary:
    """Compute the signals of every post.

    Args:
        connect: opens a connection to the marketplace's database; called once.
        as_of: D, the last day of the windows of views, and the day that ages are counted to.
        run_id: the run's name in traces (correlationId); None for a run that has none.
        parameters: weights and parameters of the score.
        batch_size: posts in one transaction, at the most.
        open_views: makes the source of views for the run, of the run's connection if it has use for it.
        stop: when set, the run ends in order after the batch in hand.
        on_progress: called after each batch.
        logger: gets the log lines.

    Raises:
        ValueError: the batch size is out of bounds.
        RankingTablesMissingError: the branch of migrations was not applied.
        psycopg.Error: the infrastructure failed; the batch in hand is taken back, committed ones stay.
    """
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(
            f"batch_size = {batch_size} is not allowed; it must be a whole number from 1 to {MAX_BATCH_SIZE}"
        )
    with tracing.span(_RUN_SPAN, run_id, as_of=as_of, batch_size=batch_size), _session(connect) as connection:
        run = _Run(
            connection=connection,
            run_id=run_id,
            as_of=as_of,
            parameters=parameters or RankingParameters(),
            batch_size=batch_size,
            views=open_views(connection),
            stop=stop or threading.Event(),
            on_progress=on_progress or (lambda _: None),
            logger=logger or logging.getLogger(__name__),
        )
        return run.execute()


@contextmanager
def _session(connect: Connect) -> Iterator[Connection]:
    with connect() as connection:
        check_ranking_tables(connection)
        connection.execute(statements.WORKER_SESSION)
        connection.commit()
        yield connection


@dataclass(frozen=True)
class _Batch:
    """What became of a page of posts."""

    last_id: UUID
    ranked: int
    created: int
    conflicts: int


# Posts, each with the token of its signals; None where there are none.
_Posts = Sequence[tuple[UUID, str | None]]


@dataclass
class _Run:
    """One run: its inputs, and what it came to so far."""

    connection: Connection
    run_id: str | None
    as_of: date
    parameters: RankingParameters
    batch_size: int
    views: PostViews
    stop: threading.Event
    on_progress: Callable[[Progress], None]
    logger: logging.Logger

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._formula = _as_statement_parameters(self.parameters)
        self._posts_total = 0
        self._batches: list[_Batch] = []
        self._retries = 0

    def execute(self) -> Summary:
        (self._posts_total,) = fetch_one(self.connection, statements.COUNT_POSTS)
        self.connection.commit()
        self.logger.info(
            "ranking recompute started: AsOf=%s posts=%d batch_size=%d", self.as_of, self._posts_total, self.batch_size
        )
        summary = self._summary(self._go_through())
        tracing.annotate(stopped_reason=summary.stopped_reason)
        self.logger.info(
            "ranking recompute ended: stopped_reason=%s PostsRanked=%d SignalsCreated=%d conflicts=%d retries=%d "
            "DurationMs=%d",
            summary.stopped_reason,
            summary.posts_ranked,
            summary.signals_created,
            summary.conflicts,
            summary.retries,
            summary.duration_ms,
        )
        return summary

    def _go_through(self) -> StopReason:
        after: UUID | None = None
        while not self.stop.is_set():
            batch = self._batch(after)
            if batch is None:
                self.connection.execute(statements.ANALYZE)
                return StopReason.COMPLETED
            after = batch.last_id
            self._batches.append(batch)
            self._report(batch)
        return StopReason.STOP_SIGNAL

    def _batch(self, after: UUID | None) -> _Batch | None:
        """See the next page through; None if there is none."""
        with tracing.batch_span(_BATCH_SPAN, self.run_id) as describe:
            return self._see_through(after, describe)

    def _see_through(self, after: UUID | None, describe: Callable[..., None]) -> _Batch | None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with self.connection.transaction():
                    return self._rank_page(after, describe)
            except _RETRIABLE as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                self._retries += 1
                self.logger.warning("batch is read again (attempt %d): %s", attempt + 1, type(error).__name__)
                tracing.note("batch is read again", exception=type(error).__name__)
                # Whoever was in the way gets out of it; two runs do not meet again in step.
                time.sleep(0.01 * 2**attempt * (1 + secrets.randbelow(100) / 100))
        return None

    def _rank_page(self, after: UUID | None, describe: Callable[..., None]) -> _Batch | None:
        posts = self._read_page(after)
        if not posts:
            return None
        describe(batch_size=len(posts))
        last_id, _ = posts[-1]
        ranked, created, others = self._upsert(posts)
        # Somebody wrote them since, or the posts are gone. The upsert left the rows locked, so it is enough to read
        # them once more.
        again = self._read(statements.THESE_POSTS, {"ids": others}) if others else []
        if again:
            ranked_again, created_again, _ = self._upsert(again)
            ranked += ranked_again
            created += created_again
        tracing.annotate(updated_count=ranked, conflicts=len(again))
        return _Batch(last_id, ranked, created, conflicts=len(again))

    def _read_page(self, after: UUID | None) -> _Posts:
        statement = statements.FIRST_PAGE if after is None else statements.NEXT_PAGE
        return self._read(statement, {"after": after, "size": self.batch_size})

    def _read(self, statement: str, parameters: dict[str, Any]) -> _Posts:
        return self.connection.execute(statement, parameters, binary=True).fetchall()

    def _upsert(self, posts: _Posts) -> tuple[int, int, list[UUID]]:
        ids = [post_id for post_id, _ in posts]
        totals = self.views.totals(ids, self.as_of)
        views = [totals.get(post_id, _NO_VIEWS) for post_id in ids]
        ranked, created, others = fetch_one(
            self.connection,
            statements.RANK_PAGE,
            {
                "ids": ids,
                "tokens": [token for _, token in posts],
                "views_7d": [each.views_7d for each in views],
                "views_30d": [each.views_30d for each in views],
                "as_of": self.as_of,
                **self._formula,
            },
            binary=True,
        )
        return ranked, created, others

    def _report(self, batch: _Batch) -> None:
        done = sum(each.ranked for each in self._batches)
        progress = Progress(done, self._posts_total, done / max(time.monotonic() - self._began, 1e-9))
        self.logger.info(
            "batch ranked: rows=%d conflicts=%d; %d of %d posts, %.0f posts/s",
            batch.ranked,
            batch.conflicts,
            progress.posts_done,
            progress.posts_total,
            progress.posts_per_second,
        )
        self.on_progress(progress)

    def _summary(self, reason: StopReason) -> Summary:
        return Summary(
            as_of=self.as_of,
            stopped_reason=reason,
            posts_total=self._posts_total,
            posts_ranked=sum(batch.ranked for batch in self._batches),
            signals_created=sum(batch.created for batch in self._batches),
            conflicts=sum(batch.conflicts for batch in self._batches),
            retries=self._retries,
            duration_ms=round((time.monotonic() - self._began) * 1000),
        )


def _as_statement_parameters(parameters: RankingParameters) -> dict[str, Any]:
    decays = [int(decay.scaleb(5)) for decay in recency_decays(parameters.half_life_days)]
    return {
        "w1": parameters.w1,
        "w2": parameters.w2,
        "w3": parameters.w3,
        "w4": parameters.w4,
        "full_boost": parameters.full_boost,
        "trusted_types": list(parameters.author_trust),
        "trusts": list(parameters.author_trust.values()),
        "decays": decays,
    }
