"""`pin-pipelines demo`: what it makes and runs, that it goes on where it was, and leaves nothing running."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pin_pipelines.local.ownership import marked_processes, postgres_dir
from pin_pipelines.local.postgres import PORT, EmbeddedPostgres, server_processes
from pin_pipelines_tests.support.command_line import COMMAND, command
from pin_pipelines_tests.support.databases import query
from pin_pipelines_tests.support.waiting import until

CARDS = 200

# One demo after the other in the same folder.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]


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
        until(lambda: nights_played(demo_dir) >= 3, "three nights")
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
