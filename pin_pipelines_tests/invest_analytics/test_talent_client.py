"""The Talent client over the loopback, against a server that keeps the contract and then against one that does not.

Pauses are noted and not made; deadlines are real, and only what they end in is asserted.
"""

import gzip
import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pin_pipelines.invest_analytics.facts import map_page
from pin_pipelines.invest_analytics.snapshots import SourceContractError, SourceError
from pin_pipelines.invest_analytics.talent import Limits, SourceStoppedError, TalentClient
from pin_pipelines.local.talent import PATH, Fault, TalentStandIn, make_objects
from pin_pipelines_tests.support.processes import background
from pin_pipelines_tests.support.waiting import until

TOKEN = "t0ken-for-nobody-to-see"
NOON = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)
IDS = [UUID(int=n) for n in (0, 1, 2**64, 2**127, 2**128 - 1)]
OBJECTS = [{"propertyObjectId": str(each), "buildingId": n} for n, each in enumerate(IDS)]
QUICK = Limits(connect_seconds=5, read_seconds=5, page_seconds=5)


@pytest.fixture(autouse=True)
def nothing_shows_the_token(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert TOKEN not in caplog.text


@pytest.fixture
def stand_in() -> Iterator[TalentStandIn]:
    with TalentStandIn(objects=OBJECTS, token=TOKEN) as server:
        yield server


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def connect(stand_in: TalentStandIn, pauses: list[float]) -> Iterator[Callable[..., TalentClient]]:
    """Makes clients of the stand-in, whose pauses are noted."""
    made: list[TalentClient] = []

    def make(limits: Limits = QUICK, **options: Any) -> TalentClient:
        options = {"base_url": stand_in.url, "token": TOKEN, "sleep": pauses.append, "now": lambda: NOON} | options
        made.append(TalentClient(limits=limits, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Callable[..., TalentClient]) -> TalentClient:
    return connect()


def fetch(client: TalentClient, after: UUID | None = None, to: UUID | None = None, take: int = 1000) -> list[UUID]:
    return [UUID(item["propertyObjectId"]) for item in client.fetch(after=after, to=to, take=take)]


def refusal(client: TalentClient, kind: type[SourceError] = SourceError) -> str:
    """The message of the error that a page ends in."""
    with pytest.raises(SourceError) as refused:
        fetch(client)
    assert type(refused.value) is kind
    # Dagster keeps an error with its causes.
    assert TOKEN not in "".join(traceback.format_exception(refused.value))
    return str(refused.value)


# The contract


def test_page_begins_after_one_id_and_ends_with_another(client: TalentClient, stand_in: TalentStandIn) -> None:
    assert fetch(client, after=IDS[0], to=IDS[3]) == IDS[1:4]
    (request,) = stand_in.requests
    assert (request.after, request.to, request.take) == (IDS[0], IDS[3], 1000)


def test_page_without_bounds_asks_for_none_and_gets_both_ends_of_all_ids(
    client: TalentClient, stand_in: TalentStandIn
) -> None:
    assert fetch(client) == IDS
    (request,) = stand_in.requests
    assert (request.after, request.to) == (None, None)


def test_pages_follow_one_another_to_an_empty_one(client: TalentClient) -> None:
    assert fetch(client, take=3) == IDS[:3]
    assert fetch(client, after=IDS[2], take=3) == IDS[3:]
    assert fetch(client, after=IDS[4], take=3) == []


def test_empty_source_gives_an_empty_page(client: TalentClient, stand_in: TalentStandIn) -> None:
    stand_in.serve([])
    assert fetch(client) == []


def test_server_that_gives_fewer_rows_than_asked_for_is_none_of_the_clients_business(
    client: TalentClient, stand_in: TalentStandIn
) -> None:
    stand_in.max_take = 2
    assert fetch(client) == IDS[:2]


def test_rows_that_break_the_contract_are_passed_on_for_the_engine_to_judge(
    client: TalentClient, stand_in: TalentStandIn
) -> None:
    stand_in.fail(Fault.items([*reversed(OBJECTS), {"buildingId": None}]))
    rows = client.fetch(after=None, to=IDS[1], take=1)
    assert list(rows) == [*reversed(OBJECTS), {"buildingId": None}]


def test_base_url_may_have_a_path_of_its_own(connect: Callable[..., TalentClient], stand_in: TalentStandIn) -> None:
    gateway, path = PATH[:4], PATH[4:]
    assert fetch(connect(base_url=f"{stand_in.url}{gateway}/", path=path)) == IDS


def test_packed_page_is_unpacked(client: TalentClient, stand_in: TalentStandIn) -> None:
    stand_in.fail(Fault.raw(gzip.compress(stand_in.page(None, None, 10)), Content_Encoding="gzip"))
    assert fetch(client) == IDS


# Numbers


def test_numbers_keep_every_digit(client: TalentClient, stand_in: TalentStandIn) -> None:
    digits = "9" * 5000
    numbers = f"[54.3000000000000000000000001, 0.1, -1E-7, 2e3, 1e999999999, 1e{digits}, 7, -0, {2**63}, {digits}]"
    stand_in.fail(Fault.raw(b'{"items": [{"numbers": %b}]}' % numbers.encode()))
    ((_, read),) = client.fetch(after=None, to=None, take=1)[0].items()
    # What no Decimal can hold comes as its text, which is a number for nobody; an int of that length as a Decimal.
    expected = [
        *map(Decimal, ("54.3000000000000000000000001", "0.1", "-1E-7", "2E+3", "1E+999999999")),
        *(f"1e{digits}", 7, 0, 2**63, Decimal(digits)),
    ]
    assert [(type(number), str(number)) for number in read] == [(type(number), str(number)) for number in expected]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_in_json_makes_its_row_a_bad_one_and_no_other(
    client: TalentClient, stand_in: TalentStandIn, constant: str
) -> None:
    made = make_objects(2, seed=1, months=1, newest=date(2026, 11, 30))
    good, row = (json.loads(text, parse_float=Decimal) for _, text in made)
    stand_in.fail(Fault.items([good, {**row, "currentPrice": Decimal(constant)}]))
    batch = map_page(client.fetch(after=None, to=None, take=2), rub_currency_id=UUID(int=0))
    assert batch.columns["PropertyObjectId"] == [good["propertyObjectId"]]
    (bad,) = batch.bad_rows
    assert str(bad.property_object_id) == row["propertyObjectId"]
    assert bad.reason == f'currentPrice = "{constant}": must be a number'


@pytest.mark.parametrize("row", [b"[]", b"null", b"7", b'"text"'])
def test_row_that_is_no_object_is_a_bad_one(client: TalentClient, stand_in: TalentStandIn, row: bytes) -> None:
    stand_in.fail(Fault.raw(b'{"items": [%b]}' % row))
    batch = map_page(client.fetch(after=None, to=None, take=1), rub_currency_id=UUID(int=0))
    assert [bad.payload for bad in batch.bad_rows] == [row.decode()]


@pytest.mark.parametrize("body", [b"[]", b"null", b"7", b"{}", b'{"items": null}', b'{"items": {}}'])
def test_json_that_is_no_page_is_refused_at_once(client: TalentClient, stand_in: TalentStandIn, body: bytes) -> None:
    stand_in.fail(Fault.raw(body))
    message = refusal(client, SourceContractError)
    assert f"GET {stand_in.url}{PATH}?take=1000 was answered with JSON that is no page" in message
    assert len(stand_in.requests) == 1


# What may pass


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.status(408), "status 408"),
        (Fault.status(429), "status 429"),
        (Fault.status(500), "status 500"),
        (Fault.status(502), "status 502"),
        (Fault.status(503), "status 503"),
        (Fault.status(504), "status 504"),
        (Fault.status(599), "status 599"),
        (Fault.reset(), "ConnectionResetError"),
        (Fault.hang_up(), "RemoteDisconnected"),
        (Fault.hang_up(after=f"Bearer {TOKEN}\x1b[31m\r\n\r\n".encode()), "BadStatusLine: Bearer …?[31m"),
        (Fault.hang_up(after=b"HTTP/1.1 200 OK\r\nX: " + b"." * 70_000), "LineTooLong"),
        (Fault.cut_headers(), "no JSON"),
        (Fault.truncate(), "IncompleteRead"),
        (Fault.truncate(reset=True), "ConnectionResetError"),
        (Fault.truncate(chunked=True), "IncompleteRead"),
        (Fault.cut_json(), "no JSON (application/json"),
        (Fault.html(), "no JSON (text/html, 58 bytes: Expecting value: line 1 column 1 (char 0))"),
        (Fault.raw(b""), "no JSON"),
        (Fault.raw(b"\xff\xfe\xfd", content_type=f"text/{TOKEN}"), "no JSON (text/…"),
        (Fault.raw(b"[" * 100_000), "no JSON"),
        (Fault.raw(b"not packed at all", Content_Encoding="gzip"), "incorrect header check"),
    ],
)
def test_page_that_failed_is_read_again(
    client: TalentClient,
    stand_in: TalentStandIn,
    pauses: list[float],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    cause: str,
) -> None:
    stand_in.fail(fault)
    assert fetch(client) == IDS
    assert len(stand_in.requests) == 2
    assert len(pauses) == 1
    (warning,) = [record for record in caplog.records if record.name == "pin_pipelines.invest_analytics.talent"]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith("a page of the Talent API failed (attempt 1 of 5), the next attempt in ")
    assert cause in warning.getMessage()


