"""The fact table on the real engine: its definition, the insert, and every question that is asked of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import permutations
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.facts import FactTableError, check_schema, is_transient
from pin_pipelines.resources.clickhouse import ClickHouseUnavailableError, open_clickhouse
from pin_pipelines_tests.support.clickhouse import BACKFILL_ROW, STREAM_ROW, count_rows, plant, stored

NOW = datetime(2026, 12, 1, 3, 4, 5, 678901, tzinfo=UTC)
RUB = UUID("00000000-0000-4000-8000-000000000643")
ONE = UUID("00000001-0000-4000-8000-000000000000")
DEVELOPER = "d0000000-0000-4000-8000-000000000001"
PROJECT = "a0000000-0000-4000-8000-000000000002"


def item(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "propertyObjectId": f"{number:08x}-0000-4000-8000-000000000000",
        "developerId": DEVELOPER,
        "projectId": PROJECT,
        "buildingId": 7,
        "layoutGroupId": 8,
        "layoutId": 9,
        "areaTotal": Decimal(40),
        "currentPrice": Decimal(1_000_000),
        "pricePerMeter": None,
        "changedAt": "2026-01-10T12:00:00Z",
        **changes,
    }


def load(client: Client, *items: dict[str, Any], now: datetime = NOW) -> int:
    batch = facts.map_page(items, rub_currency_id=RUB)
    assert batch.bad_rows == []
    return facts.insert(client, batch, now=now)


def backfill_row(**changes: Any) -> dict[str, Any]:
    return {**BACKFILL_ROW, **changes}


def stream_row(**changes: Any) -> dict[str, Any]:
    return {**STREAM_ROW, **changes}


# Definition


def test_ddl_can_be_run_again_and_leaves_what_is_stored(clickhouse: Client) -> None:
    plant(clickhouse, STREAM_ROW)
    facts.create(clickhouse, None)
    check_schema(clickhouse)
    assert stored(clickhouse) == [STREAM_ROW]


def test_ddl_replaces_an_older_chart_view(clickhouse: Client) -> None:
    plant(clickhouse, STREAM_ROW)
    clickhouse.command(f"CREATE OR REPLACE VIEW {facts.CHART_VIEW} AS SELECT 1 AS Old")
    facts.create(clickhouse, None)
    assert facts.price_series(clickhouse, ONE) == [(date(2026, 1, 15), 1_200_000)]


def test_the_chart_view_has_a_day_and_two_prices_of_each_object(clickhouse: Client) -> None:
    described = clickhouse.query(f"DESCRIBE {facts.CHART_VIEW}").result_rows
    assert [tuple(column[:2]) for column in described] == [
        ("PropertyObjectId", "UUID"),
        ("Day", "Date"),
        ("Price", "Decimal(18, 4)"),
        ("PricePerMeter", "Decimal(18, 4)"),
    ]


def test_on_a_cluster_every_statement_says_so_and_the_engine_is_replicated() -> None:
    database, table, view = facts.ddl("{cluster}")
    assert database == "CREATE DATABASE IF NOT EXISTS pin_analytics ON CLUSTER `{cluster}`"
    assert table.startswith(
        "CREATE TABLE IF NOT EXISTS pin_analytics.property_object_price_history_facts ON CLUSTER `{cluster}` (\n"
    )
    assert table.endswith(
        ")\nENGINE = ReplicatedReplacingMergeTree("
        "'/clickhouse/tables/{shard}/pin_analytics/property_object_price_history_facts', '{replica}', IngestionTime)\n"
        "PARTITION BY toYYYYMM(EventTime)\n"
        "ORDER BY (PropertyObjectId, EventTime, FactId)"
    )
    assert view.startswith(
        "CREATE OR REPLACE VIEW pin_analytics.property_object_price_daily ON CLUSTER `{cluster}` AS\n"
    )


def test_without_a_cluster_no_statement_is_replicated_and_the_columns_are_the_same() -> None:
    single, replicated = facts.ddl(None)[1], facts.ddl("prod")[1]
    assert "CLUSTER" not in "".join(facts.ddl(None))
    assert "ENGINE = ReplacingMergeTree(IngestionTime)\n" in single
    assert (
        single[single.index("(") : single.index("ENGINE")]
        == replicated[replicated.index("(") : replicated.index("ENGINE")]
    )


def test_no_statement_waits_for_a_merge() -> None:
    source = Path(facts.__file__).read_text()
    code = source[source.index('DATABASE = "pin_analytics"') :]
    assert "FINAL" not in code
    assert "OPTIMIZE" not in code


def test_a_missing_table_is_named(clickhouse_url: str) -> None:
    with open_clickhouse(clickhouse_url) as client, pytest.raises(FactTableError, match="facts is missing; `pin-"):
        check_schema(client)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("DROP COLUMN BrandId", "column BrandId Nullable(UUID) is missing"),
        ("ADD COLUMN Discount UInt8", "column Discount UInt8 is not known here"),
        ("MODIFY COLUMN NewPrice Decimal(18, 2)", "column NewPrice is Decimal(18, 2) where Decimal(18, 4) is wanted"),
        ("MODIFY COLUMN AreaTotal Nullable(Decimal(18, 4))", "column AreaTotal is Nullable(Decimal(18, 4)) where Dec"),
        ("MODIFY COLUMN ChangeSource String", "column ChangeSource is String where LowCardinality(String) is wanted"),
    ],
)
def test_a_column_that_differs_is_named(clickhouse: Client, change: str, named: str) -> None:
    clickhouse.command(f"ALTER TABLE {facts.TABLE} {change}")
    with pytest.raises(FactTableError) as raised:
        check_schema(clickhouse)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("wanted", "other", "named"),
    [
        ("ReplacingMergeTree(IngestionTime)", "MergeTree", "the engine is 'MergeTree "),
        ("ReplacingMergeTree(IngestionTime)", "ReplacingMergeTree", "the engine is 'ReplacingMergeTree "),
        ("ReplacingMergeTree(IngestionTime)", "ReplacingMergeTree(EventTime)", "the engine is 'ReplacingMergeTree(Ev"),
        ("toYYYYMM(EventTime)", "toYYYYMM(IngestionTime)", "the partition key is 'toYYYYMM(IngestionTime)' where"),
        (
            "(PropertyObjectId, EventTime, FactId)",
            "(PropertyObjectId, FactId, EventTime)",
            "the sorting key is 'PropertyObjectId, FactId, EventTime' where",
        ),
    ],
)
def test_an_engine_or_a_key_that_differs_is_named(clickhouse_url: str, wanted: str, other: str, named: str) -> None:
    database, table, _ = facts.ddl(None)
    assert wanted in table
    with open_clickhouse(clickhouse_url) as client:
        client.command(database)
        client.command(table.replace(wanted, other))
        with pytest.raises(FactTableError) as raised:
            check_schema(client)
    assert named in str(raised.value)


def test_all_that_differs_is_named_at_once(clickhouse: Client) -> None:
    clickhouse.command(f"ALTER TABLE {facts.TABLE} DROP COLUMN BrandId, DROP COLUMN LayoutId, ADD COLUMN X Int8")
    with pytest.raises(
        FactTableError, match=r"BrandId .* missing; .*LayoutId|LayoutId .* missing; .*BrandId"
    ) as raised:
        check_schema(clickhouse)
    assert "column X Int8" in str(raised.value)


# Insert


def test_a_row_comes_back_exactly_as_the_spec_maps_it(clickhouse: Client) -> None:
    written = load(
        clickhouse,
        item(
            areaTotal=Decimal("48.35"),
            currentPrice=Decimal("12345678.9"),
            changedAt="2026-01-15T10:20:30.1234567+03:00",
        ),
    )
    fact_id = f"backfill:{ONE}:2026-01-15T10:20:30.1234567+03:00"
    assert written == 1
    assert stored(clickhouse) == [
        {
            "FactId": fact_id,
            "SourceEventId": fact_id,
            "ChangeSource": "backfill",
            "PropertyObjectId": ONE,
            "DeveloperId": UUID(DEVELOPER),
            "ProjectId": UUID(PROJECT),
            "BuildingId": 7,
            "LayoutGroupId": 8,
            "LayoutId": 9,
            "TenantId": DEVELOPER,
            "AreaTotal": Decimal("48.35"),
            "NewPrice": Decimal("12345678.9"),
            "NewPricePerMeter": Decimal("255339.79"),
            "OldPrice": None,
            "OldPricePerMeter": None,
            "CurrencyId": RUB,
            "CurrencyIsoCode": "RUB",
            "BrandId": None,
            "EventTime": datetime(2026, 1, 15, 7, 20, 30, 123456, tzinfo=UTC),
            "IngestionTime": NOW,
            "TransformVersion": 1,
        }
    ]


EXTREMES = [
    (Decimal(0), "0000-0000-0000-000000000000", -(2**63), "1970-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
    (
        Decimal("0.0001"),
        "ffff-ffff-ffff-ffffffffffff",
        2**63 - 1,
        "2099-12-31T23:59:59.9999999Z",
        datetime(2099, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ),
    (
        Decimal("99999999999999.9999"),
        "0123-4567-89ab-cdef01234567",
        2**53 + 1,
        "2026-03-29T01:59:59.000001+14:00",
        datetime(2026, 3, 28, 11, 59, 59, 1, tzinfo=UTC),
    ),
    (
        # A double would make 90071992547409.94 of it.
        Decimal("90071992547409.9301"),
        "0000-0000-8000-000000000000",
        -1,
        "2026-10-25T02:30:00.9999990-03:00",
        datetime(2026, 10, 25, 5, 30, 0, 999999, tzinfo=UTC),
    ),
]


def test_extreme_values_come_back_exactly(clickhouse: Client) -> None:
    page = [
        item(
            propertyObjectId=f"{n:08x}-{tail}",
            developerId=f"ffffffff-{tail}",
            buildingId=number,
            layoutGroupId=-number - 1,
            areaTotal=amount,
            currentPrice=amount,
            pricePerMeter=amount,
            changedAt=text,
        )
        for n, (amount, tail, number, text, _) in enumerate(EXTREMES)
    ]
    assert load(clickhouse, *page) == len(EXTREMES)
    rows = stored(clickhouse)
    for n, (row, (amount, tail, number, _, moment)) in enumerate(zip(rows, EXTREMES, strict=True)):
        assert (row["AreaTotal"], row["NewPrice"], row["NewPricePerMeter"]) == (amount, amount, amount)
        assert (row["PropertyObjectId"], row["DeveloperId"]) == (UUID(f"{n:08x}-{tail}"), UUID(f"ffffffff-{tail}"))
        assert (row["BuildingId"], row["LayoutGroupId"]) == (number, -number - 1)
        assert row["EventTime"] == moment


def test_150_months_in_one_page_go_in_with_one_insert(clickhouse: Client) -> None:
    first = date(2014, 1, 1)
    months = [(first.year + n // 12, n % 12 + 1) for n in range(150)]
    page = [item(n, changedAt=f"{year}-{month:02d}-03T04:05:06Z") for n, (year, month) in enumerate(months)]

    assert load(clickhouse, *page) == 150

    partitions = clickhouse.query(
        "SELECT DISTINCT partition FROM system.parts WHERE table = {table:String} AND active ORDER BY partition",
        {"table": facts.TABLE.partition(".")[2]},
    ).result_rows
    assert [partition for (partition,) in partitions] == [f"{year}{month:02d}" for year, month in months]


def test_more_months_than_the_servers_limit_are_refused_to_an_insert_that_does_not_ask_for_it(
    clickhouse: Client,
) -> None:
    months = [datetime(2014 + n // 12, n % 12 + 1, 3, tzinfo=UTC) for n in range(150)]
    with pytest.raises(DatabaseError, match="max_partitions_per_insert_block") as raised:
        plant(clickhouse, *(stream_row(FactId=str(n), EventTime=month) for n, month in enumerate(months)))
    assert raised.value.code == 252


def test_the_server_refuses_a_value_that_is_none_of_its_columns_type(clickhouse: Client) -> None:
    batch = facts.map_page([item()], rub_currency_id=RUB)
    for column, value in {
        "NewPrice": "100000000000000.0000",
        "AreaTotal": "NaN",
        "PropertyObjectId": "00000001-0000",
        "CurrencyId": "roubles",
    }.items():
        wrong = facts.FactBatch({**batch.columns, column: [value]}, 1, [])
        with pytest.raises(DatabaseError) as raised:
            facts.insert(clickhouse, wrong, now=NOW)
        assert not is_transient(raised.value)
    assert count_rows(clickhouse) == 0


def test_a_naive_time_of_ingestion_is_refused(clickhouse: Client) -> None:
    batch = facts.map_page([item()], rub_currency_id=RUB)
    with pytest.raises(TypeError, match="naive"):
        facts.insert(clickhouse, batch, now=NOW.replace(tzinfo=None))


def test_an_insert_into_a_table_that_is_gone_is_not_worth_another_attempt(clickhouse: Client) -> None:
    clickhouse.command(f"DROP TABLE {facts.TABLE}")
    with pytest.raises(DatabaseError) as raised:
        load(clickhouse, item())
    assert not is_transient(raised.value)


# Replays and duplicates


def test_a_replayed_page_is_twice_in_the_table_and_once_in_every_answer(clickhouse: Client) -> None:
    page = [item(n, changedAt=f"2026-01-{n:02d}T12:00:00Z") for n in range(1, 21)]
    for replay in range(2):
        assert load(clickhouse, *page, now=NOW + timedelta(minutes=replay)) == 20

    assert count_rows(clickhouse) == 40
    assert facts.count_objects(clickhouse, None, None) == 20
    assert facts.uncollapsible_duplicates(clickhouse, None, None) == []
    assert facts.price_series(clickhouse, ONE) == [(date(2026, 1, 1), 1_000_000)]
    assert _view_rows(clickhouse) == 20

    # What a merge will do of itself, some day.
    clickhouse.command(f"OPTIMIZE TABLE {facts.TABLE} FINAL")
    assert count_rows(clickhouse) == 20
    assert {row["IngestionTime"] for row in stored(clickhouse)} == {NOW + timedelta(minutes=1)}


def test_the_very_same_insert_sent_twice_counts_its_rows_twice_and_is_once_in_every_answer(clickhouse: Client) -> None:
    assert load(clickhouse, item(), now=NOW) == 1
    assert load(clickhouse, item(), now=NOW) == 1
    assert facts.count_objects(clickhouse, None, None) == 1
    assert facts.price_series(clickhouse, ONE) == [(date(2026, 1, 10), 1_000_000)]


@pytest.mark.parametrize(
    "other",
    [
        {"EventTime": BACKFILL_ROW["EventTime"] + timedelta(microseconds=1)},
        {"EventTime": BACKFILL_ROW["EventTime"] + timedelta(days=31)},
        {"PropertyObjectId": UUID(int=ONE.int + 1)},
    ],
)
def test_rows_of_a_fact_that_no_merge_makes_one_are_found(clickhouse: Client, other: dict[str, Any]) -> None:
    plant(clickhouse, BACKFILL_ROW, backfill_row(**other))
    plant(clickhouse, backfill_row(FactId="a", SourceEventId="a"), backfill_row(FactId="a", SourceEventId="a"))
    assert facts.uncollapsible_duplicates(clickhouse, None, None) == [BACKFILL_ROW["FactId"]]
    assert facts.uncollapsible_duplicates(clickhouse, ONE, UUID(int=ONE.int + 1)) == [BACKFILL_ROW["FactId"]]
    assert facts.uncollapsible_duplicates(clickhouse, UUID(int=ONE.int + 2), None) == []


def test_no_more_than_ten_facts_are_named(clickhouse: Client) -> None:
    later = BACKFILL_ROW["EventTime"] + timedelta(seconds=1)
    ids = [f"backfill:{n:02d}" for n in range(12)]
    for moment in (BACKFILL_ROW["EventTime"], later):
        plant(clickhouse, *(backfill_row(FactId=fact_id, EventTime=moment) for fact_id in ids))
    assert facts.uncollapsible_duplicates(clickhouse, None, None) == ids[:10]


def test_a_stream_that_wrote_an_event_twice_is_none_of_the_backfills_duplicates(clickhouse: Client) -> None:
    plant(clickhouse, STREAM_ROW, stream_row(EventTime=NOW))
    assert facts.uncollapsible_duplicates(clickhouse, None, None) == []


# Ranges


def test_objects_are_counted_by_the_text_of_their_ids_over_the_whole_range_of_uuids(clickhouse: Client) -> None:
    # The first half ascends where the second one descends: ClickHouse's own order is the other way round.
    ids = [
        UUID("00000000-0000-0000-0000-000000000000"),
        UUID("00000000-0000-0000-ffff-ffffffffffff"),
        UUID("10000000-0000-4000-9000-000000000000"),
        UUID("20000000-0000-4000-8000-000000000000"),
        UUID("9fffffff-ffff-ffff-7fff-ffffffffffff"),
        UUID("a0000000-0000-4000-0000-000000000000"),
        UUID("ffffffff-ffff-ffff-ffff-ffffffffffff"),
    ]
    load(clickhouse, *(item(propertyObjectId=str(id_)) for id_ in ids))
    for first, lower in enumerate(ids):
        assert facts.count_objects(clickhouse, lower, None) == len(ids) - first
        assert facts.count_objects(clickhouse, None, lower) == first + 1
        for last, upper in enumerate(ids):
            assert facts.count_objects(clickhouse, lower, upper) == max(last - first + 1, 0)
    assert facts.count_objects(clickhouse, None, None) == len(ids)


def test_objects_that_only_the_stream_knows_are_not_counted(clickhouse: Client) -> None:
    plant(clickhouse, STREAM_ROW, backfill_row(PropertyObjectId=UUID(int=5)))
    assert facts.count_objects(clickhouse, None, None) == 1
    assert facts.count_objects(clickhouse, ONE, ONE) == 0


@pytest.mark.parametrize("column", ["OldPrice", "OldPricePerMeter"])
def test_backfill_rows_with_an_old_price_are_counted_and_the_streams_are_not(clickhouse: Client, column: str) -> None:
    plant(clickhouse, STREAM_ROW, BACKFILL_ROW)
    assert facts.rows_with_old_price(clickhouse, None, None) == 0
    plant(clickhouse, backfill_row(**{column: Decimal(0)}))
    assert facts.rows_with_old_price(clickhouse, None, None) == 1
    assert facts.rows_with_old_price(clickhouse, ONE, ONE) == 1
    assert facts.rows_with_old_price(clickhouse, UUID(int=ONE.int + 1), None) == 0


# The chart


def test_the_chart_of_an_object_without_rows_is_empty(clickhouse: Client) -> None:
    assert facts.price_series(clickhouse, ONE) == []


def test_a_day_of_the_chart_is_a_day_in_utc_and_its_price_the_last_one(clickhouse: Client) -> None:
    for moment, price in [
        ("2026-01-10T23:59:59.999999+00:00", 3),
        ("2026-01-10T00:00:00+00:00", 1),
        ("2026-01-10T12:00:00+00:00", 2),
        ("2026-01-11T00:00:00+00:00", 4),
        ("2026-02-01T00:00:00+03:00", 5),
    ]:
        plant(
            clickhouse,
            stream_row(FactId=moment, EventTime=datetime.fromisoformat(moment), NewPrice=Decimal(price)),
            stream_row(FactId=moment, PropertyObjectId=UUID(int=9), NewPrice=Decimal(99)),
        )
    assert facts.price_series(clickhouse, ONE) == [
        (date(2026, 1, 10), 3),
        (date(2026, 1, 11), 4),
        (date(2026, 1, 31), 5),
    ]


def test_both_prices_of_a_day_come_from_the_same_row_whatever_order_they_arrived_in(clickhouse_url: str) -> None:
    moment, later = STREAM_ROW["EventTime"], STREAM_ROW["EventTime"] + timedelta(microseconds=1)
    rows = [
        # The last by EventTime, then by IngestionTime, then by FactId: the last of the list.
        stream_row(FactId="z", EventTime=moment, IngestionTime=NOW, NewPrice=Decimal(9), NewPricePerMeter=Decimal(1)),
        stream_row(FactId="y", EventTime=later, NewPrice=Decimal(8), NewPricePerMeter=Decimal(2)),
        stream_row(FactId="a", EventTime=later, IngestionTime=NOW, NewPrice=Decimal(1), NewPricePerMeter=Decimal(9)),
        stream_row(FactId="b", EventTime=later, IngestionTime=NOW, NewPrice=Decimal(5), NewPricePerMeter=Decimal(5)),
    ]
    with open_clickhouse(clickhouse_url) as client:
        facts.create(client, None)
        for order in permutations(rows):
            client.command(f"TRUNCATE TABLE {facts.TABLE}")
            for row in order:
                plant(client, row)
            assert _view(client) == [(ONE, date(2026, 1, 15), 5, 5)]


def test_stream_and_backfill_rows_of_an_object_give_the_same_series_in_either_order(clickhouse_url: str) -> None:
    page = [item(changedAt="2026-01-15T09:30:00+03:00", currentPrice=1_000_000)]
    events = [
        stream_row(FactId="e1", EventTime=datetime(2026, 1, 15, 6, 45, tzinfo=UTC), NewPrice=Decimal(1_100_000)),
        stream_row(FactId="e2", EventTime=datetime(2026, 2, 20, tzinfo=UTC), NewPrice=Decimal(1_300_000)),
    ]
    series = []
    with open_clickhouse(clickhouse_url) as client:
        facts.create(client, None)
        steps = [lambda: load(client, *page), lambda: plant(client, events[0]), lambda: plant(client, events[1])]
        for first, second, third in permutations(steps):
            client.command(f"TRUNCATE TABLE {facts.TABLE}")
            # One of them is replayed.
            for step in (first, second, third, first):
                step()
            series.append(facts.price_series(client, ONE))
    assert series == [[(date(2026, 1, 15), 1_100_000), (date(2026, 2, 20), 1_300_000)]] * 6


# The embedded engine's folder


@contextmanager
def held(url: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until its input ends."""
    code = (
        "import sys; from pin_pipelines.resources.clickhouse import open_clickhouse\n"
        f"with open_clickhouse({url!r}): print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_folder_that_another_process_holds_is_waited_for_only_so_long_and_the_holder_is_named(
    clickhouse_url: str,
) -> None:
    with (
        held(clickhouse_url) as process,
        pytest.raises(ClickHouseUnavailableError, match=rf"held by another process \(PID: {process.pid}\)") as raised,
        open_clickhouse(clickhouse_url, wait_seconds=0.5),
    ):
        pass
    assert clickhouse_url.removeprefix("chdb://") in str(raised.value)
    assert "waited 0.5 s" in str(raised.value)


