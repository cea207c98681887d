"""The branch of migrations: what it makes, that nothing else makes it, and that it goes without a trace."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pin_pipelines.migrations import downgrade, migrate
from pin_pipelines.news.tables import POSTS, REACTIONS, SIGNALS, RankingTablesMissingError, check_ranking_tables
from pin_pipelines_tests.support.news import News

RANKING_TABLES = {"post_reactions", "post_ranking_signals"}

# name: (type, default); every column is mandatory.
REACTION_COLUMNS = {
    "id": ("uuid", None),
    "post_id": ("uuid", None),
    "user_id": ("uuid", None),
    "kind": ("character varying(16)", None),
    "created_at": ("timestamp with time zone", "now()"),
}
SIGNAL_COLUMNS = {
    "id": ("uuid", None),
    "views_7d": ("bigint", "0"),
    "views_30d": ("bigint", "0"),
    "likes": ("integer", "0"),
    "comments_rate": ("numeric(8,4)", "0"),
    "recency_decay": ("numeric(6,5)", None),
    "score": ("numeric(14,6)", "0"),
    "affinity_inputs": ("jsonb", None),
    "recomputed_at": ("timestamp with time zone", None),
}

_OBJECTS = """
SELECT 'relation', c.oid::regclass::text, c.relkind::text
FROM pg_class c WHERE c.relnamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
UNION ALL
SELECT 'column', a.attrelid::regclass::text, a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE a.attnum > 0 AND NOT a.attisdropped
  AND c.relnamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
UNION ALL
SELECT 'function', oid::regprocedure::text, ''
FROM pg_proc WHERE pronamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
ORDER BY 1, 2, 3"""


def objects(news: News) -> list[tuple[Any, ...]]:
    """All that is in the database, but for the system's own."""
    return news.execute(_OBJECTS)


def versions(news: News) -> list[str]:
    return [version for (version,) in news.execute("SELECT version_num FROM pin_pipelines.alembic_version ORDER BY 1")]


def columns(news: News, table: str) -> dict[str, tuple[str, str | None]]:
    rows = news.execute(
        "SELECT attname, format_type(atttypid, atttypmod), pg_get_expr(adbin, adrelid), attnotnull "
        "FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
        "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        table,
    )
    assert all(mandatory for *_, mandatory in rows)
    return {name: (kind, default) for name, kind, default, _ in rows}


def indexes(news: News, table: str) -> dict[str, tuple[bool, str]]:
    """Whether it is unique, and what it is on."""
    rows = news.execute(
        "SELECT c.relname, indisunique, pg_get_indexdef(indexrelid) FROM pg_index "
        "JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = %s::regclass",
        table,
    )
    return {name: (unique, definition.partition(" USING ")[2]) for name, unique, definition in rows}


# What it makes


def test_reactions_have_every_column_of_the_spec_with_its_type_and_default(news: News) -> None:
    assert columns(news, REACTIONS) == REACTION_COLUMNS


def test_signals_have_every_column_of_the_spec_with_its_type_and_default(news: News) -> None:
    assert columns(news, SIGNALS) == SIGNAL_COLUMNS


def test_indexes_have_the_names_of_the_spec(news: News) -> None:
    assert indexes(news, REACTIONS) == {
        "pk_post_reactions": (True, "btree (id)"),
        "ux_post_reactions_user": (True, "btree (post_id, user_id)"),
        "ix_post_reactions_user": (False, "btree (user_id)"),
    }
    assert indexes(news, SIGNALS) == {
        "pk_post_ranking_signals": (True, "btree (id)"),
        "ix_post_ranking_signals_score": (False, "btree (score DESC, id DESC)"),
    }


def test_both_tables_refer_to_the_post_and_go_with_it(news: News) -> None:
    rows = news.execute(
        "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE contype = 'f' AND conrelid IN (%s::regclass, %s::regclass) ORDER BY 1",
        REACTIONS,
        SIGNALS,
    )
    assert rows == [
        (SIGNALS, "FOREIGN KEY (id) REFERENCES news.posts(id) ON DELETE CASCADE"),
        (REACTIONS, "FOREIGN KEY (post_id) REFERENCES news.posts(id) ON DELETE CASCADE"),
    ]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("views_7d", "-1"),
        ("views_30d", "-1"),
        ("likes", "-1"),
        ("comments_rate", "-0.0001"),
        ("recency_decay", "-0.00001"),
        ("recency_decay", "1.00001"),
        ("score", "-0.000001"),
        ("affinity_inputs", "'{}'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_a_constraint_that_names_the_column(
    news: News, column: str, value: str
) -> None:
    news.add()
    news.run()
    with pytest.raises(psycopg.errors.CheckViolation, match=f"ck_post_ranking_signals_{column}"):
        news.execute(f"UPDATE {SIGNALS} SET {column} = {value}")


