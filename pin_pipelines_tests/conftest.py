"""One PostgreSQL server for the session, a database from a template for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from pin_pipelines.local.news_stand_ins import create_news_stand_ins
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.migrations import migrate
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines_tests.support import PROJECT_ROOT
from pin_pipelines_tests.support.catalogue import Catalogue
from pin_pipelines_tests.support.clickhouse_front import ClickHouseFront
from pin_pipelines_tests.support.databases import Database
from pin_pipelines_tests.support.news import News
from pin_pipelines_tests.support.price_backfill import Backfill
from pin_pipelines_tests.support.roles import MIGRATIONS, PIPELINE, apply_roles, as_role

_numbers = count(1)
_KEPT_DATABASES = 8
_ROOM_BYTES = 4 * 1024**3


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Let all that tests write go to memory, where there is room and nobody has named a place.

    Each test has databases of its own: to copy and to drop one takes 7 ms there, and up to 100 ms on a disk.
    """
    memory = Path("/dev/shm")
    if "TMPDIR" not in os.environ and memory.is_dir() and shutil.disk_usage(memory).free > _ROOM_BYTES:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for servers, for processes and for each other's locks."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Programs beside the tests are slow to start. The slow tests come first, so that no worker ends with one alone."""
    for item in items:
        if item.get_closest_marker("system_package"):
            item.add_marker(pytest.mark.slow)
    yield
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    # Some pairs of versions lose the groups without a word, and each worker starts the stacks that they share.
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    if config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError("pytest-xdist does not group: install the versions that constraints.txt names")


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    # Not pytest's own folder: PostgreSQL runs as another user where the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="pin-tests-"))
    try:
        with EmbeddedPostgres(folder / "postgres", {"max_wal_size": "256MB"}) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres) -> str:
    """A marketplace database: stand-ins for the cards, the roles of production, and all that the pipeline owns."""
    postgres.ensure_database("template_pin")
    url = postgres.url("template_pin")
    with psycopg.connect(url) as connection:
        create_stand_ins(connection)
    apply_roles(url)
    migrate(as_role(url, MIGRATIONS))
    return "template_pin"


@pytest.fixture(scope="session")
def server(postgres: EmbeddedPostgres) -> Database:
    """To make databases and to drop them."""
    return Database(postgres.url("postgres"))


@pytest.fixture(scope="session")
def abandoned() -> deque[str]:
    """Databases of tests that are over."""
    return deque()


@pytest.fixture
def new_database(server: Database, abandoned: deque[str]) -> Iterator[Callable[[str], str]]:
    """Copies a template database and returns the copy's name; the copies go some tests after this one.

    A backend ends a moment after its client, and DROP DATABASE waits for it in steps of 100 ms.
    """
    made: list[str] = []

    def copy(template: str) -> str:
        name = f"test_{next(_numbers)}"
        server.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')
        made.append(name)
        return name

    yield copy
    abandoned.extend(made)
    while len(abandoned) > _KEPT_DATABASES:
        server.execute(f'DROP DATABASE "{abandoned.popleft()}" WITH (FORCE)')


@pytest.fixture
def database_url(postgres: EmbeddedPostgres, template: str, new_database: Callable[[str], str]) -> str:
    return postgres.url(new_database(template))


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres, new_database: Callable[[str], str]) -> str:
    return postgres.url(new_database("template0"))


@pytest.fixture
def catalogue(database_url: str) -> Catalogue:
    return Catalogue(database_url)


@pytest.fixture
def clickhouse_url(tmp_path: Path) -> str:
    """A folder of the test's own: nothing is in it, and nobody holds it."""
    return f"chdb://{tmp_path / 'clickhouse'}"


@pytest.fixture
def open_folder(clickhouse_url: str) -> Iterator[str]:
    """The same folder, held open by this process: to open it takes 30 ms, and a test does so for each question."""
    with open_clickhouse(clickhouse_url):
        yield clickhouse_url


@pytest.fixture
def front(tmp_path: Path) -> Iterator[ClickHouseFront]:
    """ClickHouse's HTTP protocol over an empty engine."""
    with ClickHouseFront(tmp_path / "clickhouse") as front:
        yield front


@pytest.fixture
def fronted(database_url: str, front: ClickHouseFront) -> Backfill:
    """The price history backfill, through that protocol."""
    return Backfill(database_url, front.url).furnish()


@pytest.fixture(scope="session")
def news_template(postgres: EmbeddedPostgres) -> str:
    """The same with the branch of the ranking applied."""
    postgres.ensure_database("template_news")
    url = postgres.url("template_news")
    with psycopg.connect(url) as connection:
        create_news_stand_ins(connection)
    migrate(url)
    migrate(url, branch="news_ranking")
    return "template_news"


@pytest.fixture
def news(postgres: EmbeddedPostgres, news_template: str, new_database: Callable[[str], str]) -> News:
    """A database with the branch of the ranking."""
    return News(postgres.url(new_database(news_template)))


@pytest.fixture(scope="session")
def dagster_template(postgres: EmbeddedPostgres) -> str:
    """Dagster's own storage, with its tables made."""
    postgres.ensure_database("template_dagster")
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PIN_DAGSTER_POSTGRES_URL", postgres.dagster_url("template_dagster"))
        shutil.copy(PROJECT_ROOT / "dagster.yaml", home)
        dg.DagsterInstance.from_config(home).dispose()
    return "template_dagster"


@pytest.fixture
def compute_logs() -> str:
    """What is added to dagster.yaml. Nobody reads what steps print, and to catch it takes four processes a step."""
    return "compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}\n"


@pytest.fixture
def instance(
    postgres: EmbeddedPostgres,
    dagster_template: str,
    new_database: Callable[[str], str],
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compute_logs: str,
) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance as the project's dagster.yaml says, beside the test's marketplace database."""
    monkeypatch.setenv("PIN_POSTGRES_URL", as_role(database_url, PIPELINE))
    monkeypatch.setenv("PIN_DAGSTER_POSTGRES_URL", postgres.dagster_url(new_database(dagster_template)))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text((PROJECT_ROOT / "dagster.yaml").read_text() + compute_logs)
    instance = dg.DagsterInstance.get()
    yield instance
    instance.dispose()
