"""A catalogue with a month of nights behind it, as a template database that every contestant gets a copy of.

Layout: the nights are written one after the other into tables that have their indexes, in the order of ids and
with time-ordered snapshot ids, as the engine writes them. So the heap lies night by night, and the leaves of the
two window indexes have been split by growth (about three quarters full), not packed by an index build. The cards
were inserted in no order, scored once by the engine and then viewed, and the template was vacuumed: the rows that
change lie where nightly updates put them.

Views: rates follow a power law; a quarter of the cards has no views at all, a third of them was viewed since
yesterday. A tenth is younger than the window. One night is old enough for the retention to remove.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql

from pin_pipelines.catalog.ledger import RunKind
from pin_pipelines.catalog.recompute import Parameters, recompute
from pin_pipelines.catalog.tables import SNAPSHOTS, CardKind
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.migrations import migrate

RUN_DATE = date(2026, 11, 30)
PARAMETERS = Parameters()

_EXPIRED = PARAMETERS.window_days + 3
_CARDS_A_PROJECT = 60
_WRITERS = 2

# Every card, those that were delisted among them (a twentieth on top), in the order of ids.
_STAGE = """
CREATE UNLOGGED TABLE stage AS
SELECT kind, id, status, viewed, phase,
       -- Views a day: the share of cards viewed on a day comes to a third.
       CASE WHEN rank < 0.75 THEN 0.13 / greatest(rank / 0.75, 1e-6) ^ 1.2 ELSE 0 END AS rate,
       CASE WHEN age < 0.1 THEN (age * 10 * %(days)s)::int ELSE %(expired)s END AS age
FROM (
    SELECT kind, md5(kind || n)::uuid AS id, random() AS rank, random() AS phase, random() AS age,
           floor(100 / (random() + 0.001)) AS viewed,
           CASE WHEN n > cards THEN 'Delisted' WHEN n %% 20 = 0 THEN 'Hidden' ELSE 'Published' END AS status
    FROM (VALUES ('PropertyObject', %(cards)s), ('Project', %(projects)s)) AS kinds (kind, cards),
         generate_series(1, cards + cards / 20) n
) card
ORDER BY kind DESC, id"""

_COUNTER = "floor(viewed + phase + rate * {})::bigint"

_ADD_NIGHT = f"""
INSERT INTO {SNAPSHOTS} (id, card_kind, card_id, run_date, cumulative_views, created_at)
SELECT (%(id_prefix)s || lpad(to_hex(row_number() OVER ()), 12, '0'))::uuid,
       kind, id, %(run_date)s, {_COUNTER.format("%(elapsed)s")}, %(written_at)s
FROM stage
WHERE status <> 'Delisted' AND age >= %(days_ago)s AND get_byte(uuid_send(id), 0) * %(writers)s / 256 = %(writer)s"""

_ADD_CARDS = f"""
INSERT INTO {{table}} (id, title, status, popularity_views)
SELECT id, 'Card ' || left(id::text, 13), status, {_COUNTER.format("%(elapsed)s")}
FROM stage WHERE kind = %(kind)s ORDER BY random()"""

_VIEW_CARDS = f"""
UPDATE {{table}} c SET popularity_views = {_COUNTER.format("%(elapsed)s")}
FROM stage WHERE stage.id = c.id AND c.popularity_views <> {_COUNTER.format("%(elapsed)s")}"""

# Sums of hashes, since rows come in any order. Ids of snapshots and times are each contestant's own.
_FINGERPRINT = f"""
SELECT (SELECT count(*) FROM {SNAPSHOTS}),
       (SELECT sum(hash_record_extended(ROW(card_kind, card_id, run_date, cumulative_views), 0)) FROM {SNAPSHOTS}),
       """ + ", ".join(
    f"(SELECT sum(hash_record_extended(ROW(id, popularity_views, popularity_score), 0)) FROM {kind.table})"
    for kind in CardKind
)


@dataclass(frozen=True)
class Size:
    """How large a catalogue is."""

    cards: int
    days: int

    @property
    def projects(self) -> int:
        return max(self.cards // _CARDS_A_PROJECT, 1)

    @property
    def total(self) -> int:
        """Cards that a full run handles."""
        return self.cards + self.projects


Fingerprint = tuple[Any, ...]


def build(server: EmbeddedPostgres, name: str, size: Size) -> None:
    """Make a database in which the nights up to yesterday are stored and scored, and today's views are counted."""
    server.ensure_database(name)
    url = server.url(name)
    migrate(url)
    with psycopg.connect(url, autocommit=True) as connection:
        create_stand_ins(connection)
        connection.execute("SELECT setseed(0.42)")
        connection.execute(_inlined(_STAGE, days=size.days, expired=_EXPIRED, cards=size.cards, projects=size.projects))
        for days_ago in _nights(size.days):
            _add_night(url, days_ago)
        for kind in CardKind:
            connection.execute(_ADD_CARDS.format(table=kind.table), {"kind": kind, "elapsed": _elapsed(1)})
        connection.execute("VACUUM ANALYZE")
        _score_yesterday(url)
        for kind in CardKind:
            connection.execute(_VIEW_CARDS.format(table=kind.table), {"elapsed": _elapsed(0)})
        connection.execute("DROP TABLE stage")
        connection.execute("VACUUM ANALYZE")


def fingerprint(url: str) -> Fingerprint:
    """What a run left: two databases with the same fingerprint have the same snapshots and the same scores."""
    with psycopg.connect(url) as connection:
        row = connection.execute(_FINGERPRINT).fetchone()
    assert row is not None
    return row


def copy_database(server: EmbeddedPostgres, template: str, name: str) -> str:
    """Copy a database, flush everything, and return the copy's address."""
    _administer(server, "CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", name, template)
    _administer(server, "CHECKPOINT")
    return server.url(name)


def drop_database(server: EmbeddedPostgres, name: str) -> None:
    """Drop a database."""
    _administer(server, "DROP DATABASE {} WITH (FORCE)", name)


def _nights(days: int) -> Sequence[int]:
    """How many days ago the nights were, the oldest first."""
    return [_EXPIRED, *range(min(days, _EXPIRED - 1), 0, -1)]


def _elapsed(days_ago: int) -> float:
    """How much of the views had come by then, in days: a week has its ebb and flow, and today is as any day."""
    return 1 + _EXPIRED - days_ago + 0.8 * math.sin(2 * math.pi * (days_ago + 1.25) / 7)


def _add_night(url: str, days_ago: int) -> None:
    night = RUN_DATE - timedelta(days=days_ago)
    written_at = datetime(night.year, night.month, night.day, 3, tzinfo=UTC)

    def write(writer: int) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute(
                _ADD_NIGHT,
                {
                    "id_prefix": f"{round(written_at.timestamp() * 1000) + writer:012x}70008000",
                    "run_date": night,
                    "elapsed": _elapsed(days_ago),
                    "written_at": written_at,
                    "days_ago": days_ago,
                    "writers": _WRITERS,
                    "writer": writer,
                },
            )

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(_WRITERS)))


def _score_yesterday(url: str) -> None:
    recompute(
        lambda: psycopg.connect(url),
        run_id=str(uuid4()),
        run_date=RUN_DATE - timedelta(days=1),
        run_kind=RunKind.RECOMPUTE,
        parameters=Parameters(workers=_WRITERS),
    )


def _inlined(statement: str, **parameters: int) -> str:
    """With numbers in place of parameters, which CREATE TABLE AS does not take."""
    return statement % parameters


def _administer(server: EmbeddedPostgres, statement: str, *names: str) -> None:
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
