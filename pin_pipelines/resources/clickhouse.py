"""The analytics ClickHouse: a server, or the embedded engine in a folder of its own."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import clickhouse_connect
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import Error

CONNECT_TIMEOUT_SECONDS = 10
# Of one read. The server sends a header of progress more often than that while a statement runs.
READ_TIMEOUT_SECONDS = 60

_POLL_SECONDS = 0.2
# An engine may fail to open a folder that was let go just now; not twice.
_ATTEMPTS_AT_FREE_FOLDER = 2


class ClickHouseUnavailableError(RuntimeError):
    """ClickHouse cannot be opened; the message names host or folder, never a password."""


@contextmanager
def open_clickhouse(url: str, *, wait_seconds: float = 60) -> Iterator[Client]:
    """A client for one thread, closed on the way out; only then may another process open the embedded engine.

    Args:
        url: ``http(s)://user:password@host:port`` or ``chdb:///folder``.
        wait_seconds: how long to wait for a folder that another process holds. Clients of one process share it.

    Raises:
        ClickHouseUnavailableError: it cannot be reached, or another process kept the folder.
    """
    embedded = urlsplit(url).scheme == "chdb"
    client = _open_folder(url, wait_seconds) if embedded else _open_server(url)
    try:
        yield client
    finally:
        client.close()


def _open_server(url: str) -> Client:
    try:
        return clickhouse_connect.get_client(
            dsn=url,
            # A session would refuse the statements of a second thread, and ties a client to one replica.
            autogenerate_session_id=False,
            dedicated_pool=True,
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            send_receive_timeout=READ_TIMEOUT_SECONDS,
        )
    except Error as error:
        address = urlsplit(url)
        raise ClickHouseUnavailableError(
            f"ClickHouse at {address.hostname}:{address.port or 'its default port'} cannot be opened: {_brief(error)}"
        ) from None


def _open_folder(url: str, wait_seconds: float) -> Client:
    folder = Path(urlsplit(url).path)
    deadline = time.monotonic() + wait_seconds
    attempts_at_free_folder = 0
    while True:
        try:
            return clickhouse_connect.get_client(dsn=url)
        except Error as error:
            holder = _find_holder(folder)
            attempts_at_free_folder = attempts_at_free_folder + 1 if holder is None else 0
            if attempts_at_free_folder == _ATTEMPTS_AT_FREE_FOLDER:
                raise ClickHouseUnavailableError(
                    f"the ClickHouse folder {folder} cannot be opened: {_brief(error)}"
                ) from None
        # Asking the engine again would have it write a complaint of its own to stderr each time.
        while holder is not None:
            if time.monotonic() >= deadline:
                raise ClickHouseUnavailableError(
                    f"the ClickHouse folder {folder} is held by another process ({holder}), and the embedded engine "
                    f"lets in one at a time; waited {wait_seconds:g} s. Try again when that process has ended"
                )
            time.sleep(_POLL_SECONDS)
            holder = _find_holder(folder)


def _find_holder(folder: Path) -> str | None:
    """Who holds the folder, by the lock that an engine keeps on its status file; None if nobody does."""
    try:
        with (folder / "status").open() as status:
            try:
                fcntl.flock(status, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return status.readline().strip()
    except OSError:  # no such file: it goes when the engine is closed
        pass
    return None


def _brief(error: Error) -> str:
    """The error without the engine's stack trace."""
    return str(error).partition(", Stack trace")[0].partition("\n")[0]
