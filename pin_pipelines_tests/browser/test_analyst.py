"""What an analyst sees on the webserver with ``--read-only``, and that nothing can be done there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_SENSOR
from pin_pipelines_tests.browser.stack import LOCATION, Served, needs_chromium
from pin_pipelines_tests.support.stack import ask

pytestmark = needs_chromium

REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "pin_pipelines"}
LAUNCH = {
    "selector": {**REPOSITORY, "jobName": "popularity_recompute"},
    "runConfigData": json.dumps({}),
    "executionMetadata": {"tags": [{"key": "dagster/partition", "value": f"{datetime.now(UTC):%Y-%m-%d}"}]},
}
SENSOR = {**REPOSITORY, "sensorName": BACKFILL_SENSOR}
SCHEDULE = {**REPOSITORY, "scheduleName": "popularity_recompute_nightly"}
NIGHTS = {
    "assetSelection": [{"path": ["catalog", "popularity_daily_views"]}],
    "partitionNames": ["2026-01-01"],
}


@pytest.mark.parametrize(
    ("mutation", "type_name", "value"),
    [
        ("launchPipelineExecution(executionParams: $value)", "ExecutionParams!", LAUNCH),
        ("launchPartitionBackfill(backfillParams: $value)", "LaunchBackfillParams!", NIGHTS),
        ("startSensor(sensorSelector: $value)", "SensorSelector!", SENSOR),
        ("resetSensor(sensorSelector: $value)", "SensorSelector!", SENSOR),
        ("startSchedule(scheduleSelector: $value)", "ScheduleSelector!", SCHEDULE),
        ("wipeAssets(assetPartitionRanges: $value)", "[PartitionsByAssetSelector!]!", []),
        ("reloadRepositoryLocation(repositoryLocationName: $value)", "String!", "pin_pipelines"),
    ],
    ids=lambda part: part.split("(")[0] if isinstance(part, str) and "(" in part else "",
)
def test_read_only_server_refuses_every_change(stack: Served, mutation: str, type_name: str, value: Any) -> None:
    answer = ask(
        stack.analysts,
        f"mutation($value: {type_name}) {{ {mutation} {{ __typename }} }}",
        value=value,
    )
    assert list(answer.values()) == [{"__typename": "UnauthorizedError"}]


def test_analyst_finds_no_way_to_launch_a_run(analyst: Page) -> None:
    for job in ("popularity_recompute", "price_history_backfill", "ranking_recompute"):
        analyst.goto(f"{LOCATION}/jobs/{job}")
        expect(analyst.get_by_role("button", name="Materialize")).to_be_disabled()

        # The Launchpad by its address leads back to the job.
        analyst.goto(f"{LOCATION}/jobs/{job}/playground")
        expect(analyst.get_by_role("button", name="Materialize")).to_be_disabled()
        expect(analyst.get_by_role("button", name="Launch Run")).to_have_count(0)

    analyst.goto("/assets/catalog/property_object_popularity")
    expect(analyst.get_by_role("button", name="Materialize")).to_be_disabled()


def test_analyst_finds_no_way_to_switch_a_schedule_or_a_sensor(analyst: Page) -> None:
    analyst.goto(f"{LOCATION}/sensors/{BACKFILL_SENSOR}")
    expect(analyst.get_by_text("Leave it on: the flag is the switch.")).to_be_visible()
    expect(analyst.get_by_role("checkbox").first).to_be_disabled()
    expect(analyst.get_by_role("button", name="Edit")).to_be_disabled()

    analyst.goto("/automation")
    expect(analyst.get_by_text("popularity_recompute_nightly")).to_be_visible()
    expect(analyst.get_by_role("button", name="Actions")).to_be_disabled()


def test_analyst_sees_the_lineage(analyst: Page) -> None:
    analyst.goto("/assets/catalog/property_object_popularity?view=lineage")
    for name in ("popularity_daily_views", "property_object_cards", "property_object_popularity"):
        expect(analyst.get_by_text(name, exact=True).first).to_be_visible()


def test_analyst_sees_the_checks(analyst: Page) -> None:
    analyst.goto("/assets/catalog/property_object_popularity?view=checks")
    analyst.get_by_text("scores_equal_reference").first.click()
    expect(analyst.get_by_text("sampled scores equal the reference.").first).to_be_visible()


def test_analyst_sees_the_plots_of_the_nights(analyst: Page) -> None:
    analyst.goto("/assets/catalog/property_object_popularity")
    analyst.get_by_role("button", name="Plots").click()
    expect(analyst.get_by_text("property_object_cards_updated").first).to_be_visible()
    expect(analyst.locator("canvas").first).to_be_visible()
