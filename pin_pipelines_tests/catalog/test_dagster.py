"""The popularity as an operator meets it in Dagster, on a real instance and a real database."""

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import dagster as dg
import pytest
from dagster._utils.schedules import schedule_execution_time_iterator

from pin_pipelines.catalog.defs.assets import ASSET_KEYS, DAILY_VIEWS, POPULARITY, PopularityRunConfig
from pin_pipelines.catalog.defs.schedules import recompute_nightly, run_watchdog
from pin_pipelines.catalog.ledger import Ledger, RunKind
from pin_pipelines.catalog.recompute import recompute
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.definitions import build_definitions
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines_tests.support.catalogue import PROJECT, Catalogue
from pin_pipelines_tests.support.tiers import first_is_fast

TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)

Launch = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def definitions(instance: dg.DagsterInstance) -> dg.Definitions:
    return build_definitions()


@pytest.fixture(params=first_is_fast("popularity_recompute", "implicit asset job"))
def launch(request: pytest.FixtureRequest, definitions: dg.Definitions, instance: dg.DagsterInstance) -> Launch:
    """Launches a partition by the job, and as the UI's «Materialize» and backfills do."""
    implicit = request.param == "implicit asset job"
    job = (
        definitions.resolve_implicit_global_asset_job_def()
        if implicit
        else definitions.resolve_job_def("popularity_recompute")
    )

    def execute(partition: date, **config: Any) -> dg.ExecuteInProcessResult:
        return job.execute_in_process(
            partition_key=partition.isoformat(),
            instance=instance,
            asset_selection=list(ASSET_KEYS) if implicit else None,
            run_config={"ops": {"recompute_popularity": {"config": config}}} if config else None,
            raise_on_error=False,
        )

    return execute


@pytest.fixture
def run_today(definitions: dg.Definitions, instance: dg.DagsterInstance) -> Launch:
    def execute(**config: Any) -> dg.ExecuteInProcessResult:
        return definitions.resolve_job_def("popularity_recompute").execute_in_process(
            partition_key=TODAY.isoformat(),
            instance=instance,
            run_config={"ops": {"recompute_popularity": {"config": config}}},
            raise_on_error=False,
        )

    return execute


def _metadata(result: dg.ExecuteInProcessResult, asset_key: dg.AssetKey = DAILY_VIEWS) -> Mapping[str, Any]:
    for materialization in result.asset_materializations_for_node("recompute_popularity"):
        if materialization.asset_key == asset_key:
            return {name: value.value for name, value in materialization.metadata.items()}
    raise AssertionError(f"{asset_key} was not materialised")


def _failure(result: dg.ExecuteInProcessResult) -> str:
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    return failure.step_failure_data.user_failure_data.description or ""


def _checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {
        f"{evaluation.asset_key.path[-1]}.{evaluation.check_name}": evaluation
        for evaluation in result.get_asset_check_evaluations()
    }


# The partition table


def test_partition_of_today_is_captured_and_scored(catalogue: Catalogue, launch: Launch) -> None:
    card = catalogue.add(100)
    catalogue.store(card, {YESTERDAY: 70})

    result = launch(TODAY)

    assert result.success
    assert catalogue.score(card) == 30
    assert {event.asset_key for event in result.get_asset_materialization_events()} == set(ASSET_KEYS)
    assert {event.partition for event in result.get_asset_materialization_events()} == {TODAY.isoformat()}


@pytest.mark.slow
def test_partition_of_today_again_gives_the_same_scores(catalogue: Catalogue, launch: Launch) -> None:
    card = catalogue.add(130)
    catalogue.store(card, {YESTERDAY: 100})
    launch(TODAY)
    before = catalogue.stored()

    assert launch(TODAY).success

    assert catalogue.stored() == before
    assert catalogue.score(card) == 30


def test_newest_partition_of_the_past_is_scored_from_what_is_stored(catalogue: Catalogue, launch: Launch) -> None:
    card = catalogue.add(1000)
    catalogue.store(card, {YESTERDAY - timedelta(days=1): 100, YESTERDAY: 110})

    result = launch(YESTERDAY)

    assert result.success
    assert catalogue.snapshots(card) == {YESTERDAY - timedelta(days=1): 100, YESTERDAY: 110}
    assert catalogue.score(card) == 10
    assert _metadata(result)["run_kind"] == "Recompute"


