"""The price backfill as an operator starts and ends it: by the flag, by a range, and by «Terminate»."""

from __future__ import annotations

import dagster as dg
import psycopg
from playwright.sync_api import Page, expect

from pin_pipelines.invest_analytics.checkpoints import Checkpoint, CheckpointStatus, Range, checkpoint_of
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB, BACKFILL_SENSOR
from pin_pipelines.local.stack import PRICED_OBJECTS
from pin_pipelines_tests.browser.actions import (
    expect_logged,
    expect_status,
    first_objects,
    launch_with_config,
    range_config,
    turn_flag_on,
    view_requested,
)
from pin_pipelines_tests.browser.stack import LOCATION, Served, needs_chromium
from pin_pipelines_tests.support.daemon import make_due

pytestmark = needs_chromium

SLOW_SECONDS = 3.0
"""Longer a page than a person needs to press a button, while there are hundreds of pages."""


def checkpoint(stack: Served, price_range: Range) -> Checkpoint:
    with psycopg.connect(stack.stack.postgres_url) as connection:
        found = checkpoint_of(connection, price_range)
    assert found is not None, "the run left no checkpoint"
    return found


def test_operator_reads_that_the_flag_is_off_and_the_flag_starts_the_backfill(operator: Page, stack: Served) -> None:
    operator.goto(f"{LOCATION}/sensors/{BACKFILL_SENSOR}")
    operator.get_by_role("button", name="0 runs requested").first.click()
    expect(operator.get_by_text("Skip reason: The feature flag is off")).to_be_visible()
    operator.get_by_role("button", name="Close").click()

    turn_flag_on(stack)
    with dg.DagsterInstance.get() as instance:
        make_due(instance, BACKFILL_SENSOR)
    view_requested(operator)
    expect_logged(operator, "RUN_SUCCESS")
    expect_status(operator, "Success")
    loaded = checkpoint(stack, Range())
    assert (loaded.status, loaded.ingested_fact_count) == (CheckpointStatus.COMPLETED, PRICED_OBJECTS)


def test_operator_loads_a_range_by_hand(operator: Page, stack: Served) -> None:
    turn_flag_on(stack)
    lower, *_, upper = first_objects(stack, 20)
    launch_with_config(operator, BACKFILL_JOB, range_config(lower, upper, batch_size=7))
    expect_logged(operator, "RUN_SUCCESS")
    expect_status(operator, "Success")
    loaded = checkpoint(stack, Range(lower, upper))
    assert (loaded.status, loaded.ingested_fact_count) == (CheckpointStatus.COMPLETED, 20)


def test_operator_terminates_a_run_and_what_it_stored_stays(operator: Page, stack: Served) -> None:
    turn_flag_on(stack)
    lower, *_, upper = first_objects(stack, 500)
    stack.stack.talent.latency = SLOW_SECONDS
    try:
        launch_with_config(operator, BACKFILL_JOB, range_config(lower, upper, batch_size=1))
        expect_logged(operator, "STEP_START")
        operator.get_by_role("button", name="Terminate").click()
        operator.get_by_role("dialog").get_by_role("button", name="Terminate").click()
        expect_status(operator, "Canceled")
    finally:
        stack.stack.talent.latency = 0.0
    stopped = checkpoint(stack, Range(lower, upper))
    assert stopped.status is not CheckpointStatus.COMPLETED
    assert stopped.ingested_fact_count < 500
