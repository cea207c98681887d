"""The metrics, as a scrape gives them: what they say of real runs, and what they say when nothing can be read."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import psycopg
import pytest

from pin_pipelines.catalog.ledger import Ledger, RunKind, RunStatus, close_dead_runs
from pin_pipelines.catalog.recompute import NoKnownCardsError, Parameters
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS, Claim, Range
from pin_pipelines_tests.support.catalogue import PROJECT, TODAY, Catalogue, card_id, night
from pin_pipelines_tests.support.command_line import COMMAND
from pin_pipelines_tests.support.exporter import Samples, exporter, exposition, get, needs_promtool, promtool, scrape
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, Listed, object_id, price, prices
from pin_pipelines_tests.support.roles import READER, as_role
from pin_pipelines_tests.support.waiting import until

UP = "pin_pipelines_database_up"
CARDS = 'catalog_popularity_recompute_cards_total{{card_kind="{}"}}'
SNAPSHOTS = 'catalog_popularity_recompute_snapshots_total{{op="{}"}}'
ERRORS = 'catalog_popularity_recompute_errors_total{{reason="{}"}}'
DURATION = "catalog_popularity_recompute_duration_seconds"
BUCKET = DURATION + '_bucket{{le="{}"}}'
STALENESS = "catalog_popularity_score_staleness_hours"
LAST_SUCCESS = "catalog_popularity_recompute_last_success_timestamp_seconds"
INGESTED = 'invest_analytics_price_facts_ingested_total{change_source="backfill"}'
PROCESSED = "invest_analytics_price_backfill_processed_lots_total"
INSERT_ERRORS = "invest_analytics_price_backfill_insert_errors_total"
BATCH_SIZE = "invest_analytics_price_backfill_batch_size"
RUNNING = "invest_analytics_price_backfill_running"
HEARTBEAT = "invest_analytics_price_backfill_heartbeat_timestamp_seconds"
UNATTENDED = "invest_analytics_price_backfill_unattended_timestamp_seconds"

BOUNDS = ["10.0", "30.0", "60.0", "120.0", "300.0", "600.0", "900.0", "1200.0", "1800.0", "3600.0", "+Inf"]


@pytest.fixture
def backfill(database_url: str, open_folder: str) -> Backfill:
    return Backfill(database_url, open_folder).furnish()


def counters(scraped: Samples) -> Samples:
    ends = ("_total", "_bucket", "_count", "_sum")
    return {series: value for series, value in scraped.items() if series.partition("{")[0].endswith(ends)}


def no_counter_fell(before: Samples, after: Samples) -> bool:
    return all(after[series] >= value for series, value in counters(before).items())


def record(catalogue: Catalogue, seconds: float, reason: str = "completed", kind: str = "Full") -> None:
    """A run that ended an hour ago, as it stands in the ledger."""
    status = {"completed": "Completed", "error": "Failed", "died": "Failed"}.get(reason, "Stopped")
    catalogue.execute(
        "INSERT INTO catalog.popularity_runs (run_id, run_date, run_kind, status, stopped_reason, started_at, "
        "finished_at, handled_since, batch_size, duration_ms) VALUES (%s, %s, %s, %s, %s, "
        "now() - interval '2 hours', now() - interval '1 hour', now(), 1000, %s)",
        *(str(uuid4()), TODAY, kind, status, reason, round(seconds * 1000)),
    )


def test_before_the_first_run_every_counter_is_there_at_zero_and_nothing_has_an_age(database_url: str) -> None:
    zero = [
        *(BUCKET.format(bound) for bound in BOUNDS),
        *(f"{DURATION}_count", f"{DURATION}_sum"),
        *(CARDS.format(kind) for kind in ("PropertyObject", "Project")),
        *(SNAPSHOTS.format(op) for op in ("written", "pruned")),
        *(ERRORS.format(reason) for reason in ("item", "run_failed", "run_died")),
        *(INGESTED, PROCESSED, INSERT_ERRORS, RUNNING),
    ]
    assert scrape(database_url) == {UP: 1, **dict.fromkeys(zero, 0)}


def test_runs_are_counted_by_kind_and_by_what_became_of_the_snapshots(catalogue: Catalogue) -> None:
    catalogue.add_many(3)
    catalogue.add_many(2, kind=PROJECT)
    catalogue.store_many({card_id(number): {night(-33): 0} for number in range(1, 4)})
    catalogue.run(night(-1))
    catalogue.run(TODAY)
    scraped = scrape(catalogue.url)
    assert scraped[CARDS.format("PropertyObject")] == 6
    assert scraped[CARDS.format("Project")] == 4
    assert scraped[SNAPSHOTS.format("written")] == 10
    assert scraped[SNAPSHOTS.format("pruned")] == 3
    assert [scraped[BUCKET.format(bound)] for bound in BOUNDS] == [2] * len(BOUNDS)
    assert 0 < scraped[f"{DURATION}_sum"] < 20


def test_duration_has_the_runs_over_the_whole_catalogue_that_were_not_broken_off(catalogue: Catalogue) -> None:
    for seconds in (9.5, 10, 10.001, 599, 601, 4000):
        record(catalogue, seconds)
    record(catalogue, 1800, "max_duration")
    record(catalogue, 45, kind="Recompute")
    for reason in ("error", "died", "interrupted", "stop_signal"):
        record(catalogue, 1, reason)
    record(catalogue, 1, kind="Rebuild")
    scraped = scrape(catalogue.url)
    assert [scraped[BUCKET.format(bound)] for bound in BOUNDS] == [2, 3, 4, 4, 4, 5, 6, 6, 7, 7, 8]
    assert scraped[f"{DURATION}_count"] == 8
    assert scraped[f"{DURATION}_sum"] == pytest.approx(7074.501)


def test_errors_are_cards_runs_that_failed_and_runs_that_died(catalogue: Catalogue) -> None:
    catalogue.add_many(3)
    catalogue.set_views(card_id(2), -1)
    catalogue.run()
    with pytest.raises(NoKnownCardsError):
        catalogue.run(run_kind=RunKind.REBUILD, card_ids=[uuid4()])
    # What is left of a process that is killed: its row, and no lock.
    with Ledger(catalogue.connect, "killed") as ledger:
        ledger.open(TODAY, RunKind.FULL, 1000)
    close_dead(catalogue)
    scraped = scrape(catalogue.url)
    assert [scraped[ERRORS.format(reason)] for reason in ("item", "run_failed", "run_died")] == [1, 1, 1]


def close_dead(catalogue: Catalogue) -> None:
    """Until the lock of a session that is gone is free, and its run closed."""

    def closed() -> bool:
        with catalogue.connect() as connection:
            return bool(close_dead_runs(connection))

    until(closed, "the dead run to be closed")


def test_run_that_was_taken_for_dead_stays_so_whatever_it_says_later(catalogue: Catalogue) -> None:
    with Ledger(catalogue.connect, "run") as ledger:
        ledger.open(TODAY, RunKind.FULL, 1000)
        catalogue.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'popularity ledger run'"
        )
        close_dead(catalogue)
        before = scrape(catalogue.url)
        figures = ("snapshots_pruned", "cards_left_locked", "cards_remaining", "retries", "duration_ms")
        ledger.close(RunStatus.COMPLETED, stopped_reason="completed", error=None, **dict.fromkeys(figures, 0))
    assert before[ERRORS.format("run_died")] == 1
    assert counters(scrape(catalogue.url)) == counters(before)
    assert STALENESS not in before


def test_staleness_grows_while_no_run_comes_and_only_a_full_run_that_completes_ends_it(catalogue: Catalogue) -> None:
    catalogue.add_many(10)
    catalogue.run()
    assert 0 < scrape(catalogue.url)[STALENESS] < 0.1
    moved = "SET started_at = started_at - interval '31 hours', finished_at = finished_at - interval '30 hours'"
    catalogue.execute(f"UPDATE catalog.popularity_runs {moved}")
    ended = datetime.now(UTC) - timedelta(hours=30)
    catalogue.run(run_kind=RunKind.RECOMPUTE)
    catalogue.run(run_kind=RunKind.REBUILD, card_ids=[card_id(1)])
    catalogue.run(parameters=Parameters(batch_size=1, max_run_duration_seconds=1e-9))
    stale = scrape(catalogue.url)
    assert stale[STALENESS] == pytest.approx(31, abs=0.1)
    assert stale[LAST_SUCCESS] == pytest.approx(ended.timestamp(), abs=60)
    catalogue.run()
    fresh = scrape(catalogue.url)
    assert fresh[STALENESS] < 0.1
    assert fresh[LAST_SUCCESS] == pytest.approx(datetime.now(UTC).timestamp(), abs=60)


@pytest.mark.slow
def test_no_counter_falls_when_retention_prunes_or_the_exporter_is_started_again(catalogue: Catalogue) -> None:
    catalogue.add_many(4)
    short = Parameters(window_days=1, decay_half_life_days=1)
    seen: list[Samples] = []
    url = as_role(catalogue.url, READER)
    for offset in range(5):
        catalogue.run(night(offset - 4), parameters=short)
        with exporter(url) as (_, address):
            seen.append(get(address))
    assert all(no_counter_fell(before, after) for before, after in pairwise(seen))
    assert seen[-1][SNAPSHOTS.format("written")] == 20
    assert seen[-1][SNAPSHOTS.format("pruned")] == 4


def test_backfill_is_counted_and_its_rejects_are_processed_but_not_ingested(backfill: Backfill) -> None:
    backfill.run(Listed([*prices(9), price(10, areaTotal=0)]), batch_size=4)
    scraped = scrape(backfill.url)
    assert (scraped[PROCESSED], scraped[INGESTED], scraped[BATCH_SIZE]) == (10, 9, 4)
    assert scraped[RUNNING] == 0
    assert {HEARTBEAT, UNATTENDED}.isdisjoint(scraped)
    backfill.run(Listed(prices(9)), batch_size=3)
    again = scrape(backfill.url)
    assert (again[PROCESSED], again[INGESTED], again[BATCH_SIZE]) == (19, 18, 3)


def test_backfill_is_running_while_a_process_works_on_it(backfill: Backfill) -> None:
    seen: list[Samples] = []
    backfill.run(Listed(prices(9), before=lambda _: seen.append(scrape(backfill.url))))
    assert {scraped[RUNNING] for scraped in seen} == {1}
    assert all(scraped[HEARTBEAT] == pytest.approx(datetime.now(UTC).timestamp(), abs=60) for scraped in seen)
    assert all(UNATTENDED not in scraped for scraped in seen)
    assert scrape(backfill.url)[RUNNING] == 0


class SourceGoneError(Exception):
    pass


def break_off(page: int) -> None:
    if page == 2:
        raise SourceGoneError


def test_range_that_failed_is_unattended_until_a_run_goes_on_with_it(backfill: Backfill) -> None:
    with pytest.raises(SourceGoneError):
        backfill.run(Listed(prices(9), before=break_off))
    (checkpoint,) = backfill.checkpoints()
    assert checkpoint.failed_at is not None
    failed = scrape(backfill.url)
    assert (failed[UNATTENDED], failed[RUNNING]) == (checkpoint.failed_at.timestamp(), 0)
    seen: list[Samples] = []
    backfill.run(Listed(prices(9), before=lambda _: seen.append(scrape(backfill.url))))
    assert UNATTENDED not in {series for scraped in (*seen, scrape(backfill.url)) for series in scraped}


def test_range_whose_process_died_is_unattended_since_its_last_sign_of_life(backfill: Backfill) -> None:
    with Claim(backfill.connect, EVERYTHING, run_id=uuid4()) as claim:
        assert claim.take(4)
        assert scrape(backfill.url)[RUNNING] == 1
    (checkpoint,) = backfill.checkpoints()
    left = scrape(backfill.url)
    assert (left[RUNNING], left[UNATTENDED]) == (0, checkpoint.updated_at.timestamp())


@pytest.mark.parametrize(
    ("loaded", "covered"),
    [
        (EVERYTHING, True),
        (Range(object_id(1), object_id(9)), True),
        (Range(object_id(2), object_id(8)), True),
        (Range(upper=object_id(8)), True),
        (Range(lower=object_id(3)), False),
        (Range(upper=object_id(7)), False),
    ],
)
def test_range_that_failed_is_made_good_by_a_later_run_around_it(
    backfill: Backfill, loaded: Range, covered: bool
) -> None:
    with pytest.raises(SourceGoneError):
        backfill.run(Listed(prices(9), before=break_off), Range(object_id(2), object_id(8)), batch_size=2)
    backfill.run(Listed(prices(9)), loaded)
    assert (UNATTENDED not in scrape(backfill.url)) is covered


def test_repeat_that_failed_is_unattended_though_the_range_was_loaded_before(backfill: Backfill) -> None:
    backfill.run(Listed(prices(9)))
    with pytest.raises(SourceGoneError):
        backfill.run(Listed(prices(9), before=break_off))
    assert UNATTENDED in scrape(backfill.url)


def test_failed_inserts_are_counted(backfill: Backfill) -> None:
    backfill.run(Listed(prices(4)))
    backfill.execute(f"UPDATE {CHECKPOINTS} SET insert_errors = 5")
    assert scrape(backfill.url)[INSERT_ERRORS] == 5


# The database


@pytest.mark.slow
def test_scrape_reads_the_ledger_and_the_checkpoints_and_no_other_table(
    catalogue: Catalogue, backfill: Backfill
) -> None:
    catalogue.add_many(3)
    catalogue.run()
    backfill.run(Listed(prices(3)))
    catalogue.execute("CREATE ROLE pin_narrow LOGIN")
    try:
        catalogue.execute("GRANT USAGE ON SCHEMA catalog, invest_analytics TO pin_narrow")
        catalogue.execute(f"GRANT SELECT ON catalog.popularity_runs, {CHECKPOINTS} TO pin_narrow")
        with exporter(as_role(catalogue.url, "pin_narrow")) as (_, address):
            assert get(address)[PROCESSED] == 3
    finally:
        catalogue.execute("DROP OWNED BY pin_narrow")
        catalogue.execute("DROP ROLE pin_narrow")


@pytest.mark.slow
def test_database_that_cannot_be_reached_is_a_figure_and_the_exporter_recovers_by_itself(
    catalogue: Catalogue, postgres_url: str
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(catalogue.url)["dbname"]
    with exporter(as_role(catalogue.url, READER)) as (process, address):
        assert get(address)[UP] == 1
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            try:
                assert get(address) == {UP: 0}
            finally:
                connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert get(address)[UP] == 1
        assert process.poll() is None
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert "the pipelines' tables cannot be read" in said
    assert "Traceback" not in said


@pytest.fixture
def postgres_url(postgres: object, database_url: str) -> str:
    return database_url.replace(str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]), "postgres")


@pytest.mark.slow
def test_server_that_is_not_there_is_a_figure(database_url: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with exporter(f"postgresql://pin_reader:hunter2@127.0.0.1:{nobody.getsockname()[1]}/pin") as (process, address):
            assert get(address) == {UP: 0}
            process.terminate()
            _, said = process.communicate(timeout=30)
    assert "hunter2" not in said


@pytest.mark.slow
def test_tables_that_are_not_there_yet_are_a_figure(postgres_url: str) -> None:
    with exporter(postgres_url) as (_, address):
        assert get(address) == {UP: 0}


# The process


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_exporter_ends_in_order(database_url: str, by: signal.Signals) -> None:
    with exporter(as_role(database_url, READER)) as (process, address):
        get(address)
        process.send_signal(by)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def run_exporter(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "exporter", *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
def test_port_that_is_taken_is_named(taken_port: int) -> None:
    refused = run_exporter("--port", str(taken_port), PIN_POSTGRES_URL="postgresql://pin_reader@127.0.0.1/pin")
    assert refused.returncode == 1
    assert refused.stderr == f"Error: --address 127.0.0.1 --port {taken_port}: Address already in use\n"


@pytest.mark.slow
def test_address_of_the_database_is_required_and_nothing_else() -> None:
    refused = run_exporter()
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: PIN_POSTGRES_URL is not set")


class TestPromtool:
    pytestmark = needs_promtool

    def test_finds_nothing_wrong_with_the_metrics_but_the_hours_of_the_spec(
        self, catalogue: Catalogue, backfill: Backfill
    ) -> None:
        catalogue.add_many(3)
        catalogue.run()
        with pytest.raises(SourceGoneError):
            backfill.run(Listed(prices(9), before=break_off))
        checked = promtool("check", "metrics", stdin=exposition(catalogue.url))
        assert checked.stderr.splitlines() == [f'{STALENESS} use base unit "seconds" instead of "hours"']
