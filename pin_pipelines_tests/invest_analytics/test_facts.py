"""From a row of the source to a fact: field by field, what is a bad row, and the contract of a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import psycopg
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError, ProgrammingError
from hypothesis import given, settings
from hypothesis import strategies as st

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.facts import FactBatch, is_transient
from pin_pipelines.invest_analytics.snapshots import (
    BadRow,
    BadRowError,
    ChangedAt,
    SourceContractError,
    SourceError,
    check_page,
    parse_changed_at,
    parse_changed_at_column,
    parse_snapshot,
)

RUB = UUID("00000000-0000-4000-8000-000000000643")
OBJECT = "0f3a0c52-7c38-4d4e-9f5b-0c1d2e3f4a5b"
DEVELOPER = "d1f0a9b8-6c5d-4e3f-8a7b-112233445566"
PROJECT = "a9b8c7d6-e5f4-4a3b-9c8d-778899aabbcc"
ITEM: dict[str, Any] = {
    "propertyObjectId": OBJECT,
    "developerId": DEVELOPER,
    "projectId": PROJECT,
    "buildingId": 11,
    "layoutGroupId": 22,
    "layoutId": 33,
    "areaTotal": Decimal("48.35"),
    "currentPrice": Decimal("12345678.90"),
    "pricePerMeter": Decimal("255339.79"),
    "changedAt": "2026-01-15T10:20:30.1234567+03:00",
}
REQUIRED = sorted(set(ITEM) - {"pricePerMeter"})


def item(**changes: Any) -> dict[str, Any]:
    return {**ITEM, **changes}


def page_of(*items: Any) -> FactBatch:
    return facts.map_page(items, rub_currency_id=RUB)


def only(batch: FactBatch, column: str) -> Any:
    """The column's value in a batch of one fact."""
    assert (batch.size, list(batch.bad_rows)) == (1, [])
    (value,) = batch.columns[column]
    return value


def only_bad(batch: FactBatch) -> BadRow:
    assert batch.size == 0
    (bad,) = batch.bad_rows
    return bad


def in_full_pages(row: Any) -> list[tuple[Any, ...]]:
    """The row by itself, and among good ones on a page that is read column by column."""
    good = tuple(item(propertyObjectId=f"{n:08x}-0000-4000-8000-000000000000") for n in range(20))
    return [(row,), (*good, row), (row, *good), (*good, row, *good)]


# changedAt: what stands in FactId, and the moment


GOLDEN = [
    # changed_at, the time in FactId ("" for a bad row)
    ("2026-01-15T10:20:30Z", "2026-01-15T10:20:30.0000000+00:00"),
    ("2026-01-15T10:20:30z", "2026-01-15T10:20:30.0000000+00:00"),
    ("2026-01-15T10:20:30+03:00", "2026-01-15T10:20:30.0000000+03:00"),
    ("2026-01-15T10:20:30-00:00", "2026-01-15T10:20:30.0000000+00:00"),
    ("2026-01-15T10:20:30.1+03:00", "2026-01-15T10:20:30.1000000+03:00"),
    ("2026-01-15T10:20:30.1234567+03:00", "2026-01-15T10:20:30.1234567+03:00"),
    ("2026-01-15T10:20:30.123456789+03:00", "2026-01-15T10:20:30.1234567+03:00"),
    ("2026-01-15T10:20:30.9999999Z", "2026-01-15T10:20:30.9999999+00:00"),
    ("2026-01-15T10:20:30-11:30", "2026-01-15T10:20:30.0000000-11:30"),
    ("2026-01-15T10:20+05:30", "2026-01-15T10:20:00.0000000+05:30"),
    ("2024-02-29T23:59:59.0000001+14:00", "2024-02-29T23:59:59.0000001+14:00"),
    ("0001-01-01T00:00:00Z", ""),
    ("2026-01-15T10:20:30", ""),
    ("2026-01-15", ""),
    ("2026-02-30T10:20:30Z", ""),
    ("2026-01-15T24:00:00Z", ""),
    ("2026-01-15T10:20:30+15:00", ""),
]
UNREADABLE_TIMES = [
    "",
    "now",
    " 2026-01-15T10:20:30Z",
    "2026-01-15T10:20:30Z\n",
    "2026-01-15T10:20:30Z\n2026-01-15T10:20:30Z",
    "2026-01-15 10:20:30Z",
    "2026-01-15t10:20:30Z",
    "2026-1-15T10:20:30Z",
    "2026-01-15T10:20:30.Z",
    "2026-01-15T10:20:30,5Z",
    "2026-01-15T10:20:60Z",
    "2026-01-15T10:60:30Z",
    "2026-01-15T10Z",
    "2026-01-15T10:20:30+03",
    "2026-01-15T10:20:30+0300",
    "2026-01-15T10:20:30+14:01",
    "2026-01-15T10:20:30+03:60",
    "2026-13-15T10:20:30Z",
    "2026-00-15T10:20:30Z",
    "2025-02-29T10:20:30Z",
    "0000-01-15T10:20:30Z",
    "12026-01-15T10:20:30Z",
    "٢٠٢٦-01-15T10:20:30Z",
    "2026-W03-4T10:20:30Z",
]


