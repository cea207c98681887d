"""A stand-in for the Talent API: a real HTTP server on the loopback, with prices of its own making, and faults.

Everything about an object follows from the seed and its number, so the same catalogue comes out each time, of any size.
Faults are for the tests; ``demo`` and ``up`` serve the catalogue as it is.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import struct
import sys
import threading
import time
from bisect import bisect_right
from calendar import monthrange
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

PATH = "/api/v1/property-object-prices"

DEVELOPERS = 40
PROJECTS = 500

_IDS = 2**128
_TICKS = 10**7
"""Of a second: .NET writes seven digits of it."""
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# As they are written, and in minutes: Moscow most of all, UTC in both ways, and some that change day and month.
_OFFSETS = (
    *(("+03:00", 180),) * 8,
    *(("Z", 0),) * 3,
    *(("+00:00", 0),) * 2,
    *(("+05:30", 330), ("+12:00", 720), ("-11:30", -690)),
)
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class PageRequest:
    """A page that was asked for.

    Attributes:
        authorised: whether the token was right.
        at: when it came, by ``time.monotonic``.
    """

    after: UUID | None
    to: UUID | None
    take: int
    authorised: bool
    at: float


class Fault:
    """What goes wrong with one request."""

    def __init__(self, strike: Callable[[_Handler, bytes], None]) -> None:
        """Answer by ``strike``, which gets the connection and the page that should have been sent."""
        self.strike = strike

    @classmethod
    def raw(cls, body: bytes, *, status: int = 200, content_type: str = "application/json", **headers: str) -> Fault:
        """Any answer, complete; an underscore in a header's name stands for a hyphen."""
        return cls(lambda handler, _: handler.answer(body, status=status, Content_Type=content_type, **headers))

    @classmethod
    def items(cls, items: Iterable[Any]) -> Fault:
        """A page of these rows, whatever was asked for."""
        return cls.raw(_page([to_json(item) for item in items]))

    @classmethod
    def status(cls, status: int, **headers: str) -> Fault:
        """Another status."""
        return cls.raw(b"refused", status=status, content_type="text/plain", **headers)

    @classmethod
    def retry_after(cls, text: str, status: int = 429) -> Fault:
        """Too many requests, and when to come again."""
        return cls.status(status, Retry_After=text)

    @classmethod
    def redirect(cls, location: str, status: int = 302) -> Fault:
        """The page is elsewhere."""
        return cls.status(status, Location=location)

    @classmethod
    def html(cls) -> Fault:
        """The error page of a gateway, with status 200."""
        return cls.raw(b"<!DOCTYPE html><html><body>Upstream is gone.</body></html>", content_type="text/html")

    @classmethod
    def reset(cls) -> Fault:
        """The connection is reset instead of an answer."""
        return cls(lambda handler, _: handler.hang_up(reset=True))

    @classmethod
    def hang_up(cls, *, after: bytes = b"") -> Fault:
        """The connection is closed after these bytes, which need be no HTTP, instead of an answer."""
        return cls(lambda handler, _: handler.hang_up(after=after))

    @classmethod
    def cut_headers(cls) -> Fault:
        """The answer breaks off among its headers."""
        return cls.hang_up(after=b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Le")

    @classmethod
    def truncate(cls, *, chunked: bool = False, reset: bool = False) -> Fault:
        """The page breaks off in its middle, before the end that was announced."""

        def strike(handler: _Handler, page: bytes) -> None:
            half = page[: len(page) // 2]
            if chunked:
                handler.begin(Content_Type="application/json", Transfer_Encoding="chunked")
                half = b"%x\r\n%b" % (len(page), half)
            else:
                handler.begin(Content_Type="application/json", Content_Length=str(len(page)))
            handler.hang_up(after=half, reset=reset)

        return cls(strike)

    @classmethod
    def cut_json(cls) -> Fault:
        """Half of the page, announced as all of it."""
        return cls(lambda handler, page: handler.answer(page[: len(page) // 2], Content_Type="application/json"))

    @classmethod
    def drip(cls, seconds: float, *, headers: bool = False) -> Fault:
        """A byte of the page, or of endless headers, every so many seconds."""

        def strike(handler: _Handler, page: bytes) -> None:
            if headers:
                handler.drip(b"HTTP/1.1 200 OK\r\nX-Padding: " + b"." * 60_000, seconds)
            else:
                handler.begin(Content_Type="application/json", Content_Length=str(len(page)))
                handler.drip(page, seconds)

        return cls(strike)

    @classmethod
    def silence(cls) -> Fault:
        """No answer, for as long as the stand-in lives."""
        return cls(lambda handler, _: handler.stay_silent())


class TalentStandIn:
    """The server, a context manager. Its objects are JSON before the first request comes, so that pages cost little."""

    def __init__(
        self,
        size: int = 1000,
        *,
        seed: int = 1,
        months: int = 24,
        newest: date = date(2026, 1, 1),
        objects: Iterable[Mapping[str, Any]] | None = None,
        token: str | None = None,
        max_take: int | None = None,
        latency: float = 0.0,
    ) -> None:
        """Make the objects; they are served from ``with`` on.

        Args:
            size: how many objects to make, see ``make_objects``; so with ``seed``, ``months`` and ``newest``.
            seed: see there.
            months: see there.
            newest: see there.
            objects: these instead, see ``serve``.
            token: what a client must show; by default one made up.
            max_take: the most rows in a page, whatever is asked for.
            latency: seconds that each answer is held back.
        """
        self.token = token or secrets.token_urlsafe()
        self.max_take = max_take
        self.latency = latency
        self.requests: list[PageRequest] = []
        """Every page that was asked for, in order."""
        self.most_in_flight = 0
        """The most requests that were in hand at a time."""
        self.closing = threading.Event()
        self._in_flight = 0
        self._noting = threading.Lock()
        self._faults: deque[Fault] = deque()
        self._stock: tuple[Sequence[str], Sequence[str]] = ([], [])
        if objects is None:
            self._stock_up(make_objects(size, seed=seed, months=months, newest=newest))
        else:
            self.serve(objects)
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="talent-stand-in"
        )

    def __enter__(self) -> Self:
        """Begin to serve."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections and threads."""
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def faults_left(self) -> int:
        """How many faults no request has met yet."""
        return len(self._faults)

    def fail(self, *faults: Fault) -> None:
        """Let the next requests that show the token fail, one fault each."""
        self._faults.extend(faults)

    def serve(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Serve these objects from now on, in their order, which must ascend. Numbers may be Decimal.

        One without a readable id goes with the one before it: a page that ends between the two has lost it.
        """
        self._stock_up((_key(item), to_json(item)) for item in objects)

    def page(self, after: UUID | None, to: UUID | None, take: int) -> bytes:
        """The body of an answer."""
        keys, rows = self._stock
        begin = 0 if after is None else bisect_right(keys, str(after))
        end = len(keys) if to is None else bisect_right(keys, str(to))
        return _page(rows[begin : min(begin + min(take, self.max_take or take), end)])

    @contextmanager
    def attend(self, request: PageRequest) -> Iterator[Fault | None]:
        """Keep the request in mind, and count it as in hand; gives the fault that it is to meet."""
        with self._noting:
            self.requests.append(request)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            fault = self._faults.popleft() if self._faults and request.authorised else None
        try:
            yield fault
        finally:
            with self._noting:
                self._in_flight -= 1

    def _stock_up(self, objects: Iterable[tuple[str, str]]) -> None:
        keys, rows = [], []
        for key, row in objects:
            keys.append(key)
            rows.append(row)
        self._stock = (list(accumulate(keys, max)), rows)


def make_objects(size: int, *, seed: int, months: int, newest: date) -> Iterator[tuple[str, str]]:
    """Make objects: the id of each, and its JSON.

    Args:
        size: how many. Their ids ascend, and are spread evenly over all that a UUID can be.
        seed: another one makes other objects.
        months: so many months (by UTC) have prices, each of them in any so many neighbouring objects.
        newest: a day of the newest of these months.
    """
    width = _IDS // max(size, 1)
    starts = [_month_before(newest, n) for n in range(months)]
    developers = [_made_up_id("developer", n) for n in range(DEVELOPERS)]
    projects = [_made_up_id("project", n) for n in range(PROJECTS)]
    for n in range(size):
        draw = int.from_bytes(blake2b(f"{seed}/{n}".encode(), digest_size=48).digest())
        draw, place = divmod(draw, width)
        draw, project = divmod(draw, PROJECTS)
        draw, building = divmod(draw, 6)
        draw, layout = divmod(draw, 30)
        draw, area = divmod(draw, 14_001)
        draw, per_meter = divmod(draw, 50_000_000)
        draw, zone = divmod(draw, len(_OFFSETS))
        draw, unpriced = divmod(draw, 5)
        area += 1_900  # hundredths of a square metre
        price = area * (per_meter + 9_000_000) // 100  # kopecks
        object_id = str(UUID(int=n * width + place))
        per_meter_text = "null" if unpriced == 0 else _hundredths((price * 100 + area // 2) // area)
        row = (
            f'{{"propertyObjectId":"{object_id}","developerId":"{developers[project % DEVELOPERS]}",'
            f'"projectId":"{projects[project]}","buildingId":{project * 10 + building},'
            f'"layoutGroupId":{project * 10 + layout // 5},"layoutId":{project * 100 + layout},'
            f'"areaTotal":{_hundredths(area)},"currentPrice":{_hundredths(price)},"pricePerMeter":{per_meter_text},'
            f'"changedAt":"{_moment(starts[n % months], draw, *_OFFSETS[zone])}"}}'
        )
        yield object_id, row


def to_json(value: Any) -> str:
    """JSON with every digit of a Decimal."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(name)}:{to_json(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(to_json, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _page(rows: Sequence[str]) -> bytes:
    return f'{{"items":[{",".join(rows)}]}}'.encode()


def _key(item: Mapping[str, Any]) -> str:
    """What orders an object: its id, in the form that ascends as the ids do."""
    text = item.get("propertyObjectId")
    return text.lower() if isinstance(text, str) and _UUID.fullmatch(text) else ""


def _made_up_id(kind: str, number: int) -> UUID:
    return UUID(bytes=blake2b(f"{kind}/{number}".encode(), digest_size=16).digest())


def _month_before(day: date, months: int) -> datetime:
    """The first moment of the month so many months before a day's."""
    year, month = divmod(day.year * 12 + day.month - 1 - months, 12)
    return datetime(year, month + 1, 1)  # noqa: DTZ001 - its offset is added as text


def _moment(month: datetime, draw: int, offset: str, offset_minutes: int) -> str:
    """Some moment of a month of UTC, written with seven digits and at an offset."""
    days = monthrange(month.year, month.month)[1]
    seconds, ticks = divmod(draw % (days * 86_400 * _TICKS), _TICKS)
    local = month + timedelta(minutes=offset_minutes, seconds=seconds)
    return f"{local.isoformat()}.{ticks:07}{offset}"


def _hundredths(number: int) -> str:
    return f"{number // 100}.{number % 100:02}"


class _Server(ThreadingHTTPServer):
    # Threads are waited for in the end, so that nothing of a stand-in outlives it.
    daemon_threads = False

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close without saying good-bye first: a reset must be nothing but one."""
        self._open.discard(request)
        self.close_request(request)

    def hang_up(self) -> None:
        """End the connections that clients keep open."""
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go whenever they like."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    # Head and body leave in two writes; without this each answer would wait for the client's delayed ACK.
    disable_nagle_algorithm = True

    def __init__(self, stand_in: TalentStandIn, *arguments: Any) -> None:
        self._stand_in = stand_in
        super().__init__(*arguments)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path != PATH:
            self.answer(b"", status=404)
            return
        try:
            request = self._read(dict(parse_qsl(parts.query)))
        except (KeyError, ValueError):
            self.answer(b"", status=400)
            return
        with self._stand_in.attend(request) as fault:
            if self._stand_in.latency:
                self._stand_in.closing.wait(self._stand_in.latency)
            self._respond(request, fault)

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        self.begin(status, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def hang_up(self, *, after: bytes = b"", reset: bool = False) -> None:
        self.wfile.write(after)
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def drip(self, data: bytes, seconds: float) -> None:
        self.close_connection = True
        for position in range(len(data)):
            self.wfile.write(data[position : position + 1])
            if self._stand_in.closing.wait(seconds):
                break

    def stay_silent(self) -> None:
        self._stand_in.closing.wait()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing: ``requests`` of the stand-in has it."""

    def _read(self, query: Mapping[str, str]) -> PageRequest:
        after, to = (UUID(query[name]) if name in query else None for name in ("after", "to"))
        take = int(query["take"])
        if take < 1:
            raise ValueError(take)
        authorised = self.headers.get("Authorization") == f"Bearer {self._stand_in.token}"
        return PageRequest(after, to, take, authorised, time.monotonic())

    def _respond(self, request: PageRequest, fault: Fault | None) -> None:
        if not request.authorised:
            self.answer(b"", status=401, WWW_Authenticate="Bearer")
            return
        page = self._stand_in.page(request.after, request.to, request.take)
        if fault is None:
            self.answer(page, Content_Type="application/json")
        else:
            fault.strike(self, page)
