"""The price backfill as an operator meets it in Dagster, on a real instance, real stores and a real HTTP source."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import dagster as dg
import pytest

from pin_pipelines.definitions import build_definitions
from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CheckpointStatus, Claim
from pin_pipelines.invest_analytics.defs.assets import OP, PriceBackfillConfig
from pin_pipelines.invest_analytics.defs.specs import CHECKS, FACTS
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines_tests.support.clickhouse import BACKFILL_ROW, plant
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, object_id, price, prices
from pin_pipelines_tests.support.price_backfill_dagster import configure, good_page, switch
from pin_pipelines_tests.support.tiers import first_is_fast

OBJECTS = 10
TOKEN = "a-token-that-nobody-may-see"

Launch = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def talent() -> Iterator[TalentStandIn]:
    with TalentStandIn(objects=prices(OBJECTS), token=TOKEN) as stand_in:
        yield stand_in


@pytest.fixture
def backfill(
    instance: dg.DagsterInstance,
    database_url: str,
    open_folder: str,
    talent: TalentStandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> Backfill:
    """The stores, all settings, and the flag switched on."""
    configure(monkeypatch, open_folder, talent)
    backfill = Backfill(database_url, open_folder).furnish()
    switch(backfill, on=True)
    return backfill


@pytest.fixture(params=first_is_fast("price_history_backfill", "implicit asset job"))
def launch(request: pytest.FixtureRequest, backfill: Backfill, instance: dg.DagsterInstance) -> Launch:
    """Launches by the job, and as the UI's «Materialize» does."""
    return launcher(instance, implicit=request.param == "implicit asset job")


@pytest.fixture
def run(backfill: Backfill, instance: dg.DagsterInstance) -> Launch:
    return launcher(instance, implicit=False)


def launcher(instance: dg.DagsterInstance, *, implicit: bool) -> Launch:
    def execute(**config: Any) -> dg.ExecuteInProcessResult:
        definitions = build_definitions()
        job = (
            definitions.resolve_implicit_global_asset_job_def()
            if implicit
            else definitions.resolve_job_def("price_history_backfill")
        )
        return job.execute_in_process(
            instance=instance,
            asset_selection=[FACTS] if implicit else None,
            run_config={"ops": {OP: {"config": config}}} if config else None,
            raise_on_error=False,
        )

    return execute


