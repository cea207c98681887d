"""The source model: what Talent says of a property object's price, and the rows that say nothing usable.

Spec, «Источник TalentPropertyObjectPriceSnapshot». A row of the source is one JSON object; ``parse_snapshot`` says
field by field what it must hold, and is the reference that the quick path of ``facts.map_page`` must agree with.
Ids are canonical lower-case text wherever they travel as text: that text orders them as the source does (ClickHouse
orders UUIDs by their second half first).
"""

from __future__ import annotations

import json
import re
from binascii import unhexlify
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import ROUND_05UP, ROUND_HALF_UP, Context, Decimal
from itertools import pairwise, repeat
from operator import add, sub
from typing import Any, Protocol
from uuid import UUID

# One JSON object of the source. Numbers are int or Decimal: a float has lost digits before anybody looked at it.
RawItem = Mapping[str, Any]

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
"""A price is not older than the Unix epoch: such a time is an unset field (.NET's ``default`` is the year 1)."""
LATEST = datetime(2100, 1, 1, tzinfo=UTC)
"""A price is older than this: a time beyond is a sentinel (.NET's ``MaxValue`` is the year 9999), and by ``argMax``
over EventTime it would hide every later price for good. The columns end later, DateTime64(6) with 2299 and the chart's
Date with 2149. A bound that moves with the clock would map the same row differently on a replay."""

DECIMAL_LIMIT = Decimal("99999999999999.9999")
"""The greatest number of a Decimal(18, 4)."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# The first number that rounds to more than DECIMAL_LIMIT.
_TOO_LARGE = Decimal("99999999999999.99995")
_COLUMN_UNIT = Decimal("0.0001")
_KOPECK = Decimal("0.01")
_CONTEXT = Context(prec=60, rounding=ROUND_HALF_UP, traps=[])
# Cuts a quotient to more digits than any of ours needs, and leaves a trace of what was cut (ROUND_05UP is made for
# this): rounding the result again gives what rounding the exact quotient would have given.
_STICKY = Context(prec=60, rounding=ROUND_05UP, traps=[])

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_UUID_LENGTH, _HYPHENS = 36, (8, 13, 18, 23)
# .NET knows offsets up to 14 hours.
_CHANGED_AT_PATTERN = (
    r"(\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d)(?::([0-5]\d)(?:\.(\d+))?)?"
    r"(Z|z|[+-](?:(?:0\d|1[0-3]):[0-5]\d|14:00))"
)
_CHANGED_AT = re.compile(_CHANGED_AT_PATTERN, re.ASCII)
_CHANGED_AT_LINE = re.compile(f"^{_CHANGED_AT_PATTERN}$", re.ASCII | re.MULTILINE)
_ZERO_OFFSETS = dict.fromkeys(("Z", "z", "-00:00"), "+00:00")
_NO_PRICE_TIME = f"must be from {EARLIEST:%Y-%m-%d} on and before {LATEST:%Y-%m-%d} UTC, as a price's time is"
_LAST_ID = UUID(int=2**128 - 1)
_NAMED_IDS = 5
_SHOWN_CHARACTERS = 80


class SourceError(RuntimeError):
    """The source cannot be read; the message says why and what to check."""


class SourceContractError(SourceError):
    """The source answered, and broke its contract; the message names the ids."""


class BadRowError(ValueError):
    """A row of the source that cannot become a fact."""

    def __init__(self, field: str, value: Any, wanted: str) -> None:
        """Name the field, its value (printable, cut short), and what it must be."""
        shown = _json_text(value)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"{shown[:_SHOWN_CHARACTERS]}…"
        super().__init__(f"{field} = {shown}: {wanted}")


@dataclass(frozen=True, slots=True)
class ChangedAt:
    """The business time of a price.

    Attributes:
        text: as it stands in FactId, .NET's ``O`` form: seven fractional digits and the source's own offset.
        utc: the same moment, aware, microseconds; the seventh digit is cut.
    """

    text: str
    utc: datetime


@dataclass(frozen=True, slots=True)
class TalentPropertyObjectPriceSnapshot:
    """One row of the source, every field checked. Numbers are the source's own, not rounded yet.

    Areas are in m², prices in roubles, ``price_per_meter`` in roubles per m² (None: to be worked out).
    """

    property_object_id: UUID
    developer_id: UUID
    project_id: UUID
    building_id: int
    layout_group_id: int
    layout_id: int
    area_total: Decimal
    current_price: Decimal
    price_per_meter: Decimal | None
    changed_at: ChangedAt

    @property
    def new_price_per_meter(self) -> Decimal:
        """``PricePerMeter ?? round(CurrentPrice / AreaTotal, 2)``, half away from zero (spec, step 4)."""
        if self.price_per_meter is not None:
            return self.price_per_meter
        return divide_to_kopecks(self.current_price, self.area_total)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot become a fact, for ``price_backfill_rejects``.

    Attributes:
        property_object_id: None if the row has none that can be read.
        reason: one line, printable.
        payload: the row as JSON text in ASCII, numbers to their last digit; PostgreSQL's ``json`` takes it.
    """

    property_object_id: UUID | None
    reason: str
    payload: str


