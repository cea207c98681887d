"""Every environment variable of the pipelines: typed, bounded, checked when the code location loads.

All names start with ``PIN_``. A wrong value stops the location from loading with a message that names the
variable, the value and what is allowed; the values of URLs are never repeated, since they carry passwords.
What only the price history backfill needs may be missing: ``Settings.for_backfill`` says so where it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

ENV_PREFIX = "PIN_"

# Weights are exact decimals: four digits a day, and PostgreSQL's numeric holds 16,383 of them.
MAX_WINDOW_DAYS = 3650
# From here on the quantised decay base would round up to 1 and nothing would decay.
MAX_HALF_LIFE_DAYS = 3650
# One batch holds its row locks until it commits; a larger one gains nothing and makes writers wait longer.
MAX_BATCH_SIZE = 10_000
MAX_RUN_DURATION_SECONDS = 86_400
# The spec's bound on a page of the price source, which is also one insert.
MAX_BACKFILL_BATCH_SIZE = 1000
# What the ranking's formula is exact within.
MAX_RANKING_WEIGHT = 1000
MAX_RANKING_HALF_LIFE_DAYS = 365
MAX_RANKING_FULL_BOOST = 1_000_000_000
RANKING_DECIMALS = 6

# Goes into DDL, and may be one of a server's macros, such as {cluster}.
_CLUSTER = re.compile(r"[\w.{}-]+", re.ASCII)
# What a header can carry; a line break at the end of a secret file is the usual way to get it wrong.
_TOKEN = re.compile(r"[!-~]+")
_WEIGHT = f"a number from 0 to {MAX_RANKING_WEIGHT} with at most {RANKING_DECIMALS} decimals"


class SettingsError(ValueError):
    """A setting is missing or out of bounds; the message has one line for each."""


@dataclass(frozen=True)
class BackfillSettings:
    """What a price history backfill cannot do without, once all of it is set."""

    clickhouse_url: SecretStr
    talent_base_url: SecretStr
    talent_token: SecretStr
    rub_currency_id: UUID


class ClickHouseSettings(BaseSettings):
    """Where the facts go. A part of its own, since migrations need nothing else."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        # pydantic's own message would repeat a URL with its password.
        hide_input_in_errors=True,
    )

    clickhouse_url: Annotated[
        SecretStr | None,
        Field(
            description="The analytics ClickHouse: `http(s)://user:password@host:port`, or `chdb:///folder` for the "
            "embedded engine.",
            json_schema_extra={"allowed": "a URL such as http://host:8123, https://host:8443 or chdb:///folder"},
        ),
    ] = None
    clickhouse_cluster: Annotated[
        str | None,
        Field(
            description="The cluster that the fact table is made on, replicated; a single server without it.",
            json_schema_extra={"allowed": "a cluster's name of letters, digits and any of _ - . { }"},
        ),
    ] = None

    @field_validator("clickhouse_url", "clickhouse_cluster", mode="before")
    @classmethod
    def _empty_is_missing(cls, value: Any) -> Any:
        return _none_if_empty(value)

    @field_validator("clickhouse_url")
    @classmethod
    def _driver_understands(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            text = url.get_secret_value()
            embedded = text.startswith("chdb:///") and len(text.partition("?")[0]) > len("chdb:///")
            if not embedded and not _is_http_url(text):
                raise PydanticCustomError("url_scheme", "it is no URL of a ClickHouse server or folder")
        return url

    @field_validator("clickhouse_cluster")
    @classmethod
    def _is_name(cls, cluster: str | None) -> str | None:
        if cluster is not None and not _CLUSTER.fullmatch(cluster):
            raise PydanticCustomError("cluster_name", "it is no cluster's name")
        return cluster


class Settings(ClickHouseSettings):
    """The pipelines' configuration, as read from the environment."""

    postgres_url: Annotated[
        SecretStr,
        Field(
            description="The marketplace's PostgreSQL (15 or newer), where the cards are: `postgresql://…`.",
            json_schema_extra={"allowed": "a URL that starts with postgresql://"},
        ),
    ]
    dagster_postgres_url: Annotated[
        SecretStr,
        Field(
            description="Dagster's own storage, in a database of its own: `postgresql+psycopg2://…`.",
            json_schema_extra={"allowed": "a URL that starts with postgresql+psycopg2://"},
        ),
    ]
    popularity_window_days: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_WINDOW_DAYS,
            description="Width W of the window that a score sums over, in days.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_WINDOW_DAYS}"},
        ),
    ] = 30
    popularity_decay_half_life_days: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_HALF_LIFE_DAYS,
            description="Half-life H: a view weighs half after so many days.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_HALF_LIFE_DAYS}"},
        ),
    ] = 7
    popularity_batch_size: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_BATCH_SIZE,
            description="Cards in one transaction, at the most.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_BATCH_SIZE}"},
        ),
    ] = 1000
    popularity_max_run_duration_seconds: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_RUN_DURATION_SECONDS,
            description="A run that lasts longer ends in order between two batches; the next one goes on from there.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_RUN_DURATION_SECONDS}"},
        ),
    ] = 1800
    popularity_single_flight: Annotated[
        bool,
        Field(
            description="Let one instance work at a time, strictly; otherwise overlapping instances share the cards.",
            json_schema_extra={"allowed": "true or false"},
        ),
    ] = False
    popularity_workers: Annotated[
        int,
        Field(
            ge=1,
            le=16,
            description="Threads, each with a connection of its own, that share the cards of one run.",
            json_schema_extra={"allowed": "a whole number from 1 to 16"},
        ),
    ] = 1
    popularity_first_date: Annotated[
        date,
        Field(
            description="The first daily partition (UTC).",
            json_schema_extra={"allowed": "a date such as 2026-01-31, not in the future"},
        ),
    ] = date(2026, 1, 1)
    talent_base_url: Annotated[
        SecretStr | None,
        Field(
            description="The Talent API, the source of prices: scheme, host and port, and a path where a gateway has "
            "one.",
            json_schema_extra={"allowed": "a URL such as https://talent.example, without user, query or fragment"},
        ),
    ] = None
    talent_path: Annotated[
        str,
        Field(
            pattern=r"^/[^?#\s]*$",
            description="Path of the source's pages, after PIN_TALENT_BASE_URL.",
            json_schema_extra={"allowed": "a path that starts with /, without query or fragment"},
        ),
    ] = "/api/v1/property-object-prices"
    talent_token: Annotated[
        SecretStr | None,
        Field(
            description="The bearer token for the Talent API.",
            json_schema_extra={"allowed": "a token without spaces or line breaks"},
        ),
    ] = None
    rub_currency_id: Annotated[
        UUID | None,
        Field(
            description="Id of the rouble's record in the handbook of currencies; the source names no currency.",
            json_schema_extra={"allowed": "a UUID"},
        ),
    ] = None
    backfill_from: Annotated[
        UUID | None,
        Field(
            description="First property object of the range that the sensor asks for, itself included; without it the "
            "range begins with the first there is.",
            json_schema_extra={"allowed": "a UUID"},
        ),
    ] = None
    backfill_to: Annotated[
        UUID | None,
        Field(
            description="Last property object of the range that the sensor asks for, itself included; without it the "
            "range ends with the last there is.",
            json_schema_extra={"allowed": "a UUID that is not below PIN_BACKFILL_FROM"},
        ),
    ] = None
    backfill_batch_size: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_BACKFILL_BATCH_SIZE,
            description="Property objects in one page of the source, which is one insert.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_BACKFILL_BATCH_SIZE}"},
        ),
    ] = 1000
    news_ranking_w1: Annotated[
        Decimal,
        Field(
            ge=0,
            le=MAX_RANKING_WEIGHT,
            decimal_places=RANKING_DECIMALS,
            description="Weight w1 of a post's popularity times its freshness.",
            json_schema_extra={"allowed": _WEIGHT},
        ),
    ] = Decimal(1)
    news_ranking_w2: Annotated[
        Decimal,
        Field(
            ge=0,
            le=MAX_RANKING_WEIGHT,
            decimal_places=RANKING_DECIMALS,
            description="Weight w2 of a like.",
            json_schema_extra={"allowed": _WEIGHT},
        ),
    ] = Decimal("0.1")
    news_ranking_w3: Annotated[
        Decimal,
        Field(
            ge=0,
            le=MAX_RANKING_WEIGHT,
            decimal_places=RANKING_DECIMALS,
            description="Weight w3 of comments a view.",
            json_schema_extra={"allowed": _WEIGHT},
        ),
    ] = Decimal(1)
    news_ranking_w4: Annotated[
        Decimal,
        Field(
            ge=0,
            le=MAX_RANKING_WEIGHT,
            decimal_places=RANKING_DECIMALS,
            description="Weight w4 of promotion and the author's trust.",
            json_schema_extra={"allowed": _WEIGHT},
        ),
    ] = Decimal("0.5")
    news_ranking_half_life_days: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_RANKING_HALF_LIFE_DAYS,
            description="Half-life H: the popularity of a post counts half at this age.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_RANKING_HALF_LIFE_DAYS}"},
        ),
    ] = 7
    news_ranking_full_boost: Annotated[
        Decimal,
        Field(
            gt=0,
            le=MAX_RANKING_FULL_BOOST,
            decimal_places=RANKING_DECIMALS,
            description="PromotionBoost from which on a post counts as fully promoted.",
            json_schema_extra={
                "allowed": f"a number above 0, up to {MAX_RANKING_FULL_BOOST}, with at most {RANKING_DECIMALS} decimals"
            },
        ),
    ] = Decimal(100)
    news_ranking_author_trust: Annotated[
        Mapping[str, Annotated[Decimal, Field(ge=0, le=1, decimal_places=RANKING_DECIMALS)]],
        # JSON is read here, where its numbers do not become floats.
        NoDecode,
        Field(
            description="Trust in an author by type, as JSON; a type that is not in it has none.",
            json_schema_extra={
                "allowed": f"a JSON object of numbers from 0 to 1 with at most {RANKING_DECIMALS} decimals, such as "
                '{"Platform": 1, "Developer": 0.5}'
            },
        ),
    ] = {"Platform": Decimal(1), "Developer": Decimal("0.5")}
    news_ranking_batch_size: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_BATCH_SIZE,
            description="Posts in one transaction, at the most.",
            json_schema_extra={"allowed": f"a whole number from 1 to {MAX_BATCH_SIZE}"},
        ),
    ] = 1000

    @field_validator(
        "talent_base_url", "talent_token", "rub_currency_id", "backfill_from", "backfill_to", mode="before"
    )
    @classmethod
    def _empty_is_missing_too(cls, value: Any) -> Any:
        return _none_if_empty(value)

    @field_validator("postgres_url")
    @classmethod
    def _plain_scheme(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise PydanticCustomError("url_scheme", "the scheme names no plain PostgreSQL URL")
        if not is_postgres_url(url.get_secret_value()):
            # What reads it later would repeat the part that it stumbles over, which may be the password's.
            raise PydanticCustomError("url", "it cannot be read; is the password percent-encoded?")
        return url

    @field_validator("dagster_postgres_url")
    @classmethod
    def _driver_named(cls, url: SecretStr) -> SecretStr:
        # dagster-postgres speaks psycopg2; with a bare postgresql:// SQLAlchemy 2.1 would choose psycopg 3, and
        # the first run to be created would die of a syntax error at NOTIFY.
        if not url.get_secret_value().startswith("postgresql+psycopg2://"):
            raise PydanticCustomError("url_scheme", "the scheme does not name the psycopg2 driver")
        return url

    @field_validator("popularity_first_date")
    @classmethod
    def _begun(cls, first: date) -> date:
        if first > datetime.now(UTC).date():
            raise PydanticCustomError("future_date", "the first partition lies in the future")
        return first

    @field_validator("talent_base_url")
    @classmethod
    def _pages_can_be_asked_for(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            text = url.get_secret_value()
            if not _is_http_url(text) or urlsplit(text).username is not None or set("?#").intersection(text):
                raise PydanticCustomError("base_url", "it is no base URL of an HTTP server")
        return url

    @field_validator("talent_token")
    @classmethod
    def _fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not _TOKEN.fullmatch(token.get_secret_value()):
            raise PydanticCustomError("token", "it cannot be sent in a header")
        return token

    @field_validator("backfill_to")
    @classmethod
    def _range_is_in_order(cls, upper: UUID | None, info: ValidationInfo) -> UUID | None:
        lower = info.data.get("backfill_from")
        if lower is not None and upper is not None and lower > upper:
            raise PydanticCustomError("range", "it is below PIN_BACKFILL_FROM, {lower}", {"lower": str(lower)})
        return upper

    @field_validator("news_ranking_author_trust", mode="before")
    @classmethod
    def _is_json(cls, trust: Any) -> Any:
        if not isinstance(trust, str):
            return trust
        try:
            return json.loads(trust, parse_float=Decimal)
        except ValueError:
            raise PydanticCustomError("json", "it is no JSON") from None

    def for_backfill(self) -> BackfillSettings:
        """What a price history backfill needs.

        Raises:
            SettingsError: naming every variable that is not set.
        """
        url, base_url, token, currency = (
            self.clickhouse_url,
            self.talent_base_url,
            self.talent_token,
            self.rub_currency_id,
        )
        if url is None or base_url is None or token is None or currency is None:
            needed = ("clickhouse_url", "talent_base_url", "talent_token", "rub_currency_id")
            raise SettingsError("\n".join(_say_missing(field) for field in needed if getattr(self, field) is None))
        return BackfillSettings(url, base_url, token, currency)


def load_settings(**overrides: Any) -> Settings:
    """Read and check the environment.

    Args:
        overrides: values that win over the environment, by field name.

    Raises:
        SettingsError: naming each variable that is wrong, its value (never a URL's) and what is allowed.
    """
    with _explained():
        return Settings(**overrides)


def load_clickhouse_settings() -> ClickHouseSettings:
    """Read and check what names the ClickHouse, and nothing else.

    Raises:
        SettingsError: as ``load_settings``.
    """
    with _explained():
        return ClickHouseSettings()


def is_postgres_url(url: str) -> bool:
    """Whether psycopg and SQLAlchemy can both read it as a URL of a PostgreSQL database."""
    if not url.startswith(("postgresql://", "postgres://")) or url.partition("?")[0].count("@") > 1:
        return False
    try:
        ports = str(conninfo_to_dict(url).get("port", "")).split(",")
        make_url(url)
    except (psycopg.ProgrammingError, ArgumentError, ValueError):
        return False
    return all(port.isdecimal() or not port for port in ports)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


def _explain(details: ErrorDetails) -> str:
    field = str(details["loc"][0])
    if details["type"] == "missing":
        return _say_missing(field)
    annotation = Settings.model_fields[field].annotation
    secret = SecretStr in (annotation, *get_args(annotation))
    value = "its value (not shown)" if secret else repr(str(details["input"]))
    return f"{_variable(field)}: {value} is not allowed ({details['msg']}); it must be {_allowed(field)}."


def _say_missing(field: str) -> str:
    return f"{_variable(field)} is not set; it must be {_allowed(field)}."


def _variable(field: str) -> str:
    return f"{ENV_PREFIX}{field}".upper()


def _allowed(field: str) -> str:
    extra = Settings.model_fields[field].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


def _none_if_empty(value: Any) -> Any:
    """Of a variable that may be missing, an empty value is what compose files and charts give when it is."""
    return None if value == "" else value


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