def test_a_folder_that_is_let_go_in_time_is_opened(clickhouse_url: str) -> None:
    with held(clickhouse_url) as process:
        with pytest.raises(ClickHouseUnavailableError), open_clickhouse(clickhouse_url, wait_seconds=0):
            pass
        assert process.stdin is not None
        process.stdin.close()
        with open_clickhouse(clickhouse_url, wait_seconds=60) as client:
            assert client.command("SELECT 1") == 1


@pytest.mark.slow
def test_a_killed_process_holds_nothing(clickhouse_url: str) -> None:
    with held(clickhouse_url) as process:
        process.kill()
        process.wait()
        with open_clickhouse(clickhouse_url, wait_seconds=10) as client:
            assert client.command("SELECT 1") == 1


def test_clients_of_one_process_share_a_folder_and_the_last_one_lets_it_go(clickhouse_url: str) -> None:
    with open_clickhouse(clickhouse_url) as first:
        with open_clickhouse(clickhouse_url, wait_seconds=0) as second:
            facts.create(second, None)
        assert load(first, item()) == 1
    with held(clickhouse_url):
        pass


def test_a_second_folder_in_the_same_process_is_refused_at_once(clickhouse_url: str) -> None:
    with (
        open_clickhouse(clickhouse_url),
        pytest.raises(ClickHouseUnavailableError, match="cannot connect with different path"),
        open_clickhouse(f"{clickhouse_url}-other", wait_seconds=600),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_refused_at_once_without_a_stack_trace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ClickHouseUnavailableError, match="Not a directory") as raised,
        open_clickhouse(f"chdb://{tmp_path}/file/clickhouse", wait_seconds=600),
    ):
        pass
    assert "Stack trace" not in str(raised.value)
    assert "\n" not in str(raised.value)


def _view(client: Client) -> list[tuple[Any, ...]]:
    return list(client.query(f"SELECT * FROM {facts.CHART_VIEW} ORDER BY PropertyObjectId, Day").result_rows)


def _view_rows(client: Client) -> int:
    return len(_view(client))
