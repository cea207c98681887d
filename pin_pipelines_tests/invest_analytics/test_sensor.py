"""The sensor of the price backfill, state by state, on a real instance and a real database."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import dagster as dg
import pytest

from pin_pipelines.definitions import build_definitions
from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS, Claim, Range
from pin_pipelines.invest_analytics.defs.assets import OP
from pin_pipelines.invest_analytics.defs.sensor import (
    BACKFILL_JOB,
    backfill_run_config,
    build_backfill_sensor,
)
from pin_pipelines.invest_analytics.defs.specs import FACTS
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines.settings import load_settings
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, object_id, prices
from pin_pipelines_tests.support.price_backfill_dagster import (
    configure,
    good_page,
    let_pass,
    put_dagster_s_clock_back,
    switch,
    tick,
)
from pin_pipelines_tests.support.tiers import first_is_fast
from pin_pipelines_tests.support.waiting import until

OBJECTS = 10


@pytest.fixture
def talent() -> Iterator[TalentStandIn]:
    with TalentStandIn(objects=prices(OBJECTS)) as stand_in:
        yield stand_in


@pytest.fixture
def backfill(
    instance: dg.DagsterInstance,
    database_url: str,
    clickhouse_url: str,
    talent: TalentStandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> Backfill:
    """The stores, all settings, and the flag switched on."""
    configure(monkeypatch, clickhouse_url, talent)
    monkeypatch.setenv("PIN_BACKFILL_BATCH_SIZE", "4")
    backfill = Backfill(database_url, clickhouse_url)
    switch(backfill, on=True)
    return backfill


@pytest.fixture
def fact_table(backfill: Backfill) -> None:
    with backfill.clickhouse() as client:
        facts.create(client, None)


def requested(instance: dg.DagsterInstance) -> dg.RunRequest:
    said = tick(instance)
    assert isinstance(said, dg.RunRequest), said
    return said


def waiting(instance: dg.DagsterInstance) -> str:
    said = tick(instance)
    assert isinstance(said, str), said
    return said


def execute(instance: dg.DagsterInstance, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
    job = build_definitions().resolve_job_def(BACKFILL_JOB)
    return job.execute_in_process(
        instance=instance, run_config=request.run_config, tags=request.tags, raise_on_error=False
    )


def create_run(
    instance: dg.DagsterInstance, price_range: Range = EVERYTHING, *, implicit: bool = False, started: bool = False
) -> dg.DagsterRun:
    """A run as the UI launches it, and as a killed process leaves it where it is started."""
    definitions = build_definitions()
    job = definitions.resolve_implicit_global_asset_job_def() if implicit else definitions.resolve_job_def(BACKFILL_JOB)
    run = instance.create_run_for_job(
        job.get_subset(asset_selection={FACTS}) if implicit else job,
        run_config=backfill_run_config(price_range, None),
        asset_selection=frozenset({FACTS}) if implicit else None,
    )
    for event in (dg.DagsterEventType.RUN_STARTING, dg.DagsterEventType.RUN_START) if started else ():
        instance.report_dagster_event(dg.DagsterEvent(event_type_value=event.value, job_name=run.job_name), run.run_id)
    return run


def status(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRunStatus:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run.status


@contextmanager
def held(backfill: Backfill, price_range: Range, run_id: UUID) -> Iterator[None]:
    """A live process that has the claim on a range; it is dead when left, and its row stays as it was."""
    with Claim(backfill.connect, price_range, run_id=run_id) as claim:
        assert claim.take(4)
        yield


# Flag off, and none yet


def test_nothing_is_asked_for_while_the_flag_is_off(backfill: Backfill, instance: dg.DagsterInstance) -> None:
    switch(backfill, on=False)
    assert waiting(instance).startswith("The feature flag is off")


def test_flag_on_and_no_run_yet_asks_for_one_of_the_configured_range_and_page(
    backfill: Backfill, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requested(instance).run_config == {"ops": {OP: {"config": {"batch_size": 4}}}}
    assert requested(instance).tags["price_backfill/range"] == "first to last"

    monkeypatch.setenv("PIN_BACKFILL_FROM", str(object_id(3)))
    monkeypatch.setenv("PIN_BACKFILL_TO", str(object_id(5)))
    monkeypatch.setenv("PIN_BACKFILL_BATCH_SIZE", "7")
    request = requested(instance)
    assert request.run_config == {
        "ops": {
            OP: {
                "config": {
                    "from_property_object_id": str(object_id(3)),
                    "to_property_object_id": str(object_id(5)),
                    "batch_size": 7,
                }
            }
        }
    }
    assert request.tags["price_backfill/range"] == f"{object_id(3)} to {object_id(5)}"
    assert request.tags["price_backfill/attempt"] == "1"


def test_same_tick_again_has_the_same_run_key(backfill: Backfill, instance: dg.DagsterInstance) -> None:
    # Two daemons, or one that was restarted between asking and writing down: Dagster launches a key once.
    assert requested(instance).run_key == requested(instance).run_key


def test_settings_that_are_missing_are_named_instead_of_asking_for_a_run_that_cannot_work(
    backfill: Backfill, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIN_TALENT_TOKEN")
    assert "PIN_TALENT_TOKEN is not set" in waiting(instance)


def test_unreachable_database_is_said_and_nothing_asked_for(
    backfill: Backfill, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_POSTGRES_URL", "postgresql://postgres:s3cret@127.0.0.1:1/nowhere")
    said = waiting(instance)
    assert "port 1 failed" in said
    assert "s3cret" not in said


def test_missing_tables_are_said_with_the_command_that_makes_them(
    backfill: Backfill, instance: dg.DagsterInstance
) -> None:
    backfill.execute(f"DROP TABLE {CHECKPOINTS} CASCADE")
    assert "pin-pipelines migrate" in waiting(instance)


# Running


def test_run_that_is_alive_is_waited_for_whatever_launched_it(backfill: Backfill, instance: dg.DagsterInstance) -> None:
    holder = uuid4()
    with held(backfill, EVERYTHING, holder):
        assert waiting(instance).startswith(f"A run is at work on the range; run {holder}")


def test_live_run_is_never_taken_for_dead_however_old_its_heartbeat(
    backfill: Backfill, instance: dg.DagsterInstance
) -> None:
    run = create_run(instance, started=True)
    with held(backfill, EVERYTHING, UUID(run.run_id)):
        let_pass(backfill, timedelta(hours=1))
        assert waiting(instance).startswith("A run is at work on the range")
    assert status(instance, run.run_id) is dg.DagsterRunStatus.STARTED


@pytest.mark.parametrize("implicit", first_is_fast(False, True))
@pytest.mark.parametrize("started", [False, True])
def test_run_on_its_way_to_the_claim_is_waited_for(
    backfill: Backfill, instance: dg.DagsterInstance, implicit: bool, started: bool
) -> None:
    run = create_run(instance, implicit=implicit, started=started)
    assert waiting(instance) == f"Run {run.run_id} has not ended yet."


def test_run_of_another_range_or_of_other_assets_holds_nothing_up(
    backfill: Backfill, instance: dg.DagsterInstance
) -> None:
    create_run(instance, Range(object_id(1), object_id(2)), started=True)
    instance.create_run_for_job(build_definitions().resolve_job_def("popularity_freshness"))
    with held(backfill, Range(object_id(1), object_id(2)), uuid4()):
        requested(instance)


# Dead


def test_stale_run_whose_process_is_dead_is_reported_failed_and_asked_for_again(
    backfill: Backfill, instance: dg.DagsterInstance
) -> None:
    run = create_run(instance, started=True)
    with held(backfill, EVERYTHING, UUID(run.run_id)):
        pass
    assert waiting(instance) == f"Run {run.run_id} has not ended yet."

    let_pass(backfill, timedelta(minutes=16))
    request = requested(instance)

    assert request.tags["price_backfill/attempt"] == "2"
    assert status(instance, run.run_id) is dg.DagsterRunStatus.FAILURE


def test_dead_run_of_another_range_is_reported_failed_too(backfill: Backfill, instance: dg.DagsterInstance) -> None:
    run = create_run(instance, Range(object_id(1), object_id(2)), started=True)
    let_pass(backfill, timedelta(minutes=16))
    switch(backfill, on=False)
    assert waiting(instance).startswith(
        f"Reported as failed, since their processes are dead: {run.run_id}. The feature"
    )
    assert status(instance, run.run_id) is dg.DagsterRunStatus.FAILURE


RUN = """
import json, sys
import dagster as dg
from pin_pipelines.definitions import build_definitions
job = build_definitions().resolve_job_def("price_history_backfill")
with dg.DagsterInstance.get() as instance:
    job.execute_in_process(instance=instance, run_config=json.loads(sys.argv[1]), run_id=sys.argv[2])
