"""The ledger of popularity runs, and the locks that tell a live run from a dead one.

The ledger is no checkpoint: a recompute is deterministic and starts again from anywhere. It answers when a full
run last completed, what a failed run had done, and where a cut one stopped.

A run is alive while its liveness lock is held: a session-level advisory lock on a connection of its own, which
PostgreSQL frees the moment the process is gone, whatever launched it and whatever Dagster still shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from enum import StrEnum
from typing import Any, Self, cast
from uuid import UUID

import psycopg

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connect, Connection, fetch_one, free_advisory_locks


class RunKind(StrEnum):
    """What a run does."""

    FULL = "Full"
    """Captures the counters of today, scores every card, prunes old snapshots."""
    RECOMPUTE = "Recompute"
    """Scores every card from the snapshots that are stored."""
    REBUILD = "Rebuild"
    """Scores the given cards alone; makes no night complete."""


class RunStatus(StrEnum):
    """How far a run has come, or how it ended."""

    RUNNING = "Running"
    COMPLETED = "Completed"
    STOPPED = "Stopped"
    FAILED = "Failed"


@dataclass(frozen=True)
class LiveRun:
    """A run in the ledger whose liveness lock is held. Times are the database's."""

    run_id: str
    run_date: date
    run_kind: RunKind
    started_at: datetime
    handled_since: datetime


@dataclass(frozen=True)
class StopPoint:
    """Where a cut full run stopped: the last card that its cursor passed."""

    kind: CardKind
    card_id: UUID


@dataclass(frozen=True)
class Totals:
    """What all runs there ever were came to. No figure ever falls.

    Attributes:
        failed_runs: runs that ended with an error.
        died_runs: runs whose process was gone.
        durations: of runs over the whole catalogue that ended in order, by bound in seconds: how many took no longer,
            and their seconds together.
    """

    cards_processed: Mapping[CardKind, int]
    snapshots_written: int
    snapshots_pruned: int
    item_errors: int
    failed_runs: int
    died_runs: int
    durations: Mapping[float, tuple[int, float]]


class RunAlreadyAliveError(RuntimeError):
    """A live run has this run id already."""


def live_runs(connection: Connection) -> list[LiveRun]:
    """The runs that are working now, the oldest first."""
    return [
        LiveRun(run_id, run_date, RunKind(kind), started_at, handled_since)
        for run_id, run_date, kind, started_at, handled_since in connection.execute(statements.LIVE_RUNS)
    ]


def close_dead_runs(connection: Connection) -> list[str]:
    """Close the runs that the ledger shows as running while their lock is free; returns their run ids."""
    return [run_id for (run_id,) in connection.execute(statements.CLOSE_DEAD_RUNS)]


def totals(connection: Connection, duration_bounds: Sequence[float]) -> Totals:
    """Sum the ledger up; durations within these bounds, in seconds (infinity for all of them)."""
    property_objects, projects, written, pruned, item_errors, failed, died = fetch_one(connection, statements.TOTALS)
    durations = connection.execute(statements.DURATIONS, {"bounds": list(duration_bounds)})
    return Totals(
        cards_processed={CardKind.PROPERTY_OBJECT: property_objects, CardKind.PROJECT: projects},
        snapshots_written=written,
        snapshots_pruned=pruned,
        item_errors=item_errors,
        failed_runs=failed,
        died_runs=died,
        durations={bound: (runs, seconds) for bound, runs, seconds in durations},
    )


class Ledger:
    """One run's row, and the connection that keeps the run alive.

    Attributes:
        handled_since: a card whose snapshot of the run date is at least as new is handled (database clock).
        shared: another live instance works on the same run date.
        last_stop: where the newest full run that ended in order was cut; None if it was not.
    """

    def __init__(self, connect: Connect, run_id: str) -> None:
        """Open the connection; nothing is locked or written yet."""
        self._connect = connect
        self._run_id = run_id
        self._is_locked = False
        self._connection = connect()
        self._connection.autocommit = True
        self._connection.execute(statements.LIVENESS_SESSION, {"application_name": f"popularity ledger {run_id[:8]}"})

    def __enter__(self) -> Self:
        """Use as a context manager: leaving it frees the locks."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the locks and close the connection."""
        if self._is_locked:
            free_advisory_locks(self._connection)
        self._connection.close()

    def take_single_flight(self) -> bool:
        """Try to be the only instance (spec, «Расписание и locking»: strict single flight)."""
        return self._try_lock(statements.TAKE_SINGLE_FLIGHT)

    def open(self, run_date: date, run_kind: RunKind, batch_size: int) -> None:
        """Take the liveness lock, close the dead, join the live, and write the run's row.

        Raises:
            RunAlreadyAliveError: a live process works under this run id.
        """
        if not self._try_lock(statements.TAKE_LIVENESS, run_id=self._run_id):
            raise RunAlreadyAliveError(f"run {self._run_id} is alive already; a run id belongs to one process")
        with self._connection.transaction():
            self._connection.execute(statements.REGISTER_ONE_BY_ONE)
            close_dead_runs(self._connection)
            # A rebuild is asked for by name and does what it is asked for, whoever else is at work.
            joined = [
                run.handled_since
                for run in live_runs(self._connection)
                if run.run_date == run_date and run_kind is not RunKind.REBUILD
            ]
            self.shared = bool(joined)
            self.last_stop = self._find_last_stop()
            self.handled_since = self._insert(run_date, run_kind, batch_size, min(joined, default=None))

    def ping(self) -> None:
        """Prove that the connection, and the lock with it, is still there.

        Raises:
            psycopg.OperationalError: it is not; from now on others take this run for dead.
        """
        self._connection.execute("SELECT 1")

    def count(self, statement: str, parameters: dict[str, Any]) -> int:
        """Run a statement that returns one number."""
        return int(fetch_one(self._connection, statement, parameters)[0])

    def close(self, status: RunStatus, **figures: Any) -> None:
        """Close the run's row with its last figures (the columns of the ledger by name).

        A row that somebody has closed already, because the lock was lost and the run taken for dead, stays as it is.
        """
        parameters = {"run_id": self._run_id, "status": status, **figures}
        try:
            self._connection.execute(statements.CLOSE_RUN, parameters)
        except psycopg.OperationalError:
            # The server may be back already. If not, the row stays and is closed as dead by the next to look.
            with suppress(psycopg.OperationalError), self._connect() as connection:
                connection.execute(statements.CLOSE_RUN, parameters)

    def _try_lock(self, statement: str, **parameters: Any) -> bool:
        (taken,) = fetch_one(self._connection, statement, parameters)
        self._is_locked = self._is_locked or bool(taken)
        return bool(taken)

    def _find_last_stop(self) -> StopPoint | None:
        row = self._connection.execute(statements.LAST_STOP).fetchone()
        stops = zip(CardKind, row or (), strict=False)
        return next((StopPoint(kind, card_id) for kind, card_id in stops if card_id is not None), None)

    def _insert(self, run_date: date, run_kind: RunKind, batch_size: int, joined: datetime | None) -> datetime:
        stops = {
            f"{kind.prefix}_stop_id": self.last_stop.card_id
            if run_kind is RunKind.FULL and self.last_stop is not None and self.last_stop.kind is kind
            else None
            for kind in CardKind
        }
        (handled_since,) = fetch_one(
            self._connection,
            statements.OPEN_RUN,
            {
                "run_id": self._run_id,
                "run_date": run_date,
                "run_kind": run_kind,
                "handled_since": joined,
                "batch_size": batch_size,
                **stops,
            },
        )
        return cast(datetime, handled_since)
