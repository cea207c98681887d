"""The proxy of the production set-up: a real nginx with its configuration, in front of stand-ins for the webservers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from pin_pipelines.local.servers import find_port
from pin_pipelines_tests.support import PROJECT_ROOT
from pin_pipelines_tests.support.waiting import until

CONFIGURATION = PROJECT_ROOT / "docker" / "nginx" / "nginx.conf"
# Debian installs it where only root looks by default.
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")
OPENSSL = shutil.which("openssl")

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass
class Webserver:
    """A stand-in for one of Dagster's: it answers everything with what it was asked, and echoes by websocket.

    Attributes:
        asked: the paths of all that reached it.
    """

    name: str
    port: int = 0
    asked: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> JSONResponse:
        self.asked.append(request.url.path)
        return JSONResponse({"server": self.name, "path": request.url.path, "headers": dict(request.headers)})

    async def echo(self, websocket: WebSocket) -> None:
        self.asked.append(websocket.url.path)
        await websocket.accept(subprotocol="graphql-ws")
        await websocket.send_json({"server": self.name, "received": await websocket.receive_json()})
        await websocket.close()

    @contextmanager
    def serving(self) -> Iterator[None]:
        app = Starlette(
            routes=[
                WebSocketRoute("/graphql", self.echo),
                Route("/{path:path}", self.answer, methods=_METHODS),
            ]
        )
        # Of the protocols that uvicorn knows, the one that is not deprecated by `websockets` itself.
        server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, ws="websockets-sansio", log_level="error", lifespan="off")
        )
        thread = threading.Thread(target=server.run, name=self.name)
        thread.start()
        try:
            until(lambda: server.started, f"{self.name} to answer")
            self.port = server.servers[0].sockets[0].getsockname()[1]
            yield
        finally:
            server.should_exit = True
            thread.join()


@dataclass(frozen=True)
class Proxy:
    """A running proxy, its two ports, what is behind it, and the folder of its users."""

    operators_port: int
    analysts_port: int
    operators: Webserver
    analysts: Webserver
    users: Path
    log: Path


@contextmanager
def nginx(users: Mapping[str, str]) -> Iterator[Proxy]:
    """Run it.

    Args:
        users: content of the users' files, by name; a file that is not named is not there.
    """
    assert NGINX is not None
    # Not pytest's own folder: nginx's workers run as another user where the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="pin-nginx-"))
    folder.chmod(0o755)
    operators, analysts = Webserver("operators"), Webserver("analysts")
    try:
        with ExitStack() as stack:
            stack.enter_context(operators.serving())
            stack.enter_context(analysts.serving())
            (folder / "users").mkdir()
            for name, content in users.items():
                (folder / "users" / name).write_text(content)
            ports = find_port(0), find_port(0)
            (folder / "nginx.conf").write_text(_configuration(folder, ports, operators, analysts))
            log = folder / "log"
            command = [NGINX, "-c", str(folder / "nginx.conf"), "-e", str(log), "-g", "daemon off;"]
            with log.open("wb") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                for port in ports:
                    until(partial(_listens, process, port, log), "nginx to listen")
                yield Proxy(*ports, operators, analysts, folder / "users", log)
            finally:
                process.terminate()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configuration(folder: Path, ports: tuple[int, int], operators: Webserver, analysts: Webserver) -> str:
    """The one that the compose file mounts, with the places and names that only a container has replaced."""
    text = CONFIGURATION.read_text()
    for there, here in {
        " /tmp/": f" {folder}/",
        "listen 8080;": f"listen 127.0.0.1:{ports[0]};",
        "listen 8081;": f"listen 127.0.0.1:{ports[1]};",
        "http://webserver:3000;": f"http://127.0.0.1:{operators.port};",
        "http://webserver-read-only:3000;": f"http://127.0.0.1:{analysts.port};",
        "/etc/nginx/users/": f"{folder}/users/",
        "/dev/stdout": f"{folder}/access.log",
        "/dev/stderr": f"{folder}/log",
    }.items():
        assert there in text
        text = text.replace(there, here)
    return text


def _listens(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def hashed(password: str) -> str:
    """As the README says to make it."""
    assert OPENSSL is not None
    command = [OPENSSL, "passwd", "-6", "-stdin"]
    return subprocess.run(command, input=password, capture_output=True, text=True, check=True).stdout.strip()


def parsed(body: bytes) -> dict[str, object]:
    answer: dict[str, object] = json.loads(body)
    return answer
