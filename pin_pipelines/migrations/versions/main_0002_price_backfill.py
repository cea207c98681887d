"""Checkpoints of the price history backfill, and the source rows that it had to refuse."""

from __future__ import annotations

from alembic import op

revision = "main_0002"
down_revision = "main_0001"
branch_labels = None
depends_on = None

# The spec's fields (PriceBackfillCheckpoint), and behind them what alerts and the next attempt need to know of a run
# whose process is gone. One run at a time has a range: where two begin it together, the index decides.
_CHECKPOINTS = """
CREATE TABLE invest_analytics.price_backfill_checkpoints (
    id uuid NOT NULL CONSTRAINT pk_price_backfill_checkpoints PRIMARY KEY,
    status varchar(16) NOT NULL,
    from_property_object_id uuid,
    to_property_object_id uuid,
    last_processed_property_object_id uuid,
    processed_property_object_count bigint NOT NULL DEFAULT 0,
    ingested_fact_count bigint NOT NULL DEFAULT 0,
    rejected_row_count bigint NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed_at timestamptz,
    version integer NOT NULL DEFAULT 1,
    batch_size integer NOT NULL,
    last_run_id text NOT NULL,
    attempts_without_progress integer NOT NULL DEFAULT 1,
    insert_errors bigint NOT NULL DEFAULT 0,
    last_error text,
    failed_at timestamptz,
    progressed_at timestamptz,
    CONSTRAINT ck_price_backfill_checkpoints_status CHECK (status IN ('Running', 'Completed', 'Failed')),
    CONSTRAINT ck_price_backfill_checkpoints_range CHECK (from_property_object_id <= to_property_object_id),
    CONSTRAINT ck_price_backfill_checkpoints_batch_size CHECK (batch_size BETWEEN 1 AND 1000),
    CONSTRAINT ck_price_backfill_checkpoints_counts
        CHECK (processed_property_object_count = ingested_fact_count + rejected_row_count),
    CONSTRAINT ck_price_backfill_checkpoints_completed CHECK ((status = 'Completed') = (completed_at IS NOT NULL)),
    CONSTRAINT ck_price_backfill_checkpoints_failed CHECK (status <> 'Failed' OR failed_at IS NOT NULL)
);
CREATE UNIQUE INDEX ux_price_backfill_checkpoints_running
    ON invest_analytics.price_backfill_checkpoints (from_property_object_id, to_property_object_id)
    NULLS NOT DISTINCT WHERE status = 'Running';
COMMENT ON TABLE invest_analytics.price_backfill_checkpoints IS
    'How far each range of the price history backfill has come; the point from which it is resumed.';
COMMENT ON COLUMN invest_analytics.price_backfill_checkpoints.id IS 'Run id of the run that began the range.';
COMMENT ON COLUMN invest_analytics.price_backfill_checkpoints.last_run_id IS
    'Run id of the run that claimed the range last.';
COMMENT ON COLUMN invest_analytics.price_backfill_checkpoints.last_error IS
    'Why a run of the range failed last, at failed_at; kept when a later run resumes and completes it.';
"""

# `json`, not `jsonb`: it keeps the text as it came, the digits of a number and its NULs too.
_REJECTS = """
CREATE TABLE invest_analytics.price_backfill_rejects (
    id bigint NOT NULL GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_price_backfill_rejects PRIMARY KEY,
    checkpoint_id uuid NOT NULL CONSTRAINT fk_price_backfill_rejects_checkpoint
        REFERENCES invest_analytics.price_backfill_checkpoints (id),
    property_object_id uuid,
    reason text NOT NULL,
    payload json NOT NULL,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ix_price_backfill_rejects_checkpoint ON invest_analytics.price_backfill_rejects (checkpoint_id);
COMMENT ON TABLE invest_analytics.price_backfill_rejects IS
    'Rows of the source that could not become a fact, each with its reason, as the source gave them.';
"""


def upgrade() -> None:
    """Apply."""
    op.execute("CREATE SCHEMA IF NOT EXISTS invest_analytics")
    op.execute(_CHECKPOINTS)
    op.execute(_REJECTS)


def downgrade() -> None:
    """Take back. The schema stays: the invest-analytics service may have tables in it."""
    op.execute("DROP TABLE invest_analytics.price_backfill_rejects")
    op.execute("DROP TABLE invest_analytics.price_backfill_checkpoints")
