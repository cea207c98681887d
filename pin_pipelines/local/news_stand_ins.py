"""Stand-ins for what the news ranking reads of other services, for local and test databases.

Production has the real ones; the migrations never touch them. The posts and what belongs to them are the news
service's, the daily aggregates of views user-activity's: the services know each other by id alone, so views outlive
their post. Bodies of blocks are there to give a row a realistic width, and the indexes are those that the feed by date
and sums of views by post could not do without.
"""

from __future__ import annotations

from pin_pipelines.database import Connection

_NEWS = """
CREATE SCHEMA IF NOT EXISTS news;

CREATE TABLE IF NOT EXISTS news.post_categories (
    id uuid PRIMARY KEY,
    name text NOT NULL
);

CREATE TABLE IF NOT EXISTS news.posts (
    id uuid PRIMARY KEY,
    title text NOT NULL,
    category_id uuid NOT NULL REFERENCES news.post_categories (id),
    author_id uuid NOT NULL,
    author_type varchar(32) NOT NULL,
    published_at timestamptz,
    comments_count integer NOT NULL DEFAULT 0 CHECK (comments_count >= 0),
    promotion_boost numeric(12, 4) NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS ix_posts_published_at ON news.posts (published_at DESC, id DESC);

CREATE TABLE IF NOT EXISTS news.post_blocks (
    post_id uuid NOT NULL REFERENCES news.posts (id) ON DELETE CASCADE,
    position integer NOT NULL,
    kind varchar(32) NOT NULL,
    body jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (post_id, position)
);

CREATE TABLE IF NOT EXISTS news.post_project_refs (
    post_id uuid NOT NULL REFERENCES news.posts (id) ON DELETE CASCADE,
    project_id uuid NOT NULL,
    PRIMARY KEY (post_id, project_id)
);
"""

_USER_ACTIVITY = """
CREATE SCHEMA IF NOT EXISTS user_activity;

CREATE TABLE IF NOT EXISTS user_activity.post_daily_views (
    post_id uuid NOT NULL,
    day date NOT NULL,
    views bigint NOT NULL,
    PRIMARY KEY (post_id, day) INCLUDE (views)
);

CREATE TABLE IF NOT EXISTS user_activity.user_post_daily_views (
    user_id uuid NOT NULL,
    day date NOT NULL,
    post_id uuid NOT NULL,
    views bigint NOT NULL,
    PRIMARY KEY (user_id, day, post_id)
);
"""


def create_news_stand_ins(connection: Connection) -> None:
    """Make the tables where they are missing; the caller commits. The branch of migrations needs them."""
    connection.execute(_NEWS)
    connection.execute(_USER_ACTIVITY)
