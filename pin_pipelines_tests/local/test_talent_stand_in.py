"""The Talent stand-in: the contract that the real API has, objects of its own making, and faults one by one."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from uuid import UUID

import pytest
import requests

from pin_pipelines.invest_analytics.snapshots import parse_changed_at, parse_snapshot
from pin_pipelines.local.talent import PATH, Fault, TalentStandIn, make_objects
from pin_pipelines_tests.support.processes import background
from pin_pipelines_tests.support.waiting import until

FIRST, LAST = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"


def ask(stand_in: TalentStandIn, *, token: str | None = None, path: str = PATH, **query: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {token or stand_in.token}"}
    return requests.get(f"{stand_in.url}{path}", params=query, headers=headers, timeout=30)


def ids(stand_in: TalentStandIn, **query: Any) -> list[str]:
    return [item["propertyObjectId"] for item in ask(stand_in, **query).json()["items"]]


def rows(size: int, *, seed: int = 1, months: int = 24, newest: date = date(2026, 1, 1)) -> list[dict[str, Any]]:
    """Objects as a client reads them."""
    made = make_objects(size, seed=seed, months=months, newest=newest)
    return [json.loads(text, parse_float=Decimal) for _, text in made]


@pytest.fixture
def stand_in() -> Iterator[TalentStandIn]:
    with TalentStandIn(100) as server:
        yield server


# The contract


@pytest.mark.parametrize(("take", "pages"), [(1000, 1), (100, 1), (30, 4), (1, 100)])
def test_pages_of_any_size_come_to_the_same_objects(stand_in: TalentStandIn, take: int, pages: int) -> None:
    found: list[str] = []
    while page := ids(stand_in, take=take, **({"after": found[-1]} if found else {})):
        found += page
    assert found == [row["propertyObjectId"] for row in rows(100)]
    assert len(stand_in.requests) == pages + 1


def test_page_excludes_what_it_begins_after_and_includes_what_it_goes_to(stand_in: TalentStandIn) -> None:
    everything = ids(stand_in, take=1000)
    assert ids(stand_in, after=everything[9], to=everything[20], take=1000) == everything[10:21]
    assert ids(stand_in, after=everything[9].upper(), to=everything[20].upper(), take=1) == everything[10:11]
    assert ids(stand_in, after=everything[20], to=everything[9], take=1000) == []


def test_server_may_give_fewer_rows_than_asked_for(stand_in: TalentStandIn) -> None:
    stand_in.max_take = 7
    assert len(ids(stand_in, take=1000)) == 7
    assert len(ids(stand_in, take=3)) == 3


def test_who_does_not_show_the_token_gets_nothing(stand_in: TalentStandIn) -> None:
    stand_in.fail(Fault.status(500))
    answer = ask(stand_in, token="another", take=10)
    assert (answer.status_code, answer.content) == (401, b"")
    assert not stand_in.requests[0].authorised
    assert stand_in.faults_left == 1


@pytest.mark.parametrize(
    "query", [{}, {"take": 0}, {"take": -1}, {"take": "x"}, {"take": 1, "after": 7}, {"take": 1, "to": "x"}]
)
def test_request_that_says_nothing_sensible_is_refused(stand_in: TalentStandIn, query: dict[str, Any]) -> None:
    assert ask(stand_in, **query).status_code == 400


def test_there_is_nothing_at_other_addresses(stand_in: TalentStandIn) -> None:
    assert ask(stand_in, path="/api/v2", take=1).status_code == 404


def test_requests_are_noted_with_the_most_that_were_in_hand(stand_in: TalentStandIn) -> None:
    ask(stand_in, take=10, after=FIRST, to=LAST)
    (request,) = stand_in.requests
    assert (request.after, request.to, request.take) == (UUID(FIRST), UUID(LAST), 10)
    assert stand_in.most_in_flight == 1
    gate = threading.Event()
    stand_in.fail(*[Fault(lambda handler, page: (gate.wait(60), handler.answer(page)))] * 3)
    with background(*[lambda: ask(stand_in, take=1)] * 3) as asking:
        until(lambda: not stand_in.faults_left, "three requests")
        gate.set()
        assert [len(answer.result().json()["items"]) for answer in asking] == [1, 1, 1]
    assert stand_in.most_in_flight == 3


# The objects


def test_every_object_is_a_good_row() -> None:
    for row in rows(2000, months=150):
        snapshot = parse_snapshot(row)
        assert list(row) == [
            *("propertyObjectId", "developerId", "projectId", "buildingId", "layoutGroupId", "layoutId"),
            *("areaTotal", "currentPrice", "pricePerMeter", "changedAt"),
        ]
        if snapshot.price_per_meter is not None:
            exact = snapshot.current_price / snapshot.area_total
            assert snapshot.price_per_meter == exact.quantize(Decimal("0.01"), ROUND_HALF_UP)


def test_same_seed_makes_the_same_objects_and_another_one_makes_others() -> None:
    assert rows(50) == rows(50)
    assert not {str(row) for row in rows(50)} & {str(row) for row in rows(50, seed=2)}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_ids_ascend_and_are_spread_over_all_there_are(size: int) -> None:
    strata = [UUID(row["propertyObjectId"]).int * size // 2**128 for row in rows(size)]
    assert strata == list(range(size))


def test_some_objects_have_no_price_per_metre_and_most_have_one() -> None:
    without = sum(row["pricePerMeter"] is None for row in rows(1000))
    assert 100 < without < 300


def test_neighbours_have_their_prices_from_all_the_months_there_are() -> None:
    months = [parse_changed_at(row["changedAt"]).utc.strftime("%Y-%m") for row in rows(600, months=150)]
    for first in range(0, 600, 150):
        assert len(set(months[first : first + 150])) == 150
    assert (min(months), max(months)) == ("2013-08", "2026-01")
    newest = [parse_changed_at(row["changedAt"]).utc for row in rows(50, months=1, newest=date(2024, 2, 29))]
    assert {(moment.year, moment.month) for moment in newest} == {(2024, 2)}


def test_times_have_seven_digits_and_various_offsets() -> None:
    times = [row["changedAt"] for row in rows(1000)]
    assert all(time[19] == "." and time[20:27].isdigit() and time[27] in "Z+-" for time in times)
    assert {time[27:] for time in times} == {"Z", "+00:00", "+03:00", "+05:30", "+12:00", "-11:30"}
    assert len({time[26] for time in times}) == 10
    # At an offset, the day or even the month can be another one than in UTC.
    assert any(parse_changed_at(time).utc.strftime("%Y-%m") != time[:7] for time in times)


def test_objects_of_a_project_are_of_its_developer() -> None:
    made = rows(2000)
    assert len({row["projectId"] for row in made}) == len({(row["projectId"], row["developerId"]) for row in made})


# Objects of a test's own


def test_objects_given_are_served_as_they_are_up_to_both_ends_of_all_ids() -> None:
    given = [
        {"propertyObjectId": FIRST, "currentPrice": Decimal("0.10000000000000000000000000001")},
        {"propertyObjectId": "ABCDEF00-0000-0000-0000-000000000000", "areaTotal": None, "tags": [True, "\ud800"]},
        {"propertyObjectId": LAST, "currentPrice": Decimal("1E+3")},
    ]
    with TalentStandIn(objects=given) as stand_in:
        everything = ask(stand_in, take=10)
        assert json.loads(everything.content, parse_float=Decimal) == {"items": given}
        assert b"0.10000000000000000000000000001" in everything.content
        assert ids(stand_in, take=10, after=FIRST) == [given[1]["propertyObjectId"], LAST]
        assert ids(stand_in, take=10, after="abcdef00-0000-0000-0000-000000000000") == [LAST]
        assert ids(stand_in, take=10, to=FIRST) == [FIRST]


def test_row_without_an_id_goes_with_the_one_before_it() -> None:
    given = [{"propertyObjectId": "?"}, {"propertyObjectId": FIRST}, {}, {"propertyObjectId": LAST}]
    with TalentStandIn(objects=given) as stand_in:
        assert ask(stand_in, take=10).json()["items"] == given
        assert ask(stand_in, take=10, to=FIRST).json()["items"] == given[:3]
        assert ask(stand_in, take=10, after=FIRST).json()["items"] == given[3:]


def test_objects_can_be_replaced_while_they_are_served(stand_in: TalentStandIn) -> None:
    stand_in.serve([{"propertyObjectId": LAST}])
    assert ids(stand_in, take=10) == [LAST]
    stand_in.serve([])
    assert ids(stand_in, take=10) == []


# Faults


def test_faults_meet_one_request_each_in_their_order(stand_in: TalentStandIn) -> None:
    stand_in.fail(Fault.status(503), Fault.retry_after("7"), Fault.items([{"a": Decimal("1.50")}]))
    assert ask(stand_in, take=1).status_code == 503
    answer = ask(stand_in, take=1)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert ask(stand_in, take=1).content == b'{"items":[{"a":1.50}]}'
    assert stand_in.faults_left == 0
    assert len(ids(stand_in, take=1)) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault.reset(), Fault.hang_up(), Fault.truncate(), Fault.truncate(chunked=True), Fault.truncate(reset=True)],
)
def test_answer_that_breaks_off_is_no_answer(stand_in: TalentStandIn, fault: Fault) -> None:
    stand_in.fail(fault)
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        ask(stand_in, take=100)


def test_closing_ends_connections_that_clients_keep_open_and_answers_that_never_end() -> None:
    before = set(threading.enumerate())
    with ExitStack() as serving, requests.Session() as idle:
        stand_in = serving.enter_context(TalentStandIn(10))
        idle.get(stand_in.url, timeout=30)
        stand_in.fail(Fault.silence(), Fault.drip(0.01), Fault.drip(0.01, headers=True))
        with background(*[lambda: ask(stand_in, take=10)] * 3) as asking:
            until(lambda: not stand_in.faults_left, "three requests")
            serving.close()
            for answer in asking:
                assert isinstance(answer.exception(), requests.RequestException)
    assert not [thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("background")]
