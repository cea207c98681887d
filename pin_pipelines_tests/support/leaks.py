"""What a secret could have leaked into: databases, files, and the command lines of all processes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from psycopg import sql

_TABLES = """
SELECT schemaname, tablename FROM pg_tables
WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"""


def stored(url: str) -> str:
    """All that is in all tables of a database, as text."""
    with psycopg.connect(url) as connection:
        tables = connection.execute(_TABLES).fetchall()
        return "\n".join(text for table in tables for text in _contents(connection, *table))


def _contents(connection: psycopg.Connection[Any], schema: str, table: str) -> Iterator[str]:
    rows = connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, table)))
    for row in rows:
        for value in row:
            yield _readable(value) if isinstance(value, bytes) else str(value)


def _readable(body: bytes) -> str:
    """Dagster compresses what it expects to be long."""
    with suppress(zlib.error):
        body = zlib.decompress(body)
    return body.decode(errors="replace")


def written(folder: Path) -> str:
    """All that is in all files of a folder, as text."""
    return "\n".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


class ProcessList:
    """Every command line that any process of the machine has shown while the context was open."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self._seen.update(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))

    @property
    def shown(self) -> str:
        return "\n".join(self._seen)
