"""The backfill on real stores: the spec's table «Тесты» row by row, and what the rows leave unsaid.

Where ClickHouse has to fail, it is the engine behind a loopback front (``clickhouse_front``); else it is embedded.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from clickhouse_connect.driver.exceptions import ClickHouseError

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import (
    MAX_INSERT_ATTEMPTS,
    FactsNotWrittenError,
    PriceBackfillCompletedDomainEvent,
    Progress,
    StopReason,
    Summary,
)
from pin_pipelines.invest_analytics.checkpoints import (
    CHECKPOINTS,
    CheckpointStatus,
    Claim,
    ClaimLostError,
    Range,
)
from pin_pipelines.invest_analytics.facts import FactTableError
from pin_pipelines.invest_analytics.snapshots import RawItem, SourceContractError, SourceError
from pin_pipelines.local.postgres import EmbeddedPostgres, StopMode
from pin_pipelines.migrations import migrate
from pin_pipelines_tests.support.clickhouse_front import (
    ClickHouseFront,
    Fault,
    cut_headers,
    lose_answer,
    refuse,
    report_written,
    reset_before,
)
from pin_pipelines_tests.support.price_backfill import (
    EVERYTHING,
    RUB,
    Backfill,
    Listed,
    Scripted,
    object_id,
    price,
    prices,
)
from pin_pipelines_tests.support.processes import background
from pin_pipelines_tests.support.roles import apply_roles
from pin_pipelines_tests.support.waiting import until

LOGGER = "pin_pipelines.invest_analytics.backfill"
FIRST, LAST = UUID(int=0), UUID(int=2**128 - 1)


@pytest.fixture
def backfill(database_url: str, open_folder: str) -> Backfill:
    return Backfill(database_url, open_folder).furnish()


def numbers(rows: Sequence[Any]) -> list[int]:
    """Which objects the rows are of, by number."""
    return [int(str(row["PropertyObjectId"])[:8], 16) for row in rows]


def assert_loaded_once(backfill: Backfill, expected: Sequence[int]) -> None:
    """One row an object when everything is merged, and nothing that merging could not make one."""
    with backfill.clickhouse() as client:
        assert facts.uncollapsible_duplicates(client, None, None) == []
    assert numbers(backfill.merged()) == list(expected)


def assert_failed(backfill: Backfill, error: str, *, cursor: int | None) -> None:
    """The only checkpoint says why, and where the next run goes on."""
    (row,) = backfill.checkpoints()
    assert row.status is CheckpointStatus.FAILED
    assert row.last_error is not None
    assert error in row.last_error
    assert row.last_processed_property_object_id == (object_id(cursor) if cursor else None)
    assert row.processed_property_object_count == (cursor or 0)


def sessions(backfill: Backfill) -> list[Any]:
    """What is left of the claims in the server."""
    return backfill.execute(
        "SELECT state FROM pg_stat_activity WHERE application_name LIKE 'price backfill%%' "
        "AND datname = current_database()"
    )


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine said."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def raise_at(page: int, error: Exception) -> Callable[[int], None]:
    def fail(asked: int) -> None:
        if asked == page:
            raise error

    return fail


# The spec's table «Тесты»


def test_empty_source_is_a_successful_no_op(backfill: Backfill) -> None:
    summary = backfill.run(Listed([]))
    assert summary.stopped_reason is StopReason.COMPLETED
    assert (summary.processed_property_object_count, summary.pages) == (0, 0)
    assert backfill.facts() == []
    (row,) = backfill.checkpoints()
    assert (row.status, row.ingested_fact_count) == (CheckpointStatus.COMPLETED, 0)
    assert row.completed_at is not None


def test_successful_run_gives_each_object_one_starting_row(backfill: Backfill) -> None:
    items = [price(1, pricePerMeter=Decimal("25000.5")), price(2, areaTotal=Decimal("3")), price(3)]
    before = datetime.now(UTC)

    summary = backfill.run(Listed(items), batch_size=2)

    after = datetime.now(UTC)
    assert summary.stopped_reason is StopReason.COMPLETED
    first, second, third = backfill.facts()
    fact_id = f"backfill:{object_id(1)}:2026-01-15T10:20:30.1234567+03:00"
    assert before <= first["IngestionTime"] <= after
    assert {name: value for name, value in first.items() if name != "IngestionTime"} == {
        "FactId": fact_id,
        "SourceEventId": fact_id,
        "ChangeSource": "backfill",
        "PropertyObjectId": object_id(1),
        "DeveloperId": UUID("d0000000-0000-4000-8000-000000000001"),
        "ProjectId": UUID("a0000000-0000-4000-8000-000000000002"),
        "BuildingId": 7,
        "LayoutGroupId": 8,
        "LayoutId": 9,
        "TenantId": "d0000000-0000-4000-8000-000000000001",
        "AreaTotal": Decimal("40.5"),
        "NewPrice": Decimal(1_000_001),
        "NewPricePerMeter": Decimal("25000.5"),
        "OldPrice": None,
        "OldPricePerMeter": None,
        "CurrencyId": RUB,
        "CurrencyIsoCode": "RUB",
        "BrandId": None,
        "EventTime": datetime(2026, 1, 15, 7, 20, 30, 123456, tzinfo=UTC),
        "TransformVersion": 1,
    }
    # 1000002 / 3 = 333334 and 1000003 / 40.5 = 24691.4320…, to two decimals where the source says nothing.
    assert (second["NewPricePerMeter"], third["NewPricePerMeter"]) == (Decimal(333334), Decimal("24691.43"))
    assert {row["ChangeSource"] for row in (first, second, third)} == {"backfill"}


def test_restart_of_the_middle_goes_on_from_the_cursor_and_doubles_nothing(backfill: Backfill) -> None:
    with pytest.raises(SourceError, match="503"):
        backfill.run(Listed(prices(12), before=raise_at(3, SourceError("503"))))
    assert_failed(backfill, "SourceError: 503", cursor=8)

    source = Listed(prices(12))
    summary = backfill.run(source)

    assert source.asked == [object_id(8), object_id(12)]
    assert summary.stopped_reason is StopReason.COMPLETED
    assert (summary.resumed_from, summary.rows, summary.processed_property_object_count) == (object_id(8), 4, 12)
    assert numbers(backfill.facts()) == list(range(1, 13))
    (row,) = backfill.checkpoints()
    assert (row.status, row.ingested_fact_count) == (CheckpointStatus.COMPLETED, 12)


def test_restart_between_insert_and_cursor_replays_the_page_without_visible_doubles(backfill: Backfill) -> None:
    def lose_the_claim(_: int) -> None:
        backfill.execute(f"UPDATE {CHECKPOINTS} SET version = version + 1")

    with pytest.raises(ClaimLostError):
        backfill.run(Listed(prices(6), before=lose_the_claim))
    assert numbers(backfill.facts()) == [1, 2, 3, 4]

    backfill.run(Listed(prices(6)))

    assert numbers(backfill.facts()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert_loaded_once(backfill, range(1, 7))


def test_repeated_run_of_a_range_adds_no_row(backfill: Backfill) -> None:
    backfill.run(Listed(prices(10)))
    fact_ids = [row["FactId"] for row in backfill.facts()]

    part = Range(object_id(3), object_id(7))
    again, of_a_part = backfill.run(Listed(prices(10))), backfill.run(Listed(prices(10)), part)

    assert (again.processed_property_object_count, of_a_part.processed_property_object_count) == (10, 5)
    assert [row["FactId"] for row in backfill.merged()] == fact_ids
    rows = backfill.checkpoints()
    assert [row.price_range for row in rows] == [EVERYTHING, EVERYTHING, part]
    assert {row.status for row in rows} == {CheckpointStatus.COMPLETED}


def test_parallel_instance_ends_as_a_no_op_before_it_opens_clickhouse(backfill: Backfill) -> None:
    seconds: list[Summary] = []

    def never() -> Any:
        raise AssertionError("ClickHouse was opened")

    def start_another(_: int) -> None:
        seconds.append(backfill.run(Scripted([]), open_clickhouse=never))

    first = backfill.run(Listed(prices(8), before=start_another))

    assert first.stopped_reason is StopReason.COMPLETED
    assert [(second.stopped_reason, second.checkpoint_id) for second in seconds] == [(StopReason.CLAIM_TAKEN, None)] * 3
    assert len(backfill.checkpoints()) == 1
    assert numbers(backfill.facts()) == list(range(1, 9))


@pytest.mark.parametrize("stream_first", [True, False])
def test_rows_of_the_stream_and_of_the_backfill_give_the_same_series_in_either_order(
    backfill: Backfill, stream_first: bool
) -> None:
    # The starting price of 2026-01-15, then two changes on one later day.
    changes = ("2026-02-01 08:00:00", 1_100_000), ("2026-02-01 20:00:00", 1_200_000)

    def stream() -> None:
        with backfill.clickhouse() as client:
            for n, (at, new_price) in enumerate(changes):
                client.command(
                    f"INSERT INTO {facts.TABLE} (FactId, SourceEventId, ChangeSource, PropertyObjectId, NewPrice, "
                    f"OldPrice, EventTime, IngestionTime) VALUES ('event-{n}', 'event-{n}', 'talent-sync', "
                    f"'{object_id(1)}', {new_price}, 1000001, '{at}', now64(6))"
                )

    def load() -> None:
        backfill.run(Listed(prices(1)))

    for write in (stream, load) if stream_first else (load, stream):
        write()

    with backfill.clickhouse() as client:
        assert facts.price_series(client, object_id(1)) == [
            (date(2026, 1, 15), Decimal(1_000_001)),
            (date(2026, 2, 1), Decimal(1_200_000)),
        ]
    assert sorted(row["FactId"] for row in backfill.merged()) == [
        f"backfill:{object_id(1)}:2026-01-15T10:20:30.1234567+03:00",
        "event-0",
        "event-1",
    ]


def test_cancellation_between_pages_leaves_the_cursor_committed_and_no_transaction_open(backfill: Backfill) -> None:
    stop = threading.Event()

    def stop_at_the_third(asked: int) -> None:
        if asked == 3:
            stop.set()

    summary = backfill.run(Listed(prices(20), before=stop_at_the_third), stop=stop)

    assert summary.stopped_reason is StopReason.STOP_SIGNAL
    assert (summary.cursor, summary.pages, summary.rows) == (object_id(8), 2, 8)
    assert_failed(backfill, "stopped", cursor=8)
    assert numbers(backfill.facts()) == list(range(1, 9))
    until(lambda: sessions(backfill) == [], "the session of the claim to end")

    assert backfill.run(Listed(prices(20))).resumed_from == object_id(8)
    assert numbers(backfill.facts()) == list(range(1, 21))


# What the source gives


def test_short_page_is_not_the_end(backfill: Backfill) -> None:
    source = Listed(prices(10), cap=3)
    assert backfill.run(source).processed_property_object_count == 10
    assert source.asked == [None, object_id(3), object_id(6), object_id(9), object_id(10)]


def test_objects_at_both_ends_of_the_id_space_are_loaded(backfill: Backfill) -> None:
    ends = [price(0, propertyObjectId=str(FIRST)), price(5), price(9, propertyObjectId=str(LAST))]
    source = Listed(ends)
    summary = backfill.run(source, batch_size=1)
    assert (summary.processed_property_object_count, summary.cursor) == (3, LAST)
    assert source.asked == [None, FIRST, object_id(5), LAST]
    assert [row["PropertyObjectId"] for row in backfill.facts()] == [FIRST, object_id(5), LAST]


def test_page_that_reaches_to_is_the_last_one_that_is_asked_for(backfill: Backfill) -> None:
    source = Listed(prices(20))
    summary = backfill.run(source, Range(None, object_id(8)))
    assert source.asked == [None, object_id(4)]
    assert summary.cursor == object_id(8)
    assert numbers(backfill.facts()) == list(range(1, 9))


def test_from_and_to_are_part_of_the_range(backfill: Backfill) -> None:
    source = Listed(prices(20))
    backfill.run(source, Range(object_id(3), object_id(9)))
    assert source.asked == [UUID(int=object_id(3).int - 1), object_id(6)]
    assert numbers(backfill.facts()) == list(range(3, 10))


def test_range_of_one_object_is_one_request(backfill: Backfill) -> None:
    source = Listed(prices(20))
    backfill.run(source, Range(object_id(7), object_id(7)))
    assert len(source.asked) == 1
    assert numbers(backfill.facts()) == [7]


def test_all_zero_from_includes_the_all_zero_object(backfill: Backfill) -> None:
    source = Listed([price(0, propertyObjectId=str(FIRST)), *prices(2)])
    backfill.run(source, Range(FIRST, None))
    assert source.asked == [None, object_id(2)]
    assert len(backfill.facts()) == 3


def test_run_that_died_between_its_last_page_and_its_completion_is_completed_without_a_request(
    backfill: Backfill,
) -> None:
    price_range = Range(None, object_id(8))
    with Claim(backfill.connect, price_range, run_id=uuid4()) as claim:
        assert claim.take(4)
        claim.advance(object_id(8), ingested=8)
    source = Listed(prices(20))
    assert backfill.run(source, price_range).stopped_reason is StopReason.COMPLETED
    assert source.asked == []
    (row,) = backfill.checkpoints()
    assert row.status is CheckpointStatus.COMPLETED


@pytest.mark.parametrize(
    ("pages", "price_range", "complaint", "named"),
    [
        ([prices(4), [price(6), price(5)]], EVERYTHING, "out of order", 5),
        ([prices(4), [price(5), price(5)]], EVERYTHING, "out of order", 5),
        ([prices(4), prices(4)], EVERYTHING, "outside the range asked for", 1),
        ([prices(4), [price(5), price(9)]], Range(None, object_id(8)), "outside the range asked for", 9),
        ([prices(4), [price(n) for n in range(5, 10)]], EVERYTHING, "5 rows where take = 4 were asked for", None),
    ],
    ids=["wrong order", "one object twice", "the page repeats", "outside the range", "larger than take"],
)
def test_broken_contract_fails_at_the_checkpoint_and_names_the_ids(
    backfill: Backfill, pages: list[list[RawItem]], price_range: Range, complaint: str, named: int | None
) -> None:
    with pytest.raises(SourceContractError, match=complaint) as raised:
        backfill.run(Scripted(pages), price_range)
    assert named is None or str(object_id(named)) in str(raised.value)
    assert_failed(backfill, complaint, cursor=4)
    assert numbers(backfill.facts()) == [1, 2, 3, 4]


def test_error_of_the_page_ahead_waits_until_the_page_in_hand_is_done_with(backfill: Backfill) -> None:
    for page, cursor in ((1, None), (2, 4)):
        with pytest.raises(SourceError):
            backfill.run(Listed(prices(8), before=raise_at(page, SourceError("down"))))
        assert_failed(backfill, "down", cursor=cursor)


def test_no_more_than_one_page_is_fetched_ahead(backfill: Backfill) -> None:
    in_flight: list[int] = []

    def look(asked: int) -> None:
        in_flight.append(asked)
        (row,) = backfill.checkpoints()
        # The page before the one in hand is done with.
        assert row.processed_property_object_count >= 4 * (asked - 2)
        assert len(in_flight) == 1
        in_flight.clear()

    assert backfill.run(Listed(prices(24), before=look)).pages == 6


# Bad rows


def test_bad_row_is_kept_with_its_reason_and_stops_nobody(backfill: Backfill, caplog: pytest.LogCaptureFixture) -> None:
    items = prices(6)
    items[1] = price(2, areaTotal=0)
    items[4] = price(5, currentPrice=Decimal("-0.10"))
    summary = backfill.run(Listed(items))
    assert summary.stopped_reason is StopReason.COMPLETED
    assert (summary.processed_property_object_count, summary.ingested_fact_count, summary.rejected_row_count) == (
        6,
        4,
        2,
    )
    assert numbers(backfill.facts()) == [1, 3, 4, 6]
    first, second = backfill.rejects()
    assert (first.checkpoint_id, first.property_object_id) == (summary.checkpoint_id, object_id(2))
    assert first.reason == "areaTotal = 0: must be above 0 where pricePerMeter is missing"
    assert second.property_object_id == object_id(5)
    assert '"currentPrice": -0.10' in second.payload
    warnings = [line for line in lines_of(caplog) if line.startswith("rows rejected: 1")]
    assert [f"PropertyObjectId={object_id(n)}" in line for n, line in zip((2, 5), warnings, strict=True)] == [True] * 2


def test_row_without_an_id_is_kept_and_stops_nobody(backfill: Backfill) -> None:
    backfill.run(Scripted([[price(1), price(2, propertyObjectId=None), price(3)]]))
    (reject,) = backfill.rejects()
    assert reject.property_object_id is None
    (row,) = backfill.checkpoints()
    assert (row.processed_property_object_count, row.ingested_fact_count, row.rejected_row_count) == (3, 2, 1)
    assert row.last_processed_property_object_id == object_id(3)


def test_page_of_19_bad_rows_is_passed_over(backfill: Backfill) -> None:
    items = [price(n, changedAt="yesterday") for n in range(1, 20)] + [price(20)]
    summary = backfill.run(Listed(items), batch_size=19)
    assert (summary.ingested_fact_count, summary.rejected_row_count) == (1, 19)
    assert len(backfill.rejects()) == 19
    assert numbers(backfill.facts()) == [20]


def test_page_of_20_bad_rows_is_a_changed_contract(backfill: Backfill) -> None:
    items = prices(20) + [price(n, changedAt="yesterday") for n in range(21, 41)] + [price(41)]
    with pytest.raises(SourceContractError, match="all 20 rows of a page are bad") as raised:
        backfill.run(Listed(items), batch_size=20)
    assert f'{object_id(21)}: changedAt = "yesterday"' in str(raised.value)
    assert_failed(backfill, "all 20 rows", cursor=20)
    assert backfill.rejects() == []


# ClickHouse fails


def test_table_that_is_not_as_it_must_be_fails_the_run_before_anything_is_asked_for(backfill: Backfill) -> None:
    with backfill.clickhouse() as client:
        client.command(f"ALTER TABLE {facts.TABLE} DROP COLUMN BrandId")
    source = Listed(prices(4))
    with pytest.raises(FactTableError, match="BrandId"):
        backfill.run(source)
    assert source.asked == []
    assert_failed(backfill, "BrandId", cursor=None)


@pytest.mark.parametrize(
    "faults",
    [
        [refuse(252, "TOO_MANY_PARTS")],
        [refuse(241, "MEMORY_LIMIT_EXCEEDED")] * (MAX_INSERT_ATTEMPTS - 1),
        [reset_before] * 2,
        [lose_answer] * 2,
        [cut_headers] * 2,
    ],
    ids=["too many parts", "out of memory four times", "reset", "answer lost", "answer cut"],
)
def test_insert_is_tried_again_when_the_server_has_a_bad_moment(
    fronted: Backfill, front: ClickHouseFront, faults: list[Fault]
) -> None:
    front.fail(*faults)
    pauses: list[float] = []
    summary = fronted.run(Listed(prices(8)), sleep=pauses.append)
    assert summary.stopped_reason is StopReason.COMPLETED
    assert front.faults_left == 0
    assert summary.insert_errors == len(pauses) > 0
    (row,) = fronted.checkpoints()
    assert (row.status, row.insert_errors) == (CheckpointStatus.COMPLETED, summary.insert_errors)
    assert row.ingested_fact_count == 8
    assert_loaded_once(fronted, range(1, 9))


def test_insert_that_the_client_repeats_by_itself_is_no_error_and_doubles_nothing(
    fronted: Backfill, front: ClickHouseFront
) -> None:
    front.fail(lose_answer)
    summary = fronted.run(Listed(prices(8)), sleep=lambda _: pytest.fail("it paused"))
    assert (summary.insert_errors, summary.ingested_fact_count) == (0, 8)
    assert numbers(fronted.facts()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]
    assert_loaded_once(fronted, range(1, 9))


def test_pauses_between_inserts_grow_and_no_two_are_alike(fronted: Backfill, front: ClickHouseFront) -> None:
    pauses: list[float] = []
    front.fail(*[refuse(252, "TOO_MANY_PARTS")] * (MAX_INSERT_ATTEMPTS - 1))
    fronted.run(Listed(prices(4)), sleep=pauses.append)
    assert [0.5 * 2**n <= pause <= 2**n for n, pause in enumerate(pauses)] == [True] * 4
    assert len(set(pauses)) == 4


def test_server_that_does_not_recover_fails_the_run_at_its_checkpoint_with_every_error_counted(
    fronted: Backfill, front: ClickHouseFront
) -> None:
    fronted.run(Listed(prices(4)), Range(None, object_id(4)))
    front.fail(*[refuse(252, "TOO_MANY_PARTS")] * 9)
    before = len(front.inserts)
    with pytest.raises(ClickHouseError, match="TOO_MANY_PARTS"):
        fronted.run(Listed(prices(8)), sleep=lambda _: None)
    assert len(front.inserts) - before == MAX_INSERT_ATTEMPTS
    row = fronted.checkpoints()[-1]
    assert (row.status, row.insert_errors) == (CheckpointStatus.FAILED, MAX_INSERT_ATTEMPTS)
    assert row.last_processed_property_object_id is None


def test_insert_that_can_never_succeed_stops_the_run_at_once(fronted: Backfill, front: ClickHouseFront) -> None:
    front.fail(refuse(497, "ACCESS_DENIED"))
    with pytest.raises(ClickHouseError, match="ACCESS_DENIED"):
        fronted.run(Listed(prices(8)), sleep=lambda _: pytest.fail("it paused"))
    assert len(front.inserts) == 1
    assert_failed(fronted, "ACCESS_DENIED", cursor=None)


def test_fewer_rows_written_than_sent_fail_the_run_before_the_cursor_moves(
    fronted: Backfill, front: ClickHouseFront
) -> None:
    front.fail(report_written(4), report_written(3))
    with pytest.raises(FactsNotWrittenError, match="3 rows written of a page of 4"):
        fronted.run(Listed(prices(12)))
    assert_failed(fronted, "3 rows written", cursor=4)
    fronted.run(Listed(prices(12)))
    assert_loaded_once(fronted, range(1, 13))


def test_more_rows_written_than_sent_are_those_of_views_on_the_table(fronted: Backfill, front: ClickHouseFront) -> None:
    front.fail(report_written(8))
    assert fronted.run(Listed(prices(4))).ingested_fact_count == 4


def test_stop_during_a_pause_ends_the_run_before_the_page(fronted: Backfill, front: ClickHouseFront) -> None:
    stop = threading.Event()
    front.fail(report_written(4), refuse(252, "TOO_MANY_PARTS"))
    summary = fronted.run(Listed(prices(12)), stop=stop, sleep=lambda _: stop.set())
    assert (summary.stopped_reason, summary.cursor) == (StopReason.STOP_SIGNAL, object_id(4))
    assert_failed(fronted, "stopped", cursor=4)


# Stopped and interrupted


class Interrupted(BaseException):
    """Stands for DagsterExecutionInterruptedError."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Raises Interrupted in the main thread, by a signal as Dagster does."""

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, raise_it)
    main = threading.main_thread().ident
    assert main is not None
    yield partial(signal.pthread_kill, main, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("signals", [1, 3])
def test_interrupt_of_the_calling_thread_finishes_the_page_in_hand_and_leaves_no_thread_behind(
    backfill: Backfill, interrupt: Callable[[], None], signals: int
) -> None:
    stop = threading.Event()

    def interrupt_at_the_third(asked: int) -> None:
        if asked == 3:
            interrupt()
            assert stop.wait(30)
            for _ in range(signals - 1):
                interrupt()

    with pytest.raises(Interrupted):
        backfill.run(Listed(prices(20), before=interrupt_at_the_third), stop=stop)

    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("price-backfill")]
    assert_failed(backfill, "stopped by Interrupted", cursor=8)
    assert numbers(backfill.facts()) == list(range(1, 9))
    until(lambda: sessions(backfill) == [], "the session of the claim to end")
    assert backfill.run(Listed(prices(20))).resumed_from == object_id(8)


