"""When the popularity runs, who looks after a run that died, and the hourly look at the age of the scores."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import psycopg

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.defs.assets import ASSET_KEYS, OWNER
from pin_pipelines.catalog.defs.checks import FRESHNESS_SPECS
from pin_pipelines.catalog.ledger import LiveRun, RunKind, close_dead_runs, live_runs
from pin_pipelines.database import Connection
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.runs import UNFINISHED, makes_any

RECOMPUTE_JOB = "popularity_recompute"

# How long a run may be STARTED without a row in the ledger (its process loads the code), and how long it may
# stay STARTED after its row is closed (the checks run).
_WITHOUT_LOCK_SECONDS = 600


def build_recompute_job(data_checks: Sequence[dg.AssetChecksDefinition]) -> Any:
    """The nightly job: the assets and the checks that belong to a run, not the hourly ones."""
    return dg.define_asset_job(
        RECOMPUTE_JOB,
        selection=dg.AssetSelection.assets(*ASSET_KEYS).without_checks() | dg.AssetSelection.checks(*data_checks),
        description="Recomputes the popularity of all cards for one run date (UTC). Launch today's partition to bring "
        "the scores up to date; launch it again whenever you like, the result is the same. For single cards, name "
        "them in `card_ids`. Partitions of the past are safe to launch and say what they did, or why they did not.",
        owners=[OWNER],
        tags={"context": "catalog"},
        # What a night left undone, the next one takes up (spec): a failed run is not retried.
        run_tags={"dagster/max_retries": "0"},
    )


freshness_job = dg.define_asset_job(
    "popularity_freshness",
    selection=dg.AssetSelection.checks(*(spec.key for spec in FRESHNESS_SPECS)),
    description="Looks at the age of the popularity scores; reads the ledger alone.",
    owners=[OWNER],
    tags={"context": "catalog"},
)

freshness_hourly = dg.ScheduleDefinition(
    name="popularity_freshness_hourly",
    job=freshness_job,
    cron_schedule="30 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Looks at the age of the popularity scores every hour, so that a night that never ran is noticed.",
    owners=[OWNER],
)


@dg.schedule(
    name="popularity_recompute_nightly",
    job_name=RECOMPUTE_JOB,
    cron_schedule="0 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Runs today's partition of popularity_recompute at 03:00 UTC, when the shop window has the fewest "
    "visitors. Skips while a run is alive, and when it is late by a day: counters cannot be read in the past.",
    owners=[OWNER],
)
def recompute_nightly(
    context: dg.ScheduleEvaluationContext, postgres: PostgresResource
) -> dg.RunRequest | dg.SkipReason:
    """The tick of a night asks for the partition of that very day."""
    night = context.scheduled_execution_time.astimezone(UTC).date()
    today = datetime.now(UTC).date()
    if night != today:
        return dg.SkipReason(
            f"The tick of {night} comes late, on {today} (UTC): counters cannot be read in the past. The growth since "
            f"then is credited to the next run."
        )
    try:
        with postgres.connect() as connection:
            end_dead_runs(context.instance, connection)
            busy = _in_progress(context.instance, connection, night)
    except psycopg.OperationalError as error:
        # Runs that overlap share the cards, so in doubt a night is asked for; a run says clearer what is wrong.
        context.log.warning(f"Cannot see whether a run is alive ({type(error).__name__}); asking for the night's run.")
        busy = None
    if busy:
        return dg.SkipReason(busy)
    return dg.RunRequest(run_key=f"{RECOMPUTE_JOB}:{night}", partition_key=night.isoformat())


@dg.sensor(
    name="popularity_run_watchdog",
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Finds popularity runs whose process is dead (their liveness lock is free) while Dagster still shows "
    "them as started, and reports them failed. It launches nothing.",
    owners=[OWNER],
)
def run_watchdog(context: dg.SensorEvaluationContext, postgres: PostgresResource) -> dg.SkipReason:
    """A killed run stays STARTED for good if nobody looks."""
    with postgres.connect() as connection:
        ended = end_dead_runs(context.instance, connection)
    return dg.SkipReason(f"Reported as failed: {', '.join(ended)}" if ended else "No run is dead.")


def end_dead_runs(instance: dg.DagsterInstance, connection: Connection) -> list[str]:
    """Close dead runs in the ledger, report them in Dagster, and return their run ids."""
    died = set(close_dead_runs(connection))
    connection.commit()
    alive = {run.run_id for run in live_runs(connection)}
    filters = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])
    records = [
        record
        for record in instance.get_run_records(filters)
        if makes_any(record.dagster_run, ASSET_KEYS, job_name=RECOMPUTE_JOB) and record.dagster_run.run_id not in alive
    ]
    ended_for = _seconds_since_end(connection, [record.dagster_run.run_id for record in records])
    ended = []
    for record in records:
        run = record.dagster_run
        lockless_for = ended_for.get(run.run_id, datetime.now(UTC).timestamp() - (record.start_time or 0))
        if run.run_id in died or lockless_for > _WITHOUT_LOCK_SECONDS:
            instance.report_run_failed(
                run, "The process of this run is dead: its liveness lock is free. What it committed stays."
            )
            ended.append(run.run_id)
    return ended


def _seconds_since_end(connection: Connection, run_ids: list[str]) -> dict[str, float]:
    return dict(connection.execute(statements.ENDED_RUNS, {"run_ids": run_ids}).fetchall())


def _in_progress(instance: dg.DagsterInstance, connection: Connection, night: date) -> str | None:
    """Why a night must wait: a run is alive, or this night's is launched already; None if nothing is in the way.

    A rebuild of single cards is over in seconds and is no reason to lose a night.
    """
    alive = [run for run in live_runs(connection) if run.run_kind is not RunKind.REBUILD]
    if alive:
        return _describe_alive(alive[0])
    filters = dg.RunsFilter(statuses=UNFINISHED, tags={"dagster/partition": night.isoformat()})
    launched = [run.run_id for run in instance.get_runs(filters) if makes_any(run, ASSET_KEYS, job_name=RECOMPUTE_JOB)]
    return f"Run {launched[0]} of partition {night} is launched already." if launched else None


def _describe_alive(run: LiveRun) -> str:
    return (
        f"Run {run.run_id} of {run.run_date} is in progress since {run.started_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC."
    )
