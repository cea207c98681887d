"""The backfill against a model of it, through random histories of runs, crashes, thefts and changing prices.

The engine, PostgreSQL, ClickHouse and the client between them are real (``clickhouse_front``); the model knows what the
checkpoints and the fact table must hold after each step, to the last count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest
from clickhouse_connect.driver.exceptions import ClickHouseError
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import MAX_INSERT_ATTEMPTS, StopReason
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS, REJECTS, CheckpointStatus, ClaimLostError, Range
from pin_pipelines.invest_analytics.snapshots import SourceError
from pin_pipelines_tests.support.clickhouse_front import ClickHouseFront, Insert, refuse
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, Listed, object_id, price

NUMBERS = range(1, 13)
RANGES = [EVERYTHING, Range(object_id(4), object_id(9)), Range(None, object_id(6)), Range(object_id(6), None)]

numbers = st.sampled_from(NUMBERS)
ranges = st.sampled_from(RANGES)
batch_sizes = st.integers(1, 5)
pages = st.integers(1, 5)


@dataclass
class Expected:
    """What the model knows of a checkpoint."""

    price_range: Range
    status: CheckpointStatus
    cursor: UUID | None = None
    processed: int = 0
    rejected: int = 0
    attempts: int = 0
    insert_errors: int = 0
    loaded: set[str] = field(default_factory=set)
    """FactIds of the pages that the cursor has passed."""


class BackfillHistory(RuleBasedStateMachine):
    """Runs of the engine, each ended in its own way, and what the source does in between."""

    def __init__(self, backfill: Backfill, front: ClickHouseFront) -> None:
        super().__init__()
        self.backfill = backfill
        self.front = front
        self.source: dict[int, dict[str, Any]] = {}
        self.checkpoints: list[Expected] = []
        self.stored: set[str] = set()
        self.gone = False

    # What there is to load

    @initialize(known=st.sets(numbers))
    def begin(self, known: set[int]) -> None:
        self.backfill.execute(f"TRUNCATE {CHECKPOINTS}, {REJECTS}")
        with self.backfill.clickhouse() as client:
            client.command(f"TRUNCATE TABLE {facts.TABLE}")
        self.source = {number: price(number) for number in known}

    @rule(number=numbers, minute=st.integers(0, 59))
    def appears_or_changes_its_price(self, number: int, minute: int) -> None:
        self.source[number] = price(number, currentPrice=minute, changedAt=f"2026-02-01T10:{minute:02}:00Z")

    @rule(number=numbers)
    def is_deleted_in_talent(self, number: int) -> None:
        self.source.pop(number, None)

    @rule(number=numbers)
    def becomes_a_bad_row(self, number: int) -> None:
        self.source[number] = price(number, areaTotal=0)

    # Runs, by the way they end

    @rule(price_range=ranges, batch_size=batch_sizes)
    def run_to_the_end(self, price_range: Range, batch_size: int) -> None:
        summary = self.run(price_range, batch_size)
        self.expect(price_range, batch_size)
        assert summary.stopped_reason is StopReason.COMPLETED

    @rule(price_range=ranges, batch_size=batch_sizes, page=pages)
    def source_fails(self, price_range: Range, batch_size: int, page: int) -> None:
        def fail(asked: int) -> None:
            if asked == page:
                raise SourceError("down")

        # A range that ends with an object has no empty page behind its last one.
        asked_for = len(self.pages(price_range, batch_size)) + (0 if self.ends_in(price_range, batch_size) else 1)
        if not asked_for:
            return
        page = min(page, asked_for)
        with pytest.raises(SourceError):
            self.run(price_range, batch_size, before=fail)
        self.expect(price_range, batch_size, pages=page - 1, status=CheckpointStatus.FAILED)

    @rule(price_range=ranges, batch_size=batch_sizes, page=pages)
    def is_stopped(self, price_range: Range, batch_size: int, page: int) -> None:
        page = min(page, len(self.pages(price_range, batch_size)))
        if not page:
            return
        stop = threading.Event()
        summary = self.run(
            price_range, batch_size, before=lambda asked: stop.set() if asked == page else None, stop=stop
        )
        assert summary.stopped_reason is StopReason.STOP_SIGNAL
        self.expect(price_range, batch_size, pages=page - 1, status=CheckpointStatus.FAILED)

    @rule(price_range=ranges, batch_size=batch_sizes, insert=pages)
    def clickhouse_refuses(self, price_range: Range, batch_size: int, insert: int) -> None:
        page = self.strike(price_range, batch_size, insert, *[refuse(252, "TOO_MANY_PARTS")] * MAX_INSERT_ATTEMPTS)
        if page is None:
            return
        with pytest.raises(ClickHouseError):
            self.run(price_range, batch_size)
        self.expect(price_range, batch_size, pages=page, status=CheckpointStatus.FAILED, errors=MAX_INSERT_ATTEMPTS)

    @rule(price_range=ranges, batch_size=batch_sizes, insert=pages, stores_first=st.booleans())
    def process_dies_at_an_insert(self, price_range: Range, batch_size: int, insert: int, stores_first: bool) -> None:
        def die(there: Insert) -> None:
            if stores_first:
                there.store()
            self.end_the_process()
            there.answer(batch_size) if stores_first else there.refuse(497, "ACCESS_DENIED", 500)

        page = self.strike(price_range, batch_size, insert, die)
        if page is None:
            return
        with pytest.raises((ClaimLostError, ClickHouseError)):
            self.run(price_range, batch_size)
        self.gone = False
        self.expect(price_range, batch_size, pages=page, status=CheckpointStatus.RUNNING, replayed=stores_first)

    @rule(price_range=ranges, batch_size=batch_sizes, insert=pages)
    def row_is_taken_over_behind_the_lock(self, price_range: Range, batch_size: int, insert: int) -> None:
        def take_over(there: Insert) -> None:
            written = there.store()
            self.backfill.execute(
                f"UPDATE {CHECKPOINTS} SET version = version + 1, last_run_id = 'another' WHERE status = 'Running' "
                "AND from_property_object_id IS NOT DISTINCT FROM %s AND to_property_object_id IS NOT DISTINCT FROM %s",
                price_range.lower,
                price_range.upper,
            )
            there.answer(written)

        page = self.strike(price_range, batch_size, insert, take_over)
        if page is None:
            return
        with pytest.raises(ClaimLostError):
            self.run(price_range, batch_size)
        self.expect(price_range, batch_size, pages=page, status=CheckpointStatus.RUNNING, replayed=True)

    @rule(price_range=ranges, other=ranges, batch_size=batch_sizes, insert=pages)
    def another_starts_in_the_middle(self, price_range: Range, other: Range, batch_size: int, insert: int) -> None:
        reasons: list[StopReason] = []

        def start_another(there: Insert) -> None:
            written = there.store()
            reasons.append(self.run(other, batch_size).stopped_reason)
            there.answer(written)

        page = self.strike(price_range, batch_size, insert, start_another)
        if page is None:
            return
        self.run(price_range, batch_size)
        # Whoever was first has the earlier row.
        self.expect(price_range, batch_size)
        if other == price_range:
            assert reasons == [StopReason.CLAIM_TAKEN]
        else:
            assert reasons == [StopReason.COMPLETED]
            self.expect(other, batch_size)

    # What must hold after each step

    @invariant()
    def checkpoints_are_as_expected(self) -> None:
        rows = self.backfill.checkpoints()
        assert [
            (
                row.price_range,
                row.status,
                row.last_processed_property_object_id,
                row.processed_property_object_count,
                row.ingested_fact_count,
                row.rejected_row_count,
                row.attempts_without_progress,
                row.insert_errors,
            )
            for row in rows
        ] == [
            (
                each.price_range,
                each.status,
                each.cursor,
                each.processed,
                each.processed - each.rejected,
                each.rejected,
                each.attempts,
                each.insert_errors,
            )
            for each in self.checkpoints
        ]
        assert len(self.backfill.rejects()) == sum(each.rejected for each in self.checkpoints)

    @invariant()
    def no_cursor_is_beyond_what_is_stored(self) -> None:
        there = {row["FactId"] for row in self.backfill.facts()}
        for each in self.checkpoints:
            assert each.loaded <= there
        assert there == self.stored

    @precondition(lambda self: self.stored)
    @rule()
    def everything_is_merged_into_one_row_a_fact(self) -> None:
        fact_ids = [row["FactId"] for row in self.backfill.merged()]
        assert sorted(fact_ids) == sorted(self.stored)

    def teardown(self) -> None:
        """In the end everything is loaded, once."""
        if self.checkpoints:
            for price_range in RANGES:
                self.run(price_range, 5)
                self.expect(price_range, 5)
            self.checkpoints_are_as_expected()
            self.no_cursor_is_beyond_what_is_stored()
            self.everything_is_merged_into_one_row_a_fact()
            assert all(each.status is CheckpointStatus.COMPLETED for each in self.checkpoints)

    # The engine

    def run(
        self, price_range: Range, batch_size: int, *, before: Callable[[int], None] = lambda _: None, **options: Any
    ) -> Any:
        items = [self.source[number] for number in sorted(self.source)]
        return self.backfill.run(
            Listed(items, before=before),
            price_range,
            batch_size=batch_size,
            connect=self.connect,
            sleep=lambda _: None,
            **options,
        )

    def connect(self) -> psycopg.Connection[Any]:
        if self.gone:
            raise psycopg.OperationalError("this process is no more")
        return self.backfill.connect()

    def end_the_process(self) -> None:
        """As far as PostgreSQL can tell: its sessions are gone, and no other comes."""
        self.gone = True
        self.backfill.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE application_name LIKE 'price backfill%%' AND datname = current_database()"
        )

    def strike(self, price_range: Range, batch_size: int, insert: int, *faults: Callable[[Insert], None]) -> int | None:
        """Let the faults hit this insert of the next run, or its last one.

        Returns:
            How many pages come before the one with the insert; a page of bad rows alone has none. None if no page
            has one.
        """
        of_the_run = self.pages(price_range, batch_size)
        with_inserts = [n for n, page in enumerate(of_the_run) if any(map(self.is_good, page))]
        if not with_inserts:
            return None
        insert = min(insert, len(with_inserts))
        self.front.fail(*[store_and_answer] * (insert - 1), *faults)
        return with_inserts[insert - 1]

    # The model

    def pages(self, price_range: Range, batch_size: int) -> list[list[int]]:
        """The pages that the next run of the range goes through."""
        unfinished = self.unfinished(price_range)
        cursor = unfinished.cursor if unfinished else None
        left = [
            number
            for number in sorted(self.source)
            if (price_range.lower is None or object_id(number) >= price_range.lower)
            and (price_range.upper is None or object_id(number) <= price_range.upper)
            and (cursor is None or object_id(number) > cursor)
        ]
        return [left[n : n + batch_size] for n in range(0, len(left), batch_size)]

    def ends_in(self, price_range: Range, batch_size: int) -> bool:
        """Whether the next run sees its last object, or has seen it before, and knows it for the last."""
        left = self.pages(price_range, batch_size)
        unfinished = self.unfinished(price_range)
        last = object_id(left[-1][-1]) if left else unfinished.cursor if unfinished else None
        return last is not None and price_range.upper is not None and last >= price_range.upper

    def is_good(self, number: int) -> bool:
        return bool(self.source[number]["areaTotal"])

    def fact_ids(self, page: list[int]) -> set[str]:
        return {
            # The times of this source have their seven digits already, or none.
            f"backfill:{object_id(number)}:{self.source[number]['changedAt'].replace('Z', '.0000000+00:00')}"
            for number in page
            if self.is_good(number)
        }

    def unfinished(self, price_range: Range) -> Expected | None:
        found = [each for each in self.checkpoints if each.price_range == price_range]
        return found[-1] if found and found[-1].status is not CheckpointStatus.COMPLETED else None

    def expect(
        self,
        price_range: Range,
        batch_size: int,
        *,
        pages: int | None = None,
        status: CheckpointStatus = CheckpointStatus.COMPLETED,
        replayed: bool = False,
        errors: int = 0,
    ) -> None:
        """What a run must have done: so many pages, all by default; and stored one more, if it is to be replayed."""
        of_the_run = self.pages(price_range, batch_size)
        done = of_the_run if pages is None else of_the_run[:pages]
        each = self.unfinished(price_range)
        if each is None:
            each = Expected(price_range, status)
            self.checkpoints.append(each)
        each.status = status
        each.attempts = 0 if done or status is CheckpointStatus.COMPLETED else each.attempts + 1
        each.insert_errors += errors
        for page in done:
            each.cursor = object_id(page[-1])
            each.processed += len(page)
            each.rejected += sum(not self.is_good(number) for number in page)
            each.loaded |= self.fact_ids(page)
        if replayed:
            assert pages is not None
            self.stored |= self.fact_ids(of_the_run[pages])
        self.stored |= each.loaded


def store_and_answer(insert: Insert) -> None:
    insert.answer(insert.store())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_history_of_runs_leaves_checkpoints_and_facts_as_the_model_says(
    database_url: str, front: ClickHouseFront
) -> None:
    backfill = Backfill(database_url, front.url).furnish()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: BackfillHistory(backfill, front),
        settings=settings(
            max_examples=30,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
