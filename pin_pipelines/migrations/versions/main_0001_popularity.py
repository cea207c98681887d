"""Daily snapshots of view counters, the ledger of popularity runs, and the feature flags."""

from __future__ import annotations

from alembic import op

revision = "main_0001"
down_revision = None
branch_labels = ("main",)
depends_on = None

# Names, checks and both indexes are those of the spec (PopularityDailySnapshot). The unique index carries the
# counter along, so that the window of a card is read from the index alone.
_SNAPSHOTS = """
CREATE TABLE catalog.popularity_daily_views (
    id uuid NOT NULL CONSTRAINT pk_popularity_daily_views PRIMARY KEY,
    card_kind varchar(16) NOT NULL,
    card_id uuid NOT NULL,
    run_date date NOT NULL,
    cumulative_views bigint NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT ck_popularity_daily_card_kind CHECK (card_kind IN ('PropertyObject', 'Project')),
    CONSTRAINT ck_popularity_daily_cumulative_views CHECK (cumulative_views >= 0)
) WITH (
    -- A night adds a thirty-second of the table and removes as much: the defaults (a fifth, a tenth) would let
    -- a week of dead rows pile up before anything looks.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02
);
CREATE UNIQUE INDEX ix_popularity_daily_unique
    ON catalog.popularity_daily_views (card_kind, card_id, run_date) INCLUDE (cumulative_views);
CREATE INDEX ix_popularity_daily_window
    ON catalog.popularity_daily_views (card_kind, card_id, run_date DESC);
COMMENT ON TABLE catalog.popularity_daily_views IS
    'Counter of every card as it stood at each nightly run; written and read by the popularity recompute alone.';
"""

_LEDGER = """
CREATE TABLE catalog.popularity_runs (
    run_id text NOT NULL CONSTRAINT pk_popularity_runs PRIMARY KEY,
    run_date date NOT NULL,
    run_kind varchar(16) NOT NULL,
    status varchar(16) NOT NULL DEFAULT 'Running',
    stopped_reason text,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    handled_since timestamptz NOT NULL,
    batch_size integer NOT NULL,
    property_object_stop_id uuid,
    project_stop_id uuid,
    property_object_cards_processed bigint NOT NULL DEFAULT 0,
    project_cards_processed bigint NOT NULL DEFAULT 0,
    property_object_cards_updated bigint NOT NULL DEFAULT 0,
    project_cards_updated bigint NOT NULL DEFAULT 0,
    snapshots_written bigint NOT NULL DEFAULT 0,
    snapshots_pruned bigint NOT NULL DEFAULT 0,
    item_errors bigint NOT NULL DEFAULT 0,
    cards_left_locked bigint NOT NULL DEFAULT 0,
    cards_remaining bigint NOT NULL DEFAULT 0,
    retries bigint NOT NULL DEFAULT 0,
    duration_ms bigint NOT NULL DEFAULT 0,
    error text,
    CONSTRAINT ck_popularity_runs_run_kind CHECK (run_kind IN ('Full', 'Recompute', 'Rebuild')),
    CONSTRAINT ck_popularity_runs_status CHECK (status IN ('Running', 'Completed', 'Stopped', 'Failed')),
    CONSTRAINT ck_popularity_runs_finished CHECK ((status = 'Running') = (finished_at IS NULL))
);
CREATE INDEX ix_popularity_runs_started ON catalog.popularity_runs (run_kind, started_at DESC);
CREATE INDEX ix_popularity_runs_running ON catalog.popularity_runs (run_date) WHERE status = 'Running';
COMMENT ON TABLE catalog.popularity_runs IS
    'Ledger of popularity runs: when a full run last completed, what each run did, where a cut one stopped.';
"""

_FLAGS = """
CREATE TABLE pin_pipelines.feature_flags (
    name text NOT NULL CONSTRAINT pk_feature_flags PRIMARY KEY,
    enabled boolean NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE pin_pipelines.feature_flags IS
    'Feature flags by name; a flag that is not in the table is off.';
"""


def upgrade() -> None:
    """Apply."""
    op.execute("CREATE SCHEMA IF NOT EXISTS catalog")
    op.execute(_SNAPSHOTS)
    op.execute(_LEDGER)
    op.execute(_FLAGS)


def downgrade() -> None:
    """Take back. The schema stays: the cards of the catalog service are in it."""
    op.execute("DROP TABLE pin_pipelines.feature_flags")
    op.execute("DROP TABLE catalog.popularity_runs")
    op.execute("DROP TABLE catalog.popularity_daily_views")
