"""The feed: by date while the ranking is off, by score while it is on, page after page without gaps or repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from pin_pipelines.news.feed import (
    MAX_PAGE_SIZE,
    FeedCursor,
    FeedCursorError,
    FeedItem,
    FeedOrder,
    FeedPage,
    PostSortField,
    read_feed,
)
from pin_pipelines.news.reactions import like
from pin_pipelines.news.tables import POSTS, SIGNALS, RankingTablesMissingError
from pin_pipelines_tests.support.news import CATEGORY, TODAY, News, Recorder, noon, scans

RECOMMENDED, DATE = PostSortField.RECOMMENDED, PostSortField.DATE
ON, OFF = True, False
RANKING_TABLES = ("post_reactions", "post_ranking_signals")


def page(news: News, sort: PostSortField, ranking_enabled: bool, **options: Any) -> FeedPage:
    with news.connect() as connection:
        return read_feed(connection, sort, ranking_enabled=ranking_enabled, **options)


def pages(news: News, sort: PostSortField, ranking_enabled: bool, size: int) -> Iterator[tuple[FeedItem, ...]]:
    """All pages; the cursor travels as text, as it would through an API."""
    found = page(news, sort, ranking_enabled, size=size)
    yield found.items
    while found.next_page is not None:
        found = page(news, sort, ranking_enabled, size=size, after=FeedCursor.parse(str(found.next_page)))
        yield found.items


def walk(news: News, sort: PostSortField, ranking_enabled: bool, size: int = 3) -> list[UUID]:
    return [item.post_id for items in pages(news, sort, ranking_enabled, size) for item in items]


def posts_by_age(news: News, number: int = 7) -> list[UUID]:
    """The newest first; the older, the more views and likes."""
    posts = []
    for n in range(number):
        posts.append(news.add(published_at=noon(-n), views={TODAY: 10 ** (n + 1)}))
        news.set_likes(posts[-1], 100 * n)
    return posts


# Off


def test_inv_4_recommended_fallback_with_the_flag_off_recommended_is_exactly_date(plain_news: News) -> None:
    posts = posts_by_age_without_likes(plain_news)
    assert page(plain_news, RECOMMENDED, OFF) == page(plain_news, DATE, OFF)
    assert list(pages(plain_news, RECOMMENDED, OFF, 3)) == list(pages(plain_news, DATE, OFF, 3))
    assert walk(plain_news, RECOMMENDED, OFF) == posts


def test_inv_4_with_the_flag_off_scores_that_are_there_change_nothing(news: News) -> None:
    posts = posts_by_age(news)
    news.run()
    assert page(news, RECOMMENDED, OFF) == page(news, DATE, OFF) == page(news, DATE, ON)
    assert walk(news, RECOMMENDED, OFF) == posts


@pytest.mark.parametrize("sort", PostSortField)
def test_inv_4_with_the_flag_off_no_statement_mentions_reactions_or_signals(
    plain_news: News, sort: PostSortField
) -> None:
    posts_by_age_without_likes(plain_news)
    with plain_news.connect() as connection:
        sent = Recorder(connection)
        first = read_feed(connection, sort, ranking_enabled=OFF, size=2)
        read_feed(connection, sort, ranking_enabled=OFF, size=2, after=first.next_page)
    assert len(sent.calls) == 2
    assert not sent.mentioning(*RANKING_TABLES)


def posts_by_age_without_likes(news: News) -> list[UUID]:
    """The counter of likes comes with the ranking."""
    return [news.add(published_at=noon(-n), views={TODAY: 10**n}) for n in range(7)]


# On


def test_ranking_enabled_recommended_is_by_score_the_highest_first(news: News) -> None:
    posts = posts_by_age(news)
    news.run()
    found = page(news, RECOMMENDED, ON)
    assert found.order is FeedOrder.SCORE
    assert [item.post_id for item in found.items] == posts[::-1]
    scores = [item.score for item in found.items]
    assert scores == [news.signals(post).score for post in posts[::-1]]


def test_by_date_stays_by_date_with_the_flag_on_and_mentions_no_signals(news: News) -> None:
    posts = posts_by_age(news)
    news.run()
    with news.connect() as connection:
        sent = Recorder(connection)
        found = read_feed(connection, DATE, ranking_enabled=ON)
    assert [item.post_id for item in found.items] == posts
    assert not sent.mentioning(*RANKING_TABLES)


def test_turning_the_flag_off_again_is_off_at_once(news: News) -> None:
    posts = posts_by_age(news)
    news.run()
    assert walk(news, RECOMMENDED, ON) == posts[::-1]
    assert walk(news, RECOMMENDED, OFF) == posts
    assert page(news, RECOMMENDED, OFF) == page(news, DATE, OFF)


def test_a_like_shows_in_the_count_at_once_and_in_the_order_after_the_next_recompute(news: News) -> None:
    older, newer = news.add(published_at=noon(-1)), news.add(author_type="Developer")
    news.run()
    with news.connect() as connection:
        for _ in range(9):
            like(connection, older, uuid4())
    assert [(item.post_id, item.likes_count) for item in page(news, RECOMMENDED, ON).items] == [(newer, 0), (older, 9)]
    news.run()
    assert walk(news, RECOMMENDED, ON) == [older, newer]


def test_a_post_without_signals_joins_the_order_by_score_with_the_next_recompute(news: News) -> None:
    news.run()
    post = news.add()
    assert walk(news, RECOMMENDED, ON) == []
    news.run()
    assert walk(news, RECOMMENDED, ON) == [post]


def test_by_score_without_the_branch_of_migrations_says_which_command_to_run(plain_news: News) -> None:
    with pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"):
        page(plain_news, RECOMMENDED, ON)


# Pages


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("sort", PostSortField)
def test_pages_of_any_size_have_every_post_once_in_order(news: News, sort: PostSortField, size: int) -> None:
    posts = posts_by_age(news)
    news.run()
    expected = posts if sort is DATE else posts[::-1]
    found = list(pages(news, sort, ON, size))
    assert [item.post_id for items in found for item in items] == expected
    assert all(len(items) == size for items in found[:-1])


@pytest.mark.parametrize("sort", PostSortField)
def test_posts_with_the_same_key_keep_their_order_across_pages_also_after_another_recompute(
    news: News, sort: PostSortField
) -> None:
    posts = news.add_many(11)
    news.run()
    first = page(news, sort, ON, size=4)
    news.run()
    rest = page(news, sort, ON, size=10, after=first.next_page)
    assert [item.post_id for item in (*first.items, *rest.items)] == posts[::-1]


def test_a_post_that_comes_between_two_pages_moves_nothing(news: News) -> None:
    posts = posts_by_age(news)
    first = page(news, DATE, OFF, size=3)
    news.add(published_at=noon(1))
    second = page(news, DATE, OFF, size=10, after=first.next_page)
    assert [item.post_id for item in (*first.items, *second.items)] == posts


@pytest.mark.parametrize("sort", PostSortField)
def test_only_posts_that_are_published_by_now_are_on_show(news: News, sort: PostSortField) -> None:
    news.add(published_at=None, author_type="Platform")
    news.add(published_at=datetime.now(UTC) + timedelta(days=1), author_type="Platform")
    post = news.add()
    news.run()
    assert walk(news, sort, ON) == [post]


def test_an_empty_feed_is_an_empty_page(news: News) -> None:
    assert page(news, RECOMMENDED, ON) == FeedPage(FeedOrder.SCORE, (), None)
    assert page(news, RECOMMENDED, OFF) == FeedPage(FeedOrder.DATE, (), None)


def test_an_item_has_what_a_feed_shows_and_nothing_that_names_a_user(news: News) -> None:
    author, reader = uuid4(), uuid4()
    post = news.add(author=author, author_type="Developer", comments=3)
    with news.connect() as connection:
        like(connection, post, reader)
    news.run()
    by_date, by_score = page(news, DATE, ON).items[0], page(news, RECOMMENDED, ON).items[0]
    shown = {
        "post_id": post,
        "title": "post",
        "category_id": CATEGORY,
        "author_type": "Developer",
        "published_at": noon(0),
        "comments_count": 3,
    }
    assert by_date == FeedItem(**shown)
    # 0.1 for the like, 3 for the comments, 0.25 for the author.
    assert by_score == FeedItem(**shown, likes_count=1, score=Decimal("3.35"))
    told = {getattr(item, each.name) for item in (by_date, by_score) for each in fields(item)}
    assert not told & {author, reader}


@pytest.mark.parametrize("size", [0, -1, MAX_PAGE_SIZE + 1])
def test_a_size_out_of_bounds_is_refused(news: News, size: int) -> None:
    with pytest.raises(ValueError, match=f"^size = {size} is not allowed; it must be a whole number from 1 to 100$"):
        page(news, DATE, OFF, size=size)


# Cursors


def test_a_cursor_of_the_order_by_score_is_refused_after_the_flag_is_turned_off(news: News) -> None:
    posts_by_age(news)
    news.run()
    first = page(news, RECOMMENDED, ON, size=2)
    with pytest.raises(FeedCursorError, match="the cursor is of the order by score, the feed is by date now"):
        page(news, RECOMMENDED, OFF, size=2, after=first.next_page)


@pytest.mark.parametrize(
    "cursor",
    [
        FeedCursor(FeedOrder.DATE, datetime(2024, 11, 30, 12, 0, 0, 123456, timezone(timedelta(hours=3))), UUID(int=1)),
        FeedCursor(FeedOrder.SCORE, Decimal("7.006300"), UUID(int=2)),
    ],
)
def test_a_cursor_comes_back_from_its_text(cursor: FeedCursor) -> None:
    assert FeedCursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text",
    [
        "",
        "date",
        f"size~1~{UUID(int=1)}",
        f"date~2024-11-30T12:00:00~{UUID(int=1)}",
        f"date~yesterday~{UUID(int=1)}",
        f"score~NaN~{UUID(int=1)}",
        f"score~high~{UUID(int=1)}",
        "score~1~7",
        f"score~1~{UUID(int=1)}~more",
    ],
)
def test_a_text_that_is_no_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(FeedCursorError, match="is no cursor; it must be the next_page of a page") as refused:
        FeedCursor.parse(text)
    assert repr(text) in str(refused.value)


# What a page costs


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1], ids=["first page", "a page in the middle"])
@pytest.mark.parametrize(
    ("sort", "index"), [(RECOMMENDED, "ix_post_ranking_signals_score"), (DATE, "ix_posts_published")]
)
def test_a_page_reads_only_as_many_index_rows_as_it_returns_also_among_posts_with_the_same_key(
    news: News, sort: PostSortField, index: str, depth: int
) -> None:
    size = 20
    posts = news.add_many(5000)
    # Ten values of either key, with 500 posts each.
    news.execute(
        f"UPDATE {POSTS} SET likes_count = n %% 10, published_at = published_at - (n %% 10) * interval '1 hour' "
        "FROM unnest(%s::uuid[]) WITH ORDINALITY AS t (post, n) WHERE id = post",
        posts,
    )
    news.run()
    news.execute(f"ANALYZE {POSTS}, {SIGNALS}")
    after = page(news, sort, ON, size=50).next_page if depth else None

    with news.connect() as connection:
        recorder = Recorder(connection)
        assert len(read_feed(connection, sort, ranking_enabled=ON, size=size, after=after).items) == size
        ((statement, parameters),) = recorder.calls
        first, *others = scans(connection, statement, parameters)
    assert first["Index Name"].startswith(index)
    assert first["Actual Rows"] * first["Actual Loops"] == size
    assert "Rows Removed by Filter" not in first or first["Rows Removed by Filter"] == 0
    assert all(each["Actual Rows"] * each["Actual Loops"] <= size for each in others)