def test_run_that_is_stopped_before_it_begins_loads_nothing(backfill: Backfill) -> None:
    stop = threading.Event()
    stop.set()
    summary = backfill.run(Listed(prices(4)), stop=stop)
    assert (summary.stopped_reason, summary.rows) == (StopReason.STOP_SIGNAL, 0)
    assert backfill.facts() == []


def test_stop_when_nothing_is_left_to_do_stops_nothing(backfill: Backfill) -> None:
    stop = threading.Event()
    summary = backfill.run(Listed(prices(4)), Range(None, object_id(4)), stop=stop, on_progress=lambda _: stop.set())
    assert summary.stopped_reason is StopReason.COMPLETED


def test_failing_run_gives_the_source_the_sign_to_give_up_its_pauses(backfill: Backfill) -> None:
    stop, gave_up = threading.Event(), threading.Event()

    def pause_ahead(asked: int) -> None:
        if asked == 2:
            assert stop.wait(60)
            gave_up.set()
            raise SourceError("stopped")

    def break_down(_: Progress) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        backfill.run(Listed(prices(4), before=pause_ahead), batch_size=1, stop=stop, on_progress=break_down)
    assert gave_up.is_set()


# The claim is lost


def test_runner_whose_claim_connection_is_ended_stops_without_moving_the_cursor(backfill: Backfill) -> None:
    def end_the_session(_: int) -> None:
        backfill.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE application_name LIKE 'price backfill%%' AND datname = current_database()"
        )

    with pytest.raises(ClaimLostError, match="the connection that held the claim is gone"):
        backfill.run(Listed(prices(8), before=end_the_session))
    assert_failed(backfill, "ClaimLostError", cursor=None)
    assert numbers(backfill.facts()) == [1, 2, 3, 4]
    backfill.run(Listed(prices(8)))
    assert_loaded_once(backfill, range(1, 9))