def test_signals_of_a_post_begin_with_what_the_spec_gives_as_defaults(news: News) -> None:
    post = news.add()
    news.execute(
        f"INSERT INTO {SIGNALS} (id, recency_decay, affinity_inputs, recomputed_at) "
        "VALUES (%s, 1, '{\"ContractVersion\": 1}', now())",
        post,
    )
    found = news.signals(post)
    assert (found.views_7d, found.views_30d, found.likes, found.comments_rate, found.score) == (0, 0, 0, 0, 0)


def test_kind_of_a_reaction_is_text_that_later_versions_may_add_to(news: News) -> None:
    news.execute(
        f"INSERT INTO {REACTIONS} (id, post_id, user_id, kind) VALUES (%s, %s, %s, 'Bookmark')",
        uuid4(),
        news.add(),
        uuid4(),
    )


def test_the_counter_of_likes_is_added_to_the_posts_and_begins_at_0(plain_news: News) -> None:
    post = plain_news.add()
    migrate(plain_news.url, branch="news_ranking")
    assert plain_news.likes_count(post) == 0
    with pytest.raises(psycopg.errors.CheckViolation, match="ck_posts_likes_count"):
        plain_news.set_likes(post, -1)


def test_a_counter_that_the_news_service_brought_itself_is_used_as_it_is_and_stays(plain_news: News) -> None:
    plain_news.execute(f"ALTER TABLE {POSTS} ADD COLUMN likes_count integer NOT NULL DEFAULT 7")
    post = plain_news.add()
    before = objects(plain_news)
    migrate(plain_news.url, branch="news_ranking")
    assert plain_news.likes_count(post) == 7
    downgrade(plain_news.url, branch="news_ranking")
    assert plain_news.likes_count(post) == 7
    assert objects(plain_news) == before


# That nothing else makes it


def test_off_the_main_branch_makes_neither_of_the_tables(plain_news: News) -> None:
    migrate(plain_news.url)
    assert not plain_news.tables() & RANKING_TABLES
    assert "likes_count" not in columns_of_posts(plain_news)
    assert not any(version.startswith("news_ranking") for version in versions(plain_news))


def test_the_branch_needs_nothing_of_the_main_branch(news: News) -> None:
    downgrade(news.url, branch="main")
    assert news.tables() >= RANKING_TABLES
    assert versions(news) == ["news_ranking_0001"]
    post = news.add()
    news.run()
    assert set(news.all_signals()) == {post}


def columns_of_posts(news: News) -> set[str]:
    rows = news.execute("SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND NOT attisdropped", POSTS)
    return {name for (name,) in rows}


# That it goes without a trace, and can come again


def test_downgrade_removes_the_branch_cleanly_and_leaves_the_main_branch_and_the_posts_alone(plain_news: News) -> None:
    post = plain_news.add(blocks=["Text"], views={})
    before, versions_before = objects(plain_news), versions(plain_news)
    rows = plain_news.execute(f"SELECT * FROM {POSTS}")
    migrate(plain_news.url, branch="news_ranking")
    plain_news.run()
    assert set(plain_news.all_signals()) == {post}

    downgrade(plain_news.url, branch="news_ranking")

    assert objects(plain_news) == before
    assert plain_news.execute(f"SELECT * FROM {POSTS}") == rows
    assert versions(plain_news) == versions_before


def test_the_branch_may_be_applied_again_and_again_and_after_a_downgrade(news: News) -> None:
    before = objects(news)
    migrate(news.url, branch="news_ranking")
    assert objects(news) == before
    downgrade(news.url, branch="news_ranking")
    migrate(news.url, branch="news_ranking")
    assert objects(news) == before


# Whether it is applied


def test_applied_it_is_found(news: News) -> None:
    with news.connect() as connection:
        check_ranking_tables(connection)


def test_flag_on_but_branch_not_applied_is_an_error_that_says_which_command_to_run(plain_news: News) -> None:
    with (
        plain_news.connect() as connection,
        pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"),
    ):
        check_ranking_tables(connection)
