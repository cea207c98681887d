"""PriceHistoryBackfillJob: the loop over pages of the source (spec, «Алгоритм»).

Claim the range; then page by page: insert the facts into ClickHouse, move the cursor in PostgreSQL. The two stores are
not atomic and the order is fixed: a page may be stored twice (its FactIds are the same, so it is one row in the end),
but the cursor is never beyond what is stored.

Three threads: the calling one waits, since it is the one that a signal interrupts; one works through the pages; one
reads the page behind the one in hand. All have ended when ``run_backfill`` returns or raises.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client

from pin_pipelines import tracing
from pin_pipelines.database import Connect
from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import Claim, Range
from pin_pipelines.invest_analytics.snapshots import PriceSource, SourceContractError, check_page, find_id

MAX_BATCH_SIZE = 1000
MAX_INSERT_ATTEMPTS = 5
# The pause after a failed insert doubles from the first of these to the second, and half of it is by chance.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# So many rows, all of them bad, are no longer bad rows but another contract.
SUSPICIOUS_PAGE_SIZE = 20

_RUN_SPAN = "invest_analytics.price_history_backfill"
_PAGE_SPAN = f"{_RUN_SPAN}.page"

_LAST_ID = UUID(int=2**128 - 1)
_FORESEEABLE_SECONDS = 365 * 86400.0


class StopReason(StrEnum):
    """Why a run ended, where it did not fail."""

    COMPLETED = "completed"
    CLAIM_TAKEN = "claim_taken"
    """Another run has the range: this one did nothing."""
    STOP_SIGNAL = "stop_signal"
    """Stopped between two pages; the cursor is committed, and the next run of the range goes on from it."""


class FactsNotWrittenError(RuntimeError):
    """ClickHouse took a page and reports fewer rows as written."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, after a page. The counts without ``page`` are the checkpoint's, over all of its runs.

    Attributes:
        share: of the range, 0 to 1, by where the cursor stands in it. The source tells no total; ids that are spread
            evenly make this a fair guess.
        expected_end: by that share and this run's pace; None while nothing can be foreseen.
    """

    checkpoint_id: UUID
    first_property_object_id: UUID | None
    cursor: UUID
    page_rows: int
    page_inserted: int
    page_rejected: int
    processed_property_object_count: int
    ingested_fact_count: int
    rejected_row_count: int
    rows_per_second: float
    share: float
    expected_end: datetime | None


@dataclass(frozen=True)
class PriceBackfillCompletedDomainEvent:
    """A range is loaded (spec, step 6). In process only, for metrics and logs."""

    checkpoint_id: UUID
    price_range: Range
    processed_property_object_count: int
    ingested_fact_count: int
    rejected_row_count: int
    completed_at: datetime


@dataclass(frozen=True)
class Summary:
    """What a run came to. The three counts are the checkpoint's, over all of its runs; the rest is this run's.

    Attributes:
        checkpoint_id: None if the claim was taken.
        pages: pages that the cursor passed.
        rows: the rows in them.
        insert_errors: inserts that failed and were tried again.
        cursor: the last PropertyObjectId that is done with.
        resumed_from: the cursor that the run began with; None if it began the range.
    """

    run_id: UUID
    stopped_reason: StopReason
    checkpoint_id: UUID | None = None
    processed_property_object_count: int = 0
    ingested_fact_count: int = 0
    rejected_row_count: int = 0
    pages: int = 0
    rows: int = 0
    insert_errors: int = 0
    duration_ms: int = 0
    cursor: UUID | None = None
    resumed_from: UUID | None = None


@dataclass(frozen=True)
class _Page:
    """A page of the source, checked and mapped; ``last`` is the cursor behind it."""

    first: UUID | None
    last: UUID
    rows: int
    batch: facts.FactBatch


def run_backfill(
    *,
    run_id: UUID,
    price_range: Range,
    batch_size: int,
    connect: Connect,
    source: PriceSource,
    open_clickhouse: Callable[[], AbstractContextManager[Client]],
    rub_currency_id: UUID,
    stop: threading.Event,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_completed: Callable[[PriceBackfillCompletedDomainEvent], None] = lambda _: None,
    logger: logging.Logger | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] | None = None,
) -> Summary:
    """Load the range, from where an unfinished run of it stopped.

    Whether the backfill is enabled at all is the caller's to ask.

    Args:
        run_id: the run's name in checkpoint and logs (correlationId).
        price_range: which objects.
        batch_size: rows of a page, 1 to ``MAX_BATCH_SIZE``.
        connect: opens a connection to PostgreSQL; not through a pooler in transaction mode.
        source: gives the pages; called from one thread at a time, not the calling one.
        open_clickhouse: called once the range is claimed, in the thread that uses the client.
        rub_currency_id: the RUB record of the currency handbook.
        stop: when set, the run ends in order after the page in hand. Set by the run itself when it fails or is
            interrupted: a source that looks at it then gives up its pauses.
        on_progress: called after each page, from the working thread.
        on_completed: gets the domain event of a completed range.
        logger: gets the log lines of the spec.
        clock: monotonic seconds, for the pace.
        sleep: pauses before another attempt at an insert; by default until ``stop`` is set.

    Raises:
        ValueError: ``batch_size`` is out of bounds.
        SourceError: the source cannot be read, or broke its contract.
        facts.FactTableError: the fact table is not as it must be.
        FactsNotWrittenError, ClaimLostError, CheckpointHeldError, PooledConnectionError: see there.
        clickhouse_connect.driver.exceptions.ClickHouseError, psycopg.Error: the infrastructure failed.
            Whatever it was, the checkpoint stands at the last page that is stored, as Failed where it can still be
            written.
    """
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"BatchSize = {batch_size} is not allowed; it must be from 1 to {MAX_BATCH_SIZE}")
    run = _Run(
        run_id=run_id,
        price_range=price_range,
        batch_size=batch_size,
        connect=connect,
        source=source,
        open_clickhouse=open_clickhouse,
        rub_currency_id=rub_currency_id,
        stop=stop,
        on_progress=on_progress,
        on_completed=on_completed,
        logger=logger or logging.getLogger(__name__),
        clock=clock,
        sleep=sleep or stop.wait,
    )
    with tracing.span(
        _RUN_SPAN,
        str(run_id),
        from_property_object_id=price_range.lower,
        to_property_object_id=price_range.upper,
        batch_size=batch_size,
    ):
        return run.execute()


@dataclass
class _Run:
    """One run: its inputs, and what it came to so far."""

    run_id: UUID
    price_range: Range
    batch_size: int
    connect: Connect
    source: PriceSource
    open_clickhouse: Callable[[], AbstractContextManager[Client]]
    rub_currency_id: UUID
    stop: threading.Event
    on_progress: Callable[[Progress], None]
    on_completed: Callable[[PriceBackfillCompletedDomainEvent], None]
    logger: logging.Logger
    clock: Callable[[], float]
    sleep: Callable[[float], object]

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._pages = 0
        self._rows = 0
        self._insert_errors = 0
        self._resumed_from: UUID | None = None

    # The run as a whole

    def execute(self) -> Summary:
        with Claim(self.connect, self.price_range, run_id=self.run_id) as claim:
            if not claim.take(self.batch_size):
                self.logger.info(
                    "job ended as a no-op: another run has this range (RunId=%s From=%s To=%s)",
                    self.run_id,
                    self.price_range.lower,
                    self.price_range.upper,
                )
                tracing.annotate(stopped_reason=StopReason.CLAIM_TAKEN)
                return Summary(self.run_id, StopReason.CLAIM_TAKEN)
            tracing.annotate(checkpoint_id=claim.checkpoint.id)
            try:
                reason = self._go_through(claim)
            except Exception as error:
                self._fail(claim, f"{type(error).__name__}: {error}")
                raise
            except BaseException as interrupt:
                # Dagster's interrupt is no Exception. The worker has ended by now.
                self._stop_short(claim, f"stopped by {type(interrupt).__name__}")
                tracing.annotate(stopped_reason=f"interrupted by {type(interrupt).__name__}")
                raise
            if reason is StopReason.STOP_SIGNAL:
                self._stop_short(claim, "stopped")
        tracing.annotate(stopped_reason=reason)
        summary = self._summary(claim, reason)
        if reason is StopReason.COMPLETED:
            self._log_completed(summary)
            self.on_completed(_completed_event(claim))
        return summary

    def _go_through(self, claim: Claim) -> StopReason:
        self._resumed_from = claim.checkpoint.last_processed_property_object_id
        self.logger.info(
            "job started: RunId=%s From=%s To=%s cursor=%s (checkpoint %s, BatchSize=%d)",
            self.run_id,
            self.price_range.lower,
            self.price_range.upper,
            self._resumed_from,
            claim.checkpoint.id,
            self.batch_size,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="price-backfill") as pool:
            worker: Future[StopReason] | None = None
            try:
                worker = pool.submit(tracing.carried(self._work), claim)
                return worker.result()
            except BaseException:
                # The worker's own error, or an interrupt of this thread; then the page in hand is finished first.
                self.stop.set()
                _outlast(worker)
                raise

    def _fail(self, claim: Claim, error: str) -> None:
        claim.fail(error)
        self.logger.error(
            "job failed: last PropertyObjectId=%s exception=%s",
            claim.checkpoint.last_processed_property_object_id,
            error,
        )

    def _stop_short(self, claim: Claim, why: str) -> None:
        """Leave the range to be resumed."""
        claim.fail(why)
        self.logger.warning(
            "job %s: last PropertyObjectId=%s; the next run of the range goes on behind it",
            why,
            claim.checkpoint.last_processed_property_object_id,
        )

    # The worker

    def _work(self, claim: Claim) -> StopReason:
        with self.open_clickhouse() as client, ThreadPoolExecutor(1, thread_name_prefix="price-backfill-fetch") as pool:
            facts.check_schema(client)
            try:
                exhausted = self._load(claim, client, pool)
            except BaseException:
                self.stop.set()  # a fetch that is between two attempts ends with the run
                raise
        if not exhausted:
            return StopReason.STOP_SIGNAL
        claim.complete()
        return StopReason.COMPLETED

    def _load(self, claim: Claim, client: Client, pool: ThreadPoolExecutor) -> bool:
        """Go through the pages; False if stopped before the last one."""
        cursor = self._resumed_from or self.price_range.before_first
        if self.price_range.ends_at(self._resumed_from):
            return True
        ahead: Future[_Page | None] | None = pool.submit(self._read, cursor)
        while ahead is not None:
            # An error of the page ahead shows here: the page before it is stored, and the cursor moved.
            wait([ahead])
            if self.stop.is_set():
                return False
            page = ahead.result()
            if page is None:
                return True
            ahead = None if self.price_range.ends_at(page.last) else pool.submit(self._read, page.last)
            if not self._store(claim, client, page):
                return False
        return True

    def _read(self, after: UUID | None) -> _Page | None:
        """Fetch a page, check and map it, all while the page before it is inserted; None at the end."""
        upper = self.price_range.upper
        items = self.source.fetch(after=after, to=upper, take=self.batch_size)
        if not items:
            return None
        last = check_page(items, after=after, to=upper, take=self.batch_size)
        batch = facts.map_page(items, rub_currency_id=self.rub_currency_id)
        if not batch.size and len(items) >= SUSPICIOUS_PAGE_SIZE:
            raise SourceContractError(
                f"all {len(items)} rows of a page are bad, up to PropertyObjectId {last}: the source's contract has "
                f"changed. The first of them, PropertyObjectId {batch.bad_rows[0].property_object_id}: "
                f"{batch.bad_rows[0].reason}"
            )
        return _Page(find_id(items[0]), last, len(items), batch)

    # One page

    def _store(self, claim: Claim, client: Client, page: _Page) -> bool:
        """Insert a page and move the cursor behind it; False if stopped before it was stored."""
        with tracing.span(_PAGE_SPAN, str(self.run_id), **_described(page)):
            if page.batch.size and not self._insert(claim, client, page.batch):
                return False
            claim.advance(page.last, ingested=page.batch.size, rejects=page.batch.bad_rows)
            tracing.annotate(ingested_count=page.batch.size, rejected_count=len(page.batch.bad_rows))
        self._pages += 1
        self._rows += page.rows
        self._report(claim, page)
        return True

    def _insert(self, claim: Claim, client: Client, batch: facts.FactBatch) -> bool:
        """Insert a page, again if the server had a bad moment; False if stopped in between."""
        for attempt in range(1, MAX_INSERT_ATTEMPTS + 1):
            try:
                written = facts.insert(client, batch, now=datetime.now(UTC))
            except Exception as error:
                self._insert_errors += 1
                tracing.note("insert failed", attempt=attempt, exception=type(error).__name__)
                claim.count_insert_error()
                if attempt == MAX_INSERT_ATTEMPTS or not facts.is_transient(error):
                    raise
                pause = _pause(attempt)
                self.logger.warning(
                    "insert failed (attempt %d of %d), the next one in %.1f s: %s: %s",
                    attempt,
                    MAX_INSERT_ATTEMPTS,
                    pause,
                    type(error).__name__,
                    error,
                )
                self.sleep(pause)
                if self.stop.is_set():
                    return False
            else:
                _check_written(written, batch.size)
                return True
        raise AssertionError  # the last attempt returns or raises

    def _report(self, claim: Claim, page: _Page) -> None:
        progress = self._progress(claim, page)
        bad_rows = page.batch.bad_rows
        if bad_rows:
            self.logger.warning(
                "rows rejected: %d, kept in price_backfill_rejects; the first, PropertyObjectId=%s: %s",
                len(bad_rows),
                bad_rows[0].property_object_id,
                bad_rows[0].reason,
            )
        self.logger.info(
            "batch processed: PropertyObjectId %s to %s rows=%d inserted=%d rejected=%d; %d done, %.0f rows/s, "
            "about %.1f %% of the range, expected end about %s",
            progress.first_property_object_id,
            progress.cursor,
            progress.page_rows,
            progress.page_inserted,
            progress.page_rejected,
            progress.processed_property_object_count,
            progress.rows_per_second,
            100 * progress.share,
            f"{progress.expected_end:%Y-%m-%d %H:%M:%S} UTC" if progress.expected_end else "unknown",
        )
        self.on_progress(progress)

    def _progress(self, claim: Claim, page: _Page) -> Progress:
        checkpoint = claim.checkpoint
        elapsed = max(self.clock() - self._began, 1e-9)
        share = self._share(page.last)
        moved = share - self._share(self._resumed_from or self.price_range.before_first)
        left = elapsed * (1 - share) / moved if moved > 0 else math.inf
        return Progress(
            checkpoint_id=checkpoint.id,
            first_property_object_id=page.first,
            cursor=page.last,
            page_rows=page.rows,
            page_inserted=page.batch.size,
            page_rejected=len(page.batch.bad_rows),
            processed_property_object_count=checkpoint.processed_property_object_count,
            ingested_fact_count=checkpoint.ingested_fact_count,
            rejected_row_count=checkpoint.rejected_row_count,
            rows_per_second=self._rows / elapsed,
            share=share,
            expected_end=datetime.now(UTC) + timedelta(seconds=left) if left < _FORESEEABLE_SECONDS else None,
        )

    def _share(self, cursor: UUID | None) -> float:
        """How much of the range lies before the cursor, 0 to 1."""
        lower = self.price_range.lower.int if self.price_range.lower else 0
        upper = (self.price_range.upper or _LAST_ID).int
        if cursor is None or cursor.int < lower:
            return 0.0
        return (cursor.int - lower) / (upper - lower) if upper > lower else 1.0

    # The end

    def _summary(self, claim: Claim, reason: StopReason) -> Summary:
        checkpoint = claim.checkpoint
        return Summary(
            run_id=self.run_id,
            stopped_reason=reason,
            checkpoint_id=checkpoint.id,
            processed_property_object_count=checkpoint.processed_property_object_count,
            ingested_fact_count=checkpoint.ingested_fact_count,
            rejected_row_count=checkpoint.rejected_row_count,
            pages=self._pages,
            rows=self._rows,
            insert_errors=self._insert_errors,
            duration_ms=round((self.clock() - self._began) * 1000),
            cursor=checkpoint.last_processed_property_object_id,
            resumed_from=self._resumed_from,
        )

    def _log_completed(self, summary: Summary) -> None:
        self.logger.info(
            "job completed: ProcessedPropertyObjectCount=%d IngestedFactCount=%d RejectedRowCount=%d durationMs=%d "
            "(RunId=%s pages=%d insert_errors=%d)",
            summary.processed_property_object_count,
            summary.ingested_fact_count,
            summary.rejected_row_count,
            summary.duration_ms,
            summary.run_id,
            summary.pages,
            summary.insert_errors,
        )


def _outlast(worker: Future[StopReason] | None) -> None:
    """Wait for the worker, also through further interrupts: the claim that it writes to is closed after it.

    Not by joining its thread: a join that is interrupted takes the thread for ended (CPython 3.11).
    """
    while worker is not None and not worker.done():
        with suppress(BaseException):
            wait([worker])


def _described(page: _Page) -> dict[str, Any]:
    """A page as its span has it. Ids ascend, so a row of the fact table is of the page whose ids enclose its own."""
    source_event_ids = page.batch.columns["SourceEventId"]
    return {
        "from_property_object_id": page.first,
        "to_property_object_id": page.last,
        "batch_size": page.rows,
        "first_source_event_id": source_event_ids[0] if page.batch.size else None,
        "last_source_event_id": source_event_ids[-1] if page.batch.size else None,
    }


def _pause(attempt: int) -> float:
    """Seconds after a failed attempt (the first is 1): doubling up to a limit, the upper half of it by chance."""
    longest: float = min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS)
    return longest * (1 + secrets.randbelow(1000) / 1000) / 2


def _check_written(written: int, sent: int) -> None:
    """More is possible: what views on the table write counts too."""
    if written < sent:
        raise FactsNotWrittenError(
            f"ClickHouse reports {written} rows written of a page of {sent}; the cursor stays before the page"
        )


def _completed_event(claim: Claim) -> PriceBackfillCompletedDomainEvent:
    checkpoint = claim.checkpoint
    assert checkpoint.completed_at is not None  # noqa: S101 - a check of the table: Completed has a time
    return PriceBackfillCompletedDomainEvent(
        checkpoint_id=checkpoint.id,
        price_range=checkpoint.price_range,
        processed_property_object_count=checkpoint.processed_property_object_count,
        ingested_fact_count=checkpoint.ingested_fact_count,
        rejected_row_count=checkpoint.rejected_row_count,
        completed_at=checkpoint.completed_at,
    )
