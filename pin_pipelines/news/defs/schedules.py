"""When the signals are made, once somebody has switched it on."""

from datetime import UTC, datetime

import dagster as dg

from pin_pipelines.news.defs.specs import DEFERRED, OWNER, POST_SIGNALS, RECOMPUTE_JOB
from pin_pipelines.resources.feature_flags import NEWS_RANKING, evaluate
from pin_pipelines.resources.postgres import PostgresResource

RECOMPUTE_SCHEDULE = "ranking_recompute_nightly"

recompute_job = dg.define_asset_job(
    RECOMPUTE_JOB,
    selection=dg.AssetSelection.assets(POST_SIGNALS),
    description="Makes the ranking signals of all posts anew, as of today (UTC). Launch it again whenever you like: "
    f"from the same views, likes and comments come the same scores. {DEFERRED}",
    owners=[OWNER],
    tags={"context": "news", "deferred": ""},
    # Refused is refused, and what a night left undone the next one makes anew.
    run_tags={"dagster/max_retries": "0"},
)


@dg.schedule(
    name=RECOMPUTE_SCHEDULE,
    job_name=RECOMPUTE_JOB,
    cron_schedule="30 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description=f"Runs {RECOMPUTE_JOB} at 03:30 UTC, behind the popularity. Stopped: start it here once the flag "
    f"`{NEWS_RANKING}` is on. While the flag is off it skips, and so does a tick that comes a day late: signals are "
    "always made as of today.",
    owners=[OWNER],
)
def recompute_nightly(
    context: dg.ScheduleEvaluationContext, postgres: PostgresResource
) -> dg.RunRequest | dg.SkipReason:
    """The tick of a night asks for one run."""
    night = context.scheduled_execution_time.astimezone(UTC).date()
    today = datetime.now(UTC).date()
    if night != today:
        return dg.SkipReason(
            f"The tick of {night} comes late, on {today} (UTC): signals are always made as of today, so there is "
            "nothing to make up for."
        )
    flag = evaluate(postgres.connect, NEWS_RANKING)
    if not flag.enabled:
        return dg.SkipReason(f"The feature flag {NEWS_RANKING} {flag.why_off}.")
    return dg.RunRequest(run_key=f"{RECOMPUTE_JOB}:{night}")
