"""The job, and the sensor that starts it, watches it and is the only thing to start it again."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import psycopg

from pin_pipelines.database import Connection, fetch_one
from pin_pipelines.invest_analytics.checkpoints import Checkpoint, CheckpointStatus, Range, alive, checkpoint_of
from pin_pipelines.invest_analytics.defs.assets import OP, parse_range
from pin_pipelines.invest_analytics.defs.specs import FACTS, OWNER
from pin_pipelines.invest_analytics.supervision import Request, Run, Situation, Wait, decide
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, Evaluation, evaluate
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.runs import UNFINISHED, makes_any
from pin_pipelines.settings import Settings, SettingsError

BACKFILL_JOB = "price_history_backfill"
BACKFILL_SENSOR = "price_history_backfill_sensor"
# On the runs that the sensor asks for: two for people who look for them, and when they were asked for, by the clock
# that the flag and the checkpoint have their times from. Dagster's may be another's, and a run that seems older than
# the flag's flip would be no attempt.
RANGE_TAG = "price_backfill/range"
ATTEMPT_TAG = "price_backfill/attempt"
REQUESTED_AT_TAG = "price_backfill/requested_at"
_MOST_SKEW = timedelta(days=1)

backfill_job = dg.define_asset_job(
    BACKFILL_JOB,
    selection=dg.AssetSelection.assets(FACTS),
    description="Loads the starting price of every property object from Talent into ClickHouse, once. The sensor "
    f"{BACKFILL_SENSOR} launches it when the feature flag is on. By hand: leave the config empty for all objects, or "
    "give a range; a range that is loaded already may be loaded again. Terminate a run to stop it: the next one goes "
    "on from there.",
    owners=[OWNER],
    tags={"context": "invest-analytics"},
    # The sensor alone starts a failed run again, by its own rules.
    run_tags={"dagster/max_retries": "0"},
)


def build_backfill_sensor(settings: Settings) -> dg.SensorDefinition:
    """The sensor for the configured range."""
    configured = Range(settings.backfill_from, settings.backfill_to)

    @dg.sensor(
        name=BACKFILL_SENSOR,
        job=backfill_job,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Asks for a run of {BACKFILL_JOB} while the flag {PRICE_BACKFILL} is on and the configured range "
        "is not loaded; goes on with one that failed or died, with growing pauses, and gives up after a number of "
        "attempts that moved nothing. Reports runs failed whose process is dead. Leave it on: the flag is the switch.",
        owners=[OWNER],
    )
    def price_history_backfill_sensor(
        context: dg.SensorEvaluationContext, postgres: PostgresResource
    ) -> dg.RunRequest | dg.SkipReason:
        try:
            flag = evaluate(postgres.connect, PRICE_BACKFILL)
            if flag.problem:
                return dg.SkipReason(f"The feature flag {PRICE_BACKFILL} counts as off: {flag.problem}.")
            with postgres.connect() as connection:
                # Times are shown, and Dagster compares those that it is given without looking at their zone.
                connection.execute("SET TIME ZONE 'UTC'")
                now: datetime = fetch_one(connection, "SELECT clock_timestamp()")[0]
                decision, dead = _look(context.instance, connection, configured, flag, now)
        except psycopg.OperationalError as error:
            return dg.SkipReason(f"The database cannot be used, so no run could work: {' '.join(str(error).split())}")
        except psycopg.errors.UndefinedTable:
            return dg.SkipReason("The tables of the backfill are missing; `pin-pipelines migrate` makes them.")
        ended = f"Reported as failed, since their processes are dead: {', '.join(dead)}. " if dead else ""
        if isinstance(decision, Wait):
            return dg.SkipReason(f"{ended}{decision.reason[:1].upper()}{decision.reason[1:]}.")
        try:
            settings.for_backfill()
        except SettingsError as error:
            return dg.SkipReason(f"{ended}The flag is on, but a run could not work: {' '.join(str(error).split())}")
        return _request(configured, decision, settings, now)

    return price_history_backfill_sensor


def _look(
    instance: dg.DagsterInstance, connection: Connection, configured: Range, flag: Evaluation, now: datetime
) -> tuple[Request | Wait, list[str]]:
    """What to do for the configured range, and the runs of any range that were dead and are reported failed."""
    checkpoint = checkpoint_of(connection, configured)
    runs = _runs_by_range(_records(instance, flag, checkpoint))
    decisions = {
        price_range: decide(
            Situation(
                now=now,
                enabled=flag.enabled,
                switched_at=flag.switched_at,
                checkpoint=checkpoint_of(connection, price_range),
                alive=alive(connection, price_range),
                runs=runs[price_range],
            )
        )
        for price_range in {configured, *runs}
    }
    dead = [run_id for decision in decisions.values() for run_id in decision.dead_runs]
    for run_id in dead:
        run = instance.get_run_by_id(run_id)
        if run is not None:
            instance.report_run_failed(
                run, "The process of this run is dead: its claim on the range is free. What it stored stays."
            )
    return decisions[configured], dead


def _records(instance: dg.DagsterInstance, flag: Evaluation, checkpoint: Checkpoint | None) -> list[dg.RunRecord]:
    """Runs that have not ended, and while there is something to ask for, those that count as attempts."""
    records = list(instance.get_run_records(dg.RunsFilter(statuses=UNFINISHED)))
    if not flag.enabled or (checkpoint is not None and checkpoint.status is CheckpointStatus.COMPLETED):
        return records
    times = (flag.switched_at, checkpoint.progressed_at if checkpoint else None)
    since = max((time - _MOST_SKEW for time in times if time is not None), default=None)
    known = {record.dagster_run.run_id for record in records}
    recent = instance.get_run_records(dg.RunsFilter(created_after=since))
    return records + [record for record in recent if record.dagster_run.run_id not in known]


def _runs_by_range(records: Iterable[dg.RunRecord]) -> defaultdict[Range, list[Run]]:
    found: defaultdict[Range, list[Run]] = defaultdict(list)
    for record in records:
        price_range = _range_of(record.dagster_run)
        if price_range is not None:
            found[price_range].append(_run(record))
    return found


def _range_of(run: dg.DagsterRun) -> Range | None:
    """The range of one of this asset's runs; None of any other, and of one whose range is refused."""
    if not makes_any(run, [FACTS], job_name=BACKFILL_JOB):
        return None
    ops: Any = run.run_config.get("ops", {})
    config = ops.get(OP, {}).get("config", {})
    try:
        return parse_range(config.get("from_property_object_id"), config.get("to_property_object_id"))
    except ValueError:
        return None


