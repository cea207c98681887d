"""The fact table in ClickHouse: its definition, the mapping into it, the insert, and what can be asked of it.

``ReplacingMergeTree`` drops all but one of the rows with the same sorting key, some time after they were written: a
page that is inserted twice is twice in the table until then. Nothing here waits for that or asks for it. Every
statement is right with duplicates present, without FINAL and without OPTIMIZE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from operator import add, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import urllib3
from clickhouse_connect.driver.binding import quote_identifier
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import Error, OperationalError

from pin_pipelines.invest_analytics.snapshots import (
    EARLIEST,
    INT64_MAX,
    INT64_MIN,
    BadRow,
    BadRowError,
    RawItem,
    bad_row,
    canonical_ids,
    divide_to_kopecks,
    microseconds,
    parse_changed_at_column,
    parse_snapshot,
    quantise,
    quantise_column,
)

DATABASE = "pin_analytics"
TABLE = f"{DATABASE}.property_object_price_history_facts"
CHART_VIEW = f"{DATABASE}.property_object_price_daily"

COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "FactId": "String",
        "SourceEventId": "String",
        "ChangeSource": "LowCardinality(String)",
        "PropertyObjectId": "UUID",
        "DeveloperId": "UUID",
        "ProjectId": "UUID",
        "BuildingId": "Int64",
        "LayoutGroupId": "Int64",
        "LayoutId": "Int64",
        "TenantId": "String",
        "AreaTotal": "Decimal(18, 4)",
        "NewPrice": "Decimal(18, 4)",
        "NewPricePerMeter": "Decimal(18, 4)",
        "OldPrice": "Nullable(Decimal(18, 4))",
        "OldPricePerMeter": "Nullable(Decimal(18, 4))",
        "CurrencyId": "UUID",
        "CurrencyIsoCode": "LowCardinality(String)",
        "BrandId": "Nullable(UUID)",
        "EventTime": "DateTime64(6, 'UTC')",
        "IngestionTime": "DateTime64(6, 'UTC')",
        "TransformVersion": "UInt16",
    }
)
"""The columns of the table and their types, in order."""

CHANGE_SOURCE = "backfill"
"""ChangeSource of the rows that the backfill writes."""

_VERSION_COLUMN = "IngestionTime"
_PARTITION_KEY = "toYYYYMM(EventTime)"
_SORTING_KEY = "PropertyObjectId, EventTime, FactId"
# Whatever keeps the copies in step, the rows collapse by the same rule.
_ENGINE = re.compile(rf"(?:Replicated|Shared)?ReplacingMergeTree\((?:[^()]*, )?{_VERSION_COLUMN}\)")

# What clickhouse-connect can insert, tried on chDB with pages of 1,000 rows, each form exact to the last digit; best
# of 160 in ms a page: rows 13.8, columns 13.1, a data frame 19.5, Arrow 9.9 (and one more package in production), a
# Native block made by hand 9.3, columns of which ids and numbers travel as text 9.5. Text is quick since both its ends
# are C code: a string column is written as it stands, and the server reads it into the column's type. It reads some
# nonsense, too (1.2.3), and cuts digits: what is sent has been checked and rounded (_amounts).
_SENT_AS = {
    "UUID": "String",
    "Nullable(UUID)": "Nullable(String)",
    "Decimal(18, 4)": "String",
    "Nullable(Decimal(18, 4))": "Nullable(String)",
    "LowCardinality(String)": "String",
}
_INSERT_SETTINGS = {
    # The server answers when the rows are in the table, not when they are in a buffer that a crash empties …
    "async_insert": 0,
    # … and with the final number of rows.
    "wait_end_of_query": 1,
    # A page may span more months than the server's limit of 100; its rows, 1,000 at most, bound it anyway.
    "max_partitions_per_insert_block": 0,
    # A replicated table drops a block that it has seen before, which clickhouse-connect's own repeat of an insert is;
    # the answer then may count no rows, and the page would look lost. Its rows collapse anyway. (A replayed page has
    # another IngestionTime: block deduplication would not know it.)
    "insert_deduplicate": 0,
    # The default, relied upon by _SENT_AS.
    "input_format_native_allow_types_conversion": 1,
    # insert_quorum is left to the server's profile: what counts as stored is the same for the stream.
}

# By name in ClickHouse: TIMEOUT_EXCEEDED, TOO_MANY_SIMULTANEOUS_QUERIES, NO_FREE_CONNECTION, SOCKET_TIMEOUT,
# NETWORK_ERROR, NO_ZOOKEEPER, ABORTED, MEMORY_LIMIT_EXCEEDED, TABLE_IS_READ_ONLY (a replica lost its keeper),
# TOO_MANY_PARTS, ALL_CONNECTION_TRIES_FAILED, TOO_FEW_LIVE_REPLICAS, UNSATISFIED_QUORUM_FOR_PREVIOUS_WRITE,
# UNKNOWN_STATUS_OF_INSERT, QUERY_WAS_CANCELLED (by a shutdown), CANNOT_SCHEDULE_TASK, SERVER_OVERLOADED,
# KEEPER_EXCEPTION.
_TRANSIENT_CODES = {159, 202, 203, 209, 210, 225, 236, 241, 242, 252, 279, 285, 286, 319, 394, 439, 745, 999}
# clickhouse-connect tells the status of an answer that is not ClickHouse's own (a proxy's) in the message alone.
_TRANSIENT_STATUS = re.compile(r"received HTTP status (?:408|429|5\d\d)\b")

_REQUIRED_FIELDS = itemgetter(
    "propertyObjectId",
    "developerId",
    "projectId",
    "buildingId",
    "layoutGroupId",
    "layoutId",
    "areaTotal",
    "currentPrice",
    "changedAt",
)
_AMOUNT = r"\d{1,14}\.\d{4}"
_AMOUNTS = re.compile(rf"{_AMOUNT}(?:\n{_AMOUNT})*", re.ASCII)
# So few are read row by row: halving them again would cost more.
_FEW_ROWS = 8


class FactTableError(RuntimeError):
    """The fact table is not there or not as it must be; the message names what differs."""


@dataclass(frozen=True)
class FactBatch:
    """A page of the source, mapped.

    Attributes:
        columns: all of ``COLUMNS`` by name but IngestionTime, which the insert sets; rows in the order of the page,
            values as they are sent: ids and decimals as text, moments in microseconds since the Unix epoch.
        size: the number of facts.
        bad_rows: the rows of the page that became none.
    """

    columns: Mapping[str, Sequence[Any]]
    size: int
    bad_rows: Sequence[BadRow]


class _Read(NamedTuple):
    """Rows of the source by column, checked and in the form they are sent."""

    property_object_ids: list[str]
    developer_ids: list[str]
    project_ids: list[str]
    building_ids: list[int]
    layout_group_ids: list[int]
    layout_ids: list[int]
    areas: list[str]
    prices: list[str]
    prices_per_meter: list[str]
    changed_at: list[str]
    event_times: list[int]


def map_page(items: Sequence[RawItem], *, rub_currency_id: UUID) -> FactBatch:
    """Map a page field by field (spec, step 4); rows that cannot become facts come back as bad ones.

    A page is read column by column, several times as fast as row by row. Where anything is off, its halves are; of a
    few rows each is read by itself, so that ``parse_snapshot`` alone calls a row bad.
    """
    read, bad_rows = _read(items)
    size = len(read.changed_at)
    keys = zip(read.property_object_ids, read.changed_at, strict=True)
    fact_ids = [f"{CHANGE_SOURCE}:{property_object_id}:{changed_at}" for property_object_id, changed_at in keys]
    return FactBatch(
        columns={
            "FactId": fact_ids,
            "SourceEventId": fact_ids,
            "ChangeSource": [CHANGE_SOURCE] * size,
            "PropertyObjectId": read.property_object_ids,
            "DeveloperId": read.developer_ids,
            "ProjectId": read.project_ids,
            "BuildingId": read.building_ids,
            "LayoutGroupId": read.layout_group_ids,
            "LayoutId": read.layout_ids,
            "TenantId": read.developer_ids,
            "AreaTotal": read.areas,
            "NewPrice": read.prices,
            "NewPricePerMeter": read.prices_per_meter,
            "OldPrice": [None] * size,
            "OldPricePerMeter": [None] * size,
            "CurrencyId": [str(rub_currency_id)] * size,
            "CurrencyIsoCode": ["RUB"] * size,
            "BrandId": [None] * size,
            "EventTime": read.event_times,
            "TransformVersion": [1] * size,
        },
        size=size,
        bad_rows=bad_rows,
    )


def ddl(cluster: str | None) -> list[str]:
    """The statements that make database, table and chart view, each harmless where the thing is there already.

    Args:
        cluster: name of the cluster to make them on, with a replicated engine; None for a single server.
    """
    on_cluster = f" ON CLUSTER {quote_identifier(cluster)}" if cluster else ""
    replica = f"'/clickhouse/tables/{{shard}}/{TABLE.replace('.', '/')}', '{{replica}}', "
    engine = f"ReplicatedReplacingMergeTree({replica}" if cluster else "ReplacingMergeTree("
    columns = ",\n    ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    return [
        f"CREATE DATABASE IF NOT EXISTS {DATABASE}{on_cluster}",
        f"""CREATE TABLE IF NOT EXISTS {TABLE}{on_cluster} (
    {columns}
)
ENGINE = {engine}{_VERSION_COLUMN})
PARTITION BY {_PARTITION_KEY}
ORDER BY ({_SORTING_KEY})""",
        # One argMax of both prices, so that they come from the same row. FactId breaks the last tie: without it any
        # of the tied rows could win. None of these columns is Nullable: argMax would pass over a NULL.
        f"""CREATE OR REPLACE VIEW {CHART_VIEW}{on_cluster} AS
