"""What every context means by a connection to PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]
# Every call opens a connection of its own, not in autocommit mode.
Connect = Callable[[], Connection]


def fetch_one(connection: Connection, statement: str, parameters: Any = None, *, binary: bool = False) -> Any:
    """The row of a statement that returns exactly one, such as an aggregate or INSERT … RETURNING.

    Raises:
        LookupError: it returned none.
    """
    row = connection.execute(statement, parameters, binary=binary).fetchone()
    if row is None:
        raise LookupError("a statement that returns a row returned none")
    return row
