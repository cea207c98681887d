"""Stand-ins for the catalog service's card tables, for local and test databases.

Production has the real ones; the migrations never touch them. Columns that the pipeline does not read are there
to give a row a realistic width, and the popularity indexes because without them an update of a score would be
cheaper than in truth.
"""

from __future__ import annotations

from typing import Any

import psycopg

_CARDS = """
CREATE SCHEMA IF NOT EXISTS catalog;

CREATE TABLE IF NOT EXISTS catalog.project_cards (
    id uuid PRIMARY KEY,
    title text NOT NULL,
    status varchar(16) NOT NULL CHECK (status IN ('Draft', 'Published', 'Hidden', 'Delisted')),
    popularity_views bigint NOT NULL DEFAULT 0,
    popularity_score numeric(12, 4) NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS ix_project_cards_popularity
    ON catalog.project_cards (popularity_score DESC, id);

CREATE TABLE IF NOT EXISTS catalog.property_object_cards (
    id uuid PRIMARY KEY,
    project_id uuid REFERENCES catalog.project_cards (id),
    title text NOT NULL,
    status varchar(16) NOT NULL CHECK (status IN ('Draft', 'Published', 'Hidden', 'Delisted')),
    popularity_views bigint NOT NULL DEFAULT 0,
    popularity_score numeric(12, 4) NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS ix_property_object_cards_popularity
    ON catalog.property_object_cards (popularity_score DESC, id);
"""


def create_stand_ins(connection: psycopg.Connection[Any]) -> None:
    """Make the card tables where they are missing; the caller commits."""
    connection.execute(_CARDS)
