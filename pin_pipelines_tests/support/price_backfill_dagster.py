"""The backfill under Dagster: its settings, its flag, its sensor, and time that passes."""

import os
import re
from datetime import datetime, timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest

from pin_pipelines.definitions import build_definitions
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_SENSOR, REQUESTED_AT_TAG
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, set_flag
from pin_pipelines_tests.support.price_backfill import RUB, Backfill


def configure(environment: pytest.MonkeyPatch, clickhouse_url: str, talent: TalentStandIn) -> None:
    """Set all that a backfill needs."""
    environment.setenv("PIN_CLICKHOUSE_URL", clickhouse_url)
    environment.setenv("PIN_TALENT_BASE_URL", talent.url)
    environment.setenv("PIN_TALENT_TOKEN", talent.token)
    environment.setenv("PIN_RUB_CURRENCY_ID", str(RUB))


def switch(backfill: Backfill, *, on: bool) -> None:
    with backfill.connect() as connection:
        set_flag(connection, PRICE_BACKFILL, on)


def good_page() -> Fault:
    """None at all: the page as it is, before one that goes wrong."""
    return Fault(lambda handler, page: handler.answer(page))


def tick(instance: dg.DagsterInstance) -> dg.RunRequest | str:
    """What the sensor says: the run that it asks for, or why it asks for none."""
    definitions = build_definitions()
    with dg.build_sensor_context(
        instance=instance,
        definitions=definitions,
        sensor_name=BACKFILL_SENSOR,
        resources={"postgres": (definitions.resources or {})["postgres"]},
    ) as context:
        said = definitions.resolve_sensor_def(BACKFILL_SENSOR).evaluate_tick(context)
    return said.run_requests[0] if said.run_requests else str(said.skip_message)


def let_pass(backfill: Backfill, time: timedelta) -> None:
    """Make everything that has happened so far as much older."""
    for column in ("started_at", "updated_at", "completed_at", "failed_at", "progressed_at"):
        backfill.execute(f"UPDATE {CHECKPOINTS} SET {column} = {column} - %s", time)
    backfill.execute("UPDATE pin_pipelines.feature_flags SET updated_at = updated_at - %s", time)
    _age_requests(time)
    put_dagster_s_clock_back(time)


def put_dagster_s_clock_back(time: timedelta) -> None:
    """Make the runs as much older, by what Dagster says of them."""
    with _dagster() as connection:
        connection.execute(
            "UPDATE runs SET create_timestamp = create_timestamp - %(time)s, "
            "update_timestamp = update_timestamp - %(time)s, "
            "start_time = start_time - %(seconds)s, end_time = end_time - %(seconds)s",
            {"time": time, "seconds": time.total_seconds()},
        )


def _age_requests(time: timedelta) -> None:
    def older(match: re.Match[str]) -> str:
        return match[1] + (datetime.fromisoformat(match[2]) - time).isoformat()

    with _dagster() as connection:
        for run_id, body in connection.execute("SELECT run_id, run_body FROM runs").fetchall():
            aged = re.sub(f'("{REQUESTED_AT_TAG}": ")([^"]+)', older, body)
            connection.execute("UPDATE runs SET run_body = %s WHERE run_id = %s", [aged, run_id])


def _dagster() -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["PIN_DAGSTER_POSTGRES_URL"].replace("+psycopg2", ""))
