"""Which run a daily partition may have: a counter cannot be read in the past.

partition D                                what a run does
D is today (UTC)                           full run
D < today, D is the newest stored date     scores again from what is stored, no capture
D < today, newer dates are stored          nothing: it is history
D < today, nothing is stored for D         fails: that night was missed
D > today                                  refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.ledger import RunKind
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connection, fetch_one


class RunDateRefusedError(ValueError):
    """This run date cannot be run; the message says why and what to do."""


@dataclass(frozen=True)
class Work:
    """There is something to do."""

    run_kind: RunKind
    capture: bool


@dataclass(frozen=True)
class History:
    """The run date was superseded; what is stored for it stays as it is."""

    superseded_by: date
    snapshots: Mapping[CardKind, int]


def decide(connection: Connection, run_date: date, *, today: date, rebuild: bool) -> Work | History:
    """Say what a run of ``run_date`` does.

    Args:
        connection: to the marketplace's database; only read.
        run_date: D.
        today: the date in UTC, by the caller's clock.
        rebuild: single cards are asked for; a partition of the past must then be the newest one.

    Raises:
        RunDateRefusedError: D lies in the future, or is a night that was missed.
    """
    if run_date > today:
        raise RunDateRefusedError(f"partition {run_date} lies in the future: today is {today} (UTC)")
    if run_date == today:
        return Work(RunKind.REBUILD if rebuild else RunKind.FULL, capture=True)
    stored = dict.fromkeys(CardKind, 0) | {
        CardKind(kind): count for kind, count in connection.execute(statements.STORED_FOR, {"run_date": run_date})
    }
    if not any(stored.values()):
        raise RunDateRefusedError(
            f"partition {run_date} has no snapshots: that night was missed, and counters cannot be read in the past. "
            "Its growth belongs to the next run that took place; there is nothing to re-run. "
            f"Launch today's partition ({today}) to bring the scores up to date"
        )
    (newest,) = fetch_one(connection, statements.NEWEST_RUN_DATE)
    if newest > run_date:
        return History(superseded_by=newest, snapshots=stored)
    return Work(RunKind.REBUILD if rebuild else RunKind.RECOMPUTE, capture=False)
