"""The pipelines' metrics for Prometheus (specs, «Наблюдаемость»).

The exporter keeps nothing: at each scrape it reads the ledger of popularity runs and the checkpoints of the price
backfill, which have a row a run or a range, and touches no other table. So counters go on where they were when it is
restarted, and a night that never ran shows. It writes nothing, and may connect as a role that only reads; it has to be
the primary server, though, for who is at work is seen by the locks there.

When the database cannot be read, a scrape says that, and gives no other figure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial

import psycopg
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from psycopg import IsolationLevel

from pin_pipelines.catalog.checks import Freshness, check_freshness
from pin_pipelines.catalog.ledger import Totals
from pin_pipelines.catalog.ledger import totals as popularity_totals
from pin_pipelines.database import Connect, Connection
from pin_pipelines.invest_analytics.checkpoints import Standing
from pin_pipelines.invest_analytics.checkpoints import standing as backfill_standing
from pin_pipelines.invest_analytics.facts import CHANGE_SOURCE

# A night takes minutes; 600 is the limit of the spec for 95 % of them, 1800 the default of the longest run.
DURATION_BOUNDS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1200.0, 1800.0, 3600.0, math.inf)

# Together they stay below the time that Prometheus gives a scrape.
_CONNECT_SECONDS = 5
_STATEMENT_SECONDS = 5

_SESSION = f"""
    SELECT set_config('statement_timeout', '{_STATEMENT_SECONDS}s', false),
           set_config('timezone', 'UTC', false),
           set_config('application_name', 'pin-pipelines exporter', false)"""

_logger = logging.getLogger(__name__)


def connector(url: str) -> Connect:
    """Opens connections that do not outlast a scrape, whatever becomes of the server."""
    return partial(
        psycopg.connect, url, connect_timeout=_CONNECT_SECONDS, tcp_user_timeout=_STATEMENT_SECONDS * 1000, keepalives=1
    )


@contextmanager
def serving(connect: Connect, address: str, port: int) -> Iterator[int]:
    """Answer on /metrics; yields the port, which is another where 0 is given.

    Raises:
        OSError: the address cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(PipelinesCollector(connect))
    server, thread = start_http_server(port, address, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class PipelinesCollector(Collector):
    """Reads all figures at each scrape, as of one moment."""

    def __init__(self, connect: Connect) -> None:
        """Take what opens connections; none is opened yet."""
        self._connect = connect

    def collect(self) -> Iterable[Metric]:
        """All metrics, or that the database cannot be read."""
        families: list[Metric] = []
        try:
            with self._connect() as connection:
                families = _read(connection)
        except psycopg.Error as error:
            _logger.error("the pipelines' tables cannot be read: %s", " ".join(str(error).split()))  # noqa: TRY400
        yield GaugeMetricFamily(
            "pin_pipelines_database_up",
            "Whether the pipelines' tables could be read; with 0, no other metric of the pipelines is there.",
            value=bool(families),
        )
        yield from families


def _read(connection: Connection) -> list[Metric]:
    connection.read_only = True
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    connection.execute(_SESSION)
    return [
        *_popularity(popularity_totals(connection, DURATION_BOUNDS), check_freshness(connection)),
        *_backfill(backfill_standing(connection)),
    ]


def _popularity(totals: Totals, freshness: Freshness | None) -> Iterator[Metric]:
    duration = HistogramMetricFamily(
        "catalog_popularity_recompute_duration_seconds",
        "How long runs over the whole catalogue took that were through, or whose time was up.",
    )
    runs_within = [(_bound(bound), float(runs)) for bound, (runs, _) in sorted(totals.durations.items())]
    duration.add_metric([], runs_within, sum_value=totals.durations[math.inf][1])
    yield duration

    cards = CounterMetricFamily(
        "catalog_popularity_recompute_cards", "Cards that were scored, in all runs.", labels=["card_kind"]
    )
    for kind, processed in totals.cards_processed.items():
        cards.add_metric([kind], processed)
    yield cards

    snapshots = CounterMetricFamily(
        "catalog_popularity_recompute_snapshots",
        "Daily snapshots of view counters that were written, and those that retention removed.",
        labels=["op"],
    )
    snapshots.add_metric(["written"], totals.snapshots_written)
    snapshots.add_metric(["pruned"], totals.snapshots_pruned)
    yield snapshots

    errors = CounterMetricFamily(
        "catalog_popularity_recompute_errors",
        "Cards that could not be scored (item), runs that failed, and runs whose process died.",
        labels=["reason"],
    )
    errors.add_metric(["item"], totals.item_errors)
    errors.add_metric(["run_failed"], totals.failed_runs)
    errors.add_metric(["run_died"], totals.died_runs)
    yield errors

    yield _gauge(
        "catalog_popularity_score_staleness_hours",
        "Hours since the last full run that completed began: no view that came later is in any score.",
        freshness.staleness_hours if freshness else None,
    )
    yield _gauge(
        "catalog_popularity_recompute_last_success_timestamp_seconds",
        "When the last full run that completed ended.",
        _timestamp(freshness.finished_at if freshness else None),
    )


def _backfill(standing: Standing) -> Iterator[Metric]:
    ingested = CounterMetricFamily(
        "invest_analytics_price_facts_ingested",
        "Price facts that were written to ClickHouse, by where they came from.",
        labels=["change_source"],
    )
    ingested.add_metric([CHANGE_SOURCE], standing.ingested_fact_count)
    yield ingested
    yield CounterMetricFamily(
        "invest_analytics_price_backfill_processed_lots",
        "Property objects of the source that the backfill is done with: ingested and rejected ones.",
        value=standing.processed_property_object_count,
    )
    yield CounterMetricFamily(
        "invest_analytics_price_backfill_insert_errors",
        "Inserts of the backfill into ClickHouse that failed, also those that came through at a later attempt.",
        value=standing.insert_errors,
    )
    yield _gauge(
        "invest_analytics_price_backfill_batch_size",
        "Property objects in a page of the range that was worked on last.",
        standing.batch_size,
    )
    yield _gauge(
        "invest_analytics_price_backfill_running", "1 while a process works on a range, else 0.", standing.running
    )
    yield _gauge(
        "invest_analytics_price_backfill_heartbeat_timestamp_seconds",
        "When the run at work gave its last sign of life; the oldest, if there are several.",
        _timestamp(standing.heartbeat),
    )
    yield _gauge(
        "invest_analytics_price_backfill_unattended_timestamp_seconds",
        "Since when a range is neither loaded nor worked on: its run failed or died, and none went on.",
        _timestamp(standing.unattended_since),
    )


def _gauge(name: str, documentation: str, value: float | None) -> GaugeMetricFamily:
    """A gauge; without a sample where there is nothing to say."""
    family = GaugeMetricFamily(name, documentation)
    if value is not None:
        family.add_metric([], value)
    return family


def _timestamp(time: datetime | None) -> float | None:
    return time.timestamp() if time else None


def _bound(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else str(bound)
