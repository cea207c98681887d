"""Pause points of a run without hooks in the engine: triggers that wait for as long as the test wants them to.

A trigger says that it is there by a lock that the test can see, and then tries again and again to get a lock that the
test holds. It never waits *in* a lock, which the engine's lock time-out would end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID

import psycopg

from pin_pipelines.catalog.tables import LEDGER, SNAPSHOTS, CardKind
from pin_pipelines_tests.support.catalogue import FLAT, Catalogue
from pin_pipelines_tests.support.waiting import until

_ARRIVED, _HELD = 4711, 4712
_FUNCTION = f"""
CREATE OR REPLACE FUNCTION catalog.brake() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({_ARRIVED}, TG_ARGV[0]::int);
    WHILE NOT pg_try_advisory_xact_lock_shared({_HELD}, TG_ARGV[0]::int) LOOP
        PERFORM pg_sleep(0.005);
    END LOOP;
    RETURN coalesce(NEW, OLD);
END $$"""

_ADVISORY_LOCKS = """pg_locks WHERE locktype = 'advisory' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

_numbers = count(1)


@dataclass(frozen=True)
class Point:
    """Where a run is to pause: the trigger's event, and its condition on NEW or OLD."""

    event: str
    when: str = "true"
    at_commit: bool = False


def before_snapshot(when: str = "true") -> Point:
    """The page is locked, none of its snapshots is committed."""
    return Point(f"BEFORE INSERT ON {SNAPSHOTS}", when)


def before_commit(when: str = "true") -> Point:
    """All of a batch is written, and its COMMIT has begun."""
    return Point(f"AFTER UPDATE ON {LEDGER}", f"NEW.status = 'Running' AND {when}", at_commit=True)


BEFORE_RETENTION = Point(f"BEFORE DELETE ON {SNAPSHOTS}")


@dataclass
class Brake:
    """Pauses every run that comes to its point, until it is released."""

    catalogue: Catalogue
    holder: psycopg.Connection[Any]
    number: int = field(default_factory=lambda: next(_numbers))

    def paused(self) -> list[int]:
        """Backends that came to the point and have not ended that transaction."""
        rows = self.catalogue.execute(
            f"SELECT pid FROM {_ADVISORY_LOCKS} AND classid = %s AND objid = %s", _ARRIVED, self.number
        )
        return [pid for (pid,) in rows]

    def wait(self, runs: int = 1) -> None:
        """Until so many runs stand at the point."""
        until(lambda: len(self.paused()) >= runs, f"{runs} run(s) at brake {self.number}")

    def release(self) -> None:
        """Let go those who wait, and all who come later."""
        self.holder.close()


@contextmanager
def brake(catalogue: Catalogue, point: Point) -> Iterator[Brake]:
    """A brake at the point; leaving the context releases it."""
    with psycopg.connect(catalogue.url, autocommit=True) as holder:
        made = Brake(catalogue, holder)
        holder.execute("SELECT pg_advisory_lock(%s, %s)", [_HELD, made.number])
        holder.execute(_FUNCTION)
        kind, timing = ("CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED") if point.at_commit else ("TRIGGER", "")
        holder.execute(
            f"CREATE {kind} brake_{made.number} {point.event} {timing} FOR EACH ROW WHEN ({point.when}) "
            f"EXECUTE FUNCTION catalog.brake({made.number})"
        )
        try:
            yield made
        finally:
            made.release()


def locked_cards(catalogue: Catalogue, kind: CardKind = FLAT) -> list[UUID]:
    """Cards that some transaction holds."""
    free = f"SELECT id FROM {kind.table} FOR UPDATE SKIP LOCKED"
    rows = catalogue.execute(
        f"WITH free AS ({free}) SELECT id FROM {kind.table} WHERE id NOT IN (TABLE free) ORDER BY id"
    )
    return [card for (card,) in rows]


def nothing_is_held(catalogue: Catalogue) -> bool:
    """Whether all cards are free and no session of a run is left; a backend takes a moment to end after its client."""
    sessions = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND datname = current_database()"
    return not catalogue.execute(sessions, "popularity %") and not any(
        locked_cards(catalogue, kind) for kind in CardKind
    )
