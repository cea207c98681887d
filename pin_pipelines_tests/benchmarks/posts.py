"""Posts with a month of views behind them, as a template database that every contestant gets a copy of.

Layout: posts came in the order of their publication, with ids in no order; views came day by day; the signals are
those of yesterday's recompute, and the template was vacuumed. Views follow a power law: a quarter of the posts has
none, about a third was viewed on any one day. Posts are of two years, so that most are old.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import psycopg

from pin_pipelines.local.news_stand_ins import create_news_stand_ins
from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.migrations import migrate
from pin_pipelines.news.recompute import recompute
from pin_pipelines.news.tables import POST_BLOCKS, POST_DAILY_VIEWS, POST_PROJECT_REFS, POSTS, SIGNALS

AS_OF = date(2026, 11, 30)
DAYS = 30

_CATEGORIES = 12
_AUTHORS = 2_000
_PROJECTS = 500

_ADD_CATEGORIES = f"""
INSERT INTO news.post_categories (id, name)
SELECT md5('category ' || n)::uuid, 'Category ' || n FROM generate_series(1, {_CATEGORIES}) n"""

_ADD_POSTS = f"""
INSERT INTO {POSTS} (id, title, category_id, author_id, author_type, published_at, comments_count, promotion_boost,
                     likes_count)
SELECT md5('post ' || n)::uuid, 'What post ' || n || ' of this benchmark has to say about its subject',
       md5('category ' || 1 + n %% {_CATEGORIES})::uuid, md5('author ' || n %% {_AUTHORS})::uuid,
       (ARRAY['Platform', 'Developer', 'Agency'])[1 + n %% {_AUTHORS} %% 3],
       %(as_of)s::date - (%(posts)s - n) * interval '730 days' / %(posts)s,
       floor(2 / (random() + 0.01)) - 1, CASE WHEN n %% 20 = 0 THEN n %% 250 ELSE 0 END, floor(3 / (random() + 0.003))
FROM generate_series(1, %(posts)s) n"""

_ADD_BLOCKS = f"""
INSERT INTO {POST_BLOCKS} (post_id, position, kind, body)
SELECT md5('post ' || n)::uuid, position,
       (ARRAY['Heading', 'Text', 'Image', 'Gallery', 'Quote', 'Video', 'ProjectCard'])[1 + (n + 3 * position) %% 7],
       jsonb_build_object('Text', repeat('Something about flats. ', 1 + (n + position) %% 8))
FROM generate_series(1, %(posts)s) n, generate_series(1, 3 + n %% 5) position"""

_ADD_PROJECT_REFS = f"""
INSERT INTO {POST_PROJECT_REFS} (post_id, project_id)
SELECT md5('post ' || n)::uuid, md5('project ' || (n * 7 + k) %% {_PROJECTS})::uuid
FROM generate_series(1, %(posts)s) n, generate_series(1, n %% 4) k"""

_ADD_DAY = f"""
INSERT INTO {POST_DAILY_VIEWS} (post_id, day, views)
SELECT id, %(day)s, views
FROM (
    SELECT id, floor(random() + CASE WHEN rank < 0.75 THEN 0.13 / greatest(rank / 0.75, 1e-6) ^ 1.2 ELSE 0 END) AS views
    FROM (SELECT id, (hashtextextended(id::text, 0) & 65535) / 65536.0 AS rank FROM {POSTS}) ranked
) viewed
WHERE views > 0"""

# Sums of hashes, since rows come in any order; times are each contestant's own.
_FINGERPRINT = f"""
SELECT count(*), sum(hash_record_extended(
    ROW(id, views_7d, views_30d, likes, comments_rate, recency_decay, score, affinity_inputs), 0)) FROM {SIGNALS}"""

Fingerprint = tuple[Any, ...]


def build(server: EmbeddedPostgres, name: str, posts: int) -> None:
    """Make a database where the signals are as of yesterday."""
    server.ensure_database(name)
    url = server.url(name)
    with psycopg.connect(url, autocommit=True) as connection:
        create_news_stand_ins(connection)
        migrate(url, branch="news_ranking")
        connection.execute("SELECT setseed(0.42)")
        connection.execute(_ADD_CATEGORIES)
        for statement in (_ADD_POSTS, _ADD_BLOCKS, _ADD_PROJECT_REFS):
            connection.execute(statement, {"posts": posts, "as_of": AS_OF})
        for days_ago in range(DAYS, -1, -1):
            connection.execute(_ADD_DAY, {"day": AS_OF - timedelta(days=days_ago)})
        connection.execute("VACUUM ANALYZE")
        recompute(lambda: psycopg.connect(url), as_of=AS_OF - timedelta(days=1))
        connection.execute("VACUUM ANALYZE")


def fingerprint(url: str) -> Fingerprint:
    """What a run left: two databases with the same fingerprint have the same signals."""
    with psycopg.connect(url) as connection:
        row = connection.execute(_FINGERPRINT).fetchone()
    assert row is not None
    return row
