"""The fact table in the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clickhouse_connect.driver.client import Client

from pin_pipelines.invest_analytics import facts
from pin_pipelines.resources.clickhouse import open_clickhouse


@pytest.fixture
def clickhouse(clickhouse_url: str) -> Iterator[Client]:
    """An open client, the fact table and its view made."""
    with open_clickhouse(clickhouse_url) as client:
        facts.create(client, None)
        yield client