def test_runner_whose_row_another_one_has_stops_and_moves_nothing(backfill: Backfill) -> None:
    def take_over(_: int) -> None:
        backfill.execute(f"UPDATE {CHECKPOINTS} SET version = version + 1, last_run_id = 'another'")

    with pytest.raises(ClaimLostError, match="run another has it"):
        backfill.run(Listed(prices(8), before=take_over))
    (row,) = backfill.checkpoints()
    assert (row.status, row.last_run_id) == (CheckpointStatus.RUNNING, "another")
    assert (row.last_processed_property_object_id, row.last_error) == (None, None)


@pytest.fixture(scope="module")
def fragile_server() -> Iterator[EmbeddedPostgres]:
    """A server that a test may stop: the session's is shared."""
    folder = Path(tempfile.mkdtemp(prefix="pin-tests-fragile-"))
    try:
        with EmbeddedPostgres(folder / "postgres") as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_of_postgresql_in_the_middle_stops_the_run_and_the_next_one_completes(
    fragile_server: EmbeddedPostgres, clickhouse_url: str, mode: StopMode
) -> None:
    fragile_server.ensure_database(mode)
    backfill = Backfill(fragile_server.url(mode), clickhouse_url).furnish()
    migrate(backfill.url)
    apply_roles(backfill.url)

    def restart_at_the_third(asked: int) -> None:
        if asked == 3:
            until(lambda: backfill.checkpoints()[0].processed_property_object_count == 8, "the second page to be done")
            fragile_server.restart(mode)

    with pytest.raises(ClaimLostError):
        backfill.run(Listed(prices(20), before=restart_at_the_third))
    (cut,) = backfill.checkpoints()
    # A crash may take back the last pages from the checkpoint; never from what is stored.
    assert cut.last_processed_property_object_id in {None, object_id(4), object_id(8)}
    assert cut.processed_property_object_count in {0, 4, 8}
    if mode == "fast":
        assert cut.processed_property_object_count == 8

    assert backfill.run(Listed(prices(20))).stopped_reason is StopReason.COMPLETED
    (row,) = backfill.checkpoints()
    assert row.processed_property_object_count == row.ingested_fact_count == 20
    assert_loaded_once(backfill, range(1, 21))


