"""A backfill under test: a source in memory, the stores that it is loaded into, and what is in them afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Self
from uuid import UUID, uuid4

import psycopg
from clickhouse_connect.driver.client import Client

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import Summary, run_backfill
from pin_pipelines.invest_analytics.checkpoints import Checkpoint, Range, Reject, checkpoint_rows, reject_rows
from pin_pipelines.invest_analytics.snapshots import RawItem
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines_tests.support.databases import Database
from pin_pipelines_tests.support.roles import PIPELINE, as_role

EVERYTHING = Range()
RUB = UUID("00000000-0000-4000-8000-000000000643")


def object_id(number: int) -> UUID:
    """Ids that sort like numbers, and are spread over the id space like the numbers up to 0xffffffff."""
    return UUID(f"{number:08x}-0000-4000-8000-000000000000")


def price(number: int, **changes: Any) -> dict[str, Any]:
    """What the source says of the object of this number."""
    return {
        "propertyObjectId": str(object_id(number)),
        "developerId": "d0000000-0000-4000-8000-000000000001",
        "projectId": "a0000000-0000-4000-8000-000000000002",
        "buildingId": 7,
        "layoutGroupId": 8,
        "layoutId": 9,
        "areaTotal": Decimal("40.5"),
        "currentPrice": 1_000_000 + number,
        "pricePerMeter": None,
        "changedAt": "2026-01-15T10:20:30.1234567+03:00",
        **changes,
    }


def prices(number: int) -> list[dict[str, Any]]:
    """The objects from 1 to the number."""
    return [price(n) for n in range(1, number + 1)]


@dataclass
class Listed:
    """A source that keeps the contract, over a list of items sorted by id.

    Attributes:
        cap: the most that it gives, whatever ``take`` says.
        before: called before each page with its number, from 1: to look, to change things, to raise.
        asked: ``after`` of each page that was asked for.
    """

    items: Sequence[RawItem]
    cap: int = 1000
    before: Callable[[int], None] = lambda _: None
    asked: list[UUID | None] = field(default_factory=list)

    def fetch(self, *, after: UUID | None, to: UUID | None, take: int) -> list[RawItem]:
        self.asked.append(after)
        self.before(len(self.asked))
        wanted = [
            item
            for item in self.items
            if (after is None or str(after) < item["propertyObjectId"])
            and (to is None or item["propertyObjectId"] <= str(to))
        ]
        return wanted[: min(take, self.cap)]


@dataclass
class Scripted:
    """A source that gives the pages it was told to, whatever it is asked; then nothing."""

    pages: list[Sequence[RawItem]]

    def fetch(self, *, after: UUID | None, to: UUID | None, take: int) -> Sequence[RawItem]:
        return self.pages.pop(0) if self.pages else []


class Backfill(Database):
    """Access to the two stores of one test."""

    def __init__(self, url: str, clickhouse_url: str = "") -> None:
        super().__init__(url)
        self.clickhouse_url = clickhouse_url

    def connect(self) -> psycopg.Connection[Any]:
        """As the engine does: under the pipeline's role."""
        return psycopg.connect(self.pipeline_url)

    @property
    def pipeline_url(self) -> str:
        return as_role(self.url, PIPELINE)

    def furnish(self) -> Self:
        """Make the fact table."""
        with self.clickhouse() as client:
            facts.create(client, None)
        return self

    @contextmanager
    def clickhouse(self) -> Iterator[Client]:
        with open_clickhouse(self.clickhouse_url) as client:
            yield client

    def run(self, source: Any, price_range: Range = EVERYTHING, *, batch_size: int = 4, **options: Any) -> Summary:
        given: dict[str, Any] = {
            "run_id": uuid4(),
            "connect": self.connect,
            "open_clickhouse": self.clickhouse,
            "rub_currency_id": RUB,
            "stop": threading.Event(),
            **options,
        }
        return run_backfill(source=source, price_range=price_range, batch_size=batch_size, **given)

    def checkpoints(self) -> list[Checkpoint]:
        """The oldest first."""
        with self.connect() as connection:
            return checkpoint_rows(connection)[::-1]

    def rejects(self) -> list[Reject]:
        """The oldest first."""
        with self.connect() as connection:
            return reject_rows(connection, 10_000)[::-1]

    def facts(self) -> list[Mapping[str, Any]]:
        """All rows as they lie there, twice where they were inserted twice."""
        with self.clickhouse() as client:
            order = "toString(PropertyObjectId), EventTime, FactId, IngestionTime"
            rows = client.query(f"SELECT * FROM {facts.TABLE} ORDER BY {order}", tz_mode="aware")
            return list(rows.named_results())

    def merged(self) -> list[Mapping[str, Any]]:
        """What is left of them when ClickHouse has merged everything."""
        with self.clickhouse() as client:
            client.command(f"OPTIMIZE TABLE {facts.TABLE} FINAL")
        return self.facts()
