"""Every environment variable of the pipelines: typed, bounded, checked when the code location loads.

All names start with ``PIN_``. A wrong value stops the location from loading with a message that names the
variable, the value and what is allowed; the values of URLs are never repeated, since they carry passwords.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "PIN_"

# Weights are exact decimals: four digits a day, and PostgreSQL's numeric holds 16,383 of them.
MAX_WINDOW_DAYS = 3650
# From here on the quantised decay base would round up to 1 and nothing would decay.
MAX_HALF_LIFE_DAYS = 3650
# One batch holds its row locks until it commits; a larger one gains nothing and makes writers wait longer.
MAX_BATCH_SIZE = 10_000
MAX_RUN_DURATION_SECONDS = 86_400


class SettingsError(ValueError):
    """A setting is missing or out of bounds; the message has one line for each."""


class Settings(BaseSettings):
    """The pipelines' configuration, as read from the environment."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        # pydantic's own message would repeat a URL with its password.
        hide_input_in_errors=True,
    )

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

    @field_validator("postgres_url")
    @classmethod
    def _plain_scheme(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise PydanticCustomError("url_scheme", "the scheme names no plain PostgreSQL URL")
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


def load_settings(**overrides: Any) -> Settings:
    """Read and check the environment.

    Args:
        overrides: values that win over the environment, by field name.

    Raises:
        SettingsError: naming each variable that is wrong, its value (never a URL's) and what is allowed.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None


def _explain(details: ErrorDetails) -> str:
    field = str(details["loc"][0])
    variable = f"{ENV_PREFIX}{field}".upper()
    info = Settings.model_fields[field]
    extra = info.json_schema_extra
    allowed = extra["allowed"] if isinstance(extra, dict) else ""
    if details["type"] == "missing":
        return f"{variable} is not set; it must be {allowed}."
    secret = info.annotation is SecretStr
    value = "its value (not shown)" if secret else repr(str(details["input"]))
    return f"{variable}: {value} is not allowed ({details['msg']}); it must be {allowed}."
