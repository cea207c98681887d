"""Least privilege: what each role of docker/postgres/roles.sql may do, and what it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import chdb
import psycopg
import pytest

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.local.stand_ins import create_stand_ins
from pin_pipelines.migrations import downgrade, migrate
from pin_pipelines_tests.support.catalogue import Catalogue
from pin_pipelines_tests.support.price_backfill import Backfill, Listed, prices
from pin_pipelines_tests.support.roles import MIGRATIONS, PIPELINE, READER, ROLES, apply_roles, as_role

OWN = [
    "catalog.popularity_daily_views",
    "catalog.popularity_runs",
    "invest_analytics.price_backfill_checkpoints",
    "invest_analytics.price_backfill_rejects",
    "pin_pipelines.feature_flags",
]
GRANTS = ROLES.parents[1] / "clickhouse" / "grants.sql"


@pytest.fixture
def admin_url(postgres: EmbeddedPostgres, new_database: Callable[[str], str]) -> str:
    """A marketplace whose cards are the catalog service's, migrated by the role that is there for it."""
    url = postgres.url(new_database("template0"))
    with psycopg.connect(url) as connection:
        create_stand_ins(connection)
        connection.execute("CREATE TABLE catalog.agreements (id int)")
    apply_roles(url)
    migrate(as_role(url, MIGRATIONS))
    return url


def owners(url: str) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        return dict(
            connection.execute(
                "SELECT c.oid::regclass::text, c.relowner::regrole::text FROM pg_class c "
                "WHERE c.relkind = 'r' AND c.relnamespace::regnamespace::text "
                "IN ('catalog', 'invest_analytics', 'pin_pipelines')"
            ).fetchall()
        )


def test_what_migrations_make_is_the_pipeline_s_and_the_version_table_is_not(admin_url: str) -> None:
    assert owners(admin_url) == {
        **dict.fromkeys(OWN, PIPELINE),
        "catalog.property_object_cards": "postgres",
        "catalog.project_cards": "postgres",
        "catalog.agreements": "postgres",
        "pin_pipelines.alembic_version": MIGRATIONS,
    }


def test_migrations_can_be_run_again_taken_back_and_applied_anew(admin_url: str) -> None:
    before = owners(admin_url)
    migrate(as_role(admin_url, MIGRATIONS))
    downgrade(as_role(admin_url, MIGRATIONS))
    migrate(as_role(admin_url, MIGRATIONS))
    assert owners(admin_url) == before


def test_database_that_another_role_migrated_is_put_right(
    postgres: EmbeddedPostgres, new_database: Callable[[str], str]
) -> None:
    url = postgres.url(new_database("template0"))
    migrate(url)
    apply_roles(url)
    assert owners(url) == {**dict.fromkeys(OWN, PIPELINE), "pin_pipelines.alembic_version": MIGRATIONS}
    migrate(as_role(url, MIGRATIONS))


