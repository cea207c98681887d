"""The tables of the ranking: what exists, under which name, and who owns it.

The posts and what belongs to them are the news service's, the daily views user-activity's; the pipeline reads them,
and writes ``likes_count`` of a post alone. Reactions and signals are the pipeline's own (branch ``news_ranking`` of
``migrations``) and are there only once the ranking is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from pin_pipelines.database import Connection

POSTS = "news.posts"
POST_BLOCKS = "news.post_blocks"
POST_PROJECT_REFS = "news.post_project_refs"

REACTIONS = "news.post_reactions"
SIGNALS = "news.post_ranking_signals"

POST_DAILY_VIEWS = "user_activity.post_daily_views"
USER_POST_DAILY_VIEWS = "user_activity.user_post_daily_views"


class RankingTablesMissingError(RuntimeError):
    """The flag is on, but the tables of the ranking were never made."""


@contextmanager
def ranking_tables_needed() -> Iterator[None]:
    """Say what to do where a statement finds the tables of the ranking missing.

    Raises:
        RankingTablesMissingError: instead of PostgreSQL's own error about these tables.
    """
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        missing = [table for table in (REACTIONS, SIGNALS) if table in str(error)]
        if not missing:
            raise
        raise RankingTablesMissingError(
            f"the table {missing[0]} is missing; `pin-pipelines migrate --with-news-ranking` makes it"
        ) from error


def check_ranking_tables(connection: Connection) -> None:
    """Make sure that reactions and signals are there, before anything is begun.

    Raises:
        RankingTablesMissingError: they are not.
    """
    with ranking_tables_needed():
        connection.execute(f"SELECT FROM {REACTIONS}, {SIGNALS} LIMIT 0")
