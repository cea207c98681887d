"""`pin-pipelines up` under test: started in the background, asked over GraphQL, ended by a signal."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import requests

from pin_pipelines.local.ownership import MARK
from pin_pipelines_tests.support.command_line import COMMAND
from pin_pipelines_tests.support.waiting import until


def everything_of(data_dir: Path) -> list[str]:
    """Each process that has the folder's mark or works in it, whoever it belongs to; not by the stack's own search."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(data_dir) or process.cwd().startswith(str(data_dir)):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@dataclass
class Up:
    """`pin-pipelines up`, running in the background."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def address(self) -> str:
        return next(word for word in self.said.split() if word.startswith("http://"))

    @property
    def environment(self) -> dict[str, str]:
        """What it says that another terminal is to be given."""
        _, _, named = self.said.partition("another terminal:\n  . ")
        (file,) = shlex.split(named.splitlines()[0])
        exports = (line.removeprefix("export ") for line in Path(file).read_text().splitlines())
        return dict(shlex.split(line)[0].split("=", 1) for line in exports)

    @property
    def postgres_url(self) -> str:
        return self.environment["PIN_POSTGRES_URL"]

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.said or self.process.poll() is not None, text, seconds=90)
        assert text in self.said, self.said

    def end(self, by: signal.Signals) -> int:
        self.process.send_signal(by)
        return self.process.wait(timeout=60)


@contextmanager
def up(data_dir: Path) -> Iterator[Up]:
    """Started as a background shell starts it: SIGINT is ignored."""
    output = data_dir / f"up-{time.monotonic_ns()}.txt"
    with (
        output.open("wb") as out,
        subprocess.Popen(
            [*COMMAND, "up", "--port", "0", "--data-dir", str(data_dir)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        ) as process,
    ):
        try:
            started = Up(process, output)
            started.wait_for("Ctrl-C ends everything.")
            yield started
        finally:
            process.kill()


def ask(address: str, query: str, **variables: Any) -> dict[str, Any]:
    answer = requests.post(f"{address}/graphql", json={"query": query, "variables": variables}, timeout=30).json()
    assert "errors" not in answer, answer
    data: dict[str, Any] = answer["data"]
    return data


def launch_today(address: str) -> str:
    """Launch today's partition as the UI does, and return the run id."""
    parameters = {
        "selector": {
            "repositoryName": "__repository__",
            "repositoryLocationName": "pin_pipelines",
            "jobName": "popularity_recompute",
        },
        "runConfigData": json.dumps({}),
        "executionMetadata": {
            "tags": [{"key": "dagster/partition", "value": datetime.now(UTC).date().isoformat()}],
        },
    }
    launched = ask(
        address,
        "mutation($p: ExecutionParams!) { launchPipelineExecution(executionParams: $p) "
        "{ __typename ... on LaunchRunSuccess { run { runId } } } }",
        p=parameters,
    )["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id: str = launched["run"]["runId"]
    return run_id


def run_status(address: str, run_id: str) -> str:
    answer = ask(address, "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
    status: str = answer["runOrError"]["status"]
    return status
