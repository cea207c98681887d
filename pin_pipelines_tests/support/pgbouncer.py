"""A real PgBouncer in front of a PostgreSQL server of the tests: on a Unix socket alone, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import psycopg

from pin_pipelines_tests.support.waiting import until

# Debian installs it where only root looks by default.
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")

_PORT = 6432


@contextmanager
def pgbouncer(server_url: str, **settings: int | str) -> Iterator[str]:
    """The address of the same database through a PgBouncer with these settings."""
    assert PGBOUNCER is not None
    address = urlsplit(server_url)
    socket_dir = Path(parse_qs(address.query)["host"][0])
    folder = Path(tempfile.mkdtemp(prefix="pin-bouncer-"))
    try:
        # PgBouncer does not run as root, and the server's socket is its owner's alone.
        owner = socket_dir.owner()
        shutil.chown(folder, owner)
        (folder / "pgbouncer.ini").write_text(_configuration(folder, socket_dir, **settings))
        as_owner = ["-u", owner] if os.getuid() == 0 else []
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PGBOUNCER, *as_owner, str(folder / "pgbouncer.ini")], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            url = f"postgresql://postgres@{address.path}?host={quote(str(folder), safe='/')}&port={_PORT}"
            until(lambda: _answers(process, url, log), "PgBouncer to answer")
            yield url
        finally:
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configuration(folder: Path, socket_dir: Path, **settings: int | str) -> str:
    lines = [
        "[databases]",
        f"* = host={socket_dir} port=5432 user=postgres",
        "[pgbouncer]",
        f"unix_socket_dir = {folder}",
        f"listen_port = {_PORT}",
        "auth_type = any",
        *(f"{name} = {value}" for name, value in settings.items()),
    ]
    return "\n".join(lines) + "\n"


def _answers(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
