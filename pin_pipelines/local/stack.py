"""The local stack: PostgreSQL and ClickHouse with their tables, a source of prices, and Dagster's home.

All but the source is under one data folder. ClickHouse lets in one process at a time, so nothing here keeps it open.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psycopg
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from pin_pipelines.invest_analytics import facts
from pin_pipelines.local.errors import LocalStackError
from pin_pipelines.local.ownership import MARK, Ownership, end_marked_processes, postgres_dir
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.local.talent import TalentStandIn
from pin_pipelines.migrations import migrate
from pin_pipelines.resources.clickhouse import open_clickhouse

# A run that is queued waits for the daemon, whichever it is.
_NEED_A_PROCESS = [
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]

DATABASE = "pin"
DAGSTER_DATABASE = "dagster"

PRICED_OBJECTS = 5_000
"""Property objects that the source of prices knows."""
# The handbook of currencies is another service's; 643 is the rouble's number in ISO 4217.
RUB_CURRENCY_ID = UUID("00000000-0000-4000-8000-000000000643")


@dataclass(frozen=True)
class LocalStack:
    """A stack that is running.

    Attributes:
        environment: what another process needs to use it; it is in ``os.environ`` too.
        talent: the source of prices.
    """

    data_dir: Path
    project_dir: Path
    postgres_url: str
    environment: Mapping[str, str]
    talent: TalentStandIn


@contextmanager
def local_stack(ownership: Ownership, on_step: Callable[[str], None]) -> Iterator[LocalStack]:
    """Run PostgreSQL in the data folder and serve prices; when left, nothing of the stack is left running.

    Args:
        ownership: of the folder.
        on_step: told what is being done, in a few words.

    Raises:
        LocalStackError: the stack cannot start, or not end.
    """
    data_dir = ownership.data_dir
    project_dir = find_project_dir()
    postgres = EmbeddedPostgres(postgres_dir(data_dir))
    with _environment({MARK: str(data_dir)}), TalentStandIn(PRICED_OBJECTS) as talent:
        try:
            on_step("Starting PostgreSQL")
            postgres.start()
            on_step("Migrating")
            environment = _prepare(postgres, talent, data_dir, project_dir)
            with _environment(environment):
                _end_runs_left_behind()
                yield LocalStack(data_dir, project_dir, postgres.url(DATABASE), environment, talent)
        finally:
            ownership.ending.set()
            on_step("Stopping")
            # PostgreSQL after them, since runs that are stopped write down how far they came.
            end_marked_processes(data_dir)
            postgres.stop()


def _end_runs_left_behind() -> None:
    """Report the runs that went down with a stack that was killed: nothing else would for a quarter of an hour."""
    # The first to open it makes Dagster's tables; servers that do so at the same time get in each other's way.
    with DagsterInstance.get() as instance:
        for run in instance.get_runs(RunsFilter(statuses=_NEED_A_PROCESS)):
            instance.report_run_failed(
                run, "The stack that this run was a part of was killed. What it committed stays."
            )


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


def _prepare(postgres: EmbeddedPostgres, talent: TalentStandIn, data_dir: Path, project_dir: Path) -> dict[str, str]:
    """Make what a server's set-up makes elsewhere: databases, tables, Dagster's home; returns the environment."""
    for database in (DATABASE, DAGSTER_DATABASE):
        postgres.ensure_database(database)
    url = postgres.url(DATABASE)
    migrate(url)
    with psycopg.connect(url) as connection:
        create_stand_ins(connection)
    clickhouse_url = f"chdb://{data_dir / 'clickhouse'}"
    with open_clickhouse(clickhouse_url) as client:
        facts.create(client, cluster=None)
    dagster_home = data_dir / "dagster_home"
    dagster_home.mkdir(exist_ok=True)
    shutil.copyfile(project_dir / "dagster.yaml", dagster_home / "dagster.yaml")
    return {
        "PIN_POSTGRES_URL": url,
        "PIN_DAGSTER_POSTGRES_URL": postgres.dagster_url(DAGSTER_DATABASE),
        "DAGSTER_HOME": str(dagster_home),
        "PIN_CLICKHOUSE_URL": clickhouse_url,
        "PIN_TALENT_BASE_URL": talent.url,
        "PIN_TALENT_TOKEN": talent.token,
        "PIN_RUB_CURRENCY_ID": str(RUB_CURRENCY_ID),
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