# Several at once


@pytest.mark.parametrize("instances", [2, 4])
def test_of_instances_that_run_at_once_one_loads_and_the_others_end_as_no_ops(
    backfill: Backfill, instances: int
) -> None:
    others_ended = threading.Event()
    source = Listed(prices(20), before=lambda _: others_ended.wait(60) or pytest.fail("the others did not end"))
    with background(*[partial(backfill.run, source)] * instances) as runs:
        until(lambda: sum(run.done() for run in runs) == instances - 1, "all but one to end")
        others_ended.set()
        wait(runs)
        reasons = sorted(run.result().stopped_reason for run in runs)
    assert reasons == sorted([StopReason.COMPLETED] + [StopReason.CLAIM_TAKEN] * (instances - 1))
    (row,) = backfill.checkpoints()
    assert (row.status, row.version, row.ingested_fact_count) == (CheckpointStatus.COMPLETED, 7, 20)
    assert numbers(backfill.facts()) == list(range(1, 21))


def test_instances_on_ranges_that_overlap_both_load_and_double_nothing(backfill: Backfill) -> None:
    lower, upper = Range(None, object_id(14)), Range(object_id(6), None)
    meet = threading.Barrier(2)

    def together(asked: int) -> None:
        if asked == 2:
            meet.wait(60)

    with background(
        *[partial(backfill.run, Listed(prices(20), before=together), each) for each in (lower, upper)]
    ) as runs:
        counts = [run.result().processed_property_object_count for run in runs]
    assert counts == [14, 15]
    assert_loaded_once(backfill, range(1, 21))