SELECT
    PropertyObjectId,
    toDate(EventTime, 'UTC') AS Day,
    (argMax((NewPrice, NewPricePerMeter), (EventTime, IngestionTime, FactId)) AS last).1 AS Price,
    last.2 AS PricePerMeter
FROM {TABLE}
GROUP BY PropertyObjectId, Day""",
    ]


def create(client: Client, cluster: str | None) -> None:
    """Make what ``ddl`` says."""
    for statement in ddl(cluster):
        client.command(statement)


def check_schema(client: Client) -> None:
    """Check the table before anything is written to it.

    Raises:
        FactTableError: columns, types, engine or keys differ; all that does is named.
    """
    database, table = TABLE.split(".")
    where = "database = {database:String} AND table = {table:String}"
    parameters = {"database": database, "table": table}
    described = client.query(
        "SELECT engine_full, partition_key, sorting_key FROM system.tables "
        "WHERE database = {database:String} AND name = {table:String}",
        parameters,
    ).result_rows
    if not described:
        raise FactTableError(f"the table {TABLE} is missing; `pin-pipelines migrate` makes it")
    rows = client.query(f"SELECT name, type FROM system.columns WHERE {where}", parameters).result_rows
    columns = {str(name): str(kind) for name, kind in rows}
    differences = [*_differing_columns(columns), *_differing_keys(*described[0])]
    if differences:
        raise FactTableError(f"the table {TABLE} is not as the backfill needs it: {'; '.join(differences)}")


def _differing_columns(columns: Mapping[str, str]) -> list[str]:
    missing = [f"column {name} {kind} is missing" for name, kind in COLUMNS.items() if name not in columns]
    wrong = [
        f"column {name} is {columns[name]} where {kind} is wanted"
        for name, kind in COLUMNS.items()
        if columns.get(name, kind) != kind
    ]
    unknown = [f"column {name} {kind} is not known here" for name, kind in columns.items() if name not in COLUMNS]
    return missing + wrong + unknown


def _differing_keys(engine: str, partition_key: str, sorting_key: str) -> list[str]:
    differences = []
    if not _ENGINE.match(engine):
        differences.append(f"the engine is {engine!r} where a ReplacingMergeTree({_VERSION_COLUMN}) is wanted")
    if partition_key != _PARTITION_KEY:
        differences.append(f"the partition key is {partition_key!r} where {_PARTITION_KEY!r} is wanted")
    if sorting_key != _SORTING_KEY:
        differences.append(f"the sorting key is {sorting_key!r} where {_SORTING_KEY!r} is wanted")
    return differences


def insert(client: Client, batch: FactBatch, *, now: datetime) -> int:
    """Insert a batch that is not empty, in one INSERT; ``now`` (aware) becomes IngestionTime.

    Returns:
        The rows that the server reports as written: more than the batch where views are attached to the table.

    Raises:
        clickhouse_connect.driver.exceptions.Error: see ``is_transient``.
    """
    columns = {**batch.columns, _VERSION_COLUMN: [microseconds(now - EARLIEST)] * batch.size}
    data = [columns[name] for name in COLUMNS]
    try:
        summary = client.insert(
            TABLE,
            data,
            column_names=list(COLUMNS),
            column_type_names=[_SENT_AS.get(kind, kind) for kind in COLUMNS.values()],
            column_oriented=True,
            settings=_INSERT_SETTINGS,
        )
    finally:
        # clickhouse-connect's context refers to itself and to the data: page after page would stay in memory until
        # the garbage collector comes by, which so few objects do not make it do.
        data.clear()
    return summary.written_rows


def is_transient(error: BaseException) -> bool:
    """Another attempt may succeed: the connection or the server had a bad moment, the statement is all right."""
    if not isinstance(error, Error):
        return isinstance(error, urllib3.exceptions.HTTPError | ConnectionError | TimeoutError)
    if error.code is not None:
        return error.code in _TRANSIENT_CODES
    # Without a code of ClickHouse's own: no answer, or one of something in between.
    return isinstance(error, OperationalError) or bool(_TRANSIENT_STATUS.search(str(error)))


def count_objects(client: Client, lower: UUID | None, upper: UUID | None) -> int:
    """Property objects that have a backfill row; the range includes both ends, None is open."""
    return _number(client, "uniqExact(PropertyObjectId)", lower, upper)


def rows_with_old_price(client: Client, lower: UUID | None, upper: UUID | None) -> int:
    """Backfill rows of the range that have an OldPrice or OldPricePerMeter; a starting price has no past."""
    return _number(client, "countIf(OldPrice IS NOT NULL OR OldPricePerMeter IS NOT NULL)", lower, upper)


def uncollapsible_duplicates(client: Client, lower: UUID | None, upper: UUID | None) -> list[str]:
    """Up to ten FactIds of the range whose backfill rows no merge makes one.

    Rows collapse within a partition, where their sorting keys are equal; both follow from FactId, PropertyObjectId
    and EventTime.
    """
    where, parameters = _backfill_rows(lower, upper)
    rows = client.query(
        f"SELECT FactId FROM {TABLE} WHERE {where} GROUP BY FactId "
        "HAVING min((PropertyObjectId, EventTime)) != max((PropertyObjectId, EventTime)) ORDER BY FactId LIMIT 10",
        parameters,
    ).result_rows
    return [fact_id for (fact_id,) in rows]


def price_series(client: Client, property_object_id: UUID) -> list[tuple[date, Decimal]]:
    """The chart of one object: the last price of each day that has one, in UTC."""
    rows = client.query(
        f"SELECT Day, Price FROM {CHART_VIEW} WHERE PropertyObjectId = {{id:UUID}} ORDER BY Day",
        {"id": str(property_object_id)},
    ).result_rows
    return [(day, price) for day, price in rows]


def _number(client: Client, aggregate: str, lower: UUID | None, upper: UUID | None) -> int:
    where, parameters = _backfill_rows(lower, upper)
    return int(client.query(f"SELECT {aggregate} FROM {TABLE} WHERE {where}", parameters).result_rows[0][0])


def _backfill_rows(lower: UUID | None, upper: UUID | None) -> tuple[str, dict[str, str]]:
    """The condition for the backfill's rows in a range, both ends included; as text, which sorts as the source does."""
    conditions, parameters = ["ChangeSource = {source:String}"], {"source": CHANGE_SOURCE}
    if lower is not None:
        conditions.append("toString(PropertyObjectId) >= {lower:String}")
        parameters["lower"] = str(lower)
    if upper is not None:
        conditions.append("toString(PropertyObjectId) <= {upper:String}")
        parameters["upper"] = str(upper)
    return " AND ".join(conditions), parameters