@pytest.mark.parametrize(("text", "expected"), GOLDEN)
def test_fact_id_has_the_digits_of_the_source_seven_of_them_and_its_offset(text: str, expected: str) -> None:
    for page in in_full_pages(item(changedAt=text)):
        batch = page_of(*page)
        if expected:
            assert parse_changed_at(text).text == expected
            assert f"backfill:{OBJECT}:{expected}" in batch.columns["FactId"]
            assert batch.bad_rows == []
        else:
            assert [bad.reason.partition(" = ")[0] for bad in batch.bad_rows] == ["changedAt"]


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-01-15T10:20:30.1234567+03:00", datetime(2026, 1, 15, 7, 20, 30, 123456, tzinfo=UTC)),
        ("2026-01-15T10:20:30.9999999Z", datetime(2026, 1, 15, 10, 20, 30, 999999, tzinfo=UTC)),
        ("2026-01-01T00:30+01:00", datetime(2025, 12, 31, 23, 30, tzinfo=UTC)),
        ("2025-12-31T23:30:00-11:30", datetime(2026, 1, 1, 11, 0, tzinfo=UTC)),
    ],
)
def test_event_time_is_the_moment_in_utc_to_the_microsecond_the_seventh_digit_cut(text: str, utc: datetime) -> None:
    assert parse_changed_at(text).utc == utc
    (micros,) = {*page_of(*in_full_pages(item(changedAt=text))[1]).columns["EventTime"][20:]}
    assert micros == int(utc.timestamp()) * 1_000_000 + utc.microsecond


@pytest.mark.parametrize(
    ("first_bad", "last_good"),
    [
        ("1969-12-31T23:59:59.9999999Z", "1970-01-01T00:00:00Z"),
        ("1970-01-01T02:59:59.9999999+03:00", "1970-01-01T03:00:00+03:00"),
        ("1969-12-31T22:59:59.9999999-01:00", "1969-12-31T23:00:00-01:00"),
        ("2100-01-01T00:00:00Z", "2099-12-31T23:59:59.9999999Z"),
        ("2100-01-01T03:00:00+03:00", "2100-01-01T02:59:59.9999999+03:00"),
        ("9999-12-31T23:59:59.9999999-14:00", "2099-12-31T09:59:59.9999999-14:00"),
        ("0001-01-01T00:00:00+14:00", "1970-01-01T14:00:00+14:00"),
    ],
)
def test_a_time_before_the_epoch_or_from_the_year_2100_on_is_no_price_time(first_bad: str, last_good: str) -> None:
    for page in in_full_pages(item(changedAt=first_bad)):
        (bad,) = page_of(*page).bad_rows
        assert "must be from 1970-01-01 on and before 2100-01-01 UTC" in bad.reason
    for page in in_full_pages(item(changedAt=last_good)):
        assert page_of(*page).bad_rows == []


