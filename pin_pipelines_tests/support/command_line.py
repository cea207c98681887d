"""`pin-pipelines` as a user gives it: in a process of its own, and what it printed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pin_pipelines.cli import app
from pin_pipelines_tests.support.forking import SERVER

# A process that imports everything itself, for what starts others in its turn or is sent signals.
COMMAND = [sys.executable, "-c", "from pin_pipelines.cli import app; app(prog_name='pin-pipelines')"]

_TIMEOUT_SECONDS = 120


def command(*arguments: str, url: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one to its end, with these variables of the pipelines' and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIN_", "DAGSTER_"))}
    environment |= variables
    if url is not None:
        environment["PIN_POSTGRES_URL"] = url
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        process = SERVER.Process(target=_run, args=(arguments, environment, output, errors))
        process.start()
        process.join(_TIMEOUT_SECONDS)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, _TIMEOUT_SECONDS, output.read_text(), errors.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, output.read_text(), errors.read_text())


def _run(arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path) -> None:
    """In the new process."""
    os.environ.clear()
    os.environ.update(environment)
    for file, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with file.open("wb") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    app(arguments, prog_name="pin-pipelines")


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The tables of two columns that a command printed."""
    rows = (line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│"))
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
