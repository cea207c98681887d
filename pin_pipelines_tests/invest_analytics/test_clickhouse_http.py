"""Facts through ClickHouse's HTTP client: what is on the wire, and what is stored when the wire breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from clickhouse_connect.driver.exceptions import ClickHouseError

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import MAX_INSERT_ATTEMPTS, FactsNotWrittenError, StopReason, Summary
from pin_pipelines.invest_analytics.checkpoints import Checkpoint, CheckpointStatus
from pin_pipelines.resources.clickhouse import ClickHouseUnavailableError, open_clickhouse
from pin_pipelines_tests.support.clickhouse_front import (
    PASSWORD,
    ClickHouseFront,
    Fault,
    cut_headers,
    lose_answer,
    lose_answer_by_reset,
    refuse,
    refuse_without_code,
    report_written,
    reset_before,
    time_out_after,
    time_out_before,
)
from pin_pipelines_tests.support.price_backfill import RUB, Backfill, Listed, object_id, price, prices
from pin_pipelines_tests.support.tiers import first_is_fast

TAKEN_AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
BATCH = 3
# Three pages, of three, three and two objects.
EIGHT = prices(8)


@pytest.fixture
def front(front: ClickHouseFront) -> ClickHouseFront:
    """With the fact table."""
    with open_clickhouse(front.url) as client:
        facts.create(client, None)
    front.requests.clear()
    return front


@dataclass
class Runs:
    """Runs of the engine over the front."""

    front: ClickHouseFront
    stores: Backfill
    pauses: list[float] = field(default_factory=list)

    def run(self, *, patience: int = 60) -> Summary:
        """Load the eight; so many seconds without an answer are a time-out."""
        return self.stores.run(
            Listed(EIGHT),
            batch_size=BATCH,
            open_clickhouse=partial(open_clickhouse, f"{self.front.url}?send_receive_timeout={patience}"),
            sleep=self.pauses.append,
        )

    @property
    def checkpoint(self) -> Checkpoint:
        (row,) = self.stores.checkpoints()
        return row

    def visible(self) -> list[UUID]:
        """The objects of all rows that are left when everything is merged."""
        return [row["PropertyObjectId"] for row in self.stores.merged()]


@pytest.fixture
def runs(front: ClickHouseFront, database_url: str) -> Runs:
    return Runs(front, Backfill(database_url, front.url))


def ids(last: int) -> list[UUID]:
    return [object_id(number) for number in range(1, last + 1)]


def assert_completed(runs: Runs, *, insert_errors: int) -> None:
    assert runs.visible() == ids(8)
    checkpoint = runs.checkpoint
    assert checkpoint.status is CheckpointStatus.COMPLETED
    assert checkpoint.last_processed_property_object_id == object_id(8)
    assert (checkpoint.processed_property_object_count, checkpoint.ingested_fact_count) == (8, 8)
    assert checkpoint.insert_errors == insert_errors


def assert_failed_after(runs: Runs, last: int, *, insert_errors: int, error: str) -> None:
    checkpoint = runs.checkpoint
    assert checkpoint.status is CheckpointStatus.FAILED
    assert checkpoint.last_processed_property_object_id == (object_id(last) if last else None)
    assert (checkpoint.processed_property_object_count, checkpoint.ingested_fact_count) == (last, last)
    assert checkpoint.insert_errors == insert_errors
    assert error in str(checkpoint.last_error)
    assert PASSWORD not in str(checkpoint.last_error)


# What is on the wire


def test_facts_that_were_sent_over_http_are_stored_to_the_last_digit(front: ClickHouseFront) -> None:
    page = [
        price(1, areaTotal=Decimal("33.3"), currentPrice=Decimal("10000000.00005")),
        price(2, pricePerMeter=Decimal("99999999999999.9999"), areaTotal=0, changedAt="1970-01-01T00:00:00Z"),
        price(3, layoutGroupId=-(2**63), layoutId=2**63 - 1, changedAt="2026-07-31T23:59:59.9999999-11:30"),
    ]

    with open_clickhouse(front.url) as client:
        facts.check_schema(client)
        assert facts.insert(client, facts.map_page(page, rub_currency_id=RUB), now=TAKEN_AT) == 3

    moments = ["2026-01-15T10:20:30.1234567+03:00", "1970-01-01T00:00:00.0000000+00:00"]
    moments.append("2026-07-31T23:59:59.9999999-11:30")
    stored_moments = ["2026-01-15 07:20:30.123456", "1970-01-01 00:00:00.000000", "2026-08-01 11:29:59.999999"]
    layouts = [("8", "9"), ("8", "9"), ("-9223372036854775808", "9223372036854775807")]
    # 10000000.00005 / 33.3 = 300300.3003…, 1000003 / 40.5 = 24691.4320…
    amounts = [
        ("33.3", "10000000.0001", "300300.3"),
        ("0", "1000002", "99999999999999.9999"),
        ("40.5", "1000003", "24691.43"),
    ]
    fact_ids = [f"backfill:{object_id(n)}:{moment}" for n, moment in enumerate(moments, 1)]
    developer, project = "d0000000-0000-4000-8000-000000000001", "a0000000-0000-4000-8000-000000000002"
    assert [line.split("\t") for line in said_by_the_engine(front)] == [
        [
            *(fact_id, fact_id, "backfill", str(object_id(n + 1)), developer, project, "7", *layouts[n], developer),
            *(*amounts[n], "\\N", "\\N", str(RUB), "RUB", "\\N", stored_moments[n], "2026-03-01 12:00:00.123456", "1"),
        ]
        for n, fact_id in enumerate(fact_ids)
    ]


def said_by_the_engine(front: ClickHouseFront) -> list[str]:
    """The table in the engine's own words, past client and HTTP."""
    result = front.run(f"SELECT * FROM {facts.TABLE} ORDER BY FactId".encode(), "TabSeparated", {})
    return str(result.bytes().decode()).splitlines()


