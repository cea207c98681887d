"""The proxy in front of Dagster's webservers: nothing passes without a password, and each group has a server."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from pin_pipelines_tests.support.nginx import NGINX, OPENSSL, Proxy, hashed, nginx

pytestmark = [
    pytest.mark.system_package,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
    pytest.mark.skipif(OPENSSL is None, reason="OpenSSL is not installed (Debian: apt-get install openssl)"),
]

OPERATOR = ("olga", "open-sesame-1")
ANALYST = ("anton", "open-sesame-2")

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"]
PATHS = [
    "/",
    "/graphql",
    "/graphql?query=mutation",
    "/server_info",
    "/runs/0190a6f2-7c1e-7d3a-9b54-3f0c2a1d4e5f",
    "/logs/run/compute.out",
    "/download_debug/run",
    "/report_asset_materialization/catalog/property_object_popularity",
    "/static/js/main.js",
    "/favicon.png",
    "/.htaccess",
    "//",
    "/../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/nginx_status",
    "/50x.html",
]


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    users = {
        "operators": f"{OPERATOR[0]}:{hashed(OPERATOR[1])}\n",
        "analysts": f"{ANALYST[0]}:{hashed(ANALYST[1])}\n",
    }
    with nginx(users) as running:
        yield running


def basic(user: tuple[str, str]) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(":".join(user).encode()).decode()}


def ask(
    port: int,
    path: str = "/",
    *,
    user: tuple[str, str] | None = None,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """Status and, where it is the stand-in's, the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={**(basic(user) if user else {}), **(headers or {})})
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if response.status == http.HTTPStatus.OK and body else None
    finally:
        connection.close()


@pytest.mark.parametrize("method", METHODS)
def test_no_path_passes_without_a_password(proxy: Proxy, method: str) -> None:
    proxy.operators.asked.clear()
    proxy.analysts.asked.clear()
    for port in (proxy.operators_port, proxy.analysts_port):
        for path in PATHS:
            # What climbs above the root is a bad request before it is anything else.
            expected = {http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNAUTHORIZED}
            assert ask(port, path, method=method)[0] in expected, path
        assert ask(port, "/", method=method)[0] == http.HTTPStatus.UNAUTHORIZED
    assert (proxy.operators.asked, proxy.analysts.asked) == ([], [])


@pytest.mark.parametrize(
    "user",
    [ANALYST, (OPERATOR[0], "wrong"), (OPERATOR[0], ""), (OPERATOR[0], ANALYST[1]), ("", ""), ("nobody", "x")],
)
def test_nobody_but_an_operator_reaches_the_operators_server(proxy: Proxy, user: tuple[str, str]) -> None:
    proxy.operators.asked.clear()
    for path in PATHS:
        assert ask(proxy.operators_port, path, user=user)[0] in {400, 401}, path
    assert proxy.operators.asked == []


def test_operators_password_does_not_open_the_analysts_server(proxy: Proxy) -> None:
    assert ask(proxy.analysts_port, user=OPERATOR)[0] == http.HTTPStatus.UNAUTHORIZED


def test_each_group_reaches_its_own_server(proxy: Proxy) -> None:
    assert ask(proxy.operators_port, "/runs", user=OPERATOR)[1]["server"] == "operators"
    assert ask(proxy.analysts_port, "/runs", user=ANALYST)[1]["server"] == "analysts"


def test_password_goes_no_further_and_the_address_that_was_asked_for_does(proxy: Proxy) -> None:
    _, answer = ask(proxy.operators_port, "/runs", user=OPERATOR, headers={"X-Forwarded-For": "192.0.2.7"})
    assert "authorization" not in answer["headers"]
    assert answer["headers"]["host"] == f"127.0.0.1:{proxy.operators_port}"
    assert answer["headers"]["x-forwarded-for"] == "192.0.2.7, 127.0.0.1"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_path_and_method_are_handed_on_as_they_are(proxy: Proxy, method: str) -> None:
    _, answer = ask(proxy.operators_port, "/assets/a%2Fb", user=OPERATOR, method=method)
    assert answer["path"] == "/assets/a/b"


