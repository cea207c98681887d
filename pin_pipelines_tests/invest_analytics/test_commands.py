"""`pin-pipelines backfill`, as a user gives it: real processes, real stores."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, set_flag
from pin_pipelines_tests.support.command_line import COMMAND, command, shown
from pin_pipelines_tests.support.databases import query
from pin_pipelines_tests.support.price_backfill import object_id, price
from pin_pipelines_tests.support.waiting import until

pytestmark = pytest.mark.slow


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
        stored = f"SELECT 1 FROM {CHECKPOINTS} WHERE ingested_fact_count = 3"
        until(lambda: query(database_url, stored) == [(1,)], "the first page")
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