"""


@pytest.mark.slow
def test_run_killed_in_the_middle_is_gone_on_with_and_every_object_has_one_row(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    request, killed = requested(instance), str(uuid4())
    talent.fail(good_page(), Fault.silence())
    command = [sys.executable, "-c", RUN, json.dumps(request.run_config), killed]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: bool(backfill.checkpoints()) and backfill.checkpoints()[0].version > 1, "the first page")
        process.kill()
    assert waiting(instance) == f"Run {killed} has not ended yet."
    let_pass(backfill, timedelta(minutes=16))

    result = execute(instance, requested(instance))

    assert result.success
    assert status(instance, killed) is dg.DagsterRunStatus.FAILURE
    (event,) = result.get_asset_materialization_events()
    assert event.materialization.metadata["resumed_from"].value == str(object_id(4))
    assert [row["PropertyObjectId"] for row in backfill.merged()] == [object_id(n) for n in range(1, OBJECTS + 1)]
    assert waiting(instance).startswith("The range was completed at")


# Failed


def test_failed_run_is_asked_for_again_after_a_pause_under_another_key(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    first = requested(instance)
    talent.fail(Fault.status(403))
    assert not execute(instance, first).success
    assert waiting(instance).startswith("Attempt 2 is due at")

    let_pass(backfill, timedelta(seconds=31))
    second = requested(instance)
    assert second.tags["price_backfill/attempt"] == "2"
    assert second.run_key != first.run_key
    talent.fail(Fault.status(403))
    assert not execute(instance, second).success
    # The pause grows: half a minute was enough after the first.
    let_pass(backfill, timedelta(seconds=31))
    assert waiting(instance).startswith("Attempt 3 is due at")
    let_pass(backfill, timedelta(seconds=31))
    assert execute(instance, requested(instance)).success
    assert len(backfill.facts()) == OBJECTS


@pytest.mark.parametrize("zone", first_is_fast("Pacific/Kiritimati", "Pacific/Midway", "UTC"))
def test_attempts_that_moved_nothing_are_given_up_until_the_flag_is_switched_whatever_the_server_s_time_zone(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn, zone: str
) -> None:
    ((database,),) = backfill.execute("SELECT current_database()")
    backfill.execute(f"ALTER DATABASE {database} SET timezone = '{zone}'")
    talent.fail(Fault.status(403))
    assert not execute(instance, requested(instance)).success
    for _ in range(4):
        instance.report_run_failed(create_run(instance))
    let_pass(backfill, timedelta(hours=1))

    said = waiting(instance)

    assert said.startswith("Given up after 5 attempts without progress; last error: SourceError")
    assert "switch the flag off and on" in said
    for on in (False, True):
        switch(backfill, on=on)
    assert requested(instance).tags["price_backfill/attempt"] == "1"


def test_attempts_count_although_dagster_s_clock_is_slow(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    first = requested(instance)
    talent.fail(Fault.status(403))
    assert not execute(instance, first).success
    put_dagster_s_clock_back(timedelta(hours=1))
    let_pass(backfill, timedelta(seconds=31))
    second = requested(instance)
    assert second.tags["price_backfill/attempt"] == "2"
    assert second.run_key != first.run_key


def test_progress_makes_the_attempts_count_anew(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    for _ in range(4):
        instance.report_run_failed(create_run(instance))
    let_pass(backfill, timedelta(hours=1))
    talent.fail(good_page(), Fault.status(403))
    assert not execute(instance, requested(instance)).success
    let_pass(backfill, timedelta(minutes=1))
    assert requested(instance).tags["price_backfill/attempt"] == "1"


# Completed, and the flag off in the middle


def test_completed_range_is_said_and_never_asked_for_again(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    assert execute(instance, requested(instance)).success
    said = waiting(instance)
    assert said.startswith("The range was completed at")
    assert "10 property objects, of them 0 rejected" in said

    # A re-run of it by hand changes nothing, not even one that fails, and neither does the flag.
    talent.fail(Fault.status(403))
    for on in (False, True):
        switch(backfill, on=on)
    rerun = build_definitions().resolve_job_def(BACKFILL_JOB)
    assert not rerun.execute_in_process(instance=instance, raise_on_error=False).success
    let_pass(backfill, timedelta(hours=1))
    assert waiting(instance).startswith("The range was completed at")


def test_flag_switched_off_in_the_middle_lets_the_run_go_on_and_asks_for_no_other(
    backfill: Backfill, fact_table: None, instance: dg.DagsterInstance, talent: TalentStandIn
) -> None:
    said: list[str] = []

    def switch_off(handler: Any, page: bytes) -> None:
        switch(backfill, on=False)
        said.append(waiting(instance))
        handler.answer(page)

    talent.fail(Fault(switch_off))
    assert execute(instance, requested(instance)).success
    assert said[0].startswith("The feature flag is off: no run is asked for, and one that is at work goes on")
    assert waiting(instance).startswith("The feature flag is off")


# As it is in the graph


def test_sensor_is_on_by_default_and_looks_twice_a_minute() -> None:
    sensor = build_backfill_sensor(
        load_settings(postgres_url="postgresql://db/pin", dagster_postgres_url="postgresql+psycopg2://db/dagster")
    )
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert sensor.minimum_interval_seconds == 30
    assert sensor.job_name == BACKFILL_JOB