def open_websocket(port: int, user: tuple[str, str] | None, origin: str | None = None) -> dict[str, object]:
    with connect(
        f"ws://127.0.0.1:{port}/graphql",
        additional_headers=basic(user) if user else {},
        origin=origin,  # type: ignore[arg-type]
        subprotocols=[Subprotocol("graphql-ws")],
        proxy=None,
    ) as websocket:
        assert websocket.subprotocol == "graphql-ws"
        websocket.send(json.dumps({"type": "connection_init"}))
        answer: dict[str, object] = json.loads(websocket.recv(timeout=10))
        return answer


def test_websocket_passes_with_a_password(proxy: Proxy) -> None:
    received = {"type": "connection_init"}
    assert open_websocket(proxy.operators_port, OPERATOR) == {"server": "operators", "received": received}
    assert open_websocket(proxy.analysts_port, ANALYST) == {"server": "analysts", "received": received}


@pytest.mark.parametrize("user", [None, ANALYST])
def test_websocket_does_not_pass_without_the_right_one(proxy: Proxy, user: tuple[str, str] | None) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        open_websocket(proxy.operators_port, user)
    assert refusal.value.response.status_code == http.HTTPStatus.UNAUTHORIZED


def foreign_origins(proxy: Proxy) -> list[str]:
    return [
        "https://evil.example",
        "null",
        f"http://127.0.0.1:{proxy.analysts_port}",
        f"http://127.0.0.1:{proxy.operators_port}.evil.example",
        "http://127.0.0.1",
    ]


def test_page_of_another_site_cannot_use_the_password_that_a_browser_remembers(proxy: Proxy) -> None:
    proxy.operators.asked.clear()
    for origin in foreign_origins(proxy):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        path = "/graphql?query=mutation"
        status, _ = ask(proxy.operators_port, path, user=OPERATOR, method="POST", headers=headers)
        assert status == http.HTTPStatus.FORBIDDEN, origin
        with pytest.raises(InvalidStatus):
            open_websocket(proxy.operators_port, OPERATOR, origin)
    # An image or a script names no origin, but browsers say whence it is asked for.
    for whence in ("cross-site", "same-site"):
        headers = {"Sec-Fetch-Site": whence}
        assert ask(proxy.operators_port, "/graphql?query=x", user=OPERATOR, headers=headers)[0] == 403
    assert proxy.operators.asked == []


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_own_pages_may_ask_and_links_from_elsewhere_may_lead_here(proxy: Proxy, scheme: str) -> None:
    own = f"{scheme}://127.0.0.1:{proxy.operators_port}"
    headers = {"Origin": own, "Sec-Fetch-Site": "same-origin"}
    assert ask(proxy.operators_port, "/graphql", user=OPERATOR, method="POST", headers=headers)[0] == 200
    assert open_websocket(proxy.operators_port, OPERATOR, own)["server"] == "operators"
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(proxy.operators_port, "/runs/1", user=OPERATOR, headers=headers)[0] == 200


def test_user_who_is_added_or_removed_counts_at_once() -> None:
    with nginx({"operators": "", "analysts": ""}) as proxy:
        assert ask(proxy.operators_port, user=OPERATOR)[0] == http.HTTPStatus.UNAUTHORIZED
        with (proxy.users / "operators").open("a") as users:
            users.write(f"{OPERATOR[0]}:{hashed(OPERATOR[1])}\n")
        assert ask(proxy.operators_port, user=OPERATOR)[0] == http.HTTPStatus.OK
        (proxy.users / "operators").write_text("")
        assert ask(proxy.operators_port, user=OPERATOR)[0] == http.HTTPStatus.UNAUTHORIZED


def test_without_the_file_of_users_nobody_gets_in() -> None:
    with nginx({"analysts": f"{ANALYST[0]}:{hashed(ANALYST[1])}\n"}) as proxy:
        for user in (None, OPERATOR, ANALYST):
            assert ask(proxy.operators_port, user=user)[0] in {401, 403, 500}
        assert proxy.operators.asked == []
        assert ask(proxy.analysts_port, user=ANALYST)[0] == http.HTTPStatus.OK
