"""`pin-pipelines` as a user gives it: in a process of its own, and what it printed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

COMMAND = [sys.executable, "-c", "from pin_pipelines.cli import app; app(prog_name='pin-pipelines')"]


def command(*arguments: str, url: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one to its end, with these variables of the pipelines' and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIN_", "DAGSTER_"))}
    environment |= variables
    if url is not None:
        environment["PIN_POSTGRES_URL"] = url
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


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