def test_questions_about_facts_are_answered_over_http_with_duplicates_present(front: ClickHouseFront) -> None:
    batch = facts.map_page(EIGHT, rub_currency_id=RUB)

    with open_clickhouse(front.url) as client:
        facts.insert(client, batch, now=TAKEN_AT)
        facts.insert(client, batch, now=TAKEN_AT)

        assert facts.count_objects(client, None, None) == 8
        assert facts.count_objects(client, object_id(2), object_id(4)) == 3
        assert facts.uncollapsible_duplicates(client, None, None) == []
        assert facts.rows_with_old_price(client, None, None) == 0
        assert facts.price_series(client, object_id(2)) == [(date(2026, 1, 15), Decimal(1_000_002))]


def test_table_that_differs_is_named_over_http(front: ClickHouseFront) -> None:
    with open_clickhouse(front.url) as client:
        client.command(f"ALTER TABLE {facts.TABLE} MODIFY COLUMN LayoutId Int32")

        with pytest.raises(facts.FactTableError, match="LayoutId"):
            facts.check_schema(client)


def test_insert_says_its_settings_and_belongs_to_no_session(runs: Runs) -> None:
    runs.run()

    assert len(runs.front.inserts) == 3
    for insert in runs.front.inserts:
        assert insert.parameters["async_insert"] == "0"
        assert int(insert.parameters["max_partitions_per_insert_block"]) == 0 or (
            int(insert.parameters["max_partitions_per_insert_block"]) >= BATCH
        )
    assert not [request for request in runs.front.requests if "session_id" in request.parameters]


def test_one_insert_is_sent_a_page_and_nothing_else(runs: Runs) -> None:
    runs.run()

    statements = [request.statement.split()[0].upper() for request in runs.front.requests]
    assert statements[-3:] == ["INSERT", "INSERT", "INSERT"]


def test_150_months_in_a_page_are_stored_over_http(runs: Runs) -> None:
    months = [f"{2010 + month // 12}-{month % 12 + 1:02}-15T00:00:00Z" for month in range(150)]
    items = [price(number, changedAt=month) for number, month in enumerate(months, 1)]

    with open_clickhouse(runs.front.url) as client:
        assert facts.insert(client, facts.map_page(items, rub_currency_id=RUB), now=TAKEN_AT) == 150

    assert len(runs.visible()) == 150


# When the wire breaks once, clickhouse-connect or the engine sends the page again


@pytest.mark.parametrize("after_pages", first_is_fast(1, 0, 2))
@pytest.mark.parametrize("fault", [reset_before, lose_answer, lose_answer_by_reset, cut_headers])
def test_connection_that_closes_is_repeated_by_the_client_itself_and_ends_as_one_row(
    runs: Runs, fault: Fault, after_pages: int
) -> None:
    runs.front.fail(*[answer_all] * after_pages, fault)

    summary = runs.run()

    assert summary.stopped_reason is StopReason.COMPLETED
    assert_completed(runs, insert_errors=0)
    assert len(runs.front.inserts) == 4
    # The page is twice in the table where only the answer was lost, until a merge.
    sizes = [3, 3, 2]
    assert sum(runs.front.taken) == 8 + (0 if fault is reset_before else sizes[after_pages])


def answer_all(insert: Any) -> None:
    """No fault."""
    insert.answer(insert.store())


TRANSIENT: dict[str, tuple[list[Fault], int]] = {
    "reset twice": ([reset_before, reset_before], 0),
    "answer lost twice": ([lose_answer, lose_answer], 6),
    "headers cut twice": ([cut_headers, cut_headers], 6),
    "too many parts": ([refuse(252, "TOO_MANY_PARTS")], 0),
    "too many parts, said after the headers": ([refuse(252, "TOO_MANY_PARTS", status=200)], 0),
    "memory limit exceeded": ([refuse(241, "MEMORY_LIMIT_EXCEEDED")], 0),
    "too many queries": ([refuse(202, "TOO_MANY_SIMULTANEOUS_QUERIES", status=503)], 0),
    "timeout exceeded": ([refuse(159, "TIMEOUT_EXCEEDED", status=408)], 0),
    "a proxy's 502": ([refuse_without_code(502)], 0),
    "a proxy's 503": ([refuse_without_code(503)], 0),
    "a proxy's 504": ([refuse_without_code(504)], 0),
}