def test_server_that_says_nothing_is_left_after_the_read_time_out(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.fail(Fault.silence())
    assert fetch(connect(replace(QUICK, read_seconds=0.1))) == IDS
    assert "nothing came for 0.1 s" in caplog.text


@pytest.mark.parametrize("part", ["headers", "body"])
def test_server_that_drips_is_left_at_the_deadline(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn, part: str
) -> None:
    stand_in.fail(Fault.drip(0.01, headers=part == "headers"))
    message = refusal(connect(replace(QUICK, page_seconds=0.3, attempts=1)))
    assert "the page was not complete within 0.3 s" in message


def test_deadline_begins_anew_with_each_attempt(connect: Callable[..., TalentClient], stand_in: TalentStandIn) -> None:
    times = [0.0]
    stand_in.fail(*[Fault.status(500)] * 4)
    client = connect(sleep=lambda seconds: times.append(times[-1] + 3600), clock=lambda: times[-1])
    assert fetch(client) == IDS


def test_source_that_stays_down_is_given_up_after_the_last_attempt(
    client: TalentClient, stand_in: TalentStandIn, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.fail(Fault.reset(), Fault.html(), Fault.truncate(), Fault.status(500), Fault.status(502))
    assert f"GET {stand_in.url}{PATH}?take=1000 failed 5 times, at last with: status 502" in refusal(client)
    assert len(stand_in.requests) == 5
    assert len(pauses) == 4
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 4


def test_server_that_is_not_there_is_given_up_after_the_last_attempt(
    connect: Callable[..., TalentClient], pauses: list[float]
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        port = nobody.getsockname()[1]
    assert "ConnectionRefusedError" in refusal(connect(base_url=f"http://127.0.0.1:{port}"))
    assert len(pauses) == 4


def test_host_that_does_not_take_the_connection_is_left_after_the_connect_time_out(
    connect: Callable[..., TalentClient],
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        try:
            for connection in waiting:  # until the kernel has no room for another
                connection.setblocking(False)
                connection.connect_ex(address)
            limits = replace(QUICK, connect_seconds=0.1, attempts=1)
            message = refusal(connect(limits, base_url="http://{}:{}".format(*address)))
        finally:
            for connection in waiting:
                connection.close()
    assert "no connection within 0.1 s" in message


# Pauses


def test_pauses_grow_and_are_a_matter_of_chance(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn, pauses: list[float]
) -> None:
    client = connect(replace(QUICK, attempts=7, first_pause_seconds=1, longest_pause_seconds=6))
    for _ in range(20):
        stand_in.fail(*[Fault.status(500)] * 6)
        assert fetch(client) == IDS
    for attempt, longest in enumerate([1, 2, 4, 6, 6, 6]):
        drawn = pauses[attempt::6]
        assert len(set(drawn)) == 20
        assert all(0 <= pause <= longest for pause in drawn)
        assert max(drawn) > longest / 2  # but once in a million


@pytest.mark.parametrize("status", [408, 429, 503])
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("60", 60),
        ("61", 60),
        ("9" * 5000, 60),
        ("Tue, 01 Dec 2026 12:00:42 GMT", 42),
        ("Tue, 01 Dec 2026 15:00:42 +0300", 42),
        ("Tue, 01 Dec 2026 12:00:42 -0000", 42),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60),
    ],
)
def test_server_that_names_a_time_is_left_alone_until_then_within_reason(
    client: TalentClient, stand_in: TalentStandIn, pauses: list[float], status: int, text: str, seconds: float
) -> None:
    stand_in.fail(Fault.retry_after(text, status))
    assert fetch(client) == IDS
    assert pauses == [seconds]


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-5", "soon", "", "1.5", "7 s", "5, 6", "NaN", "inf", "1e9", "²", "0x7"),
        *("Tue, 01 Dec 2026 11:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"),
        *("Tue, 31 Nov 2026 12:00:00 GMT", "Tue, 01 Dec 99999 12:00:00 GMT", "Tue, 01 Dec 2026 12:00:42 +99999999999"),
    ],
)
def test_time_that_has_passed_or_says_nothing_leaves_the_usual_pause(
    client: TalentClient, stand_in: TalentStandIn, pauses: list[float], text: str
) -> None:
    stand_in.fail(Fault.retry_after(text))
    assert fetch(client) == IDS
    (pause,) = pauses
    assert 0 <= pause <= QUICK.first_pause_seconds