@pytest.mark.parametrize("text", UNREADABLE_TIMES)
def test_a_text_that_is_no_time_of_the_calendar_is_a_bad_row(text: str) -> None:
    for page in in_full_pages(item(changedAt=text)):
        (bad,) = page_of(*page).bad_rows
        assert bad.reason.startswith("changedAt = ")
        assert str(bad.property_object_id) == OBJECT


_parts = st.builds(
    "{:04d}-{:02d}-{:02d}{}{:02d}:{:02d}{}{}".format,
    st.sampled_from([1, 1969, 1970, 2024, 2025, 2099, 2100, 9999]) | st.integers(0, 9999),
    st.integers(0, 13),
    st.integers(0, 32),
    st.sampled_from("TTTTTTTTt "),
    st.integers(0, 24),
    st.integers(0, 60),
    st.just("") | st.integers(0, 60).map(":{:02d}".format) | st.from_regex(r":[0-5][0-9]\.[0-9]{1,10}", fullmatch=True),
    st.sampled_from(
        ["Z", "z", "+00:00", "-00:00", "+03:00", "-11:30", "+14:00", "-14:00", "+14:30", "+15:00", "", "+3"]
    ),
)


@given(st.lists(_parts, min_size=1, max_size=4))
def test_times_read_as_a_column_are_the_same_as_read_one_by_one(texts: list[str]) -> None:
    one_by_one: list[ChangedAt] = []
    for text in texts:
        try:
            one_by_one.append(parse_changed_at(text))
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                parse_changed_at_column(texts)
            return
    read, micros = parse_changed_at_column(texts)
    assert read == [one.text for one in one_by_one]
    assert [Fraction(micro, 10**6) for micro in micros] == [
        Fraction(int(one.utc.replace(microsecond=0).timestamp())) + Fraction(one.utc.microsecond, 10**6)
        for one in one_by_one
    ]


# Field by field


def test_every_column_of_a_fact_is_as_the_spec_maps_it() -> None:
    batch = page_of(ITEM)
    fact_id = f"backfill:{OBJECT}:2026-01-15T10:20:30.1234567+03:00"
    assert {name: only(batch, name) for name in batch.columns} == {
        "FactId": fact_id,
        "SourceEventId": fact_id,
        "ChangeSource": "backfill",
        "PropertyObjectId": OBJECT,
        "DeveloperId": DEVELOPER,
        "ProjectId": PROJECT,
        "BuildingId": 11,
        "LayoutGroupId": 22,
        "LayoutId": 33,
        "TenantId": DEVELOPER,
        "AreaTotal": "48.3500",
        "NewPrice": "12345678.9000",
        "NewPricePerMeter": "255339.7900",
        "OldPrice": None,
        "OldPricePerMeter": None,
        "CurrencyId": str(RUB),
        "CurrencyIsoCode": "RUB",
        "BrandId": None,
        "EventTime": 1_768_461_630_123_456,  # 2026-01-15T07:20:30.123456Z
        "TransformVersion": 1,
    }


def test_ids_are_lower_case_wherever_they_stand() -> None:
    shouted = item(
        propertyObjectId=OBJECT.upper(), developerId=DEVELOPER.upper(), projectId=PROJECT.upper(), unknown="field"
    )
    for page in in_full_pages(shouted):
        batch = page_of(*page)
        assert f"backfill:{OBJECT}:2026-01-15T10:20:30.1234567+03:00" in batch.columns["FactId"]
        assert OBJECT in batch.columns["PropertyObjectId"]
        for column, value in {"DeveloperId": DEVELOPER, "TenantId": DEVELOPER, "ProjectId": PROJECT}.items():
            assert set(batch.columns[column]) == {value}


