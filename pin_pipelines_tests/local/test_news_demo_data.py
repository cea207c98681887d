"""The demo's newsroom: the same each time, and such that the ranking has something to show."""

from __future__ import annotations

from typing import Any

import pytest

from pin_pipelines.local.news_demo_data import READERS, make_news
from pin_pipelines.news.feed import PostSortField, read_feed
from pin_pipelines.news.recommendations import recommend
from pin_pipelines.news.tables import POST_DAILY_VIEWS, POSTS, REACTIONS, USER_POST_DAILY_VIEWS
from pin_pipelines_tests.support.news import TODAY, News


@pytest.fixture
def newsroom(news: News) -> News:
    with news.connect() as connection:
        assert make_news(connection, TODAY) >= 30
    news.run()
    return news


def everything(news: News) -> list[list[tuple[Any, ...]]]:
    tables = [POSTS, POST_DAILY_VIEWS, USER_POST_DAILY_VIEWS, "news.post_blocks", "news.post_project_refs"]
    return [news.execute(f"SELECT t.*::text FROM {table} t ORDER BY 1") for table in tables]


def test_the_same_newsroom_comes_out_each_time(newsroom: News) -> None:
    first = everything(newsroom), newsroom.stored()
    newsroom.execute(f"DELETE FROM {POSTS}")
    newsroom.execute(f"TRUNCATE news.post_categories, {POST_DAILY_VIEWS}, {USER_POST_DAILY_VIEWS} CASCADE")
    with newsroom.connect() as connection:
        make_news(connection, TODAY)
    newsroom.run()
    assert (everything(newsroom), newsroom.stored()) == first


def test_a_newsroom_that_is_there_is_left_alone(newsroom: News) -> None:
    first = everything(newsroom)
    with newsroom.connect() as connection:
        assert make_news(connection, TODAY) == 0
    assert everything(newsroom) == first


def test_likes_are_counted(newsroom: News) -> None:
    wrong = newsroom.execute(
        f"SELECT id FROM {POSTS} p WHERE likes_count <> (SELECT count(*) FROM {REACTIONS} r WHERE r.post_id = p.id)"
    )
    assert wrong == []
    assert newsroom.execute(f"SELECT sum(likes_count) FROM {POSTS}")[0][0] > 100


def test_the_feed_by_score_differs_from_the_feed_by_date(newsroom: News) -> None:
    with newsroom.connect() as connection:
        by_date = read_feed(connection, PostSortField.DATE, ranking_enabled=True)
        by_score = read_feed(connection, PostSortField.RECOMMENDED, ranking_enabled=True)
    assert len(by_date.items) == len(by_score.items) == 20
    assert [item.post_id for item in by_date.items] != [item.post_id for item in by_score.items]


def test_readers_get_lists_of_their_own_and_the_newcomer_gets_the_feed(newsroom: News) -> None:
    with newsroom.connect() as connection:
        lists = [recommend(connection, reader.id, as_of=TODAY, ranking_enabled=True) for reader in READERS]
    assert [found.personal for found in lists] == [True, True, False]
    assert len({tuple(item.post_id for item in found.items) for found in lists}) == 3
    assert all(len(found.items) >= 3 for found in lists)