DATES = st.from_regex(r"(Tue, )?\d{1,6} ?(Dec|Feb) ?\d{1,6} \d{1,3}:\d{1,3}(:\d{1,3})? ?(GMT|[+-]\d{1,12}|Z|)")


@given(st.text(max_size=40) | DATES)
def test_no_retry_after_makes_the_client_stumble_or_wait_for_long(text: str) -> None:
    with TalentClient("http://127.0.0.1:9", TOKEN) as client:
        assert 0 <= client._parse_retry_after(text) <= 60


def test_stop_ends_a_pause(connect: Callable[..., TalentClient], stand_in: TalentStandIn) -> None:
    stop = threading.Event()
    client = connect(stop=stop, sleep=None, limits=replace(QUICK, retry_after_seconds=3600))
    stand_in.fail(Fault.retry_after("3600"))
    with background(lambda: fetch(client)) as (reading,):
        until(lambda: not stand_in.faults_left, "the first attempt")
        stop.set()
        with pytest.raises(SourceStoppedError):
            reading.result()
    assert len(stand_in.requests) == 1


def test_stop_during_a_pause_that_is_sat_out_ends_the_attempts(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn
) -> None:
    stop = threading.Event()
    client = connect(stop=stop, sleep=lambda _: stop.set())
    stand_in.fail(Fault.status(500))
    refusal(client, SourceStoppedError)
    assert len(stand_in.requests) == 1


