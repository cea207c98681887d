"""Posts for one user: like those that the user viewed, fresh, mixed, and the same each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import date
from typing import Any
from uuid import UUID, uuid4

import pytest

from pin_pipelines.news.feed import PostSortField, read_feed
from pin_pipelines.news.recommendations import RecommendationParameters, Recommendations, recommend
from pin_pipelines.news.tables import SIGNALS, RankingTablesMissingError
from pin_pipelines.news.views import ViewTotals
from pin_pipelines_tests.support.news import TODAY, News, Recorder, day, noon
from pin_pipelines_tests.support.tiers import first_is_fast

ANN, BOB = UUID(int=0xA), UUID(int=0xB)
FLATS, LOANS, GARDENS = UUID(int=0xF1), UUID(int=0xF2), UUID(int=0xF3)
ON, OFF = True, False
# Where the mixture is not the question.
ANY_MIXTURE = RecommendationParameters(max_per_category=100, max_per_author=100)


def for_user(
    news: News,
    user: UUID = ANN,
    parameters: RecommendationParameters = ANY_MIXTURE,
    *,
    ranking_enabled: bool = ON,
    as_of: date = TODAY,
    **options: Any,
) -> Recommendations:
    with news.connect() as connection:
        return recommend(
            connection, user, as_of=as_of, ranking_enabled=ranking_enabled, parameters=parameters, **options
        )


def chosen(news: News, *arguments: Any, **options: Any) -> list[UUID]:
    found = for_user(news, *arguments, **options)
    assert found.personal
    return [item.post_id for item in found.items]


def feed(news: News, *, ranking_enabled: bool = ON, size: int = 10) -> Recommendations:
    """What a user gets of whom nothing is known."""
    with news.connect() as connection:
        page = read_feed(connection, PostSortField.RECOMMENDED, ranking_enabled=ranking_enabled, size=size)
    return Recommendations(False, page.items)


def viewed(news: News, *, user: UUID = ANN, times: int = 1, on: date = TODAY, **post: Any) -> UUID:
    """A post that is too old to be recommended, and that a user viewed."""
    old = news.add(published_at=noon(-100), **post)
    news.view_as(user, old, times, on=on)
    return old


# Affinity


def test_fresh_posts_of_the_categories_that_the_user_viewed_come_first_the_most_viewed_before(news: News) -> None:
    viewed(news, category=FLATS, times=3)
    viewed(news, category=LOANS, times=5)
    flat, loan, garden = (news.add(category=category, author_type="Bank") for category in (FLATS, LOANS, GARDENS))
    news.run()
    assert chosen(news) == [loan, flat]
    assert garden not in chosen(news)


def test_fresh_posts_of_the_types_of_author_that_the_user_viewed_are_candidates_too(news: News) -> None:
    viewed(news, category=FLATS, author_type="Developer")
    both = news.add(category=FLATS, author_type="Developer", published_at=noon(-3))
    author_alone = news.add(category=GARDENS, author_type="Developer")
    neither = news.add(category=GARDENS, author_type="Agency")
    news.run()
    # Twice the affinity at 0.743 of the freshness.
    assert chosen(news) == [both, author_alone]
    assert neither not in chosen(news)


def test_the_fresher_of_two_posts_alike_comes_first(news: News) -> None:
    viewed(news, category=FLATS)
    posts = [news.add(category=FLATS, published_at=noon(-age)) for age in (4, 0, 9)]
    news.run()
    assert chosen(news) == [posts[1], posts[0], posts[2]]


def test_an_old_post_of_a_favourite_category_may_stand_behind_a_fresh_one_of_a_lesser(news: News) -> None:
    viewed(news, category=FLATS, times=3, author_type="X")
    viewed(news, category=LOANS, times=2, author_type="X")
    favourite = news.add(category=FLATS, published_at=noon(-7), author_type="Y")
    lesser = news.add(category=LOANS, author_type="Y")
    news.run()
    # 3 · 0.5 against 2 · 1.
    assert chosen(news) == [lesser, favourite]


def test_of_posts_alike_and_of_one_day_the_one_with_the_higher_score_comes_first(news: News) -> None:
    viewed(news, category=FLATS)
    plain, liked = news.add_many_in(FLATS, 2)[::-1]
    news.set_likes(liked, 5)
    news.run()
    assert chosen(news) == [liked, plain]


@pytest.mark.parametrize(("on", "personal"), [(day(0), True), (day(-29), True), (day(-30), False), (day(1), False)])
def test_history_is_the_views_of_the_last_30_days(news: News, on: date, personal: bool) -> None:
    viewed(news, category=FLATS, on=on)
    news.add(category=FLATS)
    news.run()
    assert for_user(news).personal is personal


@pytest.mark.parametrize(("age", "recommended"), [(0, True), (14, True), (15, False)])
def test_fresh_is_a_post_of_at_most_14_days(news: News, age: int, recommended: bool) -> None:
    viewed(news, category=FLATS)
    post = news.add(category=FLATS, published_at=noon(-age))
    always = news.add(category=FLATS)
    news.run()
    assert (post in chosen(news)) is recommended
    assert always in chosen(news)


def test_a_post_that_the_user_viewed_is_not_recommended_again(news: News) -> None:
    seen, unseen = news.add_many_in(FLATS, 2)
    news.view_as(ANN, seen)
    news.run()
    assert chosen(news) == [unseen]


def test_a_post_that_is_not_on_show_is_not_recommended(news: News) -> None:
    viewed(news, category=FLATS)
    news.add(category=FLATS, published_at=None)
    post = news.add(category=FLATS)
    news.run()
    assert chosen(news) == [post]


def test_what_one_user_viewed_is_nothing_to_another(news: News) -> None:
    viewed(news, category=FLATS, author_type="X", user=ANN)
    viewed(news, category=LOANS, author_type="Y", user=BOB)
    flat, loan = news.add(category=FLATS, author_type="X"), news.add(category=LOANS, author_type="Y")
    news.run()
    assert (chosen(news, ANN), chosen(news, BOB)) == ([flat], [loan])


# Mixture


def test_no_more_posts_of_one_category_than_allowed(news: News) -> None:
    viewed(news, category=FLATS, times=9, author_type="X")
    viewed(news, category=LOANS, author_type="X")
    for category in (FLATS, LOANS):
        for _ in range(6):
            news.add(category=category, author_type="Y")
    news.run()
    found = for_user(news, ANN, RecommendationParameters(max_per_category=4, max_per_author=100))
    assert [item.category_id for item in found.items] == [FLATS] * 4 + [LOANS] * 4


def test_no_more_posts_of_one_author_than_allowed(news: News) -> None:
    viewed(news, category=FLATS)
    prolific, others = uuid4(), {uuid4(), uuid4()}
    authors = {news.add(category=FLATS, author=prolific): prolific for _ in range(5)}
    authors |= {news.add(category=FLATS, author=other, published_at=noon(-9)): other for other in others}
    news.run()
    found = chosen(news, ANN, RecommendationParameters(max_per_category=100, max_per_author=2))
    assert Counter(authors[post] for post in found) == {prolific: 2, **dict.fromkeys(others, 1)}


@pytest.mark.parametrize(
    ("size", "per_category", "per_author"),
    first_is_fast((10, 4, 2), (10, 3, 3), (5, 1, 1), (20, 20, 1), (3, 100, 100)),
)
def test_both_bounds_and_the_size_hold_together_and_no_better_post_that_fits_is_passed_over(
    news: News, size: int, per_category: int, per_author: int
) -> None:
    categories, authors = [UUID(int=0xF0 + n) for n in range(4)], [UUID(int=0xA0 + n) for n in range(5)]
    for n, category in enumerate(categories):
        viewed(news, category=category, times=n + 1, author_type="X")
    facts = {}
    for n in range(60):
        category, author = categories[n % 4], authors[n * n % 5]
        age = n * 7 % 13
        post = news.add(category=category, author=author, published_at=noon(-age), author_type="Y")
        facts[post] = (category, author, (n % 4 + 1) * 2 ** (-age / 7))
    news.run()
    found = chosen(
        news,
        ANN,
        RecommendationParameters(size=size, max_per_category=per_category, max_per_author=per_author),
    )

    # The plain way: go down the list by relevance, and take what fits. Posts with the same relevance have the same
    # category and age; which of them is taken is the id's to say.
    expected: list[UUID] = []
    for post in sorted(facts, key=lambda post: (round(facts[post][2], 4), post), reverse=True):
        category, author, _ = facts[post]
        of_category = sum(facts[other][0] == category for other in expected)
        of_author = sum(facts[other][1] == author for other in expected)
        if len(expected) < size and of_category < per_category and of_author < per_author:
            expected.append(post)
    assert found == expected


def test_the_same_data_give_the_same_list(news: News) -> None:
    viewed(news, category=FLATS)
    news.add_many_in(FLATS, 30)
    news.run()
    first = for_user(news)
    news.run()
    assert for_user(news) == first
    assert len(first.items) == 10


# Without a history


def test_a_user_without_history_gets_the_plain_feed(news: News) -> None:
    for n in range(12):
        news.set_likes(news.add(published_at=noon(-n)), n)
    news.run()
    assert for_user(news) == feed(news)
    assert len(for_user(news).items) == 10


def test_a_user_whose_interests_nothing_fresh_meets_gets_the_plain_feed(news: News) -> None:
    viewed(news, category=FLATS, author_type="X")
    news.add(category=LOANS, author_type="Y")
    news.run()
    assert for_user(news) == feed(news)


def test_a_user_who_viewed_only_posts_that_are_gone_gets_the_plain_feed(news: News) -> None:
    news.view_as(ANN, uuid4(), 7)
    news.add()
    news.run()
    assert for_user(news) == feed(news)


# Off


def test_inv_4_with_the_flag_off_everybody_gets_the_feed_by_date_and_no_statement_mentions_the_tables(
    plain_news: News,
) -> None:
    viewed(plain_news, category=FLATS)
    plain_news.add(category=FLATS)
    plain_news.add(category=LOANS, published_at=noon(-1))
    with plain_news.connect() as connection:
        sent = Recorder(connection)
        found = recommend(connection, ANN, as_of=TODAY, ranking_enabled=OFF)
    assert found == feed(plain_news, ranking_enabled=OFF)
    assert sent.calls
    assert sent.mentioning("post_reactions", "post_ranking_signals") == []


def test_turning_the_flag_off_again_is_off_at_once(news: News) -> None:
    viewed(news, category=FLATS)
    news.add(category=FLATS)
    news.run()
    assert for_user(news).personal
    assert for_user(news, ranking_enabled=OFF) == feed(news, ranking_enabled=OFF)


def test_without_the_branch_of_migrations_the_error_says_which_command_to_run(plain_news: News) -> None:
    viewed(plain_news, category=FLATS)
    with pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"):
        for_user(plain_news)


# What else may be in the way


def test_nothing_that_is_returned_names_a_user(news: News) -> None:
    author = uuid4()
    viewed(news, category=FLATS, author=author)
    news.add(category=FLATS, author=author)
    news.run()
    found = for_user(news)
    told = {getattr(item, each.name) for item in found.items for each in fields(item)}
    assert found.personal
    assert not told & {author, ANN}


def test_a_post_whose_document_cannot_be_read_takes_no_part_and_stops_nothing(
    news: News, caplog: pytest.LogCaptureFixture
) -> None:
    viewed(news, category=FLATS)
    readable, of_tomorrow = news.add_many_in(FLATS, 2)
    news.run()
    news.execute(f"UPDATE {SIGNALS} SET affinity_inputs = '{{\"ContractVersion\": 2}}' WHERE id = %s", of_tomorrow)
    assert chosen(news) == [readable]
    assert "ContractVersion = 2 is not allowed" in caplog.text


def test_a_document_with_fields_of_a_later_writer_is_read(news: News) -> None:
    viewed(news, category=FLATS)
    post = news.add(category=FLATS)
    news.run()
    news.execute(f'UPDATE {SIGNALS} SET affinity_inputs = affinity_inputs || \'{{"Mood": "sunny"}}\'')
    assert chosen(news) == [post]


def test_history_comes_from_whatever_source_is_given(news: News) -> None:
    old = news.add(category=FLATS, published_at=noon(-100))
    post = news.add(category=FLATS)
    news.run()

    class Elsewhere:
        def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
            raise NotImplementedError

        def of_user(self, user_id: UUID, first_day: date, last_day: date) -> Mapping[UUID, int]:
            assert (user_id, first_day, last_day) == (ANN, day(-29), TODAY)
            return {old: 1}

    assert chosen(news, open_views=lambda _: Elsewhere()) == [post]


@pytest.mark.parametrize(
    ("name", "value", "largest"),
    [
        ("size", 0, 100),
        ("size", 101, 100),
        ("max_per_category", 0, 100),
        ("max_per_author", -1, 100),
        ("fresh_days", 31, 30),
    ],
)
def test_a_parameter_out_of_bounds_is_refused_by_name_with_its_value_and_what_is_allowed(
    name: str, value: int, largest: int
) -> None:
    message = f"^{name} = {value} is not allowed; it must be a whole number from 1 to {largest}$"
    with pytest.raises(ValueError, match=message):
        RecommendationParameters(**{name: value})