def _run(record: dg.RunRecord) -> Run:
    run, ended = record.dagster_run, None
    if run.is_finished:
        ended = _time(record.end_time) or record.update_timestamp
    tag = run.tags.get(REQUESTED_AT_TAG)
    requested = datetime.fromisoformat(tag) if tag else record.create_timestamp
    return Run(run.run_id, requested, _time(record.start_time), ended)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def backfill_run_config(price_range: Range, batch_size: int | None) -> dict[str, Any]:
    """The config of a run of this range; the configured page size for None."""
    ends = {"from_property_object_id": price_range.lower, "to_property_object_id": price_range.upper}
    config: dict[str, str | int] = {name: str(end) for name, end in ends.items() if end is not None}
    if batch_size is not None:
        config["batch_size"] = batch_size
    return {"ops": {OP: {"config": config}}}


def _request(price_range: Range, request: Request, settings: Settings, now: datetime) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=f"{BACKFILL_JOB}:{price_range.lower or ''}:{price_range.upper or ''}:{request.key}",
        run_config=backfill_run_config(price_range, settings.backfill_batch_size),
        tags={
            RANGE_TAG: f"{price_range.lower or 'first'} to {price_range.upper or 'last'}",
            ATTEMPT_TAG: str(request.attempt),
            REQUESTED_AT_TAG: now.isoformat(),
        },
    )
