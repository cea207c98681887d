"""Feature flags: a small table that every process reads, so that a flip needs no restart.

A flag that is not in the table is off. Only known names can be set: a typing error must not look like success.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

import psycopg

KNOWN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "invest-analytics.price-backfill.enabled": "Backfill of the price history into ClickHouse, once.",
        "news.ranking.enabled": "Ranking of the news feed by reactions to its posts.",
    }
)

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


def list_flags(connection: psycopg.Connection[Any]) -> list[FeatureFlag]:
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


def set_flag(connection: psycopg.Connection[Any], name: str, enabled: bool) -> None:
    """Turn a flag on or off; the caller commits.

    Raises:
        FeatureFlagError: the name is not known, or the table is missing.
    """
    if name not in KNOWN_FLAGS:
        raise FeatureFlagError(f"there is no flag {name!r}; the flags are: {', '.join(sorted(KNOWN_FLAGS))}")
    with _table_needed():
        connection.execute(_UPSERT, [name, enabled])


@contextmanager
def _table_needed() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise FeatureFlagError(
            "the table pin_pipelines.feature_flags is missing; `pin-pipelines migrate` makes it"
        ) from error