# What a run says


def test_batch_size_out_of_bounds_is_refused_before_anything_is_claimed(backfill: Backfill) -> None:
    for batch_size in (0, -1, 1001):
        with pytest.raises(ValueError, match=f"BatchSize = {batch_size} is not allowed; it must be from 1 to 1000"):
            backfill.run(Listed([]), batch_size=batch_size)
    assert backfill.checkpoints() == []


def test_summary_has_the_totals_of_the_checkpoint_and_the_figures_of_the_run(backfill: Backfill) -> None:
    first_id, run_id = uuid4(), uuid4()
    items = prices(11)
    items[0], items[9] = price(1, areaTotal=0), price(10, areaTotal=0)
    with pytest.raises(SourceError):
        backfill.run(Listed(items, before=raise_at(2, SourceError("down"))), run_id=first_id)

    summary = backfill.run(Listed(items), run_id=run_id, clock=count(100, 2.5).__next__)

    # The clock is asked at the start, after each page, and at the end.
    assert asdict(summary) == {
        "run_id": run_id,
        "stopped_reason": "completed",
        "checkpoint_id": first_id,
        "processed_property_object_count": 11,
        "ingested_fact_count": 9,
        "rejected_row_count": 2,
        "pages": 2,
        "rows": 7,
        "insert_errors": 0,
        "duration_ms": 7500,
        "cursor": object_id(11),
        "resumed_from": object_id(4),
    }


