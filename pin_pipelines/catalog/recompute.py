"""PopularityRecomputeJob: the loop over batches (spec, «Алгоритм»).

One transaction a batch: lock a page, write its snapshots and its changed scores, move the run's figures, commit.
Whatever stops a run, what it committed stays and is right, and the next run goes on.

The workers of a run are threads, each with a connection of its own. The calling thread waits for them: it is the
one that a signal interrupts, so it can stop them, and it proves every few seconds that the run is still alive.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import partial
from uuid import UUID

import psycopg

from pin_pipelines import tracing
from pin_pipelines.catalog import statements
from pin_pipelines.catalog.decay import decay_weights
from pin_pipelines.catalog.ledger import Ledger, RunKind, RunStatus
from pin_pipelines.catalog.pages import CardList, CatalogueScan, Page, PageSource, circle, lock_cards
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connect, Connection, fetch_one

# How often a batch is read again after a serialization failure, a deadlock or a lock time-out, before it is an
# infrastructure failure.
MAX_ATTEMPTS = 5
# How often cards that another writer held are tried again after the pass.
MAX_SWEEPS = 3
# A statement numbers the snapshots of its page in four hex digits (``_snapshot_id_prefix``).
MAX_BATCH_SIZE = 0xFFFF
# More poison than this in one run is a fault of something else than the cards.
MAX_ITEM_ERRORS = 1000
# How long a batch may go on after a stop signal before its statement is cancelled and the batch rolled back.
STOP_GRACE_SECONDS = 2.0

_RETRIABLE = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
# A fault of the row, not of the infrastructure: SQLSTATE classes 22 and 23.
_POISON = (psycopg.DataError, psycopg.IntegrityError)

_RUN_SPAN = "catalog.popularity_recompute"
_BATCH_SPAN = f"{_RUN_SPAN}.batch"

_PING_SECONDS = 5.0
_POLL_SECONDS = 0.2


class StopReason(StrEnum):
    """Why a run ended."""

    COMPLETED = "completed"
    MAX_DURATION = "max_duration"
    STOP_SIGNAL = "stop_signal"
    SINGLE_FLIGHT = "single_flight"
    """Another instance holds the single-flight lock; nothing was done and nothing written to the ledger."""
    INTERRUPTED = "interrupted"
    """In the ledger alone: an interrupt took the run down, in order."""
    ERROR = "error"
    """In the ledger alone: the run failed."""


class TooManyItemErrorsError(RuntimeError):
    """So many cards failed that the fault is not theirs."""


class NoKnownCardsError(ValueError):
    """None of the cards to rebuild exists."""


@dataclass(frozen=True)
class Parameters:
    """PopularityRecomputeInput of the spec, as far as it is configuration.

    Raises:
        ValueError: naming the field, when a number is not above 0 (spec, step 2), or a batch too large.
    """

    window_days: int = 30
    decay_half_life_days: int = 7
    batch_size: int = 1000
    max_run_duration_seconds: float = 1800
    workers: int = 1
    single_flight: bool = False

    def __post_init__(self) -> None:
        """Check every number."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{each.name} = {value} is not allowed; it must be above 0")
        if self.batch_size > MAX_BATCH_SIZE:
            raise ValueError(f"batch_size = {self.batch_size} is not allowed; it must be at most {MAX_BATCH_SIZE}")


@dataclass(frozen=True)
class Progress:
    """How far a run is, after a batch."""

    card_kind: CardKind
    rows: int
    updated: int
    cards_done: int
    cards_total: int
    cards_per_second: float
    expected_end: datetime | None
    """None while nothing tells the pace: so far all cards were handled by other instances."""


@dataclass(frozen=True)
class Summary:
    """The run's figures (spec, step 6), and how it ended."""

    run_id: str
    run_date: date
    run_kind: RunKind
    stopped_reason: StopReason
    property_object_cards_processed: int = 0
    project_cards_processed: int = 0
    property_object_cards_updated: int = 0
    project_cards_updated: int = 0
    snapshots_written: int = 0
    snapshots_pruned: int = 0
    item_errors: int = 0
    cards_left_locked: int = 0
    cards_remaining: int = 0
    retries: int = 0
    duration_ms: int = 0
    unknown_card_ids: tuple[UUID, ...] = ()
    """Rebuild: ids that are no card's."""
    passed_over_card_ids: tuple[UUID, ...] = ()
    """Rebuild: cards whose status is neither Published nor Hidden."""


