"""The local stack: PostgreSQL with both databases, migrated, and Dagster's home, under one data folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.local.ownership import MARK, Ownership, end_marked_processes, postgres_dir
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.migrations import migrate

DATABASE = "pin"
DAGSTER_DATABASE = "dagster"


@dataclass(frozen=True)
class LocalStack:
    """A stack that is running; its environment is in ``os.environ``."""

    data_dir: Path
    project_dir: Path
    postgres_url: str


@contextmanager
def local_stack(ownership: Ownership, on_step: Callable[[str], None]) -> Iterator[LocalStack]:
    """Run PostgreSQL in the data folder; when left, nothing of the stack is left running.

    Args:
        ownership: of the folder.
        on_step: told what is being done, in a few words.

    Raises:
        LocalStackError: the stack cannot start, or not end.
    """
    data_dir = ownership.data_dir
    project_dir = find_project_dir()
    postgres = EmbeddedPostgres(postgres_dir(data_dir))
    with _environment({MARK: str(data_dir)}):
        try:
            on_step("Starting PostgreSQL")
            postgres.start()
            on_step("Migrating")
            with _environment(_prepare(postgres, data_dir, project_dir)):
                yield LocalStack(data_dir, project_dir, postgres.url(DATABASE))
        finally:
            ownership.ending.set()
            on_step("Stopping")
            # PostgreSQL last, since runs that are stopped write down how far they came.
            end_marked_processes(data_dir)
            postgres.stop()


def find_project_dir() -> Path:
    """The checkout that this package is installed from.

    Raises:
        LocalStackError: it is not installed from one.
    """
    project_dir = Path(__file__).parents[2]
    missing = [name for name in ("dagster.yaml", "workspace.yaml") if not (project_dir / name).exists()]
    if missing:
        raise LocalStackError(
            f"{' and '.join(missing)} not found in {project_dir}: the local stack runs from a checkout of the project. "
            "Clone it, and install it with `pip install -e '.[local]'`."
        )
    return project_dir


def _prepare(postgres: EmbeddedPostgres, data_dir: Path, project_dir: Path) -> dict[str, str]:
    """Make what a server's set-up makes elsewhere: databases, tables, Dagster's home; returns the environment."""
    for database in (DATABASE, DAGSTER_DATABASE):
        postgres.ensure_database(database)
    url = postgres.url(DATABASE)
    migrate(url)
    with psycopg.connect(url) as connection:
        create_stand_ins(connection)
    dagster_home = data_dir / "dagster_home"
    dagster_home.mkdir(exist_ok=True)
    shutil.copyfile(project_dir / "dagster.yaml", dagster_home / "dagster.yaml")
    return {
        "PIN_POSTGRES_URL": url,
        "PIN_DAGSTER_POSTGRES_URL": postgres.dagster_url(DAGSTER_DATABASE),
        "DAGSTER_HOME": str(dagster_home),
    }


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which its children inherit, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