@pytest.mark.parametrize("case", first_is_fast(*TRANSIENT))
def test_bad_moment_is_counted_and_the_page_inserted_again(runs: Runs, case: str) -> None:
    faults, stored_besides = TRANSIENT[case]
    runs.front.fail(*faults)

    summary = runs.run()

    assert summary.stopped_reason is StopReason.COMPLETED
    assert summary.insert_errors == 1
    assert_completed(runs, insert_errors=1)
    assert sum(runs.front.taken) == 8 + stored_besides
    assert len(runs.pauses) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", [time_out_before, time_out_after])
def test_server_that_does_not_answer_is_given_up_and_the_page_inserted_again(runs: Runs, fault: Fault) -> None:
    runs.front.fail(answer_all, fault)

    summary = runs.run(patience=2)

    assert summary.stopped_reason is StopReason.COMPLETED
    assert_completed(runs, insert_errors=1)
    assert sum(runs.front.taken) == 8 + (3 if fault is time_out_after else 0)


def test_server_that_does_not_recover_fails_the_run_at_its_checkpoint_and_the_next_one_completes_it(
    runs: Runs,
) -> None:
    runs.front.fail(answer_all, *[refuse(252, "TOO_MANY_PARTS")] * MAX_INSERT_ATTEMPTS)

    with pytest.raises(ClickHouseError, match="TOO_MANY_PARTS"):
        runs.run()

    assert_failed_after(runs, 3, insert_errors=MAX_INSERT_ATTEMPTS, error="TOO_MANY_PARTS")
    assert runs.visible() == ids(3)
    assert len(runs.pauses) == MAX_INSERT_ATTEMPTS - 1

    summary = runs.run()
    assert summary.resumed_from == object_id(3)
    assert_completed(runs, insert_errors=MAX_INSERT_ATTEMPTS)
    assert sum(runs.front.taken) == 8


@pytest.mark.parametrize(
    ("code", "name", "status"),
    first_is_fast(
        (16, "NO_SUCH_COLUMN_IN_TABLE", 500),
        (53, "TYPE_MISMATCH", 500),
        (60, "UNKNOWN_TABLE", 404),
        (164, "READONLY", 500),
        (497, "ACCESS_DENIED", 403),
        (516, "AUTHENTICATION_FAILED", 403),
    ),
)
def test_error_that_another_attempt_cannot_help_stops_the_run_at_once(
    runs: Runs, code: int, name: str, status: int
) -> None:
    runs.front.fail(answer_all, refuse(code, name, status))

    with pytest.raises(ClickHouseError, match=name):
        runs.run()

    assert len(runs.front.inserts) == 2
    assert runs.pauses == []
    assert_failed_after(runs, 3, insert_errors=1, error=name)

    runs.run()
    assert_completed(runs, insert_errors=1)


@pytest.mark.parametrize("reported", [0, 2])
def test_fewer_rows_reported_than_sent_fail_the_run_before_the_cursor_moves(runs: Runs, reported: int) -> None:
    runs.front.fail(answer_all, report_written(reported))

    with pytest.raises(FactsNotWrittenError, match=f"{reported} rows written of a page of 3"):
        runs.run()

    assert_failed_after(runs, 3, insert_errors=0, error="rows written")
    runs.run()
    assert_completed(runs, insert_errors=0)


def test_more_rows_reported_than_sent_are_those_of_attached_views(runs: Runs) -> None:
    runs.front.fail(report_written(6))

    runs.run()

    assert_completed(runs, insert_errors=0)


# Secrets


def _refused(front: ClickHouseFront) -> str:
    return front.url_with_password("wrong-secret")


def _not_there(front: ClickHouseFront) -> str:
    # A port below 1024 that nobody listens at.
    return "http://pin:wrong-secret@127.0.0.1:9"


@pytest.mark.parametrize("address", [_refused, _not_there])
def test_password_is_in_no_error_and_no_log_line(
    front: ClickHouseFront, address: Callable[[ClickHouseFront], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    with (
        pytest.raises(ClickHouseUnavailableError, match=r"127\.0\.0\.1") as raised,
        open_clickhouse(address(front), wait_seconds=0.1),
    ):
        pass

    told = [caplog.text]
    error: BaseException | None = raised.value
    while error is not None:
        told.append(repr(error))
        error = error.__cause__ or error.__context__
    assert "wrong-secret" not in "\n".join(told)


def test_password_is_in_no_error_of_an_insert_that_fails(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runs.front.fail(*[reset_before] * 2 * MAX_INSERT_ATTEMPTS)

    with suppress(ClickHouseError):
        runs.run()

    assert_failed_after(runs, 0, insert_errors=MAX_INSERT_ATTEMPTS, error="OperationalError")
    assert PASSWORD not in caplog.text