def recompute(
    connect: Connect,
    *,
    run_id: str,
    run_date: date,
    run_kind: RunKind = RunKind.FULL,
    capture: bool | None = None,
    card_ids: Sequence[UUID] = (),
    parameters: Parameters | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    logger: logging.Logger | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Run the popularity recompute for one run date.

    Whether this run date may be run at all, and how, is ``partitions.decide``'s to say.

    Args:
        connect: opens a connection to the marketplace's database; called once a worker, and once for the ledger.
        run_id: the run's name in the ledger and the logs (correlationId).
        run_date: D.
        run_kind: what to do.
        capture: take the counters of now as the snapshots of D; by default a full run does, no other.
        card_ids: the cards of a rebuild.
        parameters: window, half-life, batch size, limits.
        stop: when set, the run ends in order after the batch in hand, or takes it back if that lasts.
        on_progress: called after each batch, from a worker's thread, one call at a time.
        logger: gets the log lines of the spec.
        clock: monotonic seconds, for the maximum duration.

    Raises:
        NoKnownCardsError: a rebuild of cards none of which exists.
        TooManyItemErrorsError: more than ``MAX_ITEM_ERRORS`` cards failed; what is committed stays.
        RunAlreadyAliveError: ``run_id`` is at work in another process.
        psycopg.Error: the infrastructure failed; the batch in hand is taken back, committed ones stay.
    """
    parameters = parameters or Parameters()
    run = _Run(
        connect=connect,
        run_id=run_id,
        run_date=run_date,
        run_kind=run_kind,
        capture=run_kind is RunKind.FULL if capture is None else capture,
        card_ids=card_ids,
        parameters=parameters,
        stop=stop or threading.Event(),
        on_progress=on_progress or (lambda _: None),
        logger=logger or logging.getLogger(__name__),
        clock=clock,
    )
    with tracing.span(_RUN_SPAN, run_id, run_date=run_date, run_kind=run_kind, batch_size=parameters.batch_size):
        return run.execute()


@dataclass(frozen=True)
class _Figures:
    """What a part of a page came to."""

    processed: int = 0
    snapshots_written: int = 0
    updated: int = 0
    poison: tuple[tuple[UUID, psycopg.Error], ...] = ()

    def __add__(self, other: _Figures) -> _Figures:
        return _Figures(
            self.processed + other.processed,
            self.snapshots_written + other.snapshots_written,
            self.updated + other.updated,
            self.poison + other.poison,
        )


@dataclass
class _Totals:
    """What the run came to so far; guarded by the run's lock."""

    processed: dict[CardKind, int] = field(default_factory=lambda: dict.fromkeys(CardKind, 0))
    updated: dict[CardKind, int] = field(default_factory=lambda: dict.fromkeys(CardKind, 0))
    snapshots_written: int = 0
    retries: int = 0
    poison: dict[CardKind, set[UUID]] = field(default_factory=lambda: {kind: set() for kind in CardKind})

    @property
    def item_errors(self) -> int:
        return sum(map(len, self.poison.values()))

    @property
    def cards_done(self) -> int:
        return sum(self.processed.values()) + self.item_errors


@dataclass
class _Run:
    """One run: its inputs, and the state that its workers share."""

    connect: Connect
    run_id: str
    run_date: date
    run_kind: RunKind
    capture: bool
    card_ids: Sequence[UUID]
    parameters: Parameters
    stop: threading.Event
    on_progress: Callable[[Progress], None]
    logger: logging.Logger
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._deadline = self._began + self.parameters.max_run_duration_seconds
        self._cut = threading.Event()
        self._halt = threading.Event()
        self._cancelling = threading.Event()
        self._taking = threading.Lock()
        self._counting = threading.Lock()
        self._totals = _Totals()
        self._connections: set[Connection] = set()
        self._cards_total = 0
        self._pruned = 0
        self._left_locked = 0
        self._remaining = 0
        self._unknown: tuple[UUID, ...] = ()
        self._passed_over: tuple[UUID, ...] = ()
        self._weights: list[Decimal] = decay_weights(self.parameters.window_days, self.parameters.decay_half_life_days)

    # The run as a whole

    def execute(self) -> Summary:
        with Ledger(self.connect, self.run_id) as ledger:
            if self.parameters.single_flight and not ledger.take_single_flight():
                self.logger.info("run skipped: another instance holds the single-flight lock (run_id=%s)", self.run_id)
                return self._summary(StopReason.SINGLE_FLIGHT)
            ledger.open(self.run_date, self.run_kind, self.parameters.batch_size)
            try:
                reason = self._go_through(ledger)
            except Exception as error:
                self._close(ledger, RunStatus.FAILED, StopReason.ERROR, error=f"{type(error).__name__}: {error}")
                raise
            except BaseException as interrupt:
                # Dagster's interrupt is no Exception. The workers have stopped by now.
                self._close(ledger, RunStatus.STOPPED, StopReason.INTERRUPTED, error=type(interrupt).__name__)
                raise
            status = RunStatus.COMPLETED if reason is StopReason.COMPLETED else RunStatus.STOPPED
            summary = self._close(ledger, status, reason)
        self._log_end(summary)
        return summary

    def _go_through(self, ledger: Ledger) -> StopReason:
        self.logger.info(
            "run started: runId=%s AsOfDate=%s W=%d H=%d kind=%s batch_size=%d workers=%d%s",
            self.run_id,
            self.run_date,
            self.parameters.window_days,
            self.parameters.decay_half_life_days,
            self.run_kind,
            self.parameters.batch_size,
            self.parameters.workers,
            " (other instances are at work; the cards are shared)" if ledger.shared else "",
        )
        source = self._open_source(ledger)
        for _ in range(1 + MAX_SWEEPS):
            self._in_workers(self.parameters.workers, partial(self._work, source), ledger)
            self._left_locked = source.left_locked
            again = None if self._halt.is_set() else source.sweep()
            if again is None:
                break
            source = again
        if self._halt.is_set():
            self._count_remaining(ledger, source)
        if self._halt.is_set() and not self._cut.is_set():
            return StopReason.STOP_SIGNAL
        if self.run_kind is RunKind.FULL:
            self._in_workers(1, self._maintain, ledger)
        if self._cancelling.is_set():
            return StopReason.STOP_SIGNAL
        # Time that was up just when nothing was left cut nothing.
        return StopReason.MAX_DURATION if self._remaining else StopReason.COMPLETED

    def _open_source(self, ledger: Ledger) -> PageSource:
        self._handled_since = ledger.handled_since
        if self.run_kind is RunKind.FULL:
            self._cards_total = sum(ledger.count(statements.count_scored(kind), {}) for kind in CardKind)
            return CatalogueScan(
                circle(ledger.last_stop),
                run_date=self.run_date,
                handled_since=ledger.handled_since,
                batch_size=self.parameters.batch_size,
                left_out=self._totals.poison,
                shared=ledger.shared,
            )
        cards = self._find_cards() if self.run_kind is RunKind.REBUILD else self._all_cards()
        self._cards_total = sum(map(len, cards.values()))
        return CardList(cards, self.parameters.batch_size)

    def _all_cards(self) -> dict[CardKind, list[UUID]]:
        with self._open_connection() as connection:
            return {
                kind: [card_id for (card_id,) in connection.execute(statements.card_ids(kind))] for kind in CardKind
            }

    def _find_cards(self) -> dict[CardKind, list[UUID]]:
        found: dict[CardKind, list[UUID]] = {}
        passed_over: list[UUID] = []
        with self._open_connection() as connection:
            for kind in CardKind:
                rows = connection.execute(statements.find_cards(kind), {"ids": list(self.card_ids)}).fetchall()
                found[kind] = [card_id for card_id, scored in rows if scored]
                passed_over += [card_id for card_id, scored in rows if not scored]
        known = {*passed_over, *(card_id for ids in found.values() for card_id in ids)}
        if not known:
            raise NoKnownCardsError(
                "card_ids: none of these is a property object's or a project's card: "
                + ", ".join(map(str, self.card_ids))
            )
        self._unknown = tuple(card_id for card_id in self.card_ids if card_id not in known)
        self._passed_over = tuple(passed_over)
        return found

    def _count_remaining(self, ledger: Ledger, source: PageSource) -> None:
        """After a cut: exactly what is left, so that the checks can tell it from what is missing."""
        if self.run_kind is not RunKind.FULL:
            self._remaining = self._cards_total - self._totals.cards_done - source.left_locked
            return
        parameters = {"run_date": self.run_date, "handled_since": ledger.handled_since}
        self._left_locked = 0
        self._remaining = sum(
            ledger.count(
                statements.count_unhandled(kind),
                {"card_kind": kind, "left_out": list(self._totals.poison[kind]), **parameters},
            )
            for kind in CardKind
        )

    def _maintain(self) -> None:
        """Retention, in a transaction of its own (spec, step 5), and fresh statistics."""
        keep_from = self.run_date - timedelta(days=self.parameters.window_days + 2)
        with self._open_connection() as connection:
            connection.execute(statements.MAINTENANCE_SESSION)
            self._pruned = connection.execute(statements.PRUNE, {"keep_from": keep_from}).rowcount
            connection.commit()
            connection.execute(statements.ANALYZE)

    # The workers

    def _in_workers(self, number: int, job: Callable[[], None], ledger: Ledger) -> None:
        """Do a job in so many threads, while this one watches over them."""
        with ThreadPoolExecutor(number, thread_name_prefix="popularity") as pool:
            workers = [pool.submit(tracing.carried(self._cancellable), job) for _ in range(number)]
            try:
                self._watch(workers, ledger)
            finally:
                # On the way out of an error or an interrupt the others stop too; leaving the pool waits for them.
                self._stop_workers(workers)
        for worker in workers:
            worker.result()

    def _cancellable(self, job: Callable[[], None]) -> None:
        try:
            job()
        except psycopg.errors.QueryCanceled:
            # Cancelled by the stop: the transaction is taken back whole. Else it was a statement time-out.
            if not self._cancelling.is_set():
                raise

    def _watch(self, workers: Sequence[Future[None]], ledger: Ledger) -> None:
        next_ping = self.clock() + _PING_SECONDS
        pending = set(workers)
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            if any(worker.exception() for worker in done):
                return
            if self.stop.is_set():
                return
            if self.clock() >= next_ping:
                ledger.ping()
                next_ping = self.clock() + _PING_SECONDS

    def _stop_workers(self, workers: Sequence[Future[None]]) -> None:
        if all(worker.done() for worker in workers):
            return
        self._halt.set()
        _, late = wait(workers, timeout=STOP_GRACE_SECONDS)
        if late:
            self._cancelling.set()
        while late:
            for connection in tuple(self._connections):
                # A server that cannot be asked is gone, and its statements with it.
                with suppress(psycopg.OperationalError):
                    connection.cancel_safe(timeout=STOP_GRACE_SECONDS)
            _, late = wait(late, timeout=_POLL_SECONDS)

    def _work(self, source: PageSource) -> None:
        with self._open_connection() as connection:
            while not self._should_stop() and self._batch(connection, source):
                pass

    def _should_stop(self) -> bool:
        if self.clock() >= self._deadline:
            self._cut.set()
            self._halt.set()
        if self.stop.is_set():
            self._halt.set()
        return self._halt.is_set()

    @contextmanager
    def _open_connection(self) -> Iterator[Connection]:
        """A connection with the session's limits, that a stop can find and cancel."""
        with self.connect() as connection:
            connection.execute(statements.WORKER_SESSION, {"application_name": f"popularity {self.run_id[:8]}"})
            connection.commit()
            self._connections.add(connection)
            try:
                yield connection
            finally:
                self._connections.discard(connection)

    # One batch

    def _batch(self, connection: Connection, source: PageSource) -> bool:
        """Take a page and see it through; False when there is none."""
        with tracing.batch_span(_BATCH_SPAN, self.run_id) as describe:
            return self._see_through(connection, source, describe)

    def _see_through(self, connection: Connection, source: PageSource, describe: Callable[..., None]) -> bool:
        page: Page | None = None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with connection.transaction():
                    page = self._take(connection, source) if page is None else self._retake(connection, source, page)
                    if page is None:
                        return False
                    describe(card_kind=page.kind, batch_size=len(page.ids))
                    figures = self._score(connection, page.kind, page.ids)
                    self._add_to_ledger(connection, page, figures)
            except _RETRIABLE as error:
                if self._should_stop():
                    return False
                if attempt == MAX_ATTEMPTS:
                    raise
                with self._counting:
                    self._totals.retries += 1
                self.logger.warning("batch is read again (attempt %d): %s", attempt + 1, type(error).__name__)
                tracing.note("batch is read again", exception=type(error).__name__)
                # Whoever was in the way gets out of it; two workers do not meet again in step.
                time.sleep(0.01 * 2**attempt * (1 + secrets.randbelow(100) / 100))
            else:
                tracing.annotate(updated_count=figures.updated, item_errors=len(figures.poison))
                self._count(page, figures, source)
                return True
        return False

    def _take(self, connection: Connection, source: PageSource) -> Page | None:
        with self._taking:
            return source.take(connection)

    def _retake(self, connection: Connection, source: PageSource, page: Page) -> Page:
        """Lock the same cards again; whoever holds one of them by now has it swept later."""
        ids = lock_cards(connection, page.kind, page.ids)
        with self._taking:
            source.pass_over(page.kind, set(page.ids) - set(ids))
        return Page(page.kind, ids, page.stop_id)

    def _score(self, connection: Connection, kind: CardKind, ids: Sequence[UUID]) -> _Figures:
        """Score locked cards, leaving out poison: halves of a part that fails, until the guilty stand alone.

        The locks were taken before the savepoint, so giving it up keeps them.
        """
        try:
            with connection.transaction():
                return self._score_part(connection, kind, ids)
        except _POISON as error:
            if len(ids) == 1:
                return _Figures(poison=((ids[0], error),))
        middle = len(ids) // 2
        figures = self._score(connection, kind, ids[:middle]) + self._score(connection, kind, ids[middle:])
        self._check_item_errors(len(figures.poison))
        return figures

    def _score_part(self, connection: Connection, kind: CardKind, ids: Sequence[UUID]) -> _Figures:
        processed, snapshots_written, updated = fetch_one(
            connection,
            statements.score_page(kind, capture=self.capture),
            {
                "card_kind": kind,
                "ids": list(ids),
                "run_date": self.run_date,
                "oldest": self.run_date - timedelta(days=self.parameters.window_days),
                "weights": self._weights,
                "handled_since": self._handled_since,
                "snapshot_id_prefix": _snapshot_id_prefix(),
            },
        )
        return _Figures(processed, snapshots_written, updated)

    def _check_item_errors(self, new: int) -> None:
        if self._totals.item_errors + new > MAX_ITEM_ERRORS:
            raise TooManyItemErrorsError(
                f"more than {MAX_ITEM_ERRORS} cards failed in run {self.run_id}: the fault is not the cards'. "
                "The log has the first of them; what was committed stays"
            )

    def _add_to_ledger(self, connection: Connection, page: Page, figures: _Figures) -> None:
        connection.execute(
            statements.add_batch(page.kind),
            {
                "run_id": self.run_id,
                "processed": figures.processed,
                "updated": figures.updated,
                "snapshots_written": figures.snapshots_written,
                "item_errors": len(figures.poison),
                "stop_id": page.stop_id,
            },
        )

    def _count(self, page: Page, figures: _Figures, source: PageSource) -> None:
        """Count a committed batch, and say so."""
        with self._counting:
            totals = self._totals
            totals.processed[page.kind] += figures.processed
            totals.updated[page.kind] += figures.updated
            totals.snapshots_written += figures.snapshots_written
            totals.poison[page.kind].update(card_id for card_id, _ in figures.poison)
            for card_id, error in figures.poison:
                self.logger.error("item failed: CardKind=%s CardId=%s exception=%s", page.kind, card_id, _name(error))
                tracing.note("item failed", card_kind=page.kind, card_id=card_id, exception=_name(error))
            if figures.processed + len(figures.poison) < len(page.ids):
                source.mark_shared()
            self._report(page, figures)

    def _report(self, page: Page, figures: _Figures) -> None:
        done = self._totals.cards_done
        rate = done / max(self.clock() - self._began, 1e-9)
        left = max(self._cards_total - done, 0)
        expected_end = datetime.now(UTC) + timedelta(seconds=left / rate) if done else None
        progress = Progress(
            card_kind=page.kind,
            rows=len(page.ids),
            updated=figures.updated,
            cards_done=done,
            cards_total=self._cards_total,
            cards_per_second=rate,
            expected_end=expected_end,
        )
        self.logger.info(
            "batch processed: CardKind=%s rows=%d updated=%d; %d of %d cards, %.0f cards/s, expected end %s",
            progress.card_kind,
            progress.rows,
            progress.updated,
            done,
            self._cards_total,
            rate,
            f"{expected_end:%H:%M:%S} UTC" if expected_end else "unknown",
        )
        self.on_progress(progress)

    # The end

    def _close(self, ledger: Ledger, status: RunStatus, reason: StopReason, error: str | None = None) -> Summary:
        summary = self._summary(reason)
        ledger.close(
            status,
            stopped_reason=reason,
            error=error,
            snapshots_pruned=summary.snapshots_pruned,
            cards_left_locked=summary.cards_left_locked,
            cards_remaining=summary.cards_remaining,
            retries=summary.retries,
            duration_ms=summary.duration_ms,
        )
        return summary

    def _summary(self, reason: StopReason) -> Summary:
        tracing.annotate(stopped_reason=reason)
        totals = self._totals
        return Summary(
            run_id=self.run_id,
            run_date=self.run_date,
            run_kind=self.run_kind,
            stopped_reason=reason,
            property_object_cards_processed=totals.processed[CardKind.PROPERTY_OBJECT],
            project_cards_processed=totals.processed[CardKind.PROJECT],
            property_object_cards_updated=totals.updated[CardKind.PROPERTY_OBJECT],
            project_cards_updated=totals.updated[CardKind.PROJECT],
            snapshots_written=totals.snapshots_written,
            snapshots_pruned=self._pruned,
            item_errors=totals.item_errors,
            cards_left_locked=self._left_locked,
            cards_remaining=self._remaining,
            retries=totals.retries,
            duration_ms=round((self.clock() - self._began) * 1000),
            unknown_card_ids=self._unknown,
            passed_over_card_ids=self._passed_over,
        )

    def _log_end(self, summary: Summary) -> None:
        self.logger.info(
            "run completed: PropertyObjectCardsUpdated=%d ProjectCardsUpdated=%d SnapshotsWritten=%d "
            "SnapshotsPruned=%d ItemErrors=%d DurationMs=%d stopped_reason=%s cards_left_locked=%d cards_remaining=%d "
            "retries=%d",
            summary.property_object_cards_updated,
            summary.project_cards_updated,
            summary.snapshots_written,
            summary.snapshots_pruned,
            summary.item_errors,
            summary.duration_ms,
            summary.stopped_reason,
            summary.cards_left_locked,
            summary.cards_remaining,
            summary.retries,
        )


def _name(error: psycopg.Error) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error.diag.message_primary}"


def _snapshot_id_prefix() -> str:
    """28 of the 32 hex digits of a time-ordered id (UUIDv7); the statement numbers the cards of its page behind it.

    Ordered ids keep the inserts of a night on the same few pages of the primary key.
    """
    milliseconds = time.time_ns() // 1_000_000
    return f"{milliseconds:012x}7{secrets.randbits(12):03x}{8 | secrets.randbits(2):x}{secrets.randbits(44):011x}"
