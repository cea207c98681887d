"""The ranking of posts as an operator meets it in Dagster: deferred, switched on, and switched off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import dagster as dg
import pytest

from pin_pipelines.definitions import build_definitions
from pin_pipelines.news.defs.assets import OP, RankingRunConfig, configured_parameters
from pin_pipelines.news.defs.schedules import recompute_nightly
from pin_pipelines.news.defs.specs import CHECKS, EXTERNAL, POST_SIGNALS, SIGNALS_SPEC
from pin_pipelines.news.feed import PostSortField, read_feed
from pin_pipelines.news.ranking import RankingParameters
from pin_pipelines.news.tables import SIGNALS
from pin_pipelines.resources.feature_flags import NEWS_RANKING, evaluate, set_flag
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.runs import refuse_if_off
from pin_pipelines.settings import (
    MAX_BATCH_SIZE,
    MAX_RANKING_FULL_BOOST,
    MAX_RANKING_HALF_LIFE_DAYS,
    MAX_RANKING_WEIGHT,
    load_settings,
)
from pin_pipelines_tests.support import spans
from pin_pipelines_tests.support.news import News, Recorder
from pin_pipelines_tests.support.tiers import first_is_fast

TODAY = datetime.now(UTC).date()
MIDNIGHT = datetime.combine(TODAY, datetime.min.time(), UTC)
JOB = "ranking_recompute"

Launch = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def database_url(news: News) -> str:
    """The marketplace's database is the one with the branch of the ranking."""
    return news.url