def _read(items: Sequence[RawItem]) -> tuple[_Read, list[BadRow]]:
    try:
        return _read_columns(items), []
    except (KeyError, TypeError, ValueError):
        if len(items) <= _FEW_ROWS:
            return _read_rows(items)
    middle = len(items) // 2
    (left, left_bad), (right, right_bad) = _read(items[:middle]), _read(items[middle:])
    return _Read(*map(add, left, right)), left_bad + right_bad


def _read_columns(items: Sequence[RawItem]) -> _Read:
    """Read rows that are all good.

    Raises:
        KeyError, TypeError, ValueError: they may not all be; a good row may fail here, a bad one never passes.
    """
    ids, developers, projects, buildings, groups, layouts, areas, prices, times = zip(
        *map(_REQUIRED_FIELDS, items), strict=True
    )
    given = [item.get("pricePerMeter") for item in items]
    area_texts, price_texts = _amounts(areas), _amounts(prices)
    per_meter = [
        divide_to_kopecks(price, area) if known is None else known
        for known, price, area in zip(given, prices, areas, strict=True)
    ]
    changed_at, event_times = parse_changed_at_column(times)
    return _Read(
        property_object_ids=canonical_ids(ids),
        developer_ids=canonical_ids(developers),
        project_ids=canonical_ids(projects),
        building_ids=_int64s(buildings),
        layout_group_ids=_int64s(groups),
        layout_ids=_int64s(layouts),
        areas=area_texts,
        prices=price_texts,
        prices_per_meter=_amounts(per_meter),
        changed_at=changed_at,
        event_times=event_times,
    )