def test_progress_tells_pace_share_of_the_range_and_about_when_it_ends(backfill: Backfill) -> None:
    seen: list[Progress] = []
    before = datetime.now(UTC)
    backfill.run(
        Listed([price(n) for n in range(5, 21)]),
        Range(object_id(0), object_id(20)),
        batch_size=6,
        clock=count(0, 10).__next__,
        on_progress=seen.append,
    )
    after = datetime.now(UTC)
    first, second, third = seen
    # Five objects of 0 … 20 lie before the first one; half the range is done when the tenth is.
    assert (first.first_property_object_id, first.cursor) == (object_id(5), object_id(10))
    assert (first.page_rows, first.page_inserted, first.page_rejected) == (6, 6, 0)
    assert (first.rows_per_second, first.share) == (0.6, 0.5)
    assert first.expected_end is not None
    assert before + timedelta(seconds=9.9) <= first.expected_end <= after + timedelta(seconds=10.1)
    assert (second.cursor, second.share, second.rows_per_second) == (object_id(16), 0.8, 0.6)
    assert (third.page_rows, third.share, third.processed_property_object_count) == (4, 1.0, 16)


def test_progress_foresees_nothing_where_the_cursor_has_hardly_moved(backfill: Backfill) -> None:
    seen: list[Progress] = []
    backfill.run(Listed(prices(4)), clock=count(0, 10).__next__, on_progress=seen.append)
    (progress,) = seen
    assert 0 < progress.share < 1e-6
    assert progress.expected_end is None