def test_engines_run_under_the_pipeline_s_role(admin_url: str, clickhouse_url: str) -> None:
    catalogue = Catalogue(admin_url)
    cards = catalogue.add_many(5, views=3)
    assert catalogue.run().snapshots_written == len(cards)
    assert catalogue.run(card_ids=cards[:1]).property_object_cards_processed == len(cards)
    backfill = Backfill(admin_url, clickhouse_url).furnish()
    assert backfill.run(Listed(prices(5))).ingested_fact_count == 5
    with psycopg.connect(admin_url) as connection:
        analysed = connection.execute("SELECT reltuples FROM pg_class WHERE relname = 'popularity_daily_views'")
        assert analysed.fetchone() == (5,)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE catalog.property_object_cards SET popularity_views = 0",
        "UPDATE catalog.project_cards SET status = 'Hidden'",
        "UPDATE catalog.property_object_cards SET title = 'x'",
        "INSERT INTO catalog.project_cards (id, title, status) VALUES (gen_random_uuid(), 'x', 'Draft')",
        "DELETE FROM catalog.property_object_cards",
        "TRUNCATE catalog.project_cards CASCADE",
        "SELECT title FROM catalog.property_object_cards",
        "SELECT * FROM catalog.project_cards",
        "SELECT * FROM catalog.agreements",
        "SELECT * FROM pin_pipelines.alembic_version",
        "ALTER TABLE catalog.project_cards ADD COLUMN x int",
        "CREATE INDEX ON catalog.project_cards (title)",
        "DROP TABLE catalog.agreements",
        "CREATE TABLE catalog.mine (x int)",
        "CREATE TABLE invest_analytics.mine (x int)",
        "CREATE TABLE pin_pipelines.mine (x int)",
        "CREATE TABLE public.mine (x int)",
        "CREATE SCHEMA mine",
        "CREATE ROLE mine",
        "SET ROLE pin_migrations",
        "SELECT pg_read_file('PG_VERSION')",
    ],
)
def test_pipeline_s_role_is_refused(admin_url: str, statement: str) -> None:
    with (
        psycopg.connect(as_role(admin_url, PIPELINE)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement)


@pytest.mark.parametrize("table", [*OWN, "pin_pipelines.alembic_version"])
def test_reader_reads_what_is_the_pipelines_and_writes_none_of_it(admin_url: str, table: str) -> None:
    with psycopg.connect(as_role(admin_url, READER), autocommit=True) as connection:
        connection.execute(f"SELECT * FROM {table}")
        # Not only since its transactions are read-only, which it can change.
        connection.execute("SET default_transaction_read_only = off")
        for statement in (f"DELETE FROM {table}", f"TRUNCATE {table}", f"DROP TABLE {table}"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE catalog.property_object_cards SET popularity_score = 1",
        "SELECT id FROM catalog.property_object_cards FOR UPDATE",
        "SELECT title FROM catalog.project_cards",
        "SELECT * FROM catalog.agreements",
        "CREATE TABLE catalog.mine (x int)",
        "INSERT INTO pin_pipelines.feature_flags VALUES ('x', true)",
    ],
)
def test_reader_is_refused(admin_url: str, statement: str) -> None:
    with psycopg.connect(as_role(admin_url, READER)) as connection:
        connection.execute("SET TRANSACTION READ WRITE")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement)


def test_migrations_role_is_refused_the_service_s_tables(admin_url: str) -> None:
    for statement in ("DELETE FROM catalog.project_cards", "ALTER TABLE catalog.agreements ADD COLUMN x int"):
        with (
            psycopg.connect(as_role(admin_url, MIGRATIONS)) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            connection.execute(statement)


def test_passwords_come_from_the_environment(admin_url: str) -> None:
    passwords = {f"{name}_PASSWORD": f"marked-{name}" for name in ("PIPELINE", "MIGRATIONS", "READER")}
    apply_roles(admin_url, **passwords)
    with psycopg.connect(admin_url) as connection:
        stored = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname LIKE 'pin\\_%'").fetchall()
    assert len(stored) == 3
    assert all(password.startswith("SCRAM-SHA-256$") for (password,) in stored)


# ClickHouse: the embedded engine has no users, so the statements are read as text, by its own parser


def clickhouse_grants(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("--")]
    return [statement.strip() for statement in "\n".join(lines).split(";") if statement.strip()]


def test_clickhouse_grants_can_be_parsed() -> None:
    for statement in clickhouse_grants(GRANTS):
        quoted = statement.replace("'", "''")
        assert str(chdb.query(f"SELECT formatQuery('{quoted}')", "TSVRaw")).startswith("GRANT ")


def test_clickhouse_pipeline_may_insert_and_read_facts_and_read_what_is_checked_before() -> None:
    assert [each for each in clickhouse_grants(GRANTS) if each.endswith("TO pin_pipeline")] == [
        "GRANT INSERT, SELECT ON pin_analytics.property_object_price_history_facts TO pin_pipeline",
        "GRANT SELECT ON system.tables TO pin_pipeline",
        "GRANT SELECT ON system.columns TO pin_pipeline",
        "GRANT SELECT ON system.settings TO pin_pipeline",
    ]