class PriceSource(Protocol):
    """The port: pages of prices, ascending by PropertyObjectId."""

    def fetch(self, *, after: UUID | None, to: UUID | None, take: int) -> Sequence[RawItem]:
        """One page: at most ``take`` rows with ``after`` < id ≤ ``to``; none is the end.

        Raises:
            SourceError: the source cannot be read, after a bounded number of attempts.
        """
        ...


def parse_changed_at(text: str) -> ChangedAt:
    """Read ``changedAt``: ISO 8601 with a time and an offset; seconds and their fraction may be missing.

    FactId is made from the text's own digits, since Python would keep six of the seven that .NET writes.

    Raises:
        ValueError: it is no such text, no such moment, or no price's time (``EARLIEST``, ``LATEST``).
    """
    match = _CHANGED_AT.fullmatch(text)
    if match is None:
        raise ValueError("must be a date, a time and an offset, like 2026-01-15T10:20:30.1234567+03:00")
    minutes, seconds, fraction, offset = match.groups(default="")
    if not EARLIEST.year - 1 <= int(minutes[:4]) <= LATEST.year:
        raise ValueError(_NO_PRICE_TIME)
    moment, offset = _to_seven_digits(minutes, seconds, fraction), _ZERO_OFFSETS.get(offset, offset)
    try:
        utc = datetime.fromisoformat(f"{moment[:-1]}{offset}").astimezone(UTC)
    except ValueError:
        raise ValueError("must be a day of the calendar") from None
    if not EARLIEST <= utc < LATEST:
        raise ValueError(_NO_PRICE_TIME)
    return ChangedAt(moment + offset, utc)


