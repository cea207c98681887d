"""The local stack: what it starts, what it refuses, and that nothing of it is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import dagster as dg
import psutil
import psycopg
import pytest
import requests

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.defs.sensor import BACKFILL_SENSOR
from pin_pipelines.local.ownership import MARK, end_marked_processes, owned, postgres_dir
from pin_pipelines.local.postgres import EmbeddedPostgres, EmbeddedPostgresError, server_processes
from pin_pipelines.local.stack import PRICED_OBJECTS, local_stack
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL, set_flag
from pin_pipelines_tests.support.command_line import COMMAND
from pin_pipelines_tests.support.daemon import make_due
from pin_pipelines_tests.support.stack import ask, everything_of, launch_today, run_status, up
from pin_pipelines_tests.support.waiting import until

pytestmark = pytest.mark.slow


def ignore(_: str) -> None:
    """What the stack says of its steps."""


def test_up_from_a_background_shell_runs_partitions_and_ends_by_sigint_with_nothing_left(data_dir: Path) -> None:
    with up(data_dir) as stack:
        assert "no catalogue yet" in stack.said
        schedules = ask(
            stack.address,
            '{ repositoryOrError(repositorySelector: {repositoryName: "__repository__", '
            'repositoryLocationName: "pin_pipelines"}) '
            "{ ... on Repository { schedules { name scheduleState { status } } } } }",
        )["repositoryOrError"]["schedules"]
        assert {"name": "popularity_recompute_nightly", "scheduleState": {"status": "RUNNING"}} in schedules

        run_id = launch_today(stack.address)
        until(lambda: run_status(stack.address, run_id) in {"SUCCESS", "FAILURE", "CANCELED"}, "the run to end")
        assert run_status(stack.address, run_id) == "SUCCESS"

        for other in ("up", "demo"):
            refused = subprocess.run(
                [*COMMAND, other, "--data-dir", str(data_dir)], capture_output=True, text=True, timeout=60, check=False
            )
            assert refused.returncode == 1
            assert f"{data_dir} is in use by `pin-pipelines up` (pid {stack.process.pid}" in refused.stderr
            assert "--data-dir" in refused.stderr

        assert stack.end(signal.SIGINT) == 0
        assert everything_of(data_dir) == []


def test_up_serves_prices_and_loads_them_once_the_flag_is_on(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with up(data_dir) as stack:
        environment = stack.environment
        prices = f"{environment['PIN_TALENT_BASE_URL']}/api/v1/property-object-prices?take=3"
        bearer = {"Authorization": f"Bearer {environment['PIN_TALENT_TOKEN']}"}
        assert len(requests.get(prices, headers=bearer, timeout=10).json()["items"]) == 3
        assert requests.get(prices, timeout=10).status_code == 401

        with psycopg.connect(stack.postgres_url) as connection:
            set_flag(connection, PRICE_BACKFILL, enabled=True)
        monkeypatch.setenv("PIN_DAGSTER_POSTGRES_URL", environment["PIN_DAGSTER_POSTGRES_URL"])
        with dg.DagsterInstance.from_config(environment["DAGSTER_HOME"]) as instance:
            make_due(instance, BACKFILL_SENSOR)
        runs = (
            '{ runsOrError(filter: {pipelineName: "price_history_backfill"}) { ... on Runs { results { status } } } }'
        )
        until(
            lambda: ask(stack.address, runs)["runsOrError"]["results"] == [{"status": "SUCCESS"}], "the run", seconds=90
        )

        # Nothing of the stack keeps ClickHouse open when the run has ended.
        with open_clickhouse(environment["PIN_CLICKHOUSE_URL"], wait_seconds=10) as client:
            assert facts.count_objects(client, None, None) == PRICED_OBJECTS
        assert stack.end(signal.SIGTERM) == 0
        assert everything_of(data_dir) == []


def test_what_a_killed_up_leaves_is_cleared_by_the_next_and_sigterm_leaves_nothing(data_dir: Path) -> None:
    with up(data_dir) as stack:
        stack.end(signal.SIGKILL)
        left = everything_of(data_dir)
        assert any("dagster_webserver" in command for command in left)
        assert any("postgres" in command for command in left)

    with up(data_dir) as stack:
        webservers = [command for command in everything_of(data_dir) if "dagster_webserver" in command]
        assert len(webservers) == 1
        assert ask(stack.address, "{ version }")
        assert stack.end(signal.SIGTERM) == 0
        assert everything_of(data_dir) == []


def test_runs_that_went_down_with_a_stack_are_reported_as_failed_by_the_next(data_dir: Path) -> None:
    statuses = {
        dg.DagsterRunStatus.STARTED: dg.DagsterRunStatus.FAILURE,
        dg.DagsterRunStatus.SUCCESS: dg.DagsterRunStatus.SUCCESS,
    }
    job = dg.GraphDefinition(name="anything", node_defs=[]).to_job()
    with owned(data_dir, "demo") as ownership, local_stack(ownership, ignore), dg.DagsterInstance.get() as instance:
        run_ids = [instance.create_run_for_job(job, status=status).run_id for status in statuses]

    with owned(data_dir, "demo") as ownership, local_stack(ownership, ignore), dg.DagsterInstance.get() as instance:
        found = [run.status for run_id in run_ids if (run := instance.get_run_by_id(run_id)) is not None]
        assert found == list(statuses.values())


def test_a_server_that_dies_takes_the_stack_down_and_is_named(data_dir: Path) -> None:
    with up(data_dir) as stack:
        (daemon,) = (child for child in psutil.Process(stack.process.pid).children() if "run" in child.cmdline())
        daemon.kill()
        assert stack.process.wait(timeout=60) == 1
        assert "the daemon ended by itself (exit code -9)" in stack.said
        assert str(data_dir / "logs" / "daemon.log") in stack.said
        assert everything_of(data_dir) == []


def test_a_taken_port_is_refused_before_anything_starts(data_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = subprocess.run(
            [*COMMAND, "up", "--port", str(port), "--data-dir", str(data_dir)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert refused.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in refused.stderr
    assert "--port" in refused.stderr
    assert not postgres_dir(data_dir).exists()


def test_another_folder_s_processes_are_not_touched(data_dir: Path) -> None:
    environment = os.environ | {MARK: f"{data_dir}-other"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as other:
        end_marked_processes(data_dir)
        assert other.poll() is None
        other.kill()


def test_marked_processes_that_ignore_sigterm_are_killed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pin_pipelines.local.ownership.PATIENCE_SECONDS", 0.5)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", stubborn],
        env=os.environ | {MARK: str(data_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end_marked_processes(data_dir)
        assert process.wait(timeout=5) == -signal.SIGKILL


# The embedded PostgreSQL


def answers(server: EmbeddedPostgres) -> bool:
    with psycopg.connect(server.url("postgres")) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


def test_postgres_works_in_a_deep_folder_with_spaces(data_dir: Path) -> None:
    folder = data_dir / "it's a folder" / Path(*["deep"] * 30) / "postgres"
    folder.parent.mkdir(parents=True)
    with EmbeddedPostgres(folder) as server:
        assert answers(server)
    assert server_processes(folder) == []


def test_postgres_keeps_its_data_over_a_crash(data_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir(data_dir)) as server:
        with psycopg.connect(server.url("postgres")) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1")
        server.restart("immediate")
        with psycopg.connect(server.url("postgres")) as connection:
            assert connection.execute("SELECT * FROM kept").fetchone() == (1,)


def test_postgres_starts_beside_a_pid_file_that_names_somebody_else(data_dir: Path) -> None:
    folder = postgres_dir(data_dir)
    with EmbeddedPostgres(folder) as server:
        lines = (folder / "postmaster.pid").read_text().splitlines()
        server.stop("immediate")
        (folder / "postmaster.pid").write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
        server.start()
        assert answers(server)


def test_postgres_left_by_a_killed_owner_is_replaced(data_dir: Path) -> None:
    left = EmbeddedPostgres(postgres_dir(data_dir))
    left.start()
    before = {process.pid for process in server_processes(postgres_dir(data_dir))}
    with EmbeddedPostgres(postgres_dir(data_dir)) as server:
        assert answers(server)
        assert before.isdisjoint(process.pid for process in server_processes(postgres_dir(data_dir)))


def test_an_unfinished_initdb_is_made_anew(data_dir: Path) -> None:
    unfinished = data_dir / "postgres.unfinished"
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(postgres_dir(data_dir)) as server:
        assert answers(server)
    assert not unfinished.exists()


def test_postgres_that_cannot_start_shows_the_end_of_its_log(data_dir: Path) -> None:
    folder = postgres_dir(data_dir)
    with EmbeddedPostgres(folder):
        pass
    (folder / "postgresql.auto.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(EmbeddedPostgresError, match=r"did not start;(.|\n)*no_such_setting"):
        EmbeddedPostgres(folder).start()


def test_an_address_is_given_only_while_the_server_runs(data_dir: Path) -> None:
    server = EmbeddedPostgres(postgres_dir(data_dir))
    with pytest.raises(EmbeddedPostgresError, match="is not started"):
        server.url("postgres")
