"""Feature flags: a small table that every process reads, so that a flip needs no restart.

A flag that is not in the table is off, and so is one that cannot be read. Only known names can be set: a typing error
must not look like success. Flags are evaluated through the OpenFeature SDK, whose provider here is the table.
"""

# The signatures of the provider are the SDK's.
# ruff: noqa: ARG002

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TypeVar

import psycopg
from openfeature import api
from openfeature.evaluation_context import EvaluationContext
from openfeature.exception import ErrorCode
from openfeature.flag_evaluation import FlagResolutionDetails, FlagValueType, Reason
from openfeature.provider import AbstractProvider, Metadata

from pin_pipelines.database import Connect, Connection

T = TypeVar("T")

PRICE_BACKFILL = "invest-analytics.price-backfill.enabled"
NEWS_RANKING = "news.ranking.enabled"

KNOWN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        PRICE_BACKFILL: "Backfill of the price history into ClickHouse, once.",
        NEWS_RANKING: "Ranking of the news feed, and recommendations of posts.",
    }
)

_DOMAIN = "pin_pipelines"
_SWITCHED_AT = "switched_at"
_SELECT = "SELECT name, enabled, updated_at FROM pin_pipelines.feature_flags"
_UPSERT = """
INSERT INTO pin_pipelines.feature_flags (name, enabled) VALUES (%s, %s)
ON CONFLICT (name) DO UPDATE SET enabled = excluded.enabled, updated_at = now()"""


class FeatureFlagError(RuntimeError):
    """A flag cannot be read or set; the message says why and what to do."""


@dataclass(frozen=True)
class FeatureFlag:
    """A known flag and how it stands."""

    name: str
    description: str
    enabled: bool
    updated_at: datetime | None
    """None if it was never set."""


def list_flags(connection: Connection) -> list[FeatureFlag]:
    """All known flags, by name.

    Raises:
        FeatureFlagError: the table is missing.
    """
    with _table_needed():
        stored = {name: (enabled, updated_at) for name, enabled, updated_at in connection.execute(_SELECT)}
    return [
        FeatureFlag(name, description, *stored.get(name, (False, None)))
        for name, description in sorted(KNOWN_FLAGS.items())
    ]


def set_flag(connection: Connection, name: str, enabled: bool) -> None:
    """Turn a flag on or off; the caller commits.

    Raises:
        FeatureFlagError: the name is not known, or the table is missing.
    """
    if name not in KNOWN_FLAGS:
        raise FeatureFlagError(f"there is no flag {name!r}; the flags are: {', '.join(sorted(KNOWN_FLAGS))}")
    with _table_needed():
        connection.execute(_UPSERT, [name, enabled])


class PostgresFlagProvider(AbstractProvider):
    """OpenFeature's provider over the table; it is read at each evaluation. Flags here are on or off."""

    def __init__(self, connect: Connect) -> None:
        """Read by a new connection each time."""
        super().__init__()
        self._connect = connect

    def get_metadata(self) -> Metadata:
        """See ``AbstractProvider``."""
        return Metadata(name="PostgreSQL")

    def resolve_boolean_details(
        self, flag_key: str, default_value: bool, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[bool]:
        """How a flag stands; the default, and why, where that cannot be told."""
        if flag_key not in KNOWN_FLAGS:
            return _unresolved(default_value, ErrorCode.FLAG_NOT_FOUND, f"there is no flag {flag_key!r}")
        try:
            with self._connect() as connection:
                (flag,) = (flag for flag in list_flags(connection) if flag.name == flag_key)
        except (psycopg.Error, FeatureFlagError) as error:
            return _unresolved(default_value, ErrorCode.GENERAL, _describe(error))
        if flag.updated_at is None:
            return FlagResolutionDetails(default_value, reason=Reason.DEFAULT)
        # Of what a provider may add, OpenFeature allows texts and numbers alone.
        metadata = {_SWITCHED_AT: flag.updated_at.isoformat()}
        return FlagResolutionDetails(flag.enabled, reason=Reason.STATIC, flag_metadata=metadata)

    def resolve_string_details(
        self, flag_key: str, default_value: str, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[str]:
        """Refused: no flag is a text."""
        return _of_another_type(default_value)

    def resolve_integer_details(
        self, flag_key: str, default_value: int, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[int]:
        """Refused: no flag is a number."""
        return _of_another_type(default_value)

    def resolve_float_details(
        self, flag_key: str, default_value: float, evaluation_context: EvaluationContext | None = None
    ) -> FlagResolutionDetails[float]:
        """Refused: no flag is a number."""
        return _of_another_type(default_value)

    def resolve_object_details(
        self,
        flag_key: str,
        default_value: Sequence[FlagValueType] | Mapping[str, FlagValueType],
        evaluation_context: EvaluationContext | None = None,
    ) -> FlagResolutionDetails[Sequence[FlagValueType] | Mapping[str, FlagValueType]]:
        """Refused: no flag is an object."""
        return _of_another_type(default_value)


# The SDK keeps one provider a domain for the whole process; here it is the caller's while a flag is evaluated.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Evaluation:
    """How a flag stands for those who go by it.

    Attributes:
        switched_at: when it was last set, in UTC; None if it never was.
        problem: why it cannot be told how it stands, and so counts as off; None where it can.
    """

    enabled: bool
    switched_at: datetime | None = None
    problem: str | None = None

    @property
    def why_off(self) -> str:
        """Of one that is not enabled: how it stands, as the end of a sentence that begins with its name."""
        return f"cannot be read and so counts as off ({self.problem})" if self.problem else "is off"


def evaluate(connect: Connect, name: str) -> Evaluation:
    """How a flag stands now, by OpenFeature. Unknown or unreadable is off."""
    with _one_at_a_time:
        api.set_provider_and_wait(PostgresFlagProvider(connect), _DOMAIN)
        details = api.get_client(_DOMAIN).get_boolean_details(name, False)
    switched_at = details.flag_metadata.get(_SWITCHED_AT)
    return Evaluation(
        enabled=details.value,
        switched_at=datetime.fromisoformat(str(switched_at)).astimezone(UTC) if switched_at else None,
        problem=(details.error_message or str(details.error_code)) if details.error_code else None,
    )


def _unresolved(default: T, code: ErrorCode, message: str) -> FlagResolutionDetails[T]:
    return FlagResolutionDetails(default, error_code=code, error_message=message, reason=Reason.ERROR)


def _of_another_type(default: T) -> FlagResolutionDetails[T]:
    return _unresolved(default, ErrorCode.TYPE_MISMATCH, "flags are on or off")


def _describe(error: Exception) -> str:
    # Of a URL that cannot be read, psycopg repeats parts that may be the password's.
    readable = isinstance(error, FeatureFlagError | psycopg.OperationalError)
    return " ".join(str(error).split()) if readable else type(error).__name__


@contextmanager
def _table_needed() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise FeatureFlagError(
            "the table pin_pipelines.feature_flags is missing; `pin-pipelines migrate` makes it"
        ) from error
