"""Who works on a data folder, and what a killed owner left running there.

One command at a time owns a folder, by a file lock that the kernel frees when the process is gone. Every process
that the owner starts inherits a mark in its environment, however deep it is nested and whichever session it makes
for itself; so what a SIGKILL left behind is found by the next owner, and nothing else is ever touched.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.local.postgres import server_processes

MARK = "PIN_LOCAL_STACK"

# A run of the pipelines stops after the batch in hand, Dagster's servers within a few seconds.
PATIENCE_SECONDS = 20.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.1


def postgres_dir(data_dir: Path) -> Path:
    """Where PostgreSQL's files are within a data folder."""
    return data_dir / "postgres"


@dataclass(frozen=True)
class Ownership:
    """A data folder that this process owns."""

    data_dir: Path
    ending: threading.Event
    """Set it when clearing up begins: from then on no signal interrupts."""


@contextmanager
def owned(data_dir: Path, command: str) -> Iterator[Ownership]:
    """Own the data folder, cleared of what a killed owner left running. Signals raise KeyboardInterrupt.

    Args:
        data_dir: the folder; made if it is not there.
        command: what the owner is called in messages to others.

    Raises:
        LocalStackError: another command owns it, or what was left does not end.
    """
    data_dir = data_dir.expanduser().resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(data_dir / "lock", timeout=0)
    owner = data_dir / "owner"
    try:
        lock.acquire()
    except Timeout:
        raise LocalStackError(
            f"{data_dir} is in use by {_read_owner(owner)}. End it with Ctrl-C or `kill`, wait until it is done, "
            "or give this command a folder of its own with --data-dir."
        ) from None
    try:
        owner.write_text(f"`pin-pipelines {command}` (pid {os.getpid()}, since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC)")
        with _interrupted_by_signals() as ending:
            end_marked_processes(data_dir)
            yield Ownership(data_dir, ending)
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _read_owner(owner: Path) -> str:
    try:
        return owner.read_text()
    except FileNotFoundError:
        return "another `pin-pipelines` command, which is just starting or ending"


def marked_processes(data_dir: Path) -> list[psutil.Process]:
    """Every process that carries the folder's mark, but this one and PostgreSQL's, which is stopped in its own way."""
    postgres = server_processes(postgres_dir(data_dir))
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _mark(process) == str(data_dir) and process not in postgres
    ]


def _mark(process: psutil.Process) -> str | None:
    # Another user's, or one that is gone or a zombie: not of this stack, or no longer.
    with suppress(psutil.Error, OSError):
        return process.environ().get(MARK)
    return None


def end_marked_processes(data_dir: Path) -> None:
    """Ask all marked processes to end, give them time, and kill those that are left.

    Raises:
        LocalStackError: naming what cannot be killed.
    """
    for process in marked_processes(data_dir):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    asked = time.monotonic()
    while left := marked_processes(data_dir):
        waited = time.monotonic() - asked
        if waited > PATIENCE_SECONDS + _KILL_SECONDS:
            names = ", ".join(f"{process.pid}" for process in left)
            raise LocalStackError(f"processes of {data_dir} do not end: {names}. End them by hand.")
        # Looked for again each time, since a dying server may just have started another process.
        for process in left if waited > PATIENCE_SECONDS else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_POLL_SECONDS)


@contextmanager
def _interrupted_by_signals() -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, unless the end has begun; then ignore them.

    A shell starts background commands with SIGINT ignored, and Python then leaves it so; hence the handlers are
    set in any case. SIGHUP alone stays ignored where it was, for that is what ``nohup`` asks for.
    """
    ending = threading.Event()

    def interrupt(*_: object) -> None:
        if not ending.is_set():
            ending.set()
            raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for each, handler in before.items():
        if each is not signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield ending
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
