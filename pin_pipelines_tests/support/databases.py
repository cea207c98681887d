"""A test's database, asked as its superuser, who plays everybody else."""

from __future__ import annotations

import threading
from typing import Any

import psycopg


class Database:
    """Each call is a transaction of its own; those of a thread share a session, since to begin one takes longer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._kept = threading.local()

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement, if it has any."""
        if not hasattr(self._kept, "session"):
            # Not prepared: tests change tables between two runs of the same statement.
            self._kept.session = _Session.connect(self.url, autocommit=True, prepare_threshold=None)
        cursor = self._kept.session.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def leave(self) -> None:
        """End this thread's session, for what needs the database to itself or outlasts the server."""
        self._kept = threading.local()


class _Session(psycopg.Connection[Any]):
    """Ends with its last reference, which psycopg would warn of."""

    def __del__(self) -> None:
        self.close()


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    return Database(url).execute(statement)


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
