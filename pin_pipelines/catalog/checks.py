"""What is asked of the popularity data after a run, and what the answers mean. Nothing here writes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

from psycopg import IsolationLevel

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.decay import reference_score
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.database import Connection, fetch_one

# Alerts of the spec («Наблюдаемость»).
MAX_HOURS_SINCE_FULL_RUN = 26
MAX_STALENESS_HOURS = 30

SAMPLE_SIZE = 200


@dataclass(frozen=True)
class Completeness:
    """Whether every card that is on show has a snapshot of the newest full run."""

    run_id: str
    run_date: date
    missing: int
    item_errors: int
    cards_left_locked: int
    cards_remaining: int

    @property
    def complete(self) -> bool:
        """No card is missing."""
        return self.missing == 0

    @property
    def explained(self) -> bool:
        """The run itself reported at least as many cards as are missing."""
        return self.missing <= self.item_errors + self.cards_left_locked + self.cards_remaining


@dataclass(frozen=True)
class WrongScore:
    """A stored score that the reference does not confirm."""

    card_id: UUID
    stored: Decimal
    expected: Decimal


@dataclass(frozen=True)
class Drift:
    """Stored scores beside the pure-Python reference, on a sample."""

    sampled: int
    wrong: tuple[WrongScore, ...]


@dataclass(frozen=True)
class Freshness:
    """How old the scores are, by the last full run that completed. Hours by the database clock."""

    run_id: str
    finished_at: datetime
    hours_since_full_run: float
    """Since that run ended."""
    staleness_hours: float
    """Since that run began: no view that came later is in any score."""


def check_completeness(connection: Connection) -> Completeness | None:
    """Look for cards that the newest full run missed; None if no full run has ended yet."""
    run = connection.execute(statements.NEWEST_FULL_RUN).fetchone()
    if run is None:
        return None
    run_id, run_date, _, finished_at, item_errors, left_locked, remaining = run
    missing = 0
    for kind in CardKind:
        parameters = {"card_kind": kind, "run_date": run_date, "finished_at": finished_at}
        missing += fetch_one(connection, statements.count_missing(kind), parameters)[0]
    return Completeness(run_id, run_date, missing, item_errors, left_locked, remaining)


def check_drift(connection: Connection, kind: CardKind, *, window_days: int, half_life_days: int) -> Drift | None:
    """Compute the scores of a sample again; None if no full run has ended yet.

    The date of the newest full run is the seed: a re-run of the check looks at the same cards, the next night at
    others. A card is scored as of its own newest snapshot, since a rebuild may have captured it later.
    """
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    run = connection.execute(statements.NEWEST_FULL_RUN).fetchone()
    if run is None:
        return None
    run_date: date = run[1]
    parameters = {"card_kind": kind, "run_date": run_date, "seed": run_date.toordinal(), "size": SAMPLE_SIZE}
    scores: dict[UUID, Decimal] = dict(connection.execute(statements.sample_scores(kind), parameters).fetchall())
    snapshots: dict[UUID, dict[date, int]] = {card_id: {} for card_id in scores}
    sampled = {"card_kind": kind, "ids": list(scores)}
    for card_id, snapshot_date, views in connection.execute(statements.SNAPSHOTS_OF_CARDS, sampled):
        snapshots[card_id][snapshot_date] = views
    expected = {
        card_id: reference_score(days, max(days), window_days, half_life_days) for card_id, days in snapshots.items()
    }
    wrong = (WrongScore(card_id, scores[card_id], expected[card_id]) for card_id in scores)
    return Drift(len(scores), tuple(each for each in wrong if each.stored != each.expected))


def check_freshness(connection: Connection) -> Freshness | None:
    """How long ago the last full run completed; None if none ever did."""
    run = connection.execute(statements.LAST_COMPLETED_FULL_RUN).fetchone()
    if run is None:
        return None
    run_id, started_at, finished_at, now = run
    return Freshness(
        run_id,
        finished_at,
        hours_since_full_run=(now - finished_at).total_seconds() / 3600,
        staleness_hours=(now - started_at).total_seconds() / 3600,
    )
