"""The step that makes the ranking signals and checks them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime

import dagster as dg
from pydantic import Field

from pin_pipelines.database import Connection
from pin_pipelines.news import report
from pin_pipelines.news.affinity import AffinityInputsRefusedError
from pin_pipelines.news.defs.checks import LastRun, evaluate_checks
from pin_pipelines.news.defs.specs import CHECKS, DEFERRED, POST_SIGNALS, RECOMPUTE_JOB, SIGNALS_SPEC
from pin_pipelines.news.ranking import RankingParameters
from pin_pipelines.news.recompute import Summary, recompute
from pin_pipelines.news.tables import RankingTablesMissingError
from pin_pipelines.reporting import as_markdown
from pin_pipelines.resources.feature_flags import NEWS_RANKING
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.run_logging import logging_aside
from pin_pipelines.resources.runs import refuse_if_off, within
from pin_pipelines.settings import MAX_BATCH_SIZE, Settings

OP = "recompute_ranking"
DISABLED = "news-ranking-disabled"

# Each says what an operator can do; another attempt of the same run would end the same way.
_CLEAR_ERRORS = (RankingTablesMissingError, AffinityInputsRefusedError)


class RankingRunConfig(dg.Config):
    """What an operator may set for one run."""

    batch_size: int | None = Field(
        default=None,
        description=f"Posts in one transaction, 1 to {MAX_BATCH_SIZE}; instead of PIN_NEWS_RANKING_BATCH_SIZE.",
    )


def build_signals_asset(settings: Settings) -> dg.AssetsDefinition:
    """The op that makes the signals and checks them."""

    @dg.multi_asset(
        name=OP,
        specs=[SIGNALS_SPEC],
        check_specs=CHECKS,
        can_subset=True,
        description="Makes the signals of every post anew, batch by batch, as of today (UTC), and checks them. With "
        f"checks alone selected, it only evaluates them. {DEFERRED}",
    )
    def recompute_ranking(
        context: dg.AssetExecutionContext, config: RankingRunConfig, postgres: PostgresResource
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        refuse_if_off(postgres.connect, NEWS_RANKING, DISABLED)
        parameters = configured_parameters(settings)
        with _clear_failures():
            if context.selected_asset_keys:
                batch_size = within("batch_size", config.batch_size, settings.news_ranking_batch_size, MAX_BATCH_SIZE)
                with logging_aside(context.log, "ranking") as logger:
                    summary = recompute(
                        postgres.connect,
                        as_of=datetime.now(UTC).date(),
                        run_id=context.run.run_id,
                        parameters=parameters,
                        batch_size=batch_size,
                        logger=logger,
                    )
                last_run = LastRun(summary.as_of, summary.posts_total)
                with postgres.connect() as connection:
                    yield _materialize_result(connection, summary)
            else:
                last_run = _last_run(context.instance)
            if context.selected_asset_check_keys:
                with postgres.connect() as connection:
                    yield from evaluate_checks(connection, last_run, parameters, context.selected_asset_check_keys)

    return recompute_ranking


def configured_parameters(settings: Settings) -> RankingParameters:
    """The formula's weights and parameters, as the settings have them."""
    return RankingParameters(
        w1=settings.news_ranking_w1,
        w2=settings.news_ranking_w2,
        w3=settings.news_ranking_w3,
        w4=settings.news_ranking_w4,
        half_life_days=settings.news_ranking_half_life_days,
        full_boost=settings.news_ranking_full_boost,
        author_trust=settings.news_ranking_author_trust,
    )


@contextmanager
def _clear_failures() -> Iterator[None]:
    """What has a name fails the run with its message alone, and is not tried again."""
    try:
        yield
    except _CLEAR_ERRORS as error:
        raise dg.Failure(str(error), allow_retries=False) from error


def _last_run(instance: dg.DagsterInstance) -> LastRun:
    """What the last materialisation says of its run.

    Raises:
        dagster.Failure: there is none, or one that was reported by hand and says nothing.
    """
    event = instance.get_latest_materialization_event(POST_SIGNALS)
    metadata = event.asset_materialization.metadata if event and event.asset_materialization else {}
    if not {"as_of", "posts_total"} <= metadata.keys():
        raise dg.Failure(
            f"The signals have not been made yet: there is nothing to check. Launch the job {RECOMPUTE_JOB}.",
            allow_retries=False,
        )
    return LastRun(date.fromisoformat(str(metadata["as_of"].value)), int(str(metadata["posts_total"].value)))


def _materialize_result(connection: Connection, summary: Summary) -> dg.MaterializeResult[None]:
    """The run's figures as numbers that plot, and what people look at."""
    return dg.MaterializeResult(
        asset_key=POST_SIGNALS,
        metadata={
            **_figures(summary),
            "top_posts": dg.MetadataValue.md(as_markdown(report.top_posts(connection))),
            "score_distribution": dg.MetadataValue.md(report.distribution_picture(connection)),
        },
    )


def _figures(summary: Summary) -> dict[str, int | float | str]:
    """The summary as metadata: numbers stay numbers."""
    figures = {name: value for name, value in asdict(summary).items() if type(value) is int}
    rate = {"posts_per_second": round(summary.posts_ranked / max(summary.duration_ms / 1000, 0.001), 1)}
    return {**figures, **rate, "as_of": str(summary.as_of), "stopped_reason": str(summary.stopped_reason)}