def parse_changed_at_column(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The same for a column: the texts for FactId, and the moments in microseconds since the Unix epoch.

    Raises:
        ValueError: ``parse_changed_at`` would refuse one of them.
    """
    lines = "\n".join(texts)
    parts = _CHANGED_AT_LINE.findall(lines)
    if len(parts) != len(texts) or lines.count("\n") != len(texts) - 1:
        raise ValueError("one of the texts is no date, time and offset")
    moments = [_to_seven_digits(minutes, seconds, fraction) for minutes, seconds, fraction, _ in parts]
    offsets = [_ZERO_OFFSETS.get(offset, offset) for _, _, _, offset in parts]
    # Python adds and subtracts moments without an offset twice as fast.
    shifts = {offset: datetime.fromisoformat(f"1970-01-01T00:00{offset}") - EARLIEST for offset in set(offsets)}
    shifts_in_microseconds = {offset: microseconds(shift) for offset, shift in shifts.items()}
    spans = map(sub, map(datetime.fromisoformat, moments), repeat(EARLIEST.replace(tzinfo=None)))
    utc = [microseconds(span) + shifts_in_microseconds[offset] for span, offset in zip(spans, offsets, strict=True)]
    if min(utc) < 0 or max(utc) >= microseconds(LATEST - EARLIEST):
        raise ValueError(_NO_PRICE_TIME)
    return list(map(add, moments, offsets)), utc


def microseconds(span: timedelta) -> int:
    """The whole length of a span."""
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def canonical_ids(texts: Sequence[Any]) -> list[str]:
    """A column of ids in lower case.

    Raises:
        ValueError: one of them is no UUID in the form 8-4-4-4-12.
        TypeError: one of them is no text.
    """
    joined = "".join(texts)
    hyphens = [joined[place::_UUID_LENGTH] for place in _HYPHENS]
    # With every text as long as an id, all its hyphens in place and none beside, the rest must be 32 hex digits each.
    if (
        set(map(len, texts)) != {_UUID_LENGTH}
        or hyphens != ["-" * len(texts)] * len(_HYPHENS)
        or len(unhexlify(joined.replace("-", ""))) != 16 * len(texts)
    ):
        raise ValueError("one of the texts is no UUID")
    return list(map(str.lower, texts))


def quantise(number: Decimal | int) -> Decimal:
    """The number as its column stores it: four decimals, half away from zero. NaN if it has far too many digits."""
    return _CONTEXT.quantize(number, _COLUMN_UNIT)


def quantise_column(numbers: Iterable[Decimal | int]) -> Iterable[Decimal]:
    """The same for each number of a column."""
    return map(_CONTEXT.quantize, numbers, repeat(_COLUMN_UNIT))


def divide_to_kopecks(dividend: Decimal | int, divisor: Decimal | int) -> Decimal:
    """The exact quotient, rounded once to two decimals, half away from zero. Not finite where there is none."""
    return _CONTEXT.quantize(_STICKY.divide(dividend, divisor), _KOPECK)


def parse_snapshot(item: RawItem) -> TalentPropertyObjectPriceSnapshot:
    """Check one row of the source field by field; a row that passes becomes a fact.

    Raises:
        BadRowError: names the first field that is wrong, its value, and what it must be.
    """
    if not isinstance(item, Mapping):
        raise BadRowError("row", item, "must be a JSON object")
    snapshot = TalentPropertyObjectPriceSnapshot(
        property_object_id=_uuid(item, "propertyObjectId"),
        developer_id=_uuid(item, "developerId"),
        project_id=_uuid(item, "projectId"),
        building_id=_int64(item, "buildingId"),
        layout_group_id=_int64(item, "layoutGroupId"),
        layout_id=_int64(item, "layoutId"),
        area_total=_decimal(item, "areaTotal"),
        current_price=_decimal(item, "currentPrice"),
        price_per_meter=None if item.get("pricePerMeter") is None else _decimal(item, "pricePerMeter"),
        changed_at=_changed_at(item),
    )
    if snapshot.price_per_meter is None:
        if not snapshot.area_total:
            raise BadRowError("areaTotal", item["areaTotal"], "must be above 0 where pricePerMeter is missing")
        if not _fits(snapshot.new_price_per_meter):
            raise BadRowError("areaTotal", item["areaTotal"], f"gives a price per metre beyond {DECIMAL_LIMIT}")
    return snapshot


def bad_row(item: RawItem, error: BadRowError) -> BadRow:
    """The row as it is kept for ``price_backfill_rejects``."""
    return BadRow(find_id(item), str(error), _json_text(item))


def find_id(item: RawItem) -> UUID | None:
    """The row's PropertyObjectId, if it has one that can be read."""
    text = item.get("propertyObjectId") if isinstance(item, Mapping) else None
    return UUID(text) if isinstance(text, str) and _UUID.fullmatch(text) else None


def check_page(items: Sequence[RawItem], *, after: UUID | None, to: UUID | None, take: int) -> UUID:
    """Check a page that is not empty against the contract: its size, its range, its order.

    Rows whose id cannot be read are passed over here; they are bad rows.

    Returns:
        The new cursor: the last id of the page.

    Raises:
        SourceContractError: it broke the contract; going on could miss objects, or never end.
    """
    if len(items) > take:
        raise SourceContractError(f"the source returned {len(items)} rows where take = {take} were asked for")
    ids = _readable_ids(items)
    if not ids:
        raise SourceContractError(
            f"none of {len(items)} rows after {after} has a readable propertyObjectId: the cursor cannot advance"
        )
    # Canonical text sorts as the ids do.
    lower, upper = "" if after is None else str(after), str(_LAST_ID if to is None else to)
    if outside := [found for found in ids if not lower < found <= upper]:
        raise SourceContractError(
            f"the source returned ids outside the range asked for (after {after}, to {to}): {_named(outside)}"
        )
    if disordered := [later for earlier, later in pairwise(ids) if later <= earlier]:
        raise SourceContractError(
            f"the source returned ids out of order, not above the one before: {_named(disordered)}"
        )
    return UUID(ids[-1])


def _readable_ids(items: Sequence[RawItem]) -> list[str]:
    try:
        return canonical_ids([item["propertyObjectId"] for item in items])
    except (KeyError, TypeError, ValueError):
        return [str(found) for found in map(find_id, items) if found is not None]


def _to_seven_digits(minutes: str, seconds: str, fraction: str) -> str:
    return f"{minutes}:{seconds or '00'}.{fraction:0<7.7}"


def _named(ids: Sequence[str]) -> str:
    """The first few ids, and how many more there are."""
    more = f" and {len(ids) - _NAMED_IDS} more" if len(ids) > _NAMED_IDS else ""
    return ", ".join(ids[:_NAMED_IDS]) + more


def _value(item: RawItem, field: str) -> Any:
    value = item.get(field)
    if value is None:
        raise BadRowError(field, value, "must be there")
    return value


def _uuid(item: RawItem, field: str) -> UUID:
    value = _value(item, field)
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        raise BadRowError(field, value, "must be a UUID in the form 8-4-4-4-12")
    return UUID(value)


def _int64(item: RawItem, field: str) -> int:
    value = _value(item, field)
    # A bool is an int to Python, and no number to JSON.
    if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
        raise BadRowError(field, value, "must be a whole number of 64 bits")
    return value


def _decimal(item: RawItem, field: str) -> Decimal:
    """A number that is not negative and fits Decimal(18, 4)."""
    value = _value(item, field)
    if type(value) is int:
        value = Decimal(value)
    if type(value) is not Decimal or not value.is_finite():
        raise BadRowError(field, value, "must be a number")
    if value < 0:
        raise BadRowError(field, value, "must not be negative")
    if not _fits(value):
        raise BadRowError(field, value, f"must be at most {DECIMAL_LIMIT}, as its column is")
    return value.copy_abs()  # −0 is 0


def _fits(number: Decimal) -> bool:
    return number.is_finite() and number < _TOO_LARGE


def _changed_at(item: RawItem) -> ChangedAt:
    value = _value(item, "changedAt")
    if not isinstance(value, str):
        raise BadRowError("changedAt", value, "must be a text")
    try:
        return parse_changed_at(value)
    except ValueError as error:
        raise BadRowError("changedAt", value, str(error)) from None


def _json_text(value: Any) -> str:
    """JSON in ASCII, numbers to their last digit. What JSON has no number for becomes a text."""
    try:
        return _written(value)
    except RecursionError:
        return json.dumps("(nested too deeply to be kept)")


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{json.dumps(str(key))}: {_written(value[key])}" for key in value]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join([_written(element) for element in value]) + "]"
    if isinstance(value, Decimal) and value.is_finite():
        return str(value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return json.dumps(str(value))
