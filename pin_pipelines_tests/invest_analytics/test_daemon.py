"""The backfill under Dagster's own daemon: the sensor's ticks, the launcher, and runs that are killed."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CheckpointStatus
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB, BACKFILL_SENSOR
from pin_pipelines.local.talent import TalentStandIn
from pin_pipelines_tests.support.daemon import daemon, make_due
from pin_pipelines_tests.support.price_backfill import Backfill, object_id, prices
from pin_pipelines_tests.support.price_backfill_dagster import configure, let_pass, switch
from pin_pipelines_tests.support.waiting import until

pytestmark = pytest.mark.slow

OBJECTS = 60
KILLS = 2


def processed(backfill: Backfill) -> int:
    return sum(row.processed_property_object_count for row in backfill.checkpoints())


def has_moved(backfill: Backfill, seen: int) -> bool:
    return processed(backfill) > seen


def test_killed_runs_end_as_failed_and_the_sensor_s_next_ones_go_on_until_every_object_has_one_row(
    instance: dg.DagsterInstance,
    database_url: str,
    clickhouse_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backfill = Backfill(database_url, clickhouse_url)
    with backfill.clickhouse() as client:
        facts.create(client, None)

    def statuses() -> list[dg.DagsterRunStatus]:
        """Of the runs, the oldest first."""
        return [run.status for run in instance.get_runs(dg.RunsFilter(job_name=BACKFILL_JOB))][::-1]

    switch(backfill, on=True)
    monkeypatch.setenv("PIN_BACKFILL_FROM", str(object_id(1)))
    monkeypatch.setenv("PIN_BACKFILL_TO", str(object_id(OBJECTS)))
    monkeypatch.setenv("PIN_BACKFILL_BATCH_SIZE", "5")
    with TalentStandIn(objects=prices(OBJECTS), latency=0.5) as talent:
        configure(monkeypatch, clickhouse_url, talent)
        with daemon(tmp_path):
            done = 0
            for kill in range(1, KILLS + 1):
                until(partial(has_moved, backfill, done), "a page", seconds=90)
                # The embedded engine writes down who has its folder open.
                holder = int((tmp_path / "clickhouse" / "status").read_text().split()[1])
                os.kill(holder, signal.SIGKILL)
                assert statuses() == [dg.DagsterRunStatus.FAILURE] * (kill - 1) + [dg.DagsterRunStatus.STARTED]
                done = processed(backfill)
                let_pass(backfill, timedelta(minutes=16))
                make_due(instance, BACKFILL_SENSOR)
            until(lambda: statuses()[-1] is dg.DagsterRunStatus.SUCCESS, "the last run", seconds=90)

    assert statuses() == [dg.DagsterRunStatus.FAILURE] * KILLS + [dg.DagsterRunStatus.SUCCESS]
    (row,) = backfill.checkpoints()
    assert (row.status, row.processed_property_object_count) == (CheckpointStatus.COMPLETED, OBJECTS)
    assert [fact["PropertyObjectId"] for fact in backfill.merged()] == [object_id(n) for n in range(1, OBJECTS + 1)]