@pytest.mark.parametrize(
    ("number", "stored"),
    [
        (0, "0.0000"),
        (7, "7.0000"),
        (Decimal("-0.0"), "0.0000"),
        (Decimal("1E+5"), "100000.0000"),
        (Decimal("0.00005"), "0.0001"),
        (Decimal("0.00025"), "0.0003"),
        (Decimal("0.0000499999999999999999999999999999999999999999999999999999999999999"), "0.0000"),
        (Decimal("0.0002500000000000000000000000000000000000000000000000000000000000001"), "0.0003"),
        (Decimal("1E-1000000"), "0.0000"),
        (Decimal("99999999999999.99994999"), "99999999999999.9999"),
        (99_999_999_999_999, "99999999999999.0000"),
    ],
)
def test_numbers_are_rounded_to_four_decimals_half_away_from_zero(number: Decimal | int, stored: str) -> None:
    for page in in_full_pages(item(currentPrice=number, pricePerMeter=number)):
        batch = page_of(*page)
        assert batch.bad_rows == []
        assert stored in batch.columns["NewPrice"]
        assert stored in batch.columns["NewPricePerMeter"]


@pytest.mark.parametrize(
    ("price", "area", "per_meter"),
    [
        ("100", "33.3", "3.0000"),
        ("1", "3", "0.3300"),
        ("2", "3", "0.6700"),
        ("12345678.90", "48.35", "255339.7900"),
        ("0", "48.35", "0.0000"),
        # Ties: half-even would give 0.12 and 2.50.
        ("1", "8", "0.1300"),
        ("2.505", "1", "2.5100"),
        # A tie but for a digit beyond every context's precision; rounded twice it would be 0.13.
        ("0.12499999999999999999999999999999999999999999999999999999999999999999999999999999", "1", "0.1200"),
        ("0.12500000000000000000000000000000000000000000000000000000000000000000000000000001", "1", "0.1300"),
        # Of the source's own digits, not of the rounded area 0.0000.
        ("1", "0.00004", "25000.0000"),
        ("99999999999999.99", "1", "99999999999999.9900"),
    ],
)
def test_a_missing_price_per_metre_is_price_over_area_with_two_decimals_half_away_from_zero(
    price: str, area: str, per_meter: str
) -> None:
    row = item(currentPrice=Decimal(price), areaTotal=Decimal(area), pricePerMeter=None)
    without = {name: value for name, value in row.items() if name != "pricePerMeter"}
    for page in in_full_pages(row) + in_full_pages(without):
        batch = page_of(*page)
        assert batch.bad_rows == []
        assert batch.columns["NewPricePerMeter"][list(batch.columns["PropertyObjectId"]).index(OBJECT)] == per_meter


def test_an_area_of_0_is_kept_where_the_source_gives_the_price_per_metre() -> None:
    batch = page_of(item(areaTotal=0, pricePerMeter=Decimal("1.5")))
    assert (only(batch, "AreaTotal"), only(batch, "NewPricePerMeter")) == ("0.0000", "1.5000")


# Bad rows