def test_superseded_partition_writes_nothing_and_observes_what_is_stored(
    catalogue: Catalogue, launch: Launch, instance: dg.DagsterInstance
) -> None:
    card = catalogue.add(1000)
    catalogue.store(card, {YESTERDAY: 100, TODAY: 110})
    before = catalogue.stored()

    result = launch(YESTERDAY)

    assert result.success
    assert catalogue.stored() == before
    assert catalogue.ledger() == []
    assert result.get_asset_materialization_events() == []
    for asset_key in ASSET_KEYS:
        (record,) = instance.fetch_observations(asset_key, limit=2).records
        observation = record.asset_observation
        assert observation is not None
        assert observation.partition == YESTERDAY.isoformat()
        assert observation.metadata["superseded_by"].value == TODAY.isoformat()
        assert observation.metadata["property_object_snapshots_stored"].value == 1
        assert f"{YESTERDAY} is history" in (observation.description or "")


def test_missed_partition_fails_and_says_so(catalogue: Catalogue, launch: Launch) -> None:
    catalogue.add(10)

    result = launch(YESTERDAY)

    assert not result.success
    assert f"partition {YESTERDAY} has no snapshots: that night was missed" in _failure(result)
    assert catalogue.snapshot_counts(YESTERDAY) == {}


def test_partition_of_tomorrow_does_not_exist(launch: Launch) -> None:
    with pytest.raises(dg.DagsterUnknownPartitionError):
        launch(TODAY + timedelta(days=1))


@pytest.mark.slow
def test_many_past_partitions_in_a_row_harm_nothing(catalogue: Catalogue, launch: Launch) -> None:
    card = catalogue.add(50)
    catalogue.store(card, {TODAY - timedelta(days=ago): 40 - ago for ago in range(30)})
    launch(TODAY)
    before = catalogue.stored()

    assert all(launch(TODAY - timedelta(days=ago)).success for ago in range(29, 20, -1))

    assert catalogue.stored() == before


# Run config


@pytest.mark.parametrize(
    ("config", "message"),
    first_is_fast(
        ({"batch_size": 0}, "batch_size: 0 is not allowed; give a whole number from 1 to 10000"),
        ({"batch_size": 10_001}, "batch_size: 10001 is not allowed"),
        ({"max_run_duration_seconds": -5}, "max_run_duration_seconds: -5 is not allowed; give a whole number from 1"),
        ({"card_ids": ["flat-7"]}, "card_ids: 'flat-7' is not a UUID"),
    ),
)
def test_bad_run_config_is_refused_at_the_start(
    catalogue: Catalogue, run_today: Launch, config: dict[str, Any], message: str
) -> None:
    catalogue.add(10)
    result = run_today(**config)
    assert not result.success
    assert message in _failure(result)
    assert catalogue.ledger() == []


@pytest.mark.slow
def test_run_config_wins_over_the_settings(catalogue: Catalogue, run_today: Launch) -> None:
    catalogue.add_many(5)
    assert run_today(batch_size=2).success
    assert catalogue.ledger()[0]["batch_size"] == 2


def test_every_field_of_the_run_config_is_described() -> None:
    fields = PopularityRunConfig.model_fields
    assert set(fields) == {"card_ids", "batch_size", "max_run_duration_seconds"}
    assert all(field.description for field in fields.values())


