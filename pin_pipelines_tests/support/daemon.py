"""Dagster's own processes beside a test: its daemon, and runs that it launches as it does in production."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from pin_pipelines.local.ownership import MARK, end_marked_processes
from pin_pipelines_tests.support import PROJECT_ROOT
from pin_pipelines_tests.support.waiting import until

WORKSPACE = str(PROJECT_ROOT / "workspace.yaml")
_ENDED = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}


@contextmanager
def daemon(tmp_path: Path) -> Iterator[None]:
    """Dagster's daemon as the environment has it; gone with all that it started."""
    with (
        (tmp_path / "daemon.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-w", str(PROJECT_ROOT / "workspace.yaml")],
            env=os.environ | {MARK: str(tmp_path)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ),
    ):
        try:
            yield
        finally:
            end_marked_processes(tmp_path)


def launch(
    job: str, *, partition: str | None = None, run_config: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Queue a run by Dagster's command line; the daemon has a process started for it."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "dagster", "job", "launch", "-w", WORKSPACE, "-j", job),
            *("--tags", json.dumps({"dagster/partition": partition} if partition else {})),
            *("--config-json", json.dumps(run_config or {})),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def make_due(instance: dg.DagsterInstance, sensor: str) -> None:
    """As if the sensor's last tick were long ago: the daemon evaluates it at its next look."""
    for state in instance.all_instigator_state():
        if state.instigator_name == sensor and state.instigator_data is not None:
            data = state.instigator_data._replace(last_tick_timestamp=0.0, last_tick_start_timestamp=0.0)
            instance.update_instigator_state(state.with_data(data))


def wait_until_ended(instance: dg.DagsterInstance, runs: int) -> list[dg.DagsterRun]:
    """So many runs, the oldest first."""

    def ended() -> list[dg.DagsterRun]:
        return [run for run in instance.get_runs() if run.status in _ENDED]

    until(lambda: len(ended()) >= runs, f"{runs} runs to end", seconds=120)
    return ended()[::-1]
