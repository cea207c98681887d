"""A catalogue under test: cards that views come to, nights that pass, and what is stored afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg

from pin_pipelines.catalog.recompute import Parameters, Summary, recompute
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines_tests.support.databases import Database
from pin_pipelines_tests.support.roles import PIPELINE, as_role

TODAY = date(2026, 11, 30)
FLAT, PROJECT = CardKind.PROPERTY_OBJECT, CardKind.PROJECT


def night(offset: int) -> date:
    """The run date so many days from TODAY."""
    return TODAY + timedelta(days=offset)


def card_id(number: int) -> UUID:
    """Ids that sort like numbers."""
    return UUID(int=number << 64 | 0x8000_0000_0000_0000)


class Catalogue(Database):
    """The cards and what is stored of them."""

    def connect(self) -> psycopg.Connection[Any]:
        """As the engine does: under the pipeline's role."""
        return psycopg.connect(self.pipeline_url)

    @property
    def pipeline_url(self) -> str:
        return as_role(self.url, PIPELINE)

    def add(self, views: int = 0, *, kind: CardKind = FLAT, status: str = "Published", new: UUID | None = None) -> UUID:
        new = new or uuid4()
        self.execute(
            f"INSERT INTO {kind.table} (id, title, status, popularity_views) VALUES (%s, 'card', %s, %s)",
            new,
            status,
            views,
        )
        return new

    def add_many(self, number: int, *, kind: CardKind = FLAT, views: int = 0, first: int = 1) -> list[UUID]:
        """Cards with ids ``card_id(first)`` and on."""
        ids = [card_id(first + n) for n in range(number)]
        self.execute(
            f"INSERT INTO {kind.table} (id, title, status, popularity_views) "
            "SELECT id, 'card', 'Published', %s FROM unnest(%s::uuid[]) id",
            views,
            ids,
        )
        return ids

    def view(self, card: UUID, times: int, *, kind: CardKind = FLAT) -> None:
        self.execute(f"UPDATE {kind.table} SET popularity_views = popularity_views + %s WHERE id = %s", times, card)

    def set_views(self, card: UUID, views: int, *, kind: CardKind = FLAT) -> None:
        self.execute(f"UPDATE {kind.table} SET popularity_views = %s WHERE id = %s", views, card)

    def set_status(self, card: UUID, status: str, *, kind: CardKind = FLAT) -> None:
        self.execute(f"UPDATE {kind.table} SET status = %s WHERE id = %s", status, card)

    def run(self, run_date: date = TODAY, *, parameters: Parameters | None = None, **options: Any) -> Summary:
        return recompute(
            self.connect, run_id=str(uuid4()), run_date=run_date, parameters=parameters or Parameters(), **options
        )

    def play(self, card: UUID, counters: Mapping[date, int], *, kind: CardKind = FLAT, **options: Any) -> None:
        """Let the nights pass, in which the card's counter stands as given."""
        for run_date in sorted(counters):
            self.set_views(card, counters[run_date], kind=kind)
            self.run(run_date, **options)

    def store(self, card: UUID, counters: Mapping[date, int], *, kind: CardKind = FLAT) -> None:
        """Snapshots as earlier nights left them."""
        self.store_many({card: counters}, kind=kind)

    def store_many(self, snapshots: Mapping[UUID, Mapping[date, int]], *, kind: CardKind = FLAT) -> None:
        rows = [(kind, card, day, views) for card, days in snapshots.items() for day, views in days.items()]
        with self.connect() as connection:
            connection.cursor().executemany(
                "INSERT INTO catalog.popularity_daily_views (id, card_kind, card_id, run_date, cumulative_views, "
                "created_at) VALUES (gen_random_uuid(), %s, %s, %s, %s, now() - interval '1 day')",
                rows,
            )

    def score(self, card: UUID, *, kind: CardKind = FLAT) -> Decimal:
        return self.scores(kind=kind)[card]

    def scores(self, *, kind: CardKind = FLAT) -> dict[UUID, Decimal]:
        return dict(self.execute(f"SELECT id, popularity_score FROM {kind.table}"))

    def snapshots(self, card: UUID, *, kind: CardKind = FLAT) -> dict[date, int]:
        return dict(
            self.execute(
                "SELECT run_date, cumulative_views FROM catalog.popularity_daily_views "
                "WHERE card_kind = %s AND card_id = %s ORDER BY run_date",
                kind,
                card,
            )
        )

    def snapshot_counts(self, run_date: date = TODAY) -> dict[CardKind, int]:
        rows = self.execute(
            "SELECT card_kind, count(*) FROM catalog.popularity_daily_views WHERE run_date = %s GROUP BY 1", run_date
        )
        return {CardKind(kind): count for kind, count in rows}

    def stored(self) -> list[tuple[Any, ...]]:
        """All that a run leaves, without ids and times."""
        return self.execute(
            "SELECT card_kind, card_id, run_date, cumulative_views::numeric FROM catalog.popularity_daily_views "
            "UNION ALL SELECT 'PropertyObject', id, NULL, popularity_score FROM catalog.property_object_cards "
            "UNION ALL SELECT 'Project', id, NULL, popularity_score FROM catalog.project_cards ORDER BY 1, 2, 3"
        )

    def ledger(self) -> list[dict[str, Any]]:
        with self.connect() as connection:
            cursor = connection.execute("SELECT * FROM catalog.popularity_runs ORDER BY started_at")
            assert cursor.description is not None
            names = [column.name for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]


def counters(first: date, values: Iterable[int]) -> dict[date, int]:
    """One counter a night, from ``first`` on."""
    return {first + timedelta(days=n): value for n, value in enumerate(values)}