def test_rebuild_by_id_scores_just_these_cards(catalogue: Catalogue, run_today: Launch) -> None:
    card, other = catalogue.add(100), catalogue.add(100)
    project = catalogue.add(7, kind=PROJECT)
    delisted = catalogue.add(1, status="Delisted")
    unknown = uuid4()
    for each in (card, other):
        catalogue.store(each, {YESTERDAY: 90})
    catalogue.store(project, {YESTERDAY: 5}, kind=PROJECT)

    result = run_today(card_ids=[str(each) for each in (card, project, delisted, unknown)])

    assert (catalogue.score(card), catalogue.score(other), catalogue.score(project, kind=PROJECT)) == (10, 0, 2)
    # It makes no night complete, so it is observed, not materialised.
    assert result.get_asset_materialization_events() == []
    observation = result.get_asset_observation_events()[0].asset_observation_data.asset_observation
    metadata = {name: value.value for name, value in observation.metadata.items()}
    assert observation.description == "Rebuilt 2 cards by id."
    assert (metadata["run_kind"], metadata["unknown_card_ids"]) == ("Rebuild", str(unknown))
    assert metadata["passed_over_card_ids"] == str(delisted)


def test_rebuild_of_unknown_cards_alone_fails(catalogue: Catalogue, run_today: Launch) -> None:
    catalogue.add(1)
    unknown = str(uuid4())
    result = run_today(card_ids=[unknown])
    assert not result.success
    assert f"none of these is a property object's or a project's card: {unknown}" in _failure(result)


# What a run says


def test_summary_is_numeric_metadata_on_every_asset(catalogue: Catalogue, run_today: Launch) -> None:
    catalogue.add(1, status="Hidden")
    card = catalogue.add(25)
    catalogue.store(card, {YESTERDAY: 5, TODAY - timedelta(days=33): 0})
    catalogue.add(3, kind=PROJECT)

    result = run_today()

    for asset_key in ASSET_KEYS:
        metadata = _metadata(result, asset_key)
        numbers = {name: value for name, value in metadata.items() if isinstance(value, int)}
        assert numbers.pop("duration_ms") > 0
        assert numbers == {
            "property_object_cards_processed": 2,
            "project_cards_processed": 1,
            "property_object_cards_updated": 1,
            "project_cards_updated": 0,
            "snapshots_written": 3,
            "snapshots_pruned": 1,
            "item_errors": 0,
            "cards_left_locked": 0,
            "cards_remaining": 0,
            "retries": 0,
        }
        assert isinstance(metadata["cards_per_second"], float)
        assert metadata["stopped_reason"] == "completed"


def test_scores_come_with_the_top_ten_and_a_picture(catalogue: Catalogue, run_today: Launch) -> None:
    cards = [catalogue.add(100 + n) for n in range(12)]
    for card in cards:
        catalogue.store(card, {YESTERDAY: 100})

    metadata = _metadata(run_today(), POPULARITY[CardKind.PROPERTY_OBJECT])

    header, _, *rows = metadata["top_cards"].splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "rank",
        "card_id",
        "popularity_views",
        "popularity_score",
    ]
    assert len(rows) == 10
    assert [cell.strip() for cell in rows[0].strip("|").split("|")] == ["1", str(cards[11]), "111", "11.0000"]
    assert metadata["score_distribution"].startswith("![score distribution](data:image/png;base64,iVBOR")


def test_log_has_the_lines_of_the_spec(catalogue: Catalogue, run_today: Launch, instance: dg.DagsterInstance) -> None:
    card = catalogue.add(1)
    poison = catalogue.add(-1)
    result = run_today()
    lines = [record.message for record in instance.all_logs(result.run_id)]
    for expected in (
        f"run started: runId={result.run_id} AsOfDate={TODAY} W=30 H=7",
        "batch processed: CardKind=PropertyObject rows=2 updated=0; 2 of 2 cards",
        f"item failed: CardKind=PropertyObject CardId={poison} exception=CheckViolation",
        "run completed: PropertyObjectCardsUpdated=0 ProjectCardsUpdated=0 SnapshotsWritten=1 SnapshotsPruned=0",
    ):
        assert any(expected in line for line in lines), expected
    assert catalogue.snapshots(card) == {TODAY: 1}


# Checks


def test_checks_of_a_run_pass(catalogue: Catalogue, run_today: Launch) -> None:
    catalogue.add(5)
    catalogue.add(5, kind=PROJECT)
    evaluations = _checks(run_today())
    assert {name: evaluation.passed for name, evaluation in evaluations.items()} == {
        "popularity_daily_views.every_card_has_a_snapshot": True,
        "property_object_popularity.scores_equal_reference": True,
        "project_popularity.scores_equal_reference": True,
    }


