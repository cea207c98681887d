"""Checkpoints of the price history backfill in PostgreSQL: the claim on a range, the cursor, the rejects.

Two things make a run the only one on its range. A session-level advisory lock on a connection of its own holds
through the commits of the pages, and is free the moment the process is gone (a row lock would end with each
transaction, and the spec forbids calls to other systems inside one). ``Version`` is the fence behind it: whatever may
have happened to the lock, a runner that finds another's Version in its row stops and moves nothing.

Every SQL statement of the backfill is in here. Times are the database's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from pin_pipelines.database import Connect, Connection, fetch_one, free_advisory_locks
from pin_pipelines.invest_analytics.snapshots import BadRow

CHECKPOINTS = "invest_analytics.price_backfill_checkpoints"
REJECTS = "invest_analytics.price_backfill_rejects"

# How long, and how often, a write waits for somebody who is looking at the row.
LOCK_TIMEOUT_SECONDS = 2.0
MAX_LOCK_ATTEMPTS = 10

MAX_ERROR_LENGTH = 2000

# A pooler in transaction mode may by chance give the same server connection a few times in a row, and several poolers
# may share an address.
_POOLER_PROBES = 4


class CheckpointStatus(StrEnum):
    """PriceBackfillStatus of the spec."""

    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"


class ClaimLostError(RuntimeError):
    """This runner no longer has the range to itself; the cursor stayed where it was."""


class CheckpointHeldError(RuntimeError):
    """Somebody else's transaction holds the checkpoint's row and does not let go of it."""


class PooledConnectionError(RuntimeError):
    """PostgreSQL is reached through a pooler in transaction mode, where a claim cannot be kept."""


@dataclass(frozen=True)
class Range:
    """A range of PropertyObjectId, both ends included; None is an open end.

    Raises:
        ValueError: From is beyond To (spec, step 2).
    """

    lower: UUID | None = None
    upper: UUID | None = None

    def __post_init__(self) -> None:
        """Check the order."""
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(
                f"FromPropertyObjectId = {self.lower} is beyond ToPropertyObjectId = {self.upper}; "
                "From must be at most To"
            )

    @property
    def before_first(self) -> UUID | None:
        """The cursor of a range that is not begun: the source leaves it out and the range includes From."""
        if self.lower is None or self.lower.int == 0:
            return None
        return UUID(int=self.lower.int - 1)

    def encloses(self, other: Range) -> bool:
        """Whether nothing of the other range is outside of this one."""
        begins = self.lower is None or (other.lower is not None and self.lower <= other.lower)
        ends = self.upper is None or (other.upper is not None and other.upper <= self.upper)
        return begins and ends

    def ends_at(self, cursor: UUID | None) -> bool:
        """Whether nothing of the range is left behind the cursor."""
        return cursor is not None and self.upper is not None and cursor >= self.upper


@dataclass(frozen=True)
class Checkpoint:
    """A row of ``price_backfill_checkpoints``.

    Attributes:
        id: run id of the run that began the range.
        last_run_id: run id of the run that claimed it last.
        last_processed_property_object_id: the cursor.
        processed_property_object_count: rows of the source that are done with: ingested and rejected ones.
        updated_at: heartbeat; moves with each page, each insert error, and each claim.
        progressed_at: when the cursor last moved.
        attempts_without_progress: claims since then.
        last_error: why a run failed last, at ``failed_at``; kept when a later one completes the range.
    """

    id: UUID
    status: CheckpointStatus
    from_property_object_id: UUID | None
    to_property_object_id: UUID | None
    last_processed_property_object_id: UUID | None
    processed_property_object_count: int
    ingested_fact_count: int
    rejected_row_count: int
    started_at: datetime
    updated_at: datetime
    completed_at: datetime | None
    version: int
    batch_size: int
    last_run_id: str
    attempts_without_progress: int
    insert_errors: int
    last_error: str | None
    failed_at: datetime | None
    progressed_at: datetime | None

    def __post_init__(self) -> None:
        """Make the status of the row a member of its type."""
        object.__setattr__(self, "status", CheckpointStatus(self.status))

    @property
    def price_range(self) -> Range:
        """The range."""
        return Range(self.from_property_object_id, self.to_property_object_id)


@dataclass(frozen=True)
class Reject:
    """A row of ``price_backfill_rejects``; the payload is JSON text."""

    checkpoint_id: UUID
    property_object_id: UUID | None
    reason: str
    payload: str
    rejected_at: datetime


@dataclass(frozen=True)
class Standing:
    """How the backfill stands, over all checkpoints there ever were. The three counts never fall.

    Attributes:
        batch_size: of the range that was worked on last; None before the first.
        running: some process works on a range now.
        heartbeat: of the ranges that are worked on, the oldest.
        unattended_since: since when a range is neither loaded nor worked on; None if there is none.
    """

    processed_property_object_count: int
    ingested_fact_count: int
    insert_errors: int
    batch_size: int | None
    running: bool
    heartbeat: datetime | None
    unattended_since: datetime | None


# The statements

_COLUMNS = ", ".join(Checkpoint.__annotations__)

_SESSION = """
    SELECT set_config('tcp_keepalives_idle', '10', false),
           set_config('tcp_keepalives_interval', '5', false),
           set_config('tcp_keepalives_count', '3', false),
           set_config('lock_timeout', %(lock_timeout)s, false),
           set_config('statement_timeout', '60s', false),
           set_config('idle_in_transaction_session_timeout', '60s', false),
           set_config('idle_session_timeout', '0', false),
           set_config('default_transaction_isolation', 'read committed', false),
           set_config('timezone', 'UTC', false),
           set_config('application_name', %(application_name)s, false)"""

_LOCK_KEY = "Pin:lock:job:oneoff:invest-analytics-price-history-backfill:{lower}:{upper}"

_TAKE_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(%(lock_key)s, 0))"

_LOCK_IS_HELD = """EXISTS (
        SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND (l.classid::bigint << 32) | l.objid::bigint = hashtextextended(%(lock_key)s, 0){}
    )"""

_OF_THE_RANGE = """from_property_object_id IS NOT DISTINCT FROM %(lower)s::uuid
          AND to_property_object_id IS NOT DISTINCT FROM %(upper)s::uuid"""

# A Running row comes before a Failed one, which can only be left of older days.
_FIND_UNFINISHED = f"""
    SELECT id FROM {CHECKPOINTS}
    WHERE {_OF_THE_RANGE} AND status <> 'Completed'
    ORDER BY status = 'Running' DESC, started_at DESC
    LIMIT 1"""

_LOCK_ROW = f"SELECT id FROM {CHECKPOINTS} WHERE id = %(id)s AND status <> 'Completed' FOR UPDATE SKIP LOCKED"

_RESUME = f"""
    UPDATE {CHECKPOINTS}
    SET status = 'Running', last_run_id = %(run_id)s, batch_size = %(batch_size)s,
        attempts_without_progress = attempts_without_progress + 1,
        updated_at = clock_timestamp(), version = version + 1
    WHERE id = %(id)s
    RETURNING {_COLUMNS}"""

_BEGIN = f"""
    INSERT INTO {CHECKPOINTS} (id, status, from_property_object_id, to_property_object_id, batch_size, last_run_id)
    VALUES (%(run_id)s::uuid, 'Running', %(lower)s, %(upper)s, %(batch_size)s, %(run_id)s)
    ON CONFLICT (from_property_object_id, to_property_object_id) WHERE status = 'Running' DO NOTHING
    RETURNING {_COLUMNS}"""

# UPDATE takes the row's lock, waits for whoever holds it, and then looks at the row again: one statement checks the
# Version and moves it.
_OWN_ROW = f"""
    WHERE id = %(id)s AND version = %(version)s AND status = 'Running'
      AND {_LOCK_IS_HELD.format(" AND l.pid = pg_backend_pid()")}
    RETURNING {_COLUMNS}"""

_ADVANCE = f"""
    UPDATE {CHECKPOINTS}
    SET last_processed_property_object_id = %(cursor)s,
        processed_property_object_count = processed_property_object_count + %(ingested)s + %(rejected)s,
        ingested_fact_count = ingested_fact_count + %(ingested)s,
        rejected_row_count = rejected_row_count + %(rejected)s,
        attempts_without_progress = 0, progressed_at = clock_timestamp(),
        updated_at = clock_timestamp(), version = version + 1
    {_OWN_ROW}"""

_REJECT = f"""
    INSERT INTO {REJECTS} (checkpoint_id, property_object_id, reason, payload)
    VALUES (%(id)s, %(property_object_id)s, %(reason)s, %(payload)s::json)"""

_COUNT_INSERT_ERROR = f"""
    UPDATE {CHECKPOINTS}
    SET insert_errors = insert_errors + 1, updated_at = clock_timestamp(), version = version + 1
    {_OWN_ROW}"""

_COMPLETE = f"""
    UPDATE {CHECKPOINTS}
    SET status = 'Completed', completed_at = clock_timestamp(), attempts_without_progress = 0,
        updated_at = clock_timestamp(), version = version + 1
    {_OWN_ROW}"""

# The claim's connection may be the very thing that failed, so the Version cannot be told: what was being committed
# just then may have come through. Every claim leaves its run id, and by that a row that is another's now is known.
_FAIL = f"""
    UPDATE {CHECKPOINTS}
    SET status = 'Failed', last_error = %(last_error)s, failed_at = clock_timestamp(),
        updated_at = clock_timestamp(), version = version + 1
    WHERE id = %(id)s AND last_run_id = %(run_id)s AND status = 'Running'"""

# A page that a crash of the server takes back is read and inserted again, so it need not wait for the disk: it is
# flushed by the next transaction that does.
_DO_NOT_WAIT_FOR_THE_DISK = "SELECT set_config('synchronous_commit', 'off', true)"

_WHO_HAS_IT = f"SELECT version, status, last_run_id FROM {CHECKPOINTS} WHERE id = %(id)s"

_ALL_CHECKPOINTS = f"SELECT {_COLUMNS} FROM {CHECKPOINTS} ORDER BY started_at DESC"

_CHECKPOINT_OF = f"""
    SELECT {_COLUMNS} FROM {CHECKPOINTS}
    WHERE {_OF_THE_RANGE}
    ORDER BY status = 'Completed' DESC, started_at DESC
    LIMIT 1"""

_NEWEST_REJECTS = f"""
    SELECT checkpoint_id, property_object_id, reason, payload::text AS payload, rejected_at FROM {REJECTS}
    ORDER BY id DESC LIMIT %(limit)s"""


# What people, checks and the sensor ask


def checkpoint_rows(connection: Connection) -> list[Checkpoint]:
    """All checkpoints, the newest first."""
    return connection.cursor(row_factory=class_row(Checkpoint)).execute(_ALL_CHECKPOINTS).fetchall()


def reject_rows(connection: Connection, limit: int) -> list[Reject]:
    """The newest rejects, the newest first."""
    return connection.cursor(row_factory=class_row(Reject)).execute(_NEWEST_REJECTS, {"limit": limit}).fetchall()


def checkpoint_of(connection: Connection, price_range: Range) -> Checkpoint | None:
    """Where a range stands: its Completed checkpoint (the newest) if there is one, else its newest checkpoint.

    A range that has been loaded stays loaded, whatever became of a re-run.
    """
    cursor = connection.cursor(row_factory=class_row(Checkpoint))
    return cursor.execute(_CHECKPOINT_OF, {"lower": price_range.lower, "upper": price_range.upper}).fetchone()


def alive(connection: Connection, price_range: Range) -> bool:
    """Whether some process works on the range now: its advisory lock is held."""
    return bool(fetch_one(connection, f"SELECT {_LOCK_IS_HELD.format('')}", {"lock_key": _lock_key(price_range)})[0])


def standing(connection: Connection) -> Standing:
    """Sum the checkpoints up, and see who is at work."""
    checkpoints = checkpoint_rows(connection)
    unfinished = [each for each in checkpoints if each.status is not CheckpointStatus.COMPLETED]
    running = [
        each for each in unfinished if each.status is CheckpointStatus.RUNNING and alive(connection, each.price_range)
    ]
    left = [_left_at(each) for each in unfinished if each not in running and not _is_loaded_since(each, checkpoints)]
    newest = max(checkpoints, key=lambda each: each.updated_at, default=None)
    return Standing(
        processed_property_object_count=sum(each.processed_property_object_count for each in checkpoints),
        ingested_fact_count=sum(each.ingested_fact_count for each in checkpoints),
        insert_errors=sum(each.insert_errors for each in checkpoints),
        batch_size=newest.batch_size if newest else None,
        running=bool(running),
        heartbeat=min((each.updated_at for each in running), default=None),
        unattended_since=min(left, default=None),
    )


def _left_at(checkpoint: Checkpoint) -> datetime:
    """When a run last did something for a range: it failed, or was seen alive before it died."""
    failed = checkpoint.failed_at if checkpoint.status is CheckpointStatus.FAILED else None
    return failed or checkpoint.updated_at


def _is_loaded_since(checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> bool:
    """Whether a run over this range, or one around it, completed after the last one of this checkpoint."""
    return any(
        other.completed_at is not None
        and other.completed_at > _left_at(checkpoint)
        and other.price_range.encloses(checkpoint.price_range)
        for other in others
    )


def _lock_key(price_range: Range) -> str:
    return _LOCK_KEY.format(lower=price_range.lower or "", upper=price_range.upper or "")


# The claim


class Claim:
    """The right of one run to load a range, and the connection that it lives on. A context manager: leaving ends it.

    One thread at a time may use it.
    """

    def __init__(self, connect: Connect, price_range: Range, *, run_id: UUID) -> None:
        """Open the connection; nothing is locked or written yet."""
        self._connect = connect
        self._range = price_range
        self._run_id = str(run_id)
        self._lock_key = _lock_key(price_range)
        self._checkpoint: Checkpoint | None = None
        self._fenced_off = False
        self._is_locked = False
        self._connection = connect()
        self._connection.autocommit = True

    def __enter__(self) -> Self:
        """Use as a context manager: leaving it gives the range free."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the lock and close the connection."""
        # A lock that was not taken may be another's, on a connection that a pooler shares out.
        if self._is_locked:
            free_advisory_locks(self._connection)
        self._connection.close()

    @property
    def checkpoint(self) -> Checkpoint:
        """The row as this run last wrote it.

        Raises:
            LookupError: the claim was not taken.
        """
        if self._checkpoint is None:
            raise LookupError("a claim that was not taken has no checkpoint")
        return self._checkpoint

    def take(self, batch_size: int) -> bool:
        """Claim the range: resume its unfinished checkpoint, or begin a new one (spec, step 3).

        Returns:
            False if another run has the range, or somebody holds its row: this run is to end as a no-op.

        Raises:
            PooledConnectionError: the lock would not stay with this connection.
            psycopg.errors.UniqueViolation: the run id has a checkpoint that is completed; a run id begins one range.
        """
        self._refuse_pooler()
        self._set_up(self._connection)
        (self._is_locked,) = fetch_one(self._connection, _TAKE_LOCK, {"lock_key": self._lock_key})
        if not self._is_locked:
            return False
        parameters = {"lower": self._range.lower, "upper": self._range.upper, "batch_size": batch_size}
        # Somebody else's insert of the very range, in a transaction that does not end, is as good as a claim.
        with suppress(psycopg.errors.LockNotAvailable), self._connection.transaction():
            self._checkpoint = self._find_or_begin({**parameters, "run_id": self._run_id})
        return self._checkpoint is not None

    def advance(self, cursor: UUID, *, ingested: int, rejects: Sequence[BadRow] = ()) -> None:
        """Move the cursor behind a page whose facts are stored, and keep its rejects (spec, step 7).

        Raises:
            ClaimLostError: nothing was moved; unless the connection broke in the commit itself, which leaves it open.
            CheckpointHeldError: somebody held the row for too long; nothing was moved.
        """
        figures = {"cursor": cursor, "ingested": ingested, "rejected": len(rejects)}
        self._write(_ADVANCE, figures, rejects=rejects, durable=False)

    def count_insert_error(self) -> None:
        """Count an insert that failed, durably, and beat: a run that tries again is no stale one.

        Raises:
            ClaimLostError, CheckpointHeldError: as ``advance``.
        """
        self._write(_COUNT_INSERT_ERROR, {}, durable=False)

    def complete(self) -> None:
        """Running becomes Completed: the source is exhausted (spec, step 7).

        Raises:
            ClaimLostError, CheckpointHeldError: as ``advance``.
        """
        self._write(_COMPLETE, {})

    def fail(self, error: str) -> None:
        """Running becomes Failed, to be resumed, if the row is still this run's and PostgreSQL is there.

        A row that is left as Running is resumed all the same, for its lock is free.
        """
        if self._fenced_off:
            return
        parameters = {"id": self.checkpoint.id, "run_id": self._run_id, "last_error": _storable(error)}
        try:
            self._connection.execute(_FAIL, parameters)
        except psycopg.OperationalError:
            # The connection is gone, and the server may be there still, or again.
            with suppress(psycopg.OperationalError), self._connect() as connection:
                self._set_up(connection)
                connection.execute(_FAIL, parameters)

    def _set_up(self, connection: Connection) -> None:
        connection.execute(
            _SESSION,
            {
                "lock_timeout": f"{LOCK_TIMEOUT_SECONDS:.3f}s",
                "application_name": f"price backfill {self._run_id[:8]}",
            },
        )

    def _refuse_pooler(self) -> None:
        """Find out whether each transaction may land on another server connection, before anything is left on one."""
        mine = _backend_pid(self._connection)
        # A pool hands out the connection that was used last, which another client is given then, or each in turn. Only
        # one other at a time: a small pool in session mode has no more, and would let them wait.
        if any(self._is_given_to_another(mine) or self._moves_from(mine) for _ in range(_POOLER_PROBES)):
            raise PooledConnectionError(
                "PostgreSQL is reached through a connection pooler in transaction mode: the claim on the range would "
                "stay on a connection that others are given. Connect the backfill to PostgreSQL itself, or to a pool "
                "in session mode"
            )

    def _is_given_to_another(self, pid: int) -> bool:
        with self._connect() as other:
            return _backend_pid(other) == pid

    def _moves_from(self, pid: int) -> bool:
        return any(_backend_pid(self._connection) != pid for _ in range(_POOLER_PROBES))

    def _find_or_begin(self, parameters: dict[str, Any]) -> Checkpoint | None:
        cursor = self._connection.cursor(row_factory=class_row(Checkpoint))
        found = self._connection.execute(_FIND_UNFINISHED, parameters).fetchone()
        if found is None:
            return cursor.execute(_BEGIN, parameters).fetchone()
        locked = self._connection.execute(_LOCK_ROW, {"id": found[0]}).fetchone()
        return None if locked is None else cursor.execute(_RESUME, {**parameters, "id": found[0]}).fetchone()

    def _write(
        self, statement: str, parameters: dict[str, Any], *, rejects: Sequence[BadRow] = (), durable: bool = True
    ) -> None:
        """Change the row if it is still this run's, waiting for whoever holds it."""
        parameters = {
            **parameters,
            "id": self.checkpoint.id,
            "version": self.checkpoint.version,
            "lock_key": self._lock_key,
        }
        for _ in range(MAX_LOCK_ATTEMPTS):
            try:
                self._checkpoint = self._write_once(statement, parameters, rejects, durable=durable)
            except psycopg.errors.LockNotAvailable:
                continue
            except psycopg.OperationalError as error:
                if not self._connection.closed:
                    raise
                raise ClaimLostError(f"the connection that held the claim is gone: {error}") from error
            else:
                return
        raise CheckpointHeldError(
            f"another session has held the row of checkpoint {self.checkpoint.id} in {CHECKPOINTS} for "
            f"{MAX_LOCK_ATTEMPTS * LOCK_TIMEOUT_SECONDS:.0f} s (pg_locks and pg_stat_activity say which). "
            "The cursor stayed where it was"
        )

    def _write_once(
        self, statement: str, parameters: dict[str, Any], rejects: Sequence[BadRow], *, durable: bool
    ) -> Checkpoint:
        with self._connection.transaction():
            if not durable:
                self._connection.execute(_DO_NOT_WAIT_FOR_THE_DISK)
            cursor = self._connection.cursor(row_factory=class_row(Checkpoint))
            written = cursor.execute(statement, parameters).fetchone()
            if written is None:
                self._fenced_off = True
                raise ClaimLostError(self._how_it_was_lost())
            if rejects:
                self._connection.cursor().executemany(_REJECT, [_reject(written.id, row) for row in rejects])
        return written

    def _how_it_was_lost(self) -> str:
        mine = f"checkpoint {self.checkpoint.id}: the claim of run {self._run_id} is lost"
        row = self._connection.execute(_WHO_HAS_IT, {"id": self.checkpoint.id}).fetchone()
        if row is None:
            return f"{mine}: the row is gone"
        version, status, last_run_id = row
        if version == self.checkpoint.version and status == CheckpointStatus.RUNNING:
            return f"{mine}: its advisory lock is not held by this connection any more"
        return (
            f"{mine}: Version is {version} instead of {self.checkpoint.version}; "
            f"the row is {status} and run {last_run_id} has it"
        )


def _backend_pid(connection: Connection) -> int:
    # Not prepared: in transaction mode the next time may be on a connection that knows of no such statement.
    row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    assert row is not None  # noqa: S101 - a SELECT without FROM returns a row
    return int(row[0])


def _reject(checkpoint_id: UUID, row: BadRow) -> dict[str, Any]:
    return {
        "id": checkpoint_id,
        "property_object_id": row.property_object_id,
        "reason": row.reason,
        "payload": row.payload,
    }


def _storable(text: str) -> str:
    """The text as a column can hold it: of a sane length, without NUL and half surrogates."""
    return text[:MAX_ERROR_LENGTH].encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