@pytest.mark.parametrize("part", ["headers", "body"])
def test_stop_ends_a_page_that_is_on_its_way(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn, part: str
) -> None:
    stop = threading.Event()
    client = connect(replace(QUICK, page_seconds=3600), stop=stop)
    stand_in.fail(Fault.drip(0.01, headers=part == "headers"))
    with background(lambda: fetch(client)) as (reading,):
        until(lambda: not stand_in.faults_left, "the request")
        stop.set()
        with pytest.raises(SourceStoppedError):
            reading.result()


# What will not pass


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "check PIN_TALENT_TOKEN"),
        (403, "check PIN_TALENT_TOKEN"),
        (404, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
        (400, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
        (410, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
        (422, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
        (204, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
        (206, "check PIN_TALENT_BASE_URL and PIN_TALENT_PATH"),
    ],
)
def test_refusal_stops_at_once_and_says_what_to_check(
    client: TalentClient, stand_in: TalentStandIn, pauses: list[float], status: int, advice: str
) -> None:
    stand_in.fail(Fault.status(status, Retry_After="1"))
    message = refusal(client)
    assert f"GET {stand_in.url}{PATH}?take=1000 was answered with status {status}: " in message
    assert advice in message
    assert len(stand_in.requests) == 1
    assert not pauses


def test_wrong_token_is_refused_at_once(connect: Callable[..., TalentClient], stand_in: TalentStandIn) -> None:
    assert "status 401: the token is not accepted" in refusal(connect(token="another"))
    assert len(stand_in.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed_since_the_token_would_go_with_it(
    client: TalentClient, stand_in: TalentStandIn, status: int
) -> None:
    with TalentStandIn(objects=OBJECTS, token=TOKEN) as elsewhere:
        location = elsewhere.url.replace("127.0.0.1", f"user:{TOKEN}@localhost")
        stand_in.fail(Fault.redirect(f"{location}{PATH}?token={TOKEN}", status))
        assert f"status {status}, a redirect to the host localhost. It is not followed" in refusal(client)
        assert not elsewhere.requests
    assert len(stand_in.requests) == 1


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("/elsewhere", "another path of the same host"),
        ("http://[half/an/address", "an address that cannot be read"),
        (f"https://{TOKEN}.example/", "the host …"),
        ("", "another path of the same host"),
    ],
)
def test_redirect_to_an_odd_place_is_described(
    client: TalentClient, stand_in: TalentStandIn, location: str, named: str
) -> None:
    stand_in.fail(Fault.redirect(location))
    assert f"a redirect to {named}" in refusal(client)
    assert len(stand_in.requests) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_body_without_end_is_left_once_it_is_too_large(
    connect: Callable[..., TalentClient], stand_in: TalentStandIn, packed: bool
) -> None:
    endless = b" " * 10**7
    stand_in.fail(Fault.raw(gzip.compress(endless), Content_Encoding="gzip") if packed else Fault.raw(endless))
    message = refusal(connect(replace(QUICK, body_bytes=200_000)))
    assert "was answered with more than 200000 bytes" in message
    assert len(stand_in.requests) == 1


def test_address_that_is_none_is_refused_at_once(connect: Callable[..., TalentClient], pauses: list[float]) -> None:
    assert "check PIN_TALENT_BASE_URL" in refusal(connect(base_url="ftp://127.0.0.1"))
    assert not pauses


# The token


def test_token_is_not_in_what_the_client_says_of_itself(client: TalentClient, stand_in: TalentStandIn) -> None:
    assert repr(client) == f"TalentClient('{stand_in.url}{PATH}')"
    assert TOKEN not in repr(vars(client))


def test_environment_sends_the_token_nowhere_else(
    client: TalentClient, stand_in: TalentStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as proxy:
        for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(variable, "http://127.0.0.1:{1}".format(*proxy.getsockname()))
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert fetch(client) == IDS
    assert [request.authorised for request in stand_in.requests] == [True]
