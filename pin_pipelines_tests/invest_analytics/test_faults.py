"""Processes that are killed and stopped, at each step by name and a hundred times at random.

Whatever ends a run: the checkpoint is never beyond what is stored and its counts are true, the next run goes on from
it, and in the end each object has one visible row.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import StopReason
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS, CheckpointStatus, alive
from pin_pipelines.invest_analytics.talent import TalentClient
from pin_pipelines.local.talent import Fault as TalentFault
from pin_pipelines.local.talent import TalentStandIn
from pin_pipelines_tests.support.brakes import Point, brake
from pin_pipelines_tests.support.clickhouse_front import ClickHouseFront, Insert
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, object_id, prices
from pin_pipelines_tests.support.price_backfill_child import BATCH, EXIT_CODES, INTERRUPTED, Child, running
from pin_pipelines_tests.support.waiting import until

OBJECTS = [str(object_id(n)) for n in range(1, 21)]


@pytest.fixture
def talent() -> Iterator[TalentStandIn]:
    with TalentStandIn(objects=prices(len(OBJECTS))) as talent:
        yield talent


def stored(backfill: Backfill) -> set[str]:
    """The ids of the objects that have a row."""
    with backfill.clickhouse() as client:
        rows = client.query(f"SELECT DISTINCT toString(PropertyObjectId) FROM {facts.TABLE}").result_rows
    return {each for (each,) in rows}


def assert_checkpoints_are_true(backfill: Backfill, objects: list[str]) -> None:
    """No cursor is beyond what is stored, and each count is that of the objects up to it."""
    there = stored(backfill)
    for row in backfill.checkpoints():
        cursor = row.last_processed_property_object_id
        done = [each for each in objects if cursor is not None and each <= str(cursor)]
        assert row.processed_property_object_count == row.ingested_fact_count == len(done)
        assert set(done) <= there
        if row.status is CheckpointStatus.COMPLETED:
            assert done == objects


def assert_loaded_once(backfill: Backfill, objects: list[str]) -> None:
    with backfill.clickhouse() as client:
        assert facts.uncollapsible_duplicates(client, None, None) == []
    assert [str(row["PropertyObjectId"]) for row in backfill.merged()] == objects


def is_alive(backfill: Backfill) -> bool:
    with backfill.connect() as connection:
        return alive(connection, EVERYTHING)


def done(backfill: Backfill) -> int:
    """How many objects the newest checkpoint says are done with."""
    rows = backfill.checkpoints()
    return rows[-1].processed_property_object_count if rows else -1


# At each step by name


@dataclass
class Stores:
    """What a run works on, and what it can be held by."""

    backfill: Backfill
    talent: TalentStandIn
    front: ClickHouseFront
    stack: ExitStack

    def page_held(self, number: int) -> Held:
        """The source waits with this page."""
        gate = self._gate()

        def strike(handler: Any, page: bytes) -> None:
            if len(self.talent.requests) == number:
                gate.wait(60)
            handler.answer(page, Content_Type="application/json")

        self.talent.fail(*[TalentFault(strike)] * number)
        return Held(
            lambda: len(self.talent.requests) == number and done(self.backfill) == BATCH * (number - 1), gate.set
        )

    def insert_held(self, number: int, *, stores_first: bool) -> Held:
        """ClickHouse waits with this insert: before it stores the rows, or before it says so."""
        gate = self._gate()
        waiting = threading.Event()

        def wait_here() -> None:
            if len(self.front.inserts) == number:
                waiting.set()
                gate.wait(60)

        def hold(insert: Insert) -> None:
            if not stores_first:
                wait_here()
            written = insert.store()
            if stores_first:
                wait_here()
            insert.answer(written)

        self.front.fail(*[hold] * number)
        return Held(waiting.is_set, gate.set)

    def braked(self, point: Point) -> Held:
        """PostgreSQL waits at this point."""
        held = self.stack.enter_context(brake(self.backfill, point))
        return Held(held.paused, held.release)

    def _gate(self) -> threading.Event:
        gate = threading.Event()
        self.stack.callback(gate.set)
        return gate


@dataclass
class Held:
    """How to tell that the run has come to its step, and how to let it go on."""

    has_come: Callable[[], Any]
    let_go: Callable[[], None]


@dataclass
class Step:
    """A step of a run of five pages.

    Attributes:
        hold: makes a run wait there.
        killed: how many objects the checkpoint shows as done with when the process is killed there.
        stopped: how many when it is interrupted there, and finishes the page in hand.
    """

    hold: Callable[[Stores], Held]
    killed: int
    stopped: int


def at_cursor(number: int, *, at_commit: bool) -> Point:
    when = f"NEW.last_processed_property_object_id = '{object_id(number)}' AND NEW.status = 'Running'"
    return Point(f"{'AFTER' if at_commit else 'BEFORE'} UPDATE ON {CHECKPOINTS}", when, at_commit=at_commit)


def at_completion(*, at_commit: bool) -> Point:
    when = "NEW.status = 'Completed'"
    return Point(f"{'AFTER' if at_commit else 'BEFORE'} UPDATE ON {CHECKPOINTS}", when, at_commit=at_commit)


STEPS = {
    "while the claim is committed": Step(
        lambda stores: stores.braked(Point(f"AFTER INSERT ON {CHECKPOINTS}", at_commit=True)), 0, 0
    ),
    "after the claim": Step(lambda stores: stores.page_held(1), 0, 0),
    "after a fetch": Step(lambda stores: stores.insert_held(2, stores_first=False), 4, 8),
    "after an insert and before the cursor": Step(lambda stores: stores.insert_held(2, stores_first=True), 4, 8),
    "while the cursor is moved": Step(lambda stores: stores.braked(at_cursor(8, at_commit=False)), 4, 8),
    "while the cursor is committed": Step(lambda stores: stores.braked(at_cursor(8, at_commit=True)), 8, 8),
    "after an advance": Step(lambda stores: stores.page_held(3), 8, 8),
    "before the completion": Step(lambda stores: stores.braked(at_completion(at_commit=False)), 20, 20),
    "while the completion is committed": Step(lambda stores: stores.braked(at_completion(at_commit=True)), 20, 20),
}


@pytest.fixture
def stores(fronted: Backfill, talent: TalentStandIn, front: ClickHouseFront) -> Iterator[Stores]:
    with ExitStack() as stack:
        yield Stores(fronted, talent, front, stack)


def resume(backfill: Backfill, talent: TalentStandIn) -> None:
    with TalentClient(talent.url, talent.token) as source:
        assert backfill.run(source).stopped_reason is StopReason.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_killed_run_leaves_a_true_checkpoint_and_the_next_one_loads_each_object_once(stores: Stores, step: str) -> None:
    backfill, held = stores.backfill, STEPS[step].hold(stores)
    with running(backfill, stores.talent) as child:
        until(held.has_come, step)
        child.kill()
    # What the servers had in hand they finish without a client; the claim is free when they have.
    held.let_go()
    until(lambda: not is_alive(backfill), "the claim to be free")

    assert_checkpoints_are_true(backfill, OBJECTS)
    (row,) = backfill.checkpoints()
    assert row.processed_property_object_count == STEPS[step].killed
    completed = step == "while the completion is committed"
    assert row.status is (CheckpointStatus.COMPLETED if completed else CheckpointStatus.RUNNING)

    resume(backfill, stores.talent)
    assert_loaded_once(backfill, OBJECTS)
    assert_checkpoints_are_true(backfill, OBJECTS)
    assert [row.status for row in backfill.checkpoints()] == [CheckpointStatus.COMPLETED] * (2 if completed else 1)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_interrupted_run_finishes_the_page_in_hand_and_leaves_the_range_to_be_resumed(
    stores: Stores, step: str
) -> None:
    backfill, held = stores.backfill, STEPS[step].hold(stores)
    with running(backfill, stores.talent) as child:
        until(held.has_come, step)
        child.interrupt()
        held.let_go()
        child.process.join()
        assert child.process.exitcode == INTERRUPTED
    until(lambda: not is_alive(backfill), "the claim to be free")

    assert_checkpoints_are_true(backfill, OBJECTS)
    (row,) = backfill.checkpoints()
    assert row.processed_property_object_count == STEPS[step].stopped
    if row.status is CheckpointStatus.FAILED:
        assert row.last_error == "stopped by Interrupted"

    resume(backfill, stores.talent)
    assert_loaded_once(backfill, OBJECTS)
    assert_checkpoints_are_true(backfill, OBJECTS)


# Several processes at once


@pytest.mark.slow
@pytest.mark.parametrize("instances", [2, 4])
def test_of_processes_that_run_at_once_one_loads_and_the_others_end_as_no_ops(
    database_url: str, clickhouse_url: str, talent: TalentStandIn, instances: int
) -> None:
    backfill, gate = Backfill(database_url, clickhouse_url).furnish(), threading.Event()

    def wait_at_the_gate(handler: Any, page: bytes) -> None:
        gate.wait(60)
        handler.answer(page, Content_Type="application/json")

    talent.fail(TalentFault(wait_at_the_gate))
    with ExitStack() as stack:
        children = [stack.enter_context(running(backfill, talent)) for _ in range(instances)]
        until(lambda: sum(not child.is_alive() for child in children) == instances - 1, "all but one to end")
        gate.set()
        for child in children:
            child.process.join()
        codes = sorted(child.process.exitcode for child in children)
    assert codes == [EXIT_CODES[StopReason.COMPLETED]] + [EXIT_CODES[StopReason.CLAIM_TAKEN]] * (instances - 1)
    (row,) = backfill.checkpoints()
    assert (row.status, row.attempts_without_progress) == (CheckpointStatus.COMPLETED, 0)
    assert len(backfill.facts()) == len(OBJECTS)


# At random


@pytest.mark.slow
def test_a_hundred_random_kills_in_a_row_leave_one_visible_row_an_object_and_true_checkpoints(
    database_url: str, clickhouse_url: str
) -> None:
    chance = random.Random(3)
    backfill = Backfill(database_url, clickhouse_url).furnish()
    objects = [str(object_id(n)) for n in range(1, 401)]
    reached: Counter[int] = Counter()
    with TalentStandIn(objects=prices(len(objects))) as talent, ExitStack() as stack:
        ready = stack.enter_context(Child(backfill, talent))
        for number in range(100):
            child, ready = ready, stack.enter_context(Child(backfill, talent))
            asked = len(talent.requests)
            # Before it has claimed anything, or at any moment of one of its first pages.
            pages = chance.randrange(5)
            child.go()
            until(partial(has_asked, talent, asked + pages, child), "pages to be asked for")
            time.sleep(chance.uniform(0, 0.2 if pages == 0 else 0.03))
            child.kill()
            reached[len(talent.requests) - asked] += 1
            until(lambda: not is_alive(backfill), "the claim to be free")
            if number % 10 == 9:
                assert_checkpoints_are_true(backfill, objects)
        resume(backfill, talent)

    # The kills came before the first page was asked for, and behind it.
    assert reached[0] > 0, reached
    assert sum(reached[n] for n in range(2, 20)) > 30, reached
    assert_checkpoints_are_true(backfill, objects)
    assert backfill.checkpoints()[-1].status is CheckpointStatus.COMPLETED
    assert_loaded_once(backfill, objects)


def has_asked(talent: TalentStandIn, pages: int, child: Child) -> bool:
    return len(talent.requests) >= pages or not child.is_alive()
