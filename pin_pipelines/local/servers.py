"""Dagster's webserver and daemon, started directly.

Not through ``dagster dev``: from a background shell that ignores SIGINT, and after SIGTERM it leaves processes
running. Here each has a session of its own, and whatever they start is found by its mark (``ownership``).
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.local.stack import LocalStack

HOST = "127.0.0.1"

_ANSWER_SECONDS = 120.0
_POLL_SECONDS = 0.25
_LOG_TAIL_LINES = 25


@dataclass(frozen=True)
class Server:
    """A server process of the stack."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def find_port(port: int) -> int:
    """The port itself if it is free, any free one for 0.

    Raises:
        LocalStackError: the port cannot be used.
    """
    with socket.socket() as probe:
        # As the webserver does, so that a port of connections that just ended counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise LocalStackError(
                f"port {port} on {HOST} cannot be used ({error.strerror}). "
                "Choose another with --port, or let --port 0 find a free one."
            ) from error
        found: int = probe.getsockname()[1]
        return found


def start_servers(stack: LocalStack, port: int) -> list[Server]:
    """Start webserver and daemon."""
    return [start_webserver(stack, port), _start(stack, "daemon", ["dagster._daemon", "run"])]


def start_webserver(stack: LocalStack, port: int, *, read_only: bool = False) -> Server:
    """Start a webserver, for operators, or as analysts get it: everything to be seen, and nothing to be done."""
    module = ["dagster_webserver", "-h", HOST, "-p", str(port)]
    if read_only:
        return _start(stack, "webserver-read-only", [*module, "--read-only"])
    return _start(stack, "webserver", module)


def _start(stack: LocalStack, name: str, module: Sequence[str]) -> Server:
    log = stack.data_dir / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    # Not by the names of the console scripts, since PATH may not have this environment's.
    command = [sys.executable, "-m", *module, "-w", str(stack.project_dir / "workspace.yaml")]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - every part of the command is ours
            command,
            cwd=stack.project_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Out of the terminal's reach: Ctrl-C is for the owner, who then stops everything in order.
            start_new_session=True,
        )
    return Server(name, process, log)


def wait_until_answering(servers: Sequence[Server], port: int) -> None:
    """Wait until the webserver answers.

    Raises:
        LocalStackError: it does not, or a server ended.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not _answers(port):
        check_servers(servers)
        if time.monotonic() > deadline:
            raise LocalStackError(
                f"the webserver did not answer on {HOST}:{port} within {_ANSWER_SECONDS:.0f} s; "
                f"see the logs in {servers[0].log.parent}."
            )
        time.sleep(_POLL_SECONDS)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/server_info")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def watch_servers(servers: Sequence[Server]) -> NoReturn:
    """Return never, but raise when a server ends by itself.

    Raises:
        LocalStackError: naming the server, with the end of its log.
    """
    while True:
        check_servers(servers)
        time.sleep(_POLL_SECONDS)


def check_servers(servers: Sequence[Server]) -> None:
    """Raise when a server has ended by itself.

    Raises:
        LocalStackError: naming the server, with the end of its log.
    """
    for server in servers:
        code = server.process.poll()
        if code is not None:
            tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
            raise LocalStackError(
                f"the {server.name} ended by itself (exit code {code}); the end of {server.log}:\n{tail}"
            )
