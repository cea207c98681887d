"""Reactions to posts, the signals that posts are ranked by, and the counter of likes that a post carries along.

A branch of its own: the ranking is deferred, and its tables are made only when it is switched on. It needs nothing of
the other branches; the posts, which it refers to, are the news service's and have to be there.
"""

from __future__ import annotations

from alembic import op

revision = "news_ranking_0001"
down_revision = None
branch_labels = ("news_ranking",)
depends_on = None

# Kinds are not checked: later writers may add some, and earlier readers pass them over.
_REACTIONS = """
CREATE TABLE news.post_reactions (
    id uuid NOT NULL CONSTRAINT pk_post_reactions PRIMARY KEY,
    post_id uuid NOT NULL CONSTRAINT fk_post_reactions_post REFERENCES news.posts (id) ON DELETE CASCADE,
    user_id uuid NOT NULL,
    kind varchar(16) NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX ux_post_reactions_user ON news.post_reactions (post_id, user_id);
CREATE INDEX ix_post_reactions_user ON news.post_reactions (user_id);
COMMENT ON TABLE news.post_reactions IS
    'Who likes which post, one reaction a user to a post; news.posts.likes_count counts the likes.';
"""

# The id behind the score gives posts of one score one order across pages, and lets a page in the middle of them read
# no more than it returns.
_SIGNALS = """
CREATE TABLE news.post_ranking_signals (
    id uuid NOT NULL CONSTRAINT pk_post_ranking_signals PRIMARY KEY
        CONSTRAINT fk_post_ranking_signals_post REFERENCES news.posts (id) ON DELETE CASCADE,
    views_7d bigint NOT NULL DEFAULT 0,
    views_30d bigint NOT NULL DEFAULT 0,
    likes integer NOT NULL DEFAULT 0,
    comments_rate numeric(8, 4) NOT NULL DEFAULT 0,
    recency_decay numeric(6, 5) NOT NULL,
    score numeric(14, 6) NOT NULL DEFAULT 0,
    affinity_inputs jsonb NOT NULL,
    recomputed_at timestamptz NOT NULL,
    CONSTRAINT ck_post_ranking_signals_views_7d CHECK (views_7d >= 0),
    CONSTRAINT ck_post_ranking_signals_views_30d CHECK (views_30d >= 0),
    CONSTRAINT ck_post_ranking_signals_likes CHECK (likes >= 0),
    CONSTRAINT ck_post_ranking_signals_comments_rate CHECK (comments_rate >= 0),
    CONSTRAINT ck_post_ranking_signals_recency_decay CHECK (recency_decay BETWEEN 0 AND 1),
    CONSTRAINT ck_post_ranking_signals_score CHECK (score >= 0),
    CONSTRAINT ck_post_ranking_signals_affinity_inputs
        CHECK (coalesce(jsonb_typeof(affinity_inputs -> 'ContractVersion') = 'number', false))
);
CREATE INDEX ix_post_ranking_signals_score ON news.post_ranking_signals (score DESC, id DESC);
COMMENT ON TABLE news.post_ranking_signals IS
    'One row a post: what its score is made of, and the score; made anew by every ranking recompute.';
COMMENT ON COLUMN news.post_ranking_signals.id IS 'Id of the post.';
COMMENT ON COLUMN news.post_ranking_signals.affinity_inputs IS
    'PostRankingAffinityInputsDocument: what the post is about, in the version that its ContractVersion says.';
"""

# Where the news service brought the counter itself, it is used as it is and outlives a downgrade; the comment tells
# the one from the other.
_ADDED_HERE = "Likes in news.post_reactions. Added by the branch news_ranking of pin_pipelines, and dropped with it."
_IS_THERE = "attrelid = 'news.posts'::regclass AND attname = 'likes_count' AND NOT attisdropped"
_ADD_LIKES_COUNT = f"""
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE {_IS_THERE}) THEN
        ALTER TABLE news.posts ADD COLUMN likes_count integer NOT NULL DEFAULT 0
            CONSTRAINT ck_posts_likes_count CHECK (likes_count >= 0);
        COMMENT ON COLUMN news.posts.likes_count IS '{_ADDED_HERE}';
    END IF;
END $$"""
_DROP_LIKES_COUNT = f"""
DO $$ BEGIN
    IF EXISTS (
        SELECT FROM pg_attribute WHERE {_IS_THERE} AND col_description(attrelid, attnum) = '{_ADDED_HERE}'
    ) THEN
        ALTER TABLE news.posts DROP COLUMN likes_count;
    END IF;
END $$"""


def upgrade() -> None:
    """Apply."""
    op.execute(_ADD_LIKES_COUNT)
    op.execute(_REACTIONS)
    op.execute(_SIGNALS)


def downgrade() -> None:
    """Take back. Of the posts only the counter goes, and only where this branch brought it."""
    op.execute("DROP TABLE news.post_ranking_signals")
    op.execute("DROP TABLE news.post_reactions")
    op.execute(_DROP_LIKES_COUNT)
