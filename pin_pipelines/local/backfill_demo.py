"""The demo's second part: the flag goes on, the sensor asks for a run, and the prices have a course."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

import dagster as dg
from clickhouse_connect.driver.client import Client

from pin_pipelines.database import Connect
from pin_pipelines.execution import Execution, execute
from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CheckpointStatus, Range, checkpoint_of
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB, BACKFILL_SENSOR
from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, evaluate, set_flag

# A run that was interrupted is asked for again after a pause.
PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 1.0

# How the prices of the objects on show went on after their start: so many days later, by so many per cent.
_CHANGES = ((6, 2), (17, 3), (17, -1), (31, 4), (48, -2), (66, 5), (83, 1), (97, 3))
_ROUBLE, _KOPECK = Decimal(1), Decimal("0.01")
_EVENTS = UUID("6f1f3c9e-0000-4000-8000-000000000000")

_FIRST_OBJECTS = f"""
SELECT DISTINCT PropertyObjectId FROM {facts.TABLE} ORDER BY toString(PropertyObjectId) LIMIT 2"""
# It may be there twice, until a merge.
_STARTING_FACT = f"""
SELECT * FROM {facts.TABLE} WHERE PropertyObjectId = {{id:UUID}} AND ChangeSource = 'backfill'
ORDER BY IngestionTime DESC LIMIT 1"""


def switch_on(connect: Connect) -> None:
    """Turn the backfill's flag on, unless it is."""
    if not evaluate(connect, PRICE_BACKFILL).enabled:
        with connect() as connection:
            set_flag(connection, PRICE_BACKFILL, enabled=True)


def ask_sensor(
    definitions: dg.Definitions, instance: dg.DagsterInstance, connect: Connect, on_reason: Callable[[str], None]
) -> dg.RunRequest | None:
    """Evaluate the sensor as the daemon does, until it asks for a run; None if it says that there is nothing to do.

    Args:
        definitions: with the sensor.
        instance: Dagster's.
        connect: to the marketplace's database.
        on_reason: told why it asks for none, each time that this is something else.

    Raises:
        LocalStackError: it did not ask for one within a minute, and the prices are not loaded.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    said = ""
    while True:
        with dg.build_sensor_context(
            instance=instance,
            definitions=definitions,
            sensor_name=BACKFILL_SENSOR,
            resources={"postgres": (definitions.resources or {})["postgres"]},
        ) as context:
            tick = definitions.resolve_sensor_def(BACKFILL_SENSOR).evaluate_tick(context)
        if tick.run_requests:
            return tick.run_requests[0]
        if tick.skip_message and tick.skip_message != said:
            said = tick.skip_message
            on_reason(said)
        if _is_completed(connect):
            return None
        if time.monotonic() > deadline:
            raise LocalStackError("the sensor asks for no run of the price backfill; try again when it would.")
        time.sleep(_POLL_SECONDS)


def run_requested(
    definitions: dg.Definitions, instance: dg.DagsterInstance, request: dg.RunRequest, run_id: str
) -> Execution:
    """Execute the run that the sensor asks for, in this process, with the tags that the daemon would give it.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    tags = {**request.tags, "dagster/sensor_name": BACKFILL_SENSOR, "dagster/run_key": request.run_key or ""}
    job = definitions.resolve_job_def(BACKFILL_JOB)
    return execute(job, instance, run_config=request.run_config, tags=tags, run_id=run_id)


def let_prices_change(client: Client) -> UUID:
    """Write what the consumer of the stream would for a few objects, unless it is there; returns one of them."""
    ids = [property_object_id for (property_object_id,) in client.query(_FIRST_OBJECTS).result_rows]
    for property_object_id in ids:
        if len(facts.price_series(client, property_object_id)) == 1:
            parameters = {"id": str(property_object_id)}
            (start,) = client.query(_STARTING_FACT, parameters, tz_mode="aware").named_results()
            rows = list(_changes(start))
            client.insert(facts.TABLE, rows, column_names=list(facts.COLUMNS))
    return UUID(str(ids[0]))


def _changes(start: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Rows as the consumer writes them, in the order of the columns: its FactIds are the ids of the events."""
    price, per_meter = start["NewPrice"], start["NewPricePerMeter"]
    for number, (days, percent) in enumerate(_CHANGES):
        event_id = str(uuid5(_EVENTS, f"{start['PropertyObjectId']}/{number}"))
        new_price = (price * (100 + percent) / 100).quantize(_ROUBLE)
        new_per_meter = (new_price / start["AreaTotal"]).quantize(_KOPECK)
        row = {
            **start,
            "FactId": event_id,
            "SourceEventId": event_id,
            "ChangeSource": "talent-sync",
            "OldPrice": price,
            "OldPricePerMeter": per_meter,
            "NewPrice": new_price,
            "NewPricePerMeter": new_per_meter,
            "EventTime": start["EventTime"] + timedelta(days=days, seconds=number),
            "IngestionTime": datetime.now(UTC),
        }
        yield [row[name] for name in facts.COLUMNS]
        price, per_meter = new_price, new_per_meter


def _is_completed(connect: Connect) -> bool:
    with connect() as connection:
        checkpoint = checkpoint_of(connection, Range())
    return checkpoint is not None and checkpoint.status is CheckpointStatus.COMPLETED