@pytest.fixture(autouse=True)
def environment(instance: dg.DagsterInstance, news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIN_POSTGRES_URL", news.url)


@pytest.fixture(params=first_is_fast(JOB, "implicit asset job"))
def launch(request: pytest.FixtureRequest, instance: dg.DagsterInstance) -> Launch:
    """Launches by the job, and as the UI's «Materialize» does."""
    return launcher(instance, implicit=request.param == "implicit asset job")


@pytest.fixture
def run(instance: dg.DagsterInstance) -> Launch:
    return launcher(instance, implicit=False)


def launcher(instance: dg.DagsterInstance, *, implicit: bool) -> Launch:
    def execute(**config: Any) -> dg.ExecuteInProcessResult:
        definitions = build_definitions()
        job = (
            definitions.resolve_implicit_global_asset_job_def()
            if implicit
            else definitions.resolve_job_def("ranking_recompute")
        )
        return job.execute_in_process(
            instance=instance,
            asset_selection=[POST_SIGNALS] if implicit else None,
            run_config={"ops": {OP: {"config": config}}} if config else None,
            raise_on_error=False,
        )

    return execute


def switch(news: News, *, on: bool) -> None:
    with news.connect() as connection:
        set_flag(connection, NEWS_RANKING, on)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Every connection that is opened from now on, with its statements."""
    opened: list[Recorder] = []
    connect = PostgresResource.connect

    def recording(resource: PostgresResource) -> Any:
        connection = connect(resource)
        opened.append(Recorder(connection))
        return connection

    monkeypatch.setattr(PostgresResource, "connect", recording)
    return opened


def metadata(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    (event,) = result.get_asset_materialization_events()
    assert event.asset_key == POST_SIGNALS
    return {name: value.value for name, value in event.materialization.metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> str:
    assert not result.success
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data.user_failure_data
    assert data is not None, event.step_failure_data.error
    return data.description or ""


def evaluations(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    return {each.check_name: each for each in result.get_asset_check_evaluations()}


def checks_alone(instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    """As the button in the UI does."""
    job = build_definitions().resolve_implicit_global_asset_job_def()
    subset = job.get_subset(asset_selection=set(), asset_check_selection={spec.key for spec in CHECKS})
    return subset.execute_in_process(instance=instance, raise_on_error=False)


def feed(news: News, sort: PostSortField) -> list[UUID]:
    """What readers see, as the flag stands."""
    with news.connect() as connection:
        page = read_feed(connection, sort, ranking_enabled=evaluate(news.connect, NEWS_RANKING).enabled)
    return [item.post_id for item in page.items]


# Off


def test_off_a_run_is_refused_with_news_ranking_disabled(news: News, launch: Launch) -> None:
    news.add()
    result = launch()
    assert failure(result).startswith(
        "news-ranking-disabled: the feature flag news.ranking.enabled is off. Nothing was read or written."
    )
    assert "pin-pipelines flags set news.ranking.enabled on" in failure(result)
    assert result.get_asset_materialization_events() == []
    assert result.get_asset_check_evaluations() == []
    assert news.stored() == []


def test_off_a_run_is_not_tried_again_by_step_or_by_run(news: News, run: Launch, instance: dg.DagsterInstance) -> None:
    with pytest.raises(dg.Failure) as refused:
        refuse_if_off(news.connect, NEWS_RANKING, "news-ranking-disabled")
    assert refused.value.allow_retries is False
    launched = instance.get_run_by_id(run().run_id)
    assert launched is not None
    assert launched.tags["dagster/max_retries"] == "0"


def test_off_a_run_opens_no_table_of_the_news(news: News, launch: Launch, sent: list[Recorder]) -> None:
    launch()
    statements = [statement for connection in sent for statement, _ in connection.calls]
    assert len(sent) == 1
    assert statements == ["SELECT name, enabled, updated_at FROM pin_pipelines.feature_flags"]


def test_off_a_run_is_refused_where_the_tables_were_never_made(
    plain_news: News, run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_POSTGRES_URL", plain_news.url)
    assert failure(run()).startswith("news-ranking-disabled")


def test_off_is_what_counts_when_the_flag_cannot_be_read(news: News, run: Launch) -> None:
    switch(news, on=True)
    news.execute("DROP TABLE pin_pipelines.feature_flags")
    said = failure(run())
    assert said.startswith("news-ranking-disabled: ")
    assert "cannot be read and so counts as off (the table pin_pipelines.feature_flags is missing" in said


def test_off_checks_alone_are_refused_too(news: News, run: Launch, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    run()
    switch(news, on=False)
    assert failure(checks_alone(instance)).startswith("news-ranking-disabled")


def test_off_comes_before_what_the_run_is_given(news: News, run: Launch) -> None:
    assert failure(run(batch_size=0)).startswith("news-ranking-disabled")


# On


def test_on_a_run_makes_the_signals_of_every_post_and_says_what_it_did(
    news: News, launch: Launch, instance: dg.DagsterInstance
) -> None:
    switch(news, on=True)
    # ln(100) = 4.605170, and 0.5 for an author of the platform.
    popular = news.add(published_at=MIDNIGHT, author_type="Platform", views={TODAY: 90, TODAY - timedelta(days=9): 9})
    plain = news.add(published_at=MIDNIGHT)
    unpublished = news.add(published_at=None)

    result = launch(batch_size=2)

    assert result.success
    assert {post: signals.score for post, signals in news.all_signals().items()} == {
        popular: Decimal("5.105170"),
        plain: 0,
        unpublished: 0,
    }
    said = dict(metadata(result))
    assert said.pop("duration_ms") >= 0
    assert said.pop("posts_per_second") > 0
    assert said.pop("score_distribution").startswith("![score distribution](data:image/png;base64,iVBOR")
    header, _, first, *others = said.pop("top_posts").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, first)]
    assert cells == [
        ["rank", "post_id", "title", "views_30d", "likes", "score"],
        ["1", str(popular), "post", "99", "0", "5.105170"],
    ]
    assert len(others) == 1
    assert said == {
        "posts_total": 3,
        "posts_ranked": 3,
        "signals_created": 3,
        "conflicts": 0,
        "retries": 0,
        "as_of": TODAY.isoformat(),
        "stopped_reason": "completed",
    }
    assert {name: check.passed for name, check in evaluations(result).items()} == {
        "one_row_per_post": True,
        "scores_equal_reference": True,
    }


@pytest.mark.slow
def test_on_a_second_run_leaves_the_same(news: News, run: Launch) -> None:
    switch(news, on=True)
    news.add(published_at=MIDNIGHT, views={TODAY: 7})
    run()
    before = news.stored()
    said = metadata(run())
    assert news.stored() == before
    assert (said["posts_ranked"], said["signals_created"]) == (1, 0)


@pytest.mark.slow
def test_on_without_posts_a_run_is_green(news: News, run: Launch) -> None:
    switch(news, on=True)
    result = run()
    assert metadata(result)["posts_ranked"] == 0
    assert all(check.passed for check in evaluations(result).values())


def test_toggled_off_again_it_is_off_at_once_and_what_was_made_stays(
    news: News, run: Launch, sent: list[Recorder]
) -> None:
    old = news.add(published_at=MIDNIGHT - timedelta(days=1), views={TODAY: 90})
    new = news.add(published_at=MIDNIGHT)
    assert feed(news, PostSortField.RECOMMENDED) == [new, old]
    switch(news, on=True)
    assert run().success
    assert feed(news, PostSortField.RECOMMENDED) == [old, new]
    before = news.stored()

    switch(news, on=False)

    sent.clear()
    assert failure(run()).startswith("news-ranking-disabled")
    assert not any(connection.mentioning("news.", "user_activity.") for connection in sent)
    assert feed(news, PostSortField.RECOMMENDED) == feed(news, PostSortField.DATE) == [new, old]
    assert news.stored() == before


def test_on_but_without_its_branch_of_migrations_the_run_names_the_command(
    plain_news: News, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_POSTGRES_URL", plain_news.url)
    switch(plain_news, on=True)
    assert "`pin-pipelines migrate --with-news-ranking` makes it" in failure(launch())


@pytest.mark.slow
def test_batch_size_is_the_setting_unless_the_config_says_otherwise(
    news: News, run: Launch, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_NEWS_RANKING_BATCH_SIZE", "7")
    switch(news, on=True)
    for config, size in (({}, 7), ({"batch_size": 9}, 9)):
        lines = [record.message for record in instance.all_logs(run(**config).run_id)]
        assert any(line.endswith(f"batch_size={size}") for line in lines)


@pytest.mark.parametrize("batch_size", first_is_fast(0, MAX_BATCH_SIZE + 1))
def test_bad_run_config_is_refused_at_the_start(news: News, run: Launch, batch_size: int) -> None:
    switch(news, on=True)
    said = failure(run(batch_size=batch_size))
    assert said.startswith(f"batch_size: {batch_size} is not allowed; give a whole number from 1 to 10000")
    assert news.stored() == []


def test_every_field_of_the_run_config_is_described() -> None:
    assert all(field.description for field in RankingRunConfig.model_fields.values())


def test_log_has_a_line_a_batch(news: News, run: Launch, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    news.add_many(3)
    lines = [record.message for record in instance.all_logs(run(batch_size=2).run_id)]
    for expected in (
        f"ranking recompute started: AsOf={TODAY} posts=3 batch_size=2",
        "batch ranked: rows=2 conflicts=0; 2 of 3 posts",
        "ranking recompute ended: stopped_reason=completed PostsRanked=3 SignalsCreated=3",
    ):
        assert any(expected in line for line in lines), expected


def test_spans_of_a_run_carry_its_run_id(news: News, run: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    switch(news, on=True)
    news.add()
    recorded = spans.record(monkeypatch)
    result = run()
    assert {spans.attributes(span)["correlationId"] for span in recorded()} == {result.run_id}


# Settings


def test_parameters_are_the_spec_s_unless_the_settings_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured_parameters(load_settings()) == RankingParameters()
    for name, value in {
        "W1": "2",
        "W2": "0.3",
        "W3": "0",
        "W4": "0.000001",
        "HALF_LIFE_DAYS": "30",
        "FULL_BOOST": "12.5",
        "AUTHOR_TRUST": '{"Agency": 0.1}',
    }.items():
        monkeypatch.setenv(f"PIN_NEWS_RANKING_{name}", value)
    assert configured_parameters(load_settings()) == RankingParameters(
        w1=Decimal(2),
        w2=Decimal("0.3"),
        w3=Decimal(0),
        w4=Decimal("0.000001"),
        half_life_days=30,
        full_boost=Decimal("12.5"),
        author_trust={"Agency": Decimal("0.1")},
    )


def test_whatever_the_settings_allow_the_formula_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 5):
        monkeypatch.setenv(f"PIN_NEWS_RANKING_W{number}", str(MAX_RANKING_WEIGHT))
    monkeypatch.setenv("PIN_NEWS_RANKING_HALF_LIFE_DAYS", str(MAX_RANKING_HALF_LIFE_DAYS))
    monkeypatch.setenv("PIN_NEWS_RANKING_FULL_BOOST", str(MAX_RANKING_FULL_BOOST))
    monkeypatch.setenv("PIN_NEWS_RANKING_AUTHOR_TRUST", '{"Platform": 1, "Agency": 0.000001, "Developer": 0}')
    configured_parameters(load_settings())


def test_weights_of_the_settings_are_those_of_the_scores(
    news: News, run: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIN_NEWS_RANKING_W2", "0.25")
    monkeypatch.setenv("PIN_NEWS_RANKING_AUTHOR_TRUST", '{"Agency": 0.5}')
    switch(news, on=True)
    post = news.add(published_at=MIDNIGHT)
    news.set_likes(post, 3)
    result = run()
    # 0.25 a like, and w4 = 0.5 times the trust.
    assert news.signals(post).score == Decimal("1.000000")
    assert evaluations(result)["scores_equal_reference"].passed


# Checks


def test_row_that_is_missing_turns_its_check_red(news: News, run: Launch, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    posts = news.add_many(3)
    run()
    news.execute(f"DELETE FROM {SIGNALS} WHERE id = %s", posts[1])
    seen = evaluations(checks_alone(instance))
    complete = seen["one_row_per_post"]
    assert (complete.passed, complete.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert complete.metadata["posts_missing"].value == 1
    assert (complete.description or "").startswith("1 of 3 posts have no row")
    assert seen["scores_equal_reference"].passed
    assert run().success
    assert evaluations(checks_alone(instance))["one_row_per_post"].passed


def test_post_that_came_since_the_run_is_a_warning(news: News, run: Launch, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    news.add_many(3)
    run()
    news.add()
    complete = evaluations(checks_alone(instance))["one_row_per_post"]
    assert (complete.passed, complete.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert complete.description == "1 posts have no row yet; 1 came since the last run began."


def test_score_that_was_tampered_with_turns_its_check_red_and_is_named(
    news: News, run: Launch, instance: dg.DagsterInstance
) -> None:
    switch(news, on=True)
    post = news.add(published_at=MIDNIGHT, author_type="Platform")
    run()
    news.execute(f"UPDATE {SIGNALS} SET score = score + 0.000001")
    exact = evaluations(checks_alone(instance))["scores_equal_reference"]
    assert (exact.passed, exact.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert exact.metadata["posts_wrong"].value == 1
    assert exact.description == (
        f"1 of 1 sampled scores differ from the reference, such as post {post}: stored 0.500001, expected 0.500000."
    )


def test_checks_alone_before_the_first_run_say_so(news: News, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    assert failure(checks_alone(instance)) == (
        "The signals have not been made yet: there is nothing to check. Launch the job ranking_recompute."
    )


def test_document_that_cannot_be_read_fails_the_checks_by_its_field(
    news: News, run: Launch, instance: dg.DagsterInstance
) -> None:
    switch(news, on=True)
    news.add()
    run()
    news.execute(f"UPDATE {SIGNALS} SET affinity_inputs = jsonb_set(affinity_inputs, '{{ContractVersion}}', '2')")
    assert failure(checks_alone(instance)) == "ContractVersion = 2 is not allowed; it must be one of: 1"


# The schedule


def tick(instance: dg.DagsterInstance, at: datetime) -> dg.RunRequest | str:
    """What the schedule says at a tick: the run that it asks for, or why it asks for none."""
    definitions = build_definitions()
    schedule = definitions.resolve_schedule_def("ranking_recompute_nightly")
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=at,
        resources={"postgres": PostgresResource(url=dg.EnvVar("PIN_POSTGRES_URL"))},
        repository_def=definitions.get_repository_def(),
    ) as context:
        said = schedule.evaluate_tick(context)
    return said.run_requests[0] if said.run_requests else str(said.skip_message)


def test_schedule_is_at_half_past_three_utc_and_stopped_until_somebody_starts_it() -> None:
    assert (recompute_nightly.cron_schedule, recompute_nightly.execution_timezone) == ("30 3 * * *", "UTC")
    assert recompute_nightly.default_status is dg.DefaultScheduleStatus.STOPPED
    assert recompute_nightly.job_name == JOB


def test_schedule_skips_while_the_flag_is_off_and_opens_no_table_of_the_news(
    news: News, instance: dg.DagsterInstance, sent: list[Recorder]
) -> None:
    assert tick(instance, MIDNIGHT) == "The feature flag news.ranking.enabled is off."
    assert not any(connection.mentioning("news.", "user_activity.") for connection in sent)


def test_schedule_asks_for_one_run_a_night_while_the_flag_is_on(news: News, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    request = tick(instance, MIDNIGHT + timedelta(hours=3, minutes=30))
    assert isinstance(request, dg.RunRequest)
    assert request.run_key == f"ranking_recompute:{TODAY}"


def test_schedule_for_a_past_night_is_skipped_with_the_reason(news: News, instance: dg.DagsterInstance) -> None:
    switch(news, on=True)
    reason = tick(instance, MIDNIGHT - timedelta(minutes=1))
    assert isinstance(reason, str)
    assert f"comes late, on {TODAY} (UTC)" in reason


# The graph


def test_group_has_the_signals_and_what_they_are_made_from() -> None:
    graph = build_definitions().get_repository_def().asset_graph
    group = {key for key in graph.get_all_asset_keys() if graph.get(key).group_name == "news_ranking"}
    assert {key.to_user_string() for key in group} == {
        "news/post_ranking_signals",
        "news/posts",
        "news/post_reactions",
        "news/post_promotion_boost",
        "user_activity/post_views",
    }
    assert {key for key in group if graph.get(key).is_materializable} == {POST_SIGNALS}


@pytest.mark.parametrize("spec", [SIGNALS_SPEC, *EXTERNAL], ids=lambda spec: spec.key.to_user_string())
def test_description_says_that_it_is_deferred_and_by_which_flag_it_comes_alive(spec: dg.AssetSpec) -> None:
    assert "Deferred: " in (spec.description or "")
    assert "`news.ranking.enabled`" in (spec.description or "")
    assert "`pin-pipelines migrate --with-news-ranking`" in (spec.description or "")


def test_description_of_job_and_schedule_says_the_same() -> None:
    definitions = build_definitions()
    assert "`news.ranking.enabled`" in (definitions.resolve_job_def(JOB).description or "")
    assert "`news.ranking.enabled`" in (recompute_nightly.description or "")


def test_no_other_job_nor_materialise_all_of_another_group_nor_an_automation_includes_it() -> None:
    repository = build_definitions().get_repository_def()
    graph = repository.asset_graph
    for job in repository.get_all_jobs():
        # The implicit job is that of whatever is selected in the UI.
        if job.name not in (JOB, "__ASSET_JOB"):
            assert POST_SIGNALS not in job.asset_layer.selected_asset_keys, job.name
            assert not job.asset_layer.selected_asset_keys & {spec.key for spec in EXTERNAL}
    for group in {graph.get(key).group_name for key in graph.get_all_asset_keys()} - {"news_ranking"}:
        selected = dg.AssetSelection.groups(group)
        assert POST_SIGNALS not in selected.upstream().resolve(graph) | selected.downstream().resolve(graph)
    assert all(graph.get(key).automation_condition is None for key in graph.get_all_asset_keys())
    launching = {each.name for each in repository.schedule_defs if each.job_name == JOB}
    launching |= {each.name for each in repository.sensor_defs if JOB in {target.job_name for target in each.targets}}
    assert launching == {recompute_nightly.name}


def test_job_makes_the_signals_and_their_checks_in_one_step_and_nothing_else() -> None:
    job = build_definitions().resolve_job_def(JOB)
    assert set(job.asset_layer.selected_asset_keys) == {POST_SIGNALS}
    assert set(job.asset_layer.asset_graph.asset_check_keys) == {spec.key for spec in CHECKS}
    assert {node.name for node in job.nodes} == {OP}