TOO_LARGE = Decimal("99999999999999.99995")
BAD_VALUES: list[tuple[str, Any]] = [
    *((field, value) for field in ("propertyObjectId", "developerId", "projectId") for value in (
        "", "none", OBJECT[:-1], f"{OBJECT}0", f"{{{OBJECT}}}", f"urn:uuid:{OBJECT}", OBJECT.replace("-", ""),
        OBJECT[:-1] + "g", f" {OBJECT[1:]}", f"{OBJECT}\n", OBJECT.replace("-", "_"), "\u0660" + OBJECT[1:],
        OBJECT[:-2] + "-0", f"{OBJECT[:7]}-{OBJECT[7]}{OBJECT[9:]}", "\u017f" + OBJECT[1:], 5, True, [OBJECT], {}, 1.5,
    )),
    *((field, value) for field in ("buildingId", "layoutGroupId", "layoutId") for value in (
        "1", True, False, Decimal(1), Decimal("1.5"), 1.0, 2**63, -(2**63) - 1, 10**400, [], {},
    )),
    *((field, value) for field in ("areaTotal", "currentPrice", "pricePerMeter") for value in (
        "1", True, False, 1.5, [], {}, -1, Decimal("-0.0001"), Decimal("-1E-30"), Decimal("NaN"), Decimal("sNaN"),
        Decimal("Infinity"), Decimal("-Infinity"), TOO_LARGE, 10**14, Decimal("1E+400"), Decimal("1E+1000000"), 10**400,
    )),
    *(("changedAt", value) for value in (1_768_461_630, True, Decimal(1), [], {}, {"text": "2026-01-15T10:20:30Z"})),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_value_of_the_wrong_kind_is_a_bad_row_that_names_it_and_the_rest_of_the_page_goes_on(
    field: str, value: Any
) -> None:
    for page in in_full_pages(item(**{field: value})):
        batch = page_of(*page)
        (bad,) = batch.bad_rows
        assert batch.size == len(page) - 1
        assert bad.reason.startswith(f"{field} = ")
        assert bad.reason.isprintable()
        assert str(bad.property_object_id) == ("None" if field == "propertyObjectId" else OBJECT)


def test_an_id_that_lost_its_last_digit_to_the_next_row_makes_two_bad_rows() -> None:
    good = [item() for _ in range(20)]
    torn = [item(developerId=DEVELOPER[:-1]), item(developerId=DEVELOPER[-1] + DEVELOPER)]
    batch = page_of(*good, *torn, *good)
    assert (batch.size, len(batch.bad_rows)) == (40, 2)


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("absent", [False, True])
def test_a_missing_field_is_a_bad_row_but_for_the_price_per_metre(field: str, absent: bool) -> None:
    row = item(**{field: None})
    if absent:
        del row[field]
    for page in in_full_pages(row):
        (bad,) = page_of(*page).bad_rows
        assert bad.reason == f"{field} = null: must be there"


@pytest.mark.parametrize("row", [None, 5, "text", [ITEM], True, Decimal(1), {}])
def test_what_is_no_object_of_the_source_is_a_bad_row(row: Any) -> None:
    for page in in_full_pages(row):
        (bad,) = page_of(*page).bad_rows
        assert bad.property_object_id is None


@pytest.mark.parametrize("area", [0, Decimal("0.00"), Decimal("0E-9")])
def test_an_area_of_0_without_a_price_per_metre_is_a_bad_row(area: Decimal | int) -> None:
    for price in (0, 100):
        for page in in_full_pages(item(areaTotal=area, currentPrice=price, pricePerMeter=None)):
            (bad,) = page_of(*page).bad_rows
            assert "must be above 0 where pricePerMeter is missing" in bad.reason


@pytest.mark.parametrize("area", ["0.00000001", "1E-60", "1E-1000000", "1E-100000000000"])
def test_an_area_so_small_that_the_price_per_metre_does_not_fit_is_a_bad_row(area: str) -> None:
    for page in in_full_pages(item(areaTotal=Decimal(area), pricePerMeter=None)):
        (bad,) = page_of(*page).bad_rows
        assert "gives a price per metre beyond 99999999999999.9999" in bad.reason


def test_int64_edges_fit() -> None:
    batch = page_of(item(buildingId=-(2**63), layoutGroupId=2**63 - 1, layoutId=0))
    assert [only(batch, name) for name in ("BuildingId", "LayoutGroupId", "LayoutId")] == [-(2**63), 2**63 - 1, 0]


def test_bad_rows_stand_in_their_order_and_so_do_the_facts_between_them() -> None:
    ids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(100)]
    bad = {ids[0], ids[7], *ids[40:60], ids[98], ids[99]}
    batch = page_of(*(item(propertyObjectId=i, currentPrice=-1 if i in bad else 1) for i in ids))
    assert batch.columns["PropertyObjectId"] == [i for i in ids if i not in bad]
    assert [str(row.property_object_id) for row in batch.bad_rows] == [i for i in ids if i in bad]
    assert {len(column) for column in batch.columns.values()} == {batch.size}


