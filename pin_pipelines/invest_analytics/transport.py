"""HTTP whose every read from the network is asked for first.

A time-out of ``requests`` bounds one read of the socket, and status line, headers, chunk sizes and body are all read in
loops: a server that drips a byte now and then holds its client for as long as it likes. Here the caller is asked before
each of those reads, and says how long that one may take or that there is to be none.
"""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from requests.adapters import HTTPAdapter

# Gives the seconds that the next read may take, or raises instead.
Leave = Callable[[], float]


class AskingAdapter(HTTPAdapter):
    """An adapter for a session whose answers are read by leave. One request at a time, as ``leave`` is for all."""

    def __init__(self, leave: Leave) -> None:
        """Ask ``leave`` before each read; what it raises ends the request, an OSError as a failure of the network."""
        self._leave = leave
        super().__init__()

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """See ``HTTPAdapter``; the pool's new connections are read by leave."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = partial(_connect, type(pool).ConnectionCls, self._leave)
        return pool


def _connect(make: Callable[..., Any], leave: Leave, **options: Any) -> Any:
    connection = make(**options)
    connection.response_class = partial(_AskingResponse, leave)
    return connection


class _AskingResponse(http.client.HTTPResponse):
    def __init__(self, leave: Leave, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_AskingReader(leave, sock, self.fp.detach()))


class _AskingReader(io.RawIOBase):
    """The socket's own reader, with the question before each read."""

    def __init__(self, leave: Leave, sock: socket.socket, reader: io.RawIOBase) -> None:
        self._leave = leave
        self._sock = sock
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._leave())
        return self._reader.readinto(buffer)

    def close(self) -> None:
        self._reader.close()  # the socket counts its readers, and is closed after the last of them
        super().close()