def test_completeness_warns_of_cards_that_the_run_reported(catalogue: Catalogue, run_today: Launch) -> None:
    catalogue.add(-1)
    evaluation = _checks(run_today())["popularity_daily_views.every_card_has_a_snapshot"]
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert "1 cards have no snapshot" in (evaluation.description or "")
    assert evaluation.metadata["item_errors"].value == 1


def test_completeness_is_an_error_when_cards_are_missing_unexplained(
    catalogue: Catalogue, run_today: Launch, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    card = catalogue.add(5)
    catalogue.add(6)
    run_today()
    catalogue.execute("DELETE FROM catalog.popularity_daily_views WHERE card_id = %s", card)

    evaluation = _evaluate(definitions, instance, "every_card_has_a_snapshot")

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert evaluation.metadata["cards_missing"].value == 1


@pytest.mark.slow
def test_a_card_put_on_show_after_the_run_is_not_missing(
    catalogue: Catalogue, run_today: Launch, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    catalogue.add(5)
    run_today()
    catalogue.add(6)
    assert _evaluate(definitions, instance, "every_card_has_a_snapshot").passed


def test_drift_is_an_error_that_names_a_card(
    catalogue: Catalogue, run_today: Launch, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    card = catalogue.add(5)
    catalogue.store(card, {YESTERDAY: 1})
    run_today()
    catalogue.execute("UPDATE catalog.property_object_cards SET popularity_score = 4.0001")

    evaluation = _evaluate(definitions, instance, "scores_equal_reference")

    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert f"card {card}: stored 4.0001, expected 4.0000" in (evaluation.description or "")


@pytest.mark.parametrize(
    ("age", "passed"),
    first_is_fast(
        (timedelta(hours=25, minutes=59), {26: True, 30: True}),
        (timedelta(hours=26, minutes=1), {26: False, 30: True}),
        (timedelta(hours=30, minutes=1), {26: False, 30: False}),
    ),
)
def test_freshness_is_the_age_of_the_last_completed_full_run(
    catalogue: Catalogue,
    run_today: Launch,
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    age: timedelta,
    passed: dict[int, bool],
) -> None:
    card = catalogue.add(5)
    run_today()
    catalogue.execute("UPDATE catalog.popularity_runs SET started_at = now() - %s, finished_at = now() - %s", age, age)
    # Neither a rebuild nor a cut or failed run makes anything fresh.
    catalogue.run(TODAY, run_kind=RunKind.REBUILD, card_ids=[card])

    result = definitions.resolve_job_def("popularity_freshness").execute_in_process(instance=instance)

    evaluations = _checks(result)
    for limit, name in ((26, "full_run_within_26_hours"), (30, "scores_within_30_hours")):
        evaluation = evaluations[f"property_object_popularity.{name}"]
        assert evaluation.passed == passed[limit]
        assert evaluation.severity is dg.AssetCheckSeverity.ERROR


def test_freshness_fails_while_no_full_run_ever_completed(
    definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    result = definitions.resolve_job_def("popularity_freshness").execute_in_process(instance=instance)
    evaluations = _checks(result).values()
    assert [evaluation.passed for evaluation in evaluations] == [False, False]
    assert all("No full run has completed yet" in (evaluation.description or "") for evaluation in evaluations)


def test_the_nightly_job_leaves_freshness_to_its_own_schedule(definitions: dg.Definitions) -> None:
    steps = {node.name for node in definitions.resolve_job_def("popularity_recompute").nodes}
    assert steps == {
        "recompute_popularity",
        "catalog__popularity_daily_views_every_card_has_a_snapshot",
        "catalog__property_object_popularity_scores_equal_reference",
        "catalog__project_popularity_scores_equal_reference",
    }


def _evaluate(definitions: dg.Definitions, instance: dg.DagsterInstance, name: str) -> dg.AssetCheckEvaluation:
    """Evaluate one check on the property objects' side alone."""
    key = DAILY_VIEWS if name == "every_card_has_a_snapshot" else POPULARITY[CardKind.PROPERTY_OBJECT]
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.get_subset(asset_selection=set(), asset_check_selection={dg.AssetCheckKey(key, name)})
    (evaluation,) = result.execute_in_process(instance=instance).get_asset_check_evaluations()
    return evaluation


# The schedule


def _tick(definitions: dg.Definitions, instance: dg.DagsterInstance, at: datetime) -> dg.RunRequest | str:
    """What the schedule says at a tick: the run that it asks for, or why it asks for none."""
    schedule = definitions.resolve_schedule_def("popularity_recompute_nightly")
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=at,
        resources={"postgres": PostgresResource(url=dg.EnvVar("PIN_POSTGRES_URL"))},
        repository_def=definitions.get_repository_def(),
    ) as context:
        tick = schedule.evaluate_tick(context)
    return tick.run_requests[0] if tick.run_requests else str(tick.skip_message)


def _three_o_clock(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, 3, tzinfo=UTC)


def _next_tick(after: datetime) -> datetime:
    ticks = schedule_execution_time_iterator(
        after.timestamp(), recompute_nightly.cron_schedule, recompute_nightly.execution_timezone, ascending=True
    )
    return next(ticks).astimezone(UTC)


def test_schedule_runs_at_three_utc_and_is_on_by_default() -> None:
    assert (recompute_nightly.cron_schedule, recompute_nightly.execution_timezone) == ("0 3 * * *", "UTC")
    assert recompute_nightly.default_status is dg.DefaultScheduleStatus.RUNNING


def test_schedule_at_two_fifty_nine_waits_for_three() -> None:
    assert _next_tick(datetime(2026, 11, 30, 2, 59, tzinfo=UTC)) == datetime(2026, 11, 30, 3, tzinfo=UTC)


def test_schedule_after_three_waits_for_the_next_night() -> None:
    assert _next_tick(datetime(2026, 11, 30, 3, 0, 1, tzinfo=UTC)) == datetime(2026, 12, 1, 3, tzinfo=UTC)


@pytest.mark.parametrize("day", [date(2026, 3, 29), date(2026, 10, 25)])
def test_schedule_stays_at_three_utc_when_local_clocks_change(day: date) -> None:
    midnight_in_berlin = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo("Europe/Berlin"))
    first = _next_tick(midnight_in_berlin)
    assert first == datetime(day.year, day.month, day.day, 3, tzinfo=UTC)
    assert _next_tick(first + timedelta(seconds=1)) - first == timedelta(days=1)


def test_schedule_at_three_asks_for_the_partition_of_that_day(
    definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    request = _tick(definitions, instance, _three_o_clock(TODAY))
    assert isinstance(request, dg.RunRequest)
    assert request.partition_key == TODAY.isoformat()


def test_schedule_for_a_past_night_is_skipped_with_the_reason(
    definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    reason = _tick(definitions, instance, _three_o_clock(YESTERDAY))
    assert isinstance(reason, str)
    assert f"The tick of {YESTERDAY} comes late, on {TODAY} (UTC)" in reason


@pytest.mark.parametrize("run_date", [TODAY, YESTERDAY])
def test_schedule_is_skipped_while_a_run_is_alive_whatever_launched_it(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance, run_date: date
) -> None:
    with Ledger(catalogue.connect, "a-run-of-anyone") as ledger:
        ledger.open(run_date, RunKind.FULL, 1000)
        reason = _tick(definitions, instance, _three_o_clock(TODAY))
    assert isinstance(reason, str)
    assert f"Run a-run-of-anyone of {run_date} is in progress since" in reason


def test_schedule_is_not_held_up_by_a_dead_run(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    run = _started_run(definitions, instance)
    _die(catalogue, run.run_id)

    assert isinstance(_tick(definitions, instance, _three_o_clock(TODAY)), dg.RunRequest)

    assert _status(instance, run) is dg.DagsterRunStatus.FAILURE


def test_schedule_is_not_held_up_by_a_rebuild(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    with Ledger(catalogue.connect, "rebuild") as ledger:
        ledger.open(TODAY, RunKind.REBUILD, 1000)
        assert isinstance(_tick(definitions, instance, _three_o_clock(TODAY)), dg.RunRequest)


def test_schedule_is_skipped_when_the_night_is_launched_already(
    definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    run = _started_run(definitions, instance)
    assert _tick(definitions, instance, _three_o_clock(TODAY)) == (
        f"Run {run.run_id} of partition {TODAY} is launched already."
    )


def test_schedule_asks_for_the_night_when_it_cannot_see(
    definitions: dg.Definitions, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_POSTGRES_URL", "postgresql://postgres@127.0.0.1:1/nowhere")
    assert isinstance(_tick(definitions, instance, _three_o_clock(TODAY)), dg.RunRequest)


# The watchdog


def _started_run(definitions: dg.Definitions, instance: dg.DagsterInstance) -> dg.DagsterRun:
    """A run that Dagster shows as started, as a killed process leaves it."""
    run = instance.create_run_for_job(
        definitions.resolve_job_def("popularity_recompute"), tags={"dagster/partition": TODAY.isoformat()}
    )
    for event in (dg.DagsterEventType.RUN_STARTING, dg.DagsterEventType.RUN_START):
        instance.report_dagster_event(
            dg.DagsterEvent(event_type_value=event.value, job_name="popularity_recompute"), run.run_id
        )
    assert _status(instance, run) is dg.DagsterRunStatus.STARTED
    return run


def _die(catalogue: Catalogue, run_id: str) -> None:
    """What a killed process leaves: a row that says it runs, and no lock."""
    with Ledger(catalogue.connect, run_id) as ledger:
        ledger.open(TODAY, RunKind.FULL, 1000)


def _status(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def _watch(instance: dg.DagsterInstance) -> str:
    with dg.build_sensor_context(
        instance=instance, resources={"postgres": PostgresResource(url=dg.EnvVar("PIN_POSTGRES_URL"))}
    ) as context:
        result = run_watchdog(context)
    assert isinstance(result, dg.SkipReason)
    return str(result.skip_message)


def test_watchdog_reports_a_dead_run_failed(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    run = _started_run(definitions, instance)
    _die(catalogue, run.run_id)

    assert _watch(instance) == f"Reported as failed: {run.run_id}"

    assert _status(instance, run) is dg.DagsterRunStatus.FAILURE
    (row,) = catalogue.ledger()
    assert (row["status"], row["stopped_reason"]) == ("Failed", "died")


def test_watchdog_leaves_a_live_run_alone(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    run = _started_run(definitions, instance)
    with Ledger(catalogue.connect, run.run_id) as ledger:
        ledger.open(TODAY, RunKind.FULL, 1000)
        assert _watch(instance) == "No run is dead."
    assert _status(instance, run) is dg.DagsterRunStatus.STARTED


def test_watchdog_gives_a_run_that_is_loading_or_checking_its_time(
    catalogue: Catalogue, definitions: dg.Definitions, instance: dg.DagsterInstance
) -> None:
    loading, checking = _started_run(definitions, instance), _started_run(definitions, instance)
    recompute(catalogue.connect, run_id=checking.run_id, run_date=TODAY)
    assert _watch(instance) == "No run is dead."

    catalogue.execute("UPDATE catalog.popularity_runs SET finished_at = now() - interval '11 minutes'")
    assert _watch(instance) == f"Reported as failed: {checking.run_id}"
    assert _status(instance, loading) is dg.DagsterRunStatus.STARTED


# The graph


def test_graph_has_these_assets_jobs_schedules_sensors_and_checks(definitions: dg.Definitions) -> None:
    repository = definitions.get_repository_def()
    graph = repository.asset_graph
    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == {
        "user_activity/property_object_view_ended",
        "catalog/property_object_cards",
        "catalog/project_cards",
        "catalog/popularity_daily_views",
        "catalog/property_object_popularity",
        "catalog/project_popularity",
        "talent/property_object_prices",
        "chessboard/property_object_price_changed",
        "pin_analytics/property_object_price_history_facts",
        "pin_analytics/property_object_price_daily",
        "news/post_ranking_signals",
        "news/posts",
        "news/post_reactions",
        "news/post_promotion_boost",
        "user_activity/post_views",
    }
    assert {f"{key.asset_key.to_user_string()}:{key.name}" for key in graph.asset_check_keys} == {
        "catalog/popularity_daily_views:every_card_has_a_snapshot",
        "catalog/property_object_popularity:scores_equal_reference",
        "catalog/project_popularity:scores_equal_reference",
        "catalog/property_object_popularity:full_run_within_26_hours",
        "catalog/property_object_popularity:scores_within_30_hours",
        "pin_analytics/property_object_price_history_facts:one_row_per_processed_object",
        "pin_analytics/property_object_price_history_facts:duplicates_are_collapsible",
        "pin_analytics/property_object_price_history_facts:no_rejected_rows",
        "pin_analytics/property_object_price_history_facts:old_price_is_null",
        "news/post_ranking_signals:one_row_per_post",
        "news/post_ranking_signals:scores_equal_reference",
    }
    assert set(repository.job_names) == {
        "popularity_recompute",
        "popularity_freshness",
        "price_history_backfill",
        "ranking_recompute",
        "__ASSET_JOB",
    }
    assert {schedule.name for schedule in repository.schedule_defs} == {
        "popularity_recompute_nightly",
        "popularity_freshness_hourly",
        "ranking_recompute_nightly",
    }
    assert {sensor.name for sensor in repository.sensor_defs} == {
        "popularity_run_watchdog",
        "price_history_backfill_sensor",
    }


def test_everything_in_the_graph_is_described_and_owned(definitions: dg.Definitions) -> None:
    repository = definitions.get_repository_def()
    for spec in repository.asset_graph.get_all_asset_keys():
        node = repository.asset_graph.get(spec)
        assert node.description
        assert node.owners
        assert node.kinds
        assert node.group_name != "default"
    for key in repository.asset_graph.asset_check_keys:
        assert repository.asset_graph.get_check_spec(key).description
    for each in (*repository.schedule_defs, *repository.sensor_defs):
        assert each.description
        assert each.owners
        # What is deferred waits for somebody to start it.
        assert each.default_status.value == ("STOPPED" if each.name == "ranking_recompute_nightly" else "RUNNING")
    for name in ("popularity_recompute", "popularity_freshness", "price_history_backfill", "ranking_recompute"):
        job = definitions.resolve_job_def(name)
        assert job.description
        assert job.owners


def test_lineage_starts_at_the_source(definitions: dg.Definitions) -> None:
    graph = definitions.get_repository_def().asset_graph
    parents = {
        key.to_user_string(): {parent.to_user_string() for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    source = "user_activity/property_object_view_ended"
    cards, projects = "catalog/property_object_cards", "catalog/project_cards"
    prices, changes = "talent/property_object_prices", "chessboard/property_object_price_changed"
    facts = "pin_analytics/property_object_price_history_facts"
    assert parents == {
        source: set(),
        cards: {source},
        projects: {source},
        "catalog/popularity_daily_views": {cards, projects},
        "catalog/property_object_popularity": {"catalog/popularity_daily_views", cards},
        "catalog/project_popularity": {"catalog/popularity_daily_views", projects},
        prices: set(),
        changes: set(),
        facts: {prices, changes},
        "pin_analytics/property_object_price_daily": {facts},
        "news/posts": set(),
        "news/post_promotion_boost": set(),
        "user_activity/post_views": set(),
        "news/post_reactions": {"news/posts"},
        "news/post_ranking_signals": {
            "news/posts",
            "news/post_reactions",
            "news/post_promotion_boost",
            "user_activity/post_views",
        },
    }


def test_first_partition_is_a_setting_and_the_last_is_today(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_POPULARITY_FIRST_DATE", YESTERDAY.isoformat())
    partitions = build_definitions().get_repository_def().asset_graph.get(DAILY_VIEWS).partitions_def
    assert partitions is not None
    assert partitions.get_partition_keys() == [YESTERDAY.isoformat(), TODAY.isoformat()]
