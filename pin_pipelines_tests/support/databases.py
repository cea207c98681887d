"""What is in a database, asked as its superuser."""

from __future__ import annotations

from typing import Any

import psycopg


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def tables(url: str) -> set[str]:
    """All but PostgreSQL's own, with their schemas."""
    return {
        name
        for (name,) in query(
            url,
            "SELECT schemaname || '.' || tablename FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
        )
    }
