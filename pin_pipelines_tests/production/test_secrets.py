"""Secrets, planted where each has its place, and looked for in all that Dagster stored and printed.

Under Dagster's own daemon and launcher, since it is them that hand settings from process to process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from pin_pipelines.catalog.defs.schedules import RECOMPUTE_JOB
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_JOB
from pin_pipelines.local.talent import Fault, TalentStandIn
from pin_pipelines_tests.support.catalogue import Catalogue
from pin_pipelines_tests.support.clickhouse_front import PASSWORD, ClickHouseFront
from pin_pipelines_tests.support.command_line import free_port
from pin_pipelines_tests.support.daemon import daemon, launch, wait_until_ended
from pin_pipelines_tests.support.leaks import ProcessList, stored, written
from pin_pipelines_tests.support.price_backfill import Backfill, prices
from pin_pipelines_tests.support.price_backfill_dagster import configure, switch

pytestmark = pytest.mark.slow

POSTGRES, DAGSTER, CLICKHOUSE, TALENT = (
    f"marked-{place}-5f1c9e" for place in ("postgres", "dagster", "clickhouse", "talent")
)
SECRETS = [POSTGRES, DAGSTER, CLICKHOUSE, PASSWORD, TALENT]
EXECUTE = [sys.executable, "-m", "dagster", "job", "execute", "-m", "pin_pipelines.definitions", "-j"]


def with_password(variable: str, password: str) -> str:
    """The address in a variable, with a password that the embedded server does not ask for."""
    address = os.environ[variable]
    user = address.partition("://")[2].partition("@")[0]
    return address.replace(f"{user}@", f"{user}:{password}@", 1)


@pytest.fixture
def compute_logs() -> str:
    """As in production: what steps print is kept."""
    return ""


@pytest.fixture
def talent(instance: dg.DagsterInstance, fronted: Backfill, monkeypatch: pytest.MonkeyPatch) -> Iterator[TalentStandIn]:
    """All that the pipelines need is there, and each secret is in its variable."""
    for variable, password in (("PIN_POSTGRES_URL", POSTGRES), ("PIN_DAGSTER_POSTGRES_URL", DAGSTER)):
        monkeypatch.setenv(variable, with_password(variable, password))
    with TalentStandIn(objects=prices(30), token=TALENT) as stand_in:
        configure(monkeypatch, fronted.clickhouse_url, stand_in)
        yield stand_in


def all_that_is_stored(fronted: Backfill, folder: Path) -> str:
    """By Dagster in its database and its home, by the daemon in its log, by the pipelines in theirs."""
    return "\n".join([stored(dagster_url()), stored(fronted.url), written(folder)])


def dagster_url() -> str:
    return os.environ["PIN_DAGSTER_POSTGRES_URL"].replace("+psycopg2", "")


def secrets_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def test_no_secret_is_stored_printed_or_in_the_process_list(
    instance: dg.DagsterInstance, talent: TalentStandIn, catalogue: Catalogue, fronted: Backfill, tmp_path: Path
) -> None:
    catalogue.add_many(3)
    switch(fronted, on=True)
    with ProcessList() as processes, daemon(tmp_path):
        printed = launch(RECOMPUTE_JOB, partition=datetime.now(UTC).date().isoformat())
        runs = wait_until_ended(instance, 2)
    assert {run.job_name: run.status for run in runs} == dict.fromkeys(
        (RECOMPUTE_JOB, BACKFILL_JOB), dg.DagsterRunStatus.SUCCESS
    )
    found = "\n".join([all_that_is_stored(fronted, tmp_path), processes.shown, printed.stdout, printed.stderr])

    assert secrets_in(found) == []
    # What is looked through has been looked into: run rows, compressed snapshots, files, processes.
    snapshots = stored(dagster_url())
    assert "PIN_TALENT_TOKEN" in snapshots
    for run in runs:
        assert run.run_id in snapshots
        assert run.run_id in written(tmp_path)
        assert run.run_id in processes.shown


def gone(variable: str) -> str:
    """The address in a variable, with nobody at home there."""
    scheme, _, rest = os.environ[variable].partition("://")
    credentials = rest.partition("@")[0]
    return f"{scheme}://{credentials}@127.0.0.1:{free_port()}/pin"


def execute(job: str) -> subprocess.CompletedProcess[str]:
    """Run a job by Dagster's command line, which prints the run's log with every traceback."""
    today = {"dagster/partition": datetime.now(UTC).date().isoformat()} if job == RECOMPUTE_JOB else {}
    return subprocess.run(
        [*EXECUTE, job, "--tags", json.dumps(today)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("fault", "job", "said"),
    [
        ("PIN_POSTGRES_URL", RECOMPUTE_JOB, "OperationalError"),
        ("PIN_DAGSTER_POSTGRES_URL", RECOMPUTE_JOB, "OperationalError"),
        ("PIN_CLICKHOUSE_URL", BACKFILL_JOB, "ClickHouse at 127.0.0.1"),
        ("PIN_TALENT_BASE_URL", BACKFILL_JOB, "Talent"),
        ("ClickHouse's password", BACKFILL_JOB, "ClickHouse at 127.0.0.1"),
        ("Talent's token", BACKFILL_JOB, "401"),
    ],
)
def test_no_secret_is_in_what_a_run_says_that_fails(
    fault: str,
    job: str,
    said: str,
    talent: TalentStandIn,
    front: ClickHouseFront,
    fronted: Backfill,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch(fronted, on=True)
    storage = os.environ["PIN_DAGSTER_POSTGRES_URL"]
    match fault:
        case "ClickHouse's password":
            monkeypatch.setenv("PIN_CLICKHOUSE_URL", front.url_with_password(CLICKHOUSE))
        case "Talent's token":
            talent.fail(*(Fault.status(401) for _ in range(5)))
        case "PIN_TALENT_BASE_URL":
            monkeypatch.setenv(fault, f"http://127.0.0.1:{free_port()}")
        case variable:
            monkeypatch.setenv(variable, gone(variable))
    with ProcessList() as processes:
        printed = execute(job)
    monkeypatch.setenv("PIN_DAGSTER_POSTGRES_URL", storage)

    assert printed.returncode != 0
    assert said in printed.stdout + printed.stderr
    assert secrets_in("\n".join([printed.stdout, printed.stderr, processes.shown])) == []
    assert secrets_in(all_that_is_stored(fronted, tmp_path)) == []
