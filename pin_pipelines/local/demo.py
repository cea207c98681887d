"""The demo: a month of history by the engine's own rules, then today's partition through Dagster."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import dagster as dg
import psycopg
from psycopg.rows import dict_row

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.defs.assets import ASSET_KEYS, configured_parameters, materialize_results
from pin_pipelines.catalog.ledger import RunKind
from pin_pipelines.catalog.recompute import Parameters, Summary, recompute
from pin_pipelines.catalog.tables import LEDGER, SNAPSHOTS, CardKind
from pin_pipelines.database import Connect, fetch_one
from pin_pipelines.definitions import build_definitions
from pin_pipelines.execution import execute
from pin_pipelines.local.demo_data import Catalogue, advance_a_little, advance_to, find_catalogue, make_catalogue
from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.settings import Settings

HISTORY_DAYS = 31
NIGHT = time(3, tzinfo=UTC)
JOB = "popularity_recompute"

# The last of a day's materialisations: with it, the day is complete.
_LAST_REPORTED = ASSET_KEYS[-1]

# The engine stamps with the database's clock, the night was long ago. The freshness checks read these times. A night
# that was interrupted before it was put in its place has a run more.
_MOVE_SNAPSHOTS = f"""
UPDATE {SNAPSHOTS} s SET created_at = s.created_at + (%(night)s - r.started_at)
FROM {LEDGER} r WHERE r.run_id = %(run_id)s AND s.run_date = r.run_date"""
_MOVE_RUNS = f"""
UPDATE {LEDGER} SET started_at = %(night)s, finished_at = finished_at + (%(night)s - started_at),
    handled_since = handled_since + (%(night)s - started_at)
WHERE run_date = (SELECT run_date FROM {LEDGER} WHERE run_id = %(run_id)s)"""


class CatalogueSizeError(LocalStackError):
    """A catalogue of another size is there already."""


@dataclass(frozen=True)
class Popular:
    """A card, as the top of a list shows it."""

    title: str
    status: str
    views: int
    score: Decimal


@dataclass(frozen=True)
class Outcome:
    """How today's run ended: its row in the ledger, empty if it got none, and why it failed, if it did."""

    run_id: str
    figures: dict[str, Any]
    failure: str | None


def ensure_catalogue(
    connect: Connect, property_objects: int | None, default: int, today: date
) -> tuple[Catalogue, bool]:
    """The catalogue that is there, or a new one, and whether it is new.

    Raises:
        CatalogueSizeError: a size was asked for, and the one that is there has another. Going on with it would show
            figures of a size that nobody asked for.
    """
    with connect() as connection:
        found = find_catalogue(connection)
        if found is None:
            return make_catalogue(connection, property_objects or default, today), True
    if property_objects not in (None, found.property_objects):
        raise CatalogueSizeError(
            f"a catalogue of {found.property_objects:,} property objects is there already, not one of "
            f"{property_objects:,}. Go on with it by leaving out --cards, or remove the data folder first, "
            "or name another one with --data-dir."
        )
    return found, False


def missing_history(instance: dg.DagsterInstance, catalogue: Catalogue, settings: Settings) -> list[date]:
    """The days of the month before the catalogue was made that have not been played yet."""
    played = instance.get_materialized_partitions(_LAST_REPORTED)
    month = (catalogue.made_on - timedelta(days=age) for age in range(HISTORY_DAYS, 0, -1))
    return [day for day in month if day >= settings.popularity_first_date and day.isoformat() not in played]


def play_night(
    connect: Connect, instance: dg.DagsterInstance, catalogue: Catalogue, day: date, settings: Settings
) -> None:
    """Let a day's views come in, run its night, and put it where it belongs in time and in Dagster's history."""
    with connect() as connection:
        advance_to(connection, catalogue, day)
    summary = recompute(
        connect,
        run_id=f"demo-{day}-{uuid4().hex[:8]}",
        run_date=day,
        run_kind=RunKind.FULL,
        parameters=_parameters(settings),
        logger=_silent_logger(),
    )
    with connect() as connection:
        where = {"run_id": summary.run_id, "night": datetime.combine(day, NIGHT)}
        connection.execute(_MOVE_SNAPSHOTS, where)
        connection.execute(_MOVE_RUNS, where)
    _report_night(instance, connect, summary)


def let_views_come_in(connect: Connect, catalogue: Catalogue, today: date) -> None:
    """Today's views, the first time; a little more each time after."""
    with connect() as connection:
        if catalogue.views_until == today:
            advance_a_little(connection, catalogue, today, key=uuid4().hex)
        else:
            advance_to(connection, catalogue, today)


def run_today(instance: dg.DagsterInstance, connect: Connect, settings: Settings, today: date) -> Outcome:
    """Run today's partition as a job of Dagster's, in this process.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    job = build_definitions(settings).resolve_job_def(JOB)
    execution = execute(job, instance, run_config={}, partition_key=today.isoformat())
    run_id = execution.result.run_id
    return Outcome(run_id, _ledger_row(connect, run_id), execution.failure)


def cards_to_score(connect: Connect) -> int:
    """How many cards a full run goes through."""
    with connect() as connection:
        return sum(_number(connection, statements.count_scored(kind)) for kind in CardKind)


def cards_done(connect: Connect, run_date: date, since: datetime) -> int:
    """How many cards the runs of a run date have processed that began since a moment."""
    with connect() as connection:
        return _number(
            connection,
            f"SELECT coalesce(sum(property_object_cards_processed + project_cards_processed), 0) FROM {LEDGER} "
            "WHERE run_date = %s AND started_at >= %s",
            run_date,
            since,
        )


def most_popular(connect: Connect, kind: CardKind, limit: int) -> list[Popular]:
    """The cards with the highest scores."""
    with connect() as connection:
        rows = connection.execute(
            f"SELECT title, status, popularity_views, popularity_score FROM {kind.table} "
            "ORDER BY popularity_score DESC, id LIMIT %s",
            [limit],
        )
        return [Popular(*row) for row in rows]


def _report_night(instance: dg.DagsterInstance, connect: Connect, summary: Summary) -> None:
    """Leave the events in Dagster's history that a run of the job would have left."""
    with connect() as connection:
        for result in materialize_results(connection, summary):
            assert result.asset_key is not None  # noqa: S101 - the op makes several assets, so each is named
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    asset_key=result.asset_key,
                    partition=summary.run_date.isoformat(),
                    metadata=dict(result.metadata or {}),
                )
            )


def _parameters(settings: Settings) -> Parameters:
    """As the job would run, but with two workers at least: a month of nights in a row is worth the second core."""
    return replace(configured_parameters(settings), workers=max(settings.popularity_workers, 2), single_flight=False)


def _ledger_row(connect: Connect, run_id: str) -> dict[str, Any]:
    with connect() as connection:
        cursor = connection.cursor(row_factory=dict_row)
        return cursor.execute(f"SELECT * FROM {LEDGER} WHERE run_id = %s", [run_id]).fetchone() or {}


def _number(connection: psycopg.Connection[Any], statement: str, *parameters: Any) -> int:
    return int(fetch_one(connection, statement, parameters)[0])


def _silent_logger() -> logging.Logger:
    """For nights that nobody watches: their lines would go through the progress bars."""
    logger = logging.getLogger(f"{__name__}.history")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return logger