def metadata(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    (event,) = result.get_asset_materialization_events()
    assert event.asset_key == FACTS
    return {name: value.value for name, value in event.materialization.metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> str:
    assert not result.success
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data.user_failure_data
    assert data is not None, event.step_failure_data.error
    return data.description or ""


def evaluations(result: dg.ExecuteInProcessResult) -> dict[str, tuple[bool, dg.AssetCheckSeverity]]:
    return {each.check_name: (each.passed, each.severity) for each in result.get_asset_check_evaluations()}


def evaluate_checks(instance: dg.DagsterInstance) -> dict[str, dg.AssetCheckEvaluation]:
    """The checks alone, as the button in the UI does."""
    job = build_definitions().resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection={spec.key for spec in CHECKS})
    result = subset.execute_in_process(instance=instance, raise_on_error=False)
    assert result.success, failure(result)
    assert result.get_asset_materialization_events() == []
    return {each.check_name: each for each in result.get_asset_check_evaluations()}


# A run


def test_run_loads_every_object_and_says_what_it_did(backfill: Backfill, launch: Launch) -> None:
    result = launch(batch_size=4)

    assert result.success
    assert [row["PropertyObjectId"] for row in backfill.facts()] == [object_id(n) for n in range(1, OBJECTS + 1)]
    said = dict(metadata(result))
    assert said.pop("duration_ms") > 0
    assert said.pop("objects_per_second") > 0
    assert datetime.fromisoformat(said.pop("completed_at")).tzinfo is not None
    assert said == {
        "processed_property_object_count": 10,
        "ingested_fact_count": 10,
        "rejected_row_count": 0,
        "pages": 3,
        "rows": 10,
        "insert_errors": 0,
        "stopped_reason": "completed",
        "checkpoint_id": result.run_id,
        "cursor": str(object_id(10)),
    }
    assert evaluations(result) == {
        name: (True, severity)
        for name, severity in {
            "one_row_per_processed_object": dg.AssetCheckSeverity.ERROR,
            "duplicates_are_collapsible": dg.AssetCheckSeverity.ERROR,
            "no_rejected_rows": dg.AssetCheckSeverity.WARN,
            "old_price_is_null": dg.AssetCheckSeverity.ERROR,
        }.items()
    }


@pytest.mark.slow
def test_source_without_objects_is_loaded_too(backfill: Backfill, run: Launch, talent: TalentStandIn) -> None:
    talent.serve([])
    result = run()
    assert result.success
    assert metadata(result)["processed_property_object_count"] == 0
    assert all(passed for passed, _ in evaluations(result).values())


@pytest.mark.slow
def test_page_size_is_the_setting_unless_the_config_says_otherwise(
    backfill: Backfill, run: Launch, talent: TalentStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_BACKFILL_BATCH_SIZE", "7")
    run()
    assert {request.take for request in talent.requests} == {7}
    talent.requests.clear()
    run(batch_size=9)
    assert {request.take for request in talent.requests} == {9}


@pytest.mark.slow
def test_rerun_of_a_range_doubles_nothing(backfill: Backfill, run: Launch) -> None:
    run()
    before = [row["FactId"] for row in backfill.facts()]

    result = run(
        from_property_object_id=str(object_id(3)).upper(), to_property_object_id=str(object_id(6)), batch_size=2
    )

    assert result.success
    said = metadata(result)
    assert (said["processed_property_object_count"], said["checkpoint_id"]) == (4, result.run_id)
    assert (said["from_property_object_id"], said["to_property_object_id"]) == (str(object_id(3)), str(object_id(6)))
    assert all(passed for passed, _ in evaluations(result).values())
    assert [row["FactId"] for row in backfill.merged()] == before


@pytest.mark.slow
def test_run_that_failed_is_gone_on_with_by_the_next(backfill: Backfill, run: Launch, talent: TalentStandIn) -> None:
    talent.fail(good_page(), Fault.status(403))
    failed = run(batch_size=4)
    assert "status 403" in failure(failed)
    assert "PIN_TALENT_TOKEN" in failure(failed)
    assert failed.get_asset_materialization_events() == []

    result = run(batch_size=4)

    said = metadata(result)
    assert (said["resumed_from"], said["rows"]) == (str(object_id(4)), 6)
    assert (said["checkpoint_id"], said["processed_property_object_count"]) == (failed.run_id, 10)
    assert len(backfill.facts()) == OBJECTS


@pytest.mark.slow
def test_cancelled_run_keeps_its_cursor_and_is_gone_on_with(
    backfill: Backfill, run: Launch, talent: TalentStandIn
) -> None:
    def cancel(handler: Any, page: bytes) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        handler.answer(page)

    talent.fail(good_page(), Fault(cancel))
    cancelled = run(batch_size=4)

    assert not cancelled.success
    (row,) = backfill.checkpoints()
    assert row.status is CheckpointStatus.FAILED
    assert row.last_error == "stopped by DagsterExecutionInterruptedError"
    assert row.last_processed_property_object_id in {object_id(4), object_id(8)}
    assert run(batch_size=4).success
    assert len(backfill.merged()) == OBJECTS


def test_flag_switched_off_in_the_middle_lets_the_run_go_on(
    backfill: Backfill, run: Launch, talent: TalentStandIn
) -> None:
    def switch_off(handler: Any, page: bytes) -> None:
        switch(backfill, on=False)
        handler.answer(page)

    talent.fail(Fault(switch_off))
    assert run(batch_size=4).success
    assert len(backfill.facts()) == OBJECTS
    assert "price-backfill-disabled" in failure(run())


def test_log_has_the_lines_of_the_spec(backfill: Backfill, run: Launch, instance: dg.DagsterInstance) -> None:
    result = run(batch_size=4)
    lines = [record.message for record in instance.all_logs(result.run_id)]
    for expected in (
        f"job started: RunId={result.run_id} From=None To=None cursor=None",
        f"batch processed: PropertyObjectId {object_id(1)} to {object_id(4)} rows=4 inserted=4",
        "job completed: ProcessedPropertyObjectCount=10 IngestedFactCount=10",
    ):
        assert any(expected in line for line in lines), expected


# A run that is refused, or has nothing to do


def test_run_is_refused_while_the_flag_is_off(backfill: Backfill, launch: Launch, talent: TalentStandIn) -> None:
    switch(backfill, on=False)
    said = failure(launch())
    assert said.startswith("price-backfill-disabled: the feature flag invest-analytics.price-backfill.enabled is off.")
    assert "pin-pipelines flags set invest-analytics.price-backfill.enabled on" in said
    assert talent.requests == []
    assert backfill.checkpoints() == []


def test_run_is_refused_when_the_flag_cannot_be_read(backfill: Backfill, run: Launch) -> None:
    backfill.execute("DROP TABLE pin_pipelines.feature_flags")
    said = failure(run())
    assert said.startswith("price-backfill-disabled: ")
    assert "cannot be read and so counts as off (the table pin_pipelines.feature_flags is missing" in said


@pytest.mark.parametrize(
    ("config", "message"),
    first_is_fast(
        ({"batch_size": 0}, "batch_size: 0 is not allowed; give a whole number from 1 to 1000"),
        ({"batch_size": 1001}, "batch_size: 1001 is not allowed"),
        ({"from_property_object_id": "flat 7"}, "from_property_object_id: 'flat 7' is not a UUID; give one such as"),
        ({"to_property_object_id": ""}, "to_property_object_id: '' is not a UUID"),
        (
            {"from_property_object_id": str(object_id(2)), "to_property_object_id": str(object_id(1))},
            f"FromPropertyObjectId = {object_id(2)} is beyond ToPropertyObjectId = {object_id(1)}",
        ),
    ),
)
def test_bad_run_config_is_refused_at_the_start(
    backfill: Backfill,
    run: Launch,
    talent: TalentStandIn,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.delenv("PIN_TALENT_TOKEN")
    assert message in failure(run(**config))
    assert talent.requests == []
    assert backfill.checkpoints() == []
    # Whether it may run at all comes before what it is given.
    switch(backfill, on=False)
    assert failure(run(**config)).startswith("price-backfill-disabled")


def test_run_without_its_settings_names_all_that_are_missing(
    backfill: Backfill, run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIN_TALENT_TOKEN")
    monkeypatch.setenv("PIN_CLICKHOUSE_URL", "")
    said = failure(run())
    assert [line.split()[0] for line in said.splitlines()] == ["PIN_CLICKHOUSE_URL", "PIN_TALENT_TOKEN"]
    assert backfill.checkpoints() == []


def test_run_that_finds_the_claim_taken_ends_green_before_clickhouse_is_opened(
    backfill: Backfill, launch: Launch, talent: TalentStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_CLICKHOUSE_URL", "http://127.0.0.1:1")
    holder = uuid4()
    with Claim(backfill.connect, EVERYTHING, run_id=holder) as claim:
        assert claim.take(1000)
        result = launch()
    assert result.success
    assert result.get_asset_materialization_events() == []
    assert result.get_asset_check_evaluations() == []
    (event,) = result.get_asset_observation_events()
    observation = event.asset_observation_data.asset_observation
    assert observation.asset_key == FACTS
    assert (observation.description or "").startswith(f"no-op: run {holder} is at work on this range")
    assert observation.metadata["claimed_by_run_id"].value == str(holder)
    assert talent.requests == []


def test_missing_fact_table_is_named_with_the_command_that_makes_it(backfill: Backfill, run: Launch) -> None:
    with backfill.clickhouse() as client:
        client.command(f"DROP TABLE {facts.TABLE}")
    assert "pin-pipelines migrate" in failure(run())
    (row,) = backfill.checkpoints()
    assert row.status is CheckpointStatus.FAILED


@pytest.mark.slow
def test_no_secret_is_stored_whatever_fails(
    backfill: Backfill,
    run: Launch,
    talent: TalentStandIn,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talent.fail(Fault.status(401))
    results = [run()]
    monkeypatch.setenv("PIN_CLICKHOUSE_URL", "http://pipeline:s3cret@127.0.0.1:1")
    results.append(run())
    monkeypatch.setenv("PIN_CLICKHOUSE_URL", backfill.clickhouse_url)
    results.append(run())
    assert [result.success for result in results] == [False, False, True]
    assert "127.0.0.1:1" in failure(results[1])
    for result in results:
        stored = [str(entry) for entry in instance.all_logs(result.run_id)]
        stored.append(str(instance.get_run_by_id(result.run_id)))
        for secret in (TOKEN, "s3cret", backfill.url):
            assert not any(secret in entry for entry in stored)


def test_every_field_of_the_run_config_is_described() -> None:
    fields = PriceBackfillConfig.model_fields
    assert set(fields) == {"from_property_object_id", "to_property_object_id", "batch_size"}
    assert all(field.description for field in fields.values())


# Checks


def test_rejected_rows_turn_two_checks_to_warn(
    backfill: Backfill, run: Launch, talent: TalentStandIn, instance: dg.DagsterInstance
) -> None:
    talent.serve([price(1), price(2, currentPrice=-1), price(3)])
    result = run()
    assert result.success
    assert metadata(result)["rejected_row_count"] == 1
    seen = {each.check_name: each for each in result.get_asset_check_evaluations()}
    assert {name: (each.passed, each.severity) for name, each in seen.items() if not each.passed} == {
        "one_row_per_processed_object": (False, dg.AssetCheckSeverity.WARN),
        "no_rejected_rows": (False, dg.AssetCheckSeverity.WARN),
    }
    complete = seen["one_row_per_processed_object"]
    assert {name: value.value for name, value in complete.metadata.items()} == {
        "objects_with_fact": 2,
        "objects_missing": 0,
        "processed_property_object_count": 3,
        "rejected_row_count": 1,
    }
    assert seen["no_rejected_rows"].description == "1 of 3 rows of the source were rejected."


def test_object_whose_fact_was_deleted_is_missed(backfill: Backfill, run: Launch, instance: dg.DagsterInstance) -> None:
    run()
    with backfill.clickhouse() as client:
        client.command(f"DELETE FROM {facts.TABLE} WHERE PropertyObjectId = '{object_id(4)}'")
    complete = evaluate_checks(instance)["one_row_per_processed_object"]
    assert (complete.passed, complete.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert complete.metadata["objects_missing"].value == 1
    assert "1 property objects have no starting fact" in (complete.description or "")


def test_object_that_talent_knows_no_more_is_no_fault_of_a_rerun(
    backfill: Backfill, run: Launch, talent: TalentStandIn
) -> None:
    run()
    talent.serve(prices(OBJECTS - 1))
    assert all(passed for passed, _ in evaluations(run()).values())


def test_rows_that_no_merge_can_make_one_are_named(
    backfill: Backfill, run: Launch, instance: dg.DagsterInstance
) -> None:
    run()
    fact_id = backfill.facts()[0]["FactId"]
    with backfill.clickhouse() as client:
        plant(
            client,
            {**BACKFILL_ROW, "FactId": fact_id, "EventTime": datetime(2020, 1, 1, tzinfo=UTC)},
        )
    seen = evaluate_checks(instance)
    collapsible = seen["duplicates_are_collapsible"]
    assert (collapsible.passed, collapsible.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert fact_id in (collapsible.description or "")
    assert seen["one_row_per_processed_object"].passed


def test_starting_price_with_a_past_is_counted(backfill: Backfill, run: Launch, instance: dg.DagsterInstance) -> None:
    run()
    with backfill.clickhouse() as client:
        plant(client, {**BACKFILL_ROW, "OldPrice": 1})
    old_price = evaluate_checks(instance)["old_price_is_null"]
    assert (old_price.passed, old_price.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert old_price.metadata["rows_with_old_price"].value == 1


def test_checks_alone_of_a_range_that_is_not_loaded_say_so(backfill: Backfill, instance: dg.DagsterInstance) -> None:
    job = build_definitions().resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection={CHECKS[0].key})
    said = failure(subset.execute_in_process(instance=instance, raise_on_error=False))
    assert "has not been loaded completely" in said
    assert "price_history_backfill" in said