def _int64s(numbers: Sequence[Any]) -> list[int]:
    if set(map(type, numbers)) != {int}:
        raise TypeError("one of them is no whole number")
    if min(numbers) < INT64_MIN or max(numbers) > INT64_MAX:
        raise ValueError("one of them does not fit")
    return list(numbers)


def _amounts(numbers: Sequence[Any]) -> list[str]:
    """The numbers as their column stores them."""
    if not set(map(type, numbers)) <= {int, Decimal}:
        raise TypeError("one of them is no number")
    texts = list(map(str, quantise_column(numbers)))
    # A minus, NaN, an infinity or a digit too many: none of them is an amount.
    if not _AMOUNTS.fullmatch("\n".join(texts)):
        raise ValueError("one of them is no amount")
    return texts


def _read_rows(items: Sequence[RawItem]) -> tuple[_Read, list[BadRow]]:
    rows, bad_rows = [], []
    for item in items:
        try:
            snapshot = parse_snapshot(item)
        except BadRowError as error:
            bad_rows.append(bad_row(item, error))
            continue
        rows.append(
            (
                str(snapshot.property_object_id),
                str(snapshot.developer_id),
                str(snapshot.project_id),
                snapshot.building_id,
                snapshot.layout_group_id,
                snapshot.layout_id,
                str(quantise(snapshot.area_total)),
                str(quantise(snapshot.current_price)),
                str(quantise(snapshot.new_price_per_meter)),
                snapshot.changed_at.text,
                microseconds(snapshot.changed_at.utc - EARLIEST),
            )
        )
    columns = zip(*rows, strict=True) if rows else [()] * len(_Read._fields)
    return _Read(*map(list, columns)), bad_rows