@pytest.mark.parametrize("size", [0, 1, 8, 9, 40])
def test_a_page_of_nothing_but_bad_rows_has_every_column_and_no_fact(size: int) -> None:
    batch = page_of(*[item(currentPrice=-1)] * size)
    assert (batch.size, len(batch.bad_rows)) == (0, size)
    assert {*batch.columns, "IngestionTime"} == {*facts.COLUMNS}
    assert {len(column) for column in batch.columns.values()} == {0}


def test_payload_of_a_bad_row_is_the_row_with_every_digit() -> None:
    digits = "0.1000000000000000055511151231257827021181583404541015625"
    row = item(currentPrice=Decimal("-1.10"), areaTotal=Decimal(digits), note=['Вид на "море"', None, True, 2**80, {}])
    bad = only_bad(page_of(row))
    assert '"currentPrice": -1.10,' in bad.payload
    assert digits in bad.payload
    assert json.loads(bad.payload, parse_float=Decimal) == row


def test_postgresql_keeps_any_payload_and_reason_as_they_are(database_url: str) -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    rows = [
        item(changedAt="\x00 \ud800 \U0001f3e0"),
        item(currentPrice=Decimal("NaN"), areaTotal=Decimal("-Infinity"), layoutId=float("nan")),
        item(currentPrice=Decimal("-1E+1000000"), pricePerMeter=Decimal("-0E-1000000")),
        item(propertyObjectId=["\x00" * 1000]),
        item(buildingId=nested),
        "\ud800",
    ]
    batch = page_of(*rows)
    assert len(batch.bad_rows) == len(rows)
    with psycopg.connect(database_url) as connection:
        for bad in batch.bad_rows:
            row = connection.execute("SELECT %s::text, %s::json::text", [bad.reason, bad.payload]).fetchone()
            assert row == (bad.reason, bad.payload)
            assert len(bad.reason) < 300


# The quick path against the reference


def half_away(number: Fraction, decimals: int) -> str:
    """Rounded half away from zero, worked out in whole numbers; for numbers that are not negative."""
    scaled = (number * 10**decimals + Fraction(1, 2)).__floor__()
    whole, part = divmod(scaled, 10**decimals)
    return f"{whole}.{part:0{decimals}d}".ljust(len(f"{whole}.") + 4, "0")


_ids = st.uuids().map(str) | st.uuids().map(lambda found: str(found).upper())
_edges = st.sampled_from(["99999999999999.9999", "99999999999999.99994", "99999999999999.99995", "0", "0.00005", "-0"])
_amounts = (
    st.integers(0, 10**15)
    | _edges.map(Decimal)
    | st.decimals("0", "1E+15", allow_nan=False)
    | st.integers(0, 10**19).map(lambda number: Decimal(number).scaleb(-5))
    | st.integers(0, 10**9).map(lambda number: Decimal(number).scaleb(-4))
)
_int64s = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63, -(2**63) - 1])
_times = st.sampled_from([text for text, _ in GOLDEN] + UNREADABLE_TIMES) | _parts
_fields = {
    "propertyObjectId": _ids,
    "developerId": _ids,
    "projectId": _ids,
    "buildingId": _int64s,
    "layoutGroupId": _int64s,
    "layoutId": _int64s,
    "areaTotal": _amounts,
    "currentPrice": _amounts,
    "pricePerMeter": st.none() | _amounts,
    "changedAt": _times,
}
_odd = st.sampled_from([value for _, value in BAD_VALUES] + [None])
_good_rows = st.builds(
    item, propertyObjectId=_ids, areaTotal=st.integers(1, 10**6).map(lambda n: Decimal(n).scaleb(-2)),
    currentPrice=st.integers(0, 10**12).map(lambda n: Decimal(n).scaleb(-3)),
    pricePerMeter=st.none() | st.integers(0, 10**9), changedAt=st.sampled_from([t for t, time in GOLDEN if time]),
)  # fmt: skip
_any_rows = st.fixed_dictionaries(_fields)
_odd_rows = st.builds(lambda row, field, odd: {**row, field: odd}, _good_rows, st.sampled_from(list(_fields)), _odd)
_pages = st.lists(_good_rows | _good_rows | _good_rows | _any_rows | _odd_rows, max_size=30)


