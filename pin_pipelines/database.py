"""What every context means by a connection to PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]
# Every call opens a connection of its own, not in autocommit mode.
Connect = Callable[[], Connection]


def free_advisory_locks(connection: Connection) -> None:
    """Give the session's advisory locks up now: by itself the server frees them a moment after the client has left.

    From a connection that is gone there is nothing to be freed here; the server does it.
    """
    with suppress(psycopg.Error):
        connection.execute("SELECT pg_advisory_unlock_all()")


def fetch_one(connection: Connection, statement: str, parameters: Any = None, *, binary: bool = False) -> Any:
    """The row of a statement that returns exactly one, such as an aggregate or INSERT … RETURNING.

    Raises:
        LookupError: it returned none.
    """
    row = connection.execute(statement, parameters, binary=binary).fetchone()
    if row is None:
        raise LookupError("a statement that returns a row returned none")
    return row
