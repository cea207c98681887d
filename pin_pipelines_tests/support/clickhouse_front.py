"""ClickHouse's HTTP interface over the chDB engine of this process, for the real HTTP client, with faults on demand.

It speaks what clickhouse-connect asks of a server: statements in the body or in ``query``; settings, database and bound
parameters beside them; Native data in and out, compressed and chunked bodies; a summary with the rows written; errors
with code and text; Basic authentication. A request gets a connection of its own to the engine, as it gets a context of
its own on a server, so that no setting outlives it. Sessions, progress headers and compressed answers are left out: a
client does without. Nothing is simulated but the wire: what a fault leaves behind is the engine's own doing.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import tempfile
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import chdb
import lz4.frame

USER = "pin"
PASSWORD = "front-door-secret"

# What stands beside a statement in the address and is no setting of the engine.
_TRANSPORT = {"query", "database", "query_id", "session_id", "wait_end_of_query", "client_protocol_version"}
_INSERT = re.compile(rb"\s*(INSERT\s+INTO\s+.+?)\s+FORMAT\s+(\w+)\s*?(?:\n|$)", re.IGNORECASE | re.DOTALL)
_ANSWERS_ROWS = re.compile(rb"\s*(SELECT|WITH|SHOW|DESCRIBE|DESC|EXISTS|EXPLAIN)\b", re.IGNORECASE)
_FORMAT = re.compile(rb"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_CODE = re.compile(r"Code: (\d+)")
# Where a server's status differs from 500, as far as tests come across it.
_STATUS = {60: 404, 81: 404, 115: 404, 159: 408, 516: 403}
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Request:
    """A statement that arrived, as it was sent."""

    statement: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def is_insert(self) -> bool:
        return bool(_INSERT.match(self.statement.encode()))


class EngineError(Exception):
    """The engine refused a statement."""

    def __init__(self, error: Exception) -> None:
        text = str(error)
        super().__init__(text[max(text.find("Code: "), 0) :])
        found = _CODE.search(text)
        self.code = int(found[1]) if found else 1002


class Insert:
    """An insert in hand: what a fault can do with it."""

    def __init__(self, store: Callable[[], int], handler: _Handler) -> None:
        self._store = store
        self._handler = handler

    def store(self) -> int:
        """Store the rows; returns how many."""
        return self._store()

    def answer(self, written_rows: int) -> None:
        self._handler.answer(b"", summary={"written_rows": str(written_rows), "written_bytes": "0"})

    def refuse(self, code: int, name: str, status: int) -> None:
        self._handler.refuse(code, f"Code: {code}. DB::Exception: Refused by the test. ({name})", status)

    def refuse_without_code(self, status: int) -> None:
        """As a proxy in front of the server does."""
        self._handler.answer(b"<html>upstream is gone</html>", status=status)

    def hang_up(self, *, reset: bool = False, after: bytes = b"") -> None:
        """End the connection, in order or by a reset, after so much of an answer."""
        self._handler.hang_up(reset=reset, after=after)

    def stay_silent(self) -> None:
        """Answer nothing for as long as the front lives, or the client waits."""
        self._handler.stay_silent()


Fault = Callable[[Insert], None]


def reset_before(insert: Insert) -> None:
    """The connection is reset, nothing is stored."""
    insert.hang_up(reset=True)


def lose_answer(insert: Insert) -> None:
    """The rows are stored, the connection is closed instead of an answer."""
    insert.store()
    insert.hang_up()


def lose_answer_by_reset(insert: Insert) -> None:
    """The rows are stored, the connection is reset instead of an answer."""
    insert.store()
    insert.hang_up(reset=True)


def cut_headers(insert: Insert) -> None:
    """The rows are stored, the answer breaks off among its progress headers."""
    insert.store()
    insert.hang_up(after=b'HTTP/1.1 200 OK\r\nX-ClickHouse-Progress: {"read_rows":"0"}\r\n')


def time_out_before(insert: Insert) -> None:
    """No answer comes, nothing is stored."""
    insert.stay_silent()


def time_out_after(insert: Insert) -> None:
    """The rows are stored, no answer comes."""
    insert.store()
    insert.stay_silent()


def refuse(code: int, name: str, status: int = 500) -> Fault:
    """The server refuses the insert with an error of its own; nothing is stored."""
    return lambda insert: insert.refuse(code, name, status)


def refuse_without_code(status: int) -> Fault:
    """Something in front of the server refuses the insert; nothing is stored."""
    return lambda insert: insert.refuse_without_code(status)


def report_written(rows: int) -> Fault:
    """The rows are stored, and another number is reported."""

    def report(insert: Insert) -> None:
        insert.store()
        insert.answer(rows)

    return report


class ClickHouseFront:
    """The front over the engine at a path; a context manager. Faults are used up one an insert."""

    def __init__(self, path: Path) -> None:
        self.requests: list[Request] = []
        self.taken: list[int] = []
        """Rows that the engine took, of each insert."""
        self.closing = threading.Event()
        self._path = path
        self._faults: deque[Fault] = deque()
        self._noting = threading.Lock()
        # Holds the engine open between requests.
        self._engine = chdb.connect(str(path))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        # Waits for the threads of requests too.
        self._server.server_close()
        self._engine.close()

    @property
    def url(self) -> str:
        return self.url_with_password(PASSWORD)

    def url_with_password(self, password: str) -> str:
        return f"http://{USER}:{password}@127.0.0.1:{self._server.server_port}"

    @property
    def inserts(self) -> list[Request]:
        return [request for request in self.requests if request.is_insert]

    @property
    def faults_left(self) -> int:
        return len(self._faults)

    def fail(self, *faults: Fault) -> None:
        """Let the next inserts fail, one fault each."""
        self._faults.extend(faults)

    def note(self, request: Request) -> None:
        with self._noting:
            self.requests.append(request)

    def next_fault(self) -> Fault | None:
        with self._noting:
            return self._faults.popleft() if self._faults else None

    def run(self, statement: bytes, output_format: str, parameters: Mapping[str, str]) -> Any:
        """Let the engine run a statement, under the settings of its request.

        Raises:
            EngineError: the engine refused it, or one of its settings.
        """
        bound = {name.removeprefix("param_"): value for name, value in parameters.items() if _is_bound(name)}
        with closing(chdb.connect(str(self._path))) as engine:
            try:
                if database := parameters.get("database"):
                    engine.query(f"USE `{database}`")
                for name, value in parameters.items():
                    if name not in _TRANSPORT and not _is_bound(name):
                        engine.query(f"SET {name} = {_quoted(value)}")
                return engine.query(statement, output_format, params=bound)
            except RuntimeError as error:
                raise EngineError(error) from error

    def store(self, insert: bytes, data_format: str, data: bytes, parameters: Mapping[str, str]) -> int:
        """Let the engine insert data; returns the rows that it took."""
        # By way of a file, since of data in the statement the engine does not say how many rows they were.
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            statement = f"{insert.decode()} FROM INFILE {_quoted(file.name)} FORMAT {data_format}"
            rows: int = self.run(statement.encode(), "TabSeparated", parameters).rows_read()
        with self._noting:
            self.taken.append(rows)
        return rows


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    # Header and body leave in two writes; without this each answer would wait for the client's delayed ACK.
    disable_nagle_algorithm = True

    def __init__(self, front: ClickHouseFront, *arguments: Any) -> None:
        self.front = front
        super().__init__(*arguments)

    @cached_property
    def parameters(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def do_GET(self) -> None:
        self.answer(b"Ok.\n")

    def do_POST(self) -> None:
        self.__dict__.pop("parameters", None)
        body = self._body()
        if self.headers.get("Authorization") != f"Basic {b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}":
            self.refuse(516, "Code: 516. DB::Exception: pin: Authentication failed. (AUTHENTICATION_FAILED)")
            return
        query = self.parameters.get("query", "").encode()
        statement = query + b"\n" + body if query else body
        insert = _INSERT.match(statement)
        shown = insert[0] if insert else statement
        self.front.note(Request(shown.decode().strip(), self.parameters, dict(self.headers)))
        try:
            if insert:
                self._insert(insert, statement[insert.end() :])
            else:
                self._run(statement)
        except EngineError as error:
            self.refuse(error.code, str(error))

    def answer(self, body: bytes, *, status: int = 200, summary: Mapping[str, str] | None = None, **more: str) -> None:
        self.send_response(status)
        self.send_header("X-ClickHouse-Query-Id", self.parameters.get("query_id") or str(uuid4()))
        self.send_header("X-ClickHouse-Summary", json.dumps(summary or {}))
        self.send_header("Content-Length", str(len(body)))
        for name, value in more.items():
            self.send_header(f"X-ClickHouse-{name.replace('_', '-')}", value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code: int, text: str, status: int | None = None) -> None:
        self.answer(text.encode(), status=status or _STATUS.get(code, 500), Exception_Code=str(code))

    def hang_up(self, *, reset: bool, after: bytes) -> None:
        self.wfile.write(after)
        self.close_connection = True
        if reset:
            # Closing now sends RST. The files of this handler hold the socket open, so it is closed by its number.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def stay_silent(self) -> None:
        self.front.closing.wait()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing: tests look at ``requests``."""

    def _insert(self, insert: re.Match[bytes], data: bytes) -> None:
        store = partial(self.front.store, insert[1], insert[2].decode(), data, self.parameters)
        fault = self.front.next_fault()
        if fault is None:
            Insert(store, self).answer(store())
        else:
            fault(Insert(store, self))

    def _run(self, statement: bytes) -> None:
        named = _FORMAT.search(statement)
        output_format = named[1].decode() if named else "TabSeparated"
        result = self.front.run(statement, output_format, self.parameters)
        shown = {"Format": output_format} if _ANSWERS_ROWS.match(statement) else {}
        summary = {"read_rows": str(result.rows_read()), "written_rows": "0"}
        self.answer(result.bytes() or b"", summary=summary, **shown)

    def _body(self) -> bytes:
        body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self._sized()
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding == "lz4":
            return lz4.frame.decompress(body)
        assert encoding == "identity", f"the front does not speak {encoding}"
        return body

    def _sized(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> bytes:
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)


def _is_bound(name: str) -> bool:
    return name.startswith("param_")


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
