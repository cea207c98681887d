"""An analytics ClickHouse under test: the embedded engine over a folder of its own, and what is stored in it."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from clickhouse_connect.driver.client import Client

from pin_pipelines.invest_analytics import facts

# A row as the stream writes it; its id is that of an event, and it knows the price before.
STREAM_ROW: dict[str, Any] = {
    "FactId": "5f0c2f6e-3a53-4b8c-9c39-6c0a4f1f9d11",
    "SourceEventId": "5f0c2f6e-3a53-4b8c-9c39-6c0a4f1f9d11",
    "ChangeSource": "talent-sync",
    "PropertyObjectId": UUID("00000001-0000-4000-8000-000000000000"),
    "DeveloperId": UUID("d0000000-0000-4000-8000-000000000001"),
    "ProjectId": UUID("a0000000-0000-4000-8000-000000000002"),
    "BuildingId": 7,
    "LayoutGroupId": 8,
    "LayoutId": 9,
    "TenantId": "d0000000-0000-4000-8000-000000000001",
    "AreaTotal": Decimal(40),
    "NewPrice": Decimal(1_200_000),
    "NewPricePerMeter": Decimal(30_000),
    "OldPrice": Decimal(1_000_000),
    "OldPricePerMeter": Decimal(25_000),
    "CurrencyId": UUID("00000000-0000-4000-8000-000000000643"),
    "CurrencyIsoCode": "RUB",
    "BrandId": None,
    "EventTime": datetime(2026, 1, 15, 12, tzinfo=UTC),
    "IngestionTime": datetime(2026, 2, 1, tzinfo=UTC),
    "TransformVersion": 1,
}
BACKFILL_ROW: dict[str, Any] = {
    **STREAM_ROW,
    "FactId": "backfill:00000001-0000-4000-8000-000000000000:2026-01-10T12:00:00.0000000+00:00",
    "SourceEventId": "backfill:00000001-0000-4000-8000-000000000000:2026-01-10T12:00:00.0000000+00:00",
    "ChangeSource": "backfill",
    "NewPrice": Decimal(1_000_000),
    "NewPricePerMeter": Decimal(25_000),
    "OldPrice": None,
    "OldPricePerMeter": None,
    "EventTime": datetime(2026, 1, 10, 12, tzinfo=UTC),
}


def plant(client: Client, *rows: dict[str, Any]) -> None:
    """Store rows as another writer would: with its own client code, value by value."""
    client.insert(
        facts.TABLE, [[row[name] for name in facts.COLUMNS] for row in rows], column_names=list(facts.COLUMNS)
    )


def count_rows(client: Client) -> int:
    """The physical rows, duplicates and all."""
    return int(client.query(f"SELECT count() FROM {facts.TABLE}").result_rows[0][0])


def stored(client: Client) -> list[dict[str, Any]]:
    """The physical rows by FactId; moments are UTC and aware."""
    result = client.query(f"SELECT * FROM {facts.TABLE} ORDER BY FactId, IngestionTime", tz_mode="aware")
    return [dict(zip(result.column_names, row, strict=True)) for row in result.result_rows]