@settings(max_examples=300)
@given(_pages)
def test_a_page_is_mapped_as_its_rows_are_one_by_one(page: list[dict[str, Any]]) -> None:
    expected: dict[str, list[Any]] = {name: [] for name in facts.COLUMNS if name != "IngestionTime"}
    bad: list[tuple[str, str]] = []
    for row in page:
        try:
            snapshot = parse_snapshot(row)
        except BadRowError as error:
            bad.append((str(error), str(row.get("propertyObjectId"))))
            continue
        price, area = Fraction(snapshot.current_price), Fraction(snapshot.area_total)
        given_per_meter = snapshot.price_per_meter
        fact_id = f"backfill:{snapshot.property_object_id}:{snapshot.changed_at.text}"
        fact = {
            "FactId": fact_id,
            "SourceEventId": fact_id,
            "ChangeSource": "backfill",
            "PropertyObjectId": str(snapshot.property_object_id),
            "DeveloperId": str(snapshot.developer_id),
            "ProjectId": str(snapshot.project_id),
            "BuildingId": row["buildingId"],
            "LayoutGroupId": row["layoutGroupId"],
            "LayoutId": row["layoutId"],
            "TenantId": str(snapshot.developer_id),
            "AreaTotal": half_away(area, 4),
            "NewPrice": half_away(price, 4),
            "NewPricePerMeter": half_away(price / area, 2)
            if given_per_meter is None
            else half_away(Fraction(given_per_meter), 4),
            "OldPrice": None,
            "OldPricePerMeter": None,
            "CurrencyId": str(RUB),
            "CurrencyIsoCode": "RUB",
            "BrandId": None,
            "EventTime": int(snapshot.changed_at.utc.replace(microsecond=0).timestamp()) * 10**6
            + snapshot.changed_at.utc.microsecond,
            "TransformVersion": 1,
        }
        for name, value in fact.items():
            expected[name].append(value)

    batch = page_of(*page)

    assert batch.columns == expected
    assert batch.size == len(page) - len(bad)
    assert [row.reason for row in batch.bad_rows] == [reason for reason, _ in bad]
    assert all(
        str(row.property_object_id) == text.lower()
        for row, (_, text) in zip(batch.bad_rows, bad, strict=True)
        if row.property_object_id
    )


@given(row=_any_rows)
def test_a_row_that_passes_fits_its_columns(row: dict[str, Any]) -> None:
    batch = page_of(row)
    for column in ("AreaTotal", "NewPrice", "NewPricePerMeter"):
        for text in batch.columns[column]:
            assert 0 <= Decimal(text) <= Decimal("99999999999999.9999")
            assert Decimal(text).as_tuple().exponent == -4
    for column in ("BuildingId", "LayoutGroupId", "LayoutId"):
        assert all(-(2**63) <= number < 2**63 for number in batch.columns[column])


# The contract of a page


def ids_of(*numbers: int) -> list[dict[str, Any]]:
    return [{"propertyObjectId": str(UUID(int=number))} for number in numbers]


LAST = 2**128 - 1


