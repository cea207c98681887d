"""What the pipelines own in PostgreSQL, as alembic revisions on labelled branches.

Tables of other services are not made here, in production they are there; ``local`` makes stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

# The version table lives in a schema of the pipelines' own: other services keep theirs elsewhere.
VERSION_SCHEMA = "pin_pipelines"
MAIN_BRANCH = "main"
NEWS_RANKING_BRANCH = "news_ranking"

# Two deployments that migrate at the same time would both see the old version.
_LOCK = "Pin:lock:migrations:pin-pipelines"

# A role that migrates but is not to own what it makes has this setting (docker/postgres/roles.sql).
_OWNER = "SELECT quote_ident(nullif(current_setting('pin_pipelines.owner', true), ''))"
_MADE = f"""
    SELECT c.oid::regclass::text, c.relnamespace::regnamespace::text FROM pg_class c
    WHERE c.relowner = current_user::regrole AND c.relkind IN ('r', 'p')
      AND c.oid <> '{VERSION_SCHEMA}.alembic_version'::regclass"""


def migrate(postgres_url: str, *, branch: str = MAIN_BRANCH, revision: str = "head") -> None:
    """Bring one branch up to its head; safe to call again, and from several places at once.

    Args:
        postgres_url: ``postgresql://…``; the role must be allowed to create the pipelines' schemas and tables. They
            are handed over to the role of its setting ``pin_pipelines.owner``, if it has one.
        branch: label of the branch. Never all heads at once: a deferred branch is applied by name only.
        revision: how far, within the branch.
    """
    with _locked(postgres_url) as connection:
        command.upgrade(_config(connection), f"{branch}@{revision}")
        _hand_over(connection)


def downgrade(postgres_url: str, *, branch: str = MAIN_BRANCH) -> None:
    """Take one branch back to nothing, its tables and their rows with it."""
    with _locked(postgres_url) as connection:
        command.downgrade(_config(connection), f"{branch}@base")


@contextmanager
def _locked(postgres_url: str) -> Iterator[sa.Connection]:
    """A connection that holds the migration lock, in one transaction with all that is migrated."""
    url = sa.make_url(postgres_url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    try:
        with engine.begin() as connection:
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:lock, 0))"), {"lock": _LOCK})
            connection.execute(sa.text(f"CREATE SCHEMA IF NOT EXISTS {VERSION_SCHEMA}"))
            yield connection
    finally:
        engine.dispose()


def _hand_over(connection: sa.Connection) -> None:
    """Give the tables that were made to the role that is to own them, if the migrating role names one."""
    owner = connection.scalar(sa.text(_OWNER))
    if owner is None:
        return
    for table, schema in connection.execute(sa.text(_MADE)).all():
        # PostgreSQL asks of a new owner that it may make tables there: within this transaction it may, and never else.
        connection.execute(sa.text(f"GRANT CREATE ON SCHEMA {schema} TO {owner}"))
        connection.execute(sa.text(f"ALTER TABLE {table} OWNER TO {owner}"))
        connection.execute(sa.text(f"REVOKE CREATE ON SCHEMA {schema} FROM {owner}"))


def _config(connection: sa.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