def test_domain_event_is_raised_once_and_at_completion_only(backfill: Backfill) -> None:
    events: list[PriceBackfillCompletedDomainEvent] = []
    with pytest.raises(SourceError):
        backfill.run(Listed(prices(8), before=raise_at(2, SourceError("down"))), on_completed=events.append)
    assert events == []
    summary = backfill.run(Listed(prices(8)), on_completed=events.append)
    (row,) = backfill.checkpoints()
    assert events == [PriceBackfillCompletedDomainEvent(row.id, EVERYTHING, 8, 8, 0, row.completed_at)]
    assert summary.checkpoint_id == row.id


def test_log_lines_of_the_spec(backfill: Backfill, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    run_id, price_range = uuid4(), Range(object_id(1), object_id(6))
    with pytest.raises(SourceError):
        backfill.run(Listed(prices(9), before=raise_at(2, SourceError("down"))), price_range)
    failed = f"job failed: last PropertyObjectId={object_id(4)} exception=SourceError: down"
    assert lines_of(caplog)[-1] == failed
    caplog.clear()

    backfill.run(Listed(prices(9)), price_range, run_id=run_id, clock=count(0, 1).__next__)

    started, batch, completed = lines_of(caplog)
    assert f"job started: RunId={run_id} From={object_id(1)} To={object_id(6)} cursor={object_id(4)}" in started
    assert f"batch processed: PropertyObjectId {object_id(5)} to {object_id(6)} rows=2 inserted=2" in batch
    assert "6 done, 2 rows/s, about 100.0 % of the range, expected end about " in batch
    assert (
        "job completed: ProcessedPropertyObjectCount=6 IngestedFactCount=6 RejectedRowCount=0 durationMs=2000"
        in completed
    )


def test_error_of_a_listener_fails_the_run_behind_the_page_that_it_was_told_of(backfill: Backfill) -> None:
    def refuse_to_listen(_: Progress) -> None:
        raise RuntimeError("the listener is broken")

    with pytest.raises(RuntimeError, match="listener"):
        backfill.run(Listed(prices(8)), on_progress=refuse_to_listen)
    assert_failed(backfill, "listener", cursor=4)


def test_postgresql_that_cannot_be_reached_fails_the_run_and_asks_nothing_of_the_source(backfill: Backfill) -> None:
    source = Listed(prices(4))
    with pytest.raises(psycopg.OperationalError):
        backfill.run(source, connect=partial(psycopg.connect, "postgresql://nobody@/none?host=/nowhere"))
    assert source.asked == []