@pytest.mark.parametrize(
    ("numbers", "after", "to"),
    [
        ([5], None, None),
        ([0], None, 0),
        ([0, 1, LAST], None, None),
        ([LAST], LAST - 1, LAST),
        ([6, 7, 9], 5, 9),
        # Where ClickHouse's own order of UUIDs, by the second half first, would be another.
        ([1 << 64 | 9, 2 << 64 | 1, 3 << 64], 9, 3 << 64),
    ],
)
def test_a_page_within_its_range_gives_its_last_id_as_the_cursor(
    numbers: Sequence[int], after: int | None, to: int | None
) -> None:
    cursor = check_page(ids_of(*numbers), after=_uuid(after), to=_uuid(to), take=len(numbers))
    assert cursor == UUID(int=numbers[-1])


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([10, 12, 11, 20], [11]),
        ([10, 11, 11, 20], [11]),
        ([14, 13, 12], [13, 12]),
        # At the cursor, before it, beyond the end.
        ([5, 6], [5]),
        ([4, 6], [4]),
        ([6, 21, 22], [21, 22]),
    ],
)
def test_a_page_out_of_order_or_range_breaks_the_contract_and_the_ids_are_named(
    numbers: Sequence[int], named: Sequence[int]
) -> None:
    with pytest.raises(SourceContractError) as raised:
        check_page(ids_of(*numbers), after=UUID(int=5), to=UUID(int=20), take=10)
    assert isinstance(raised.value, SourceError)
    assert str(raised.value).endswith(": " + ", ".join(str(UUID(int=number)) for number in named))


def test_a_page_larger_than_asked_for_breaks_the_contract() -> None:
    with pytest.raises(SourceContractError, match="returned 3 rows where take = 2"):
        check_page(ids_of(1, 2, 3), after=None, to=None, take=2)


def test_of_many_wrong_ids_the_first_are_named_and_the_rest_counted() -> None:
    with pytest.raises(SourceContractError, match="and 995 more"):
        check_page(ids_of(*range(1, 1001)), after=UUID(int=1000), to=None, take=1000)


def test_rows_without_an_id_do_not_hold_up_the_cursor_unless_there_is_no_other() -> None:
    page = [{}, *ids_of(3), {"propertyObjectId": "?"}, None, *ids_of(8), {"propertyObjectId": 9}]
    assert check_page(page, after=None, to=None, take=10) == UUID(int=8)
    with pytest.raises(SourceContractError, match="the cursor cannot advance"):
        check_page([{}, {"propertyObjectId": "?"}], after=UUID(int=1), to=None, take=10)


def test_upper_case_ids_are_compared_as_what_they_are() -> None:
    page = [{"propertyObjectId": f"{digit}{OBJECT[1:]}"} for digit in "9AbCdE"]
    assert check_page(page, after=UUID(page[0]["propertyObjectId"].replace("9", "8", 1)), to=None, take=6) == UUID(
        page[-1]["propertyObjectId"]
    )


def _uuid(number: int | None) -> UUID | None:
    return None if number is None else UUID(int=number)


# Which failures of an insert are worth another attempt


@pytest.mark.parametrize("code", [159, 202, 209, 210, 241, 242, 252, 285, 319, 999])
def test_a_server_that_has_a_bad_moment_is_worth_another_attempt(code: int) -> None:
    assert is_transient(DatabaseError("Received ClickHouse exception", code=code))


@pytest.mark.parametrize("code", [16, 47, 53, 60, 62, 164, 192, 497, 516])
def test_a_statement_that_is_wrong_or_forbidden_is_not(code: int) -> None:
    assert not is_transient(DatabaseError("Received ClickHouse exception", code=code))


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OperationalError("Error … executing HTTP request attempt 1"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (DatabaseError("HTTP driver received HTTP status 502, server response: <html>"), True),
        (DatabaseError("HTTP driver received HTTP status 500"), True),
        (DatabaseError("HTTP driver received HTTP status 401"), False),
        (DatabaseError("HTTP driver received HTTP status 404, server response: HTTP/1.1 500"), False),
        (ProgrammingError("Insert data column count does not match column names"), False),
        (ValueError("anything else"), False),
    ],
)
def test_without_a_code_of_clickhouse_a_broken_connection_or_a_proxy_in_trouble_is(
    error: Exception, transient: bool
) -> None:
    assert is_transient(error) is transient
