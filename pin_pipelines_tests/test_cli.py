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
from pathlib import Path

import psutil
import psycopg
import pytest

from pin_pipelines.local.ownership import marked_processes, postgres_dir
from pin_pipelines.local.postgres import EmbeddedPostgres, server_processes

COMMAND = [sys.executable, "-c", "from pin_pipelines.cli import app; app(prog_name='pin-pipelines')"]


def command(*arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIN_")}
    if url is not None:
        environment["PIN_POSTGRES_URL"] = url
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


# The demo


@pytest.fixture(scope="module")
def demo_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pin-demo-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def interrupted_demo(demo_dir: Path) -> tuple[int, str]:
    """A first demo, ended by SIGTERM while it plays the nights; its exit code and what it said."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--cards", "200", "--data-dir", str(demo_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: nights_played(demo_dir) >= 3)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    return process.returncode, said


@pytest.fixture(scope="module")
def demo(demo_dir: Path, interrupted_demo: tuple[int, str]) -> subprocess.CompletedProcess[str]:
    """The same command again, to its end."""
    return command("demo", "--cards", "200", "--data-dir", str(demo_dir))


def nights_played(demo_dir: Path) -> int:
    server = EmbeddedPostgres(postgres_dir(demo_dir))
    del server
    socket_dir = postgres_dir(demo_dir)
    try:
        with psycopg.connect(f"postgresql://postgres@/pin?host={socket_dir}&port=5432") as connection:
            row = connection.execute("SELECT count(*) FROM catalog.popularity_runs").fetchone()
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
        return 0
    assert row is not None
    return int(row[0])


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def left_running(data_dir: Path) -> list[psutil.Process]:
    return [*marked_processes(data_dir), *server_processes(postgres_dir(data_dir))]
