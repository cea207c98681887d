"""Alembic's environment: runs the revisions on the connection that ``migrations`` hands over."""

from __future__ import annotations

from alembic import context

from pin_pipelines.migrations import VERSION_SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    version_table_schema=VERSION_SCHEMA,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
