"""What is asked of the signals after a run: one row a post, scores as the reference has them, and what people see."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from pin_pipelines.news.checks import SAMPLE_SIZE, Completeness, WrongScore, check_completeness, check_scores
from pin_pipelines.news.ranking import RankingParameters
from pin_pipelines.news.report import distribution_picture, top_posts
from pin_pipelines.news.tables import POSTS, SIGNALS, RankingTablesMissingError
from pin_pipelines_tests.support.news import TODAY, News, day, golden_cases, noon

PARAMETERS = RankingParameters()


def ask(news: News, question: Any, *arguments: Any) -> Any:
    with news.connect() as connection:
        return question(connection, *arguments)


def test_after_a_run_no_post_is_without_its_row(news: News) -> None:
    news.add_many(5)
    assert ask(news, check_completeness) == Completeness(posts=5, missing=5)
    news.run()
    assert ask(news, check_completeness) == Completeness(posts=5, missing=0)
    news.add()
    assert ask(news, check_completeness) == Completeness(posts=6, missing=1)


def test_scores_of_a_run_are_those_of_the_reference(news: News) -> None:
    for case in golden_cases():
        news.add_inputs(case.inputs)
    news.run()
    assert ask(news, check_scores, TODAY, PARAMETERS).wrong == ()
    assert ask(news, check_scores, TODAY, PARAMETERS).sampled == len(golden_cases())


def test_a_score_that_is_off_by_its_last_decimal_is_found(news: News) -> None:
    post = news.add(author_type="Developer")
    news.add()
    news.run()
    news.execute(f"UPDATE {SIGNALS} SET score = score + 0.000001 WHERE id = %s", post)
    assert ask(news, check_scores, TODAY, PARAMETERS).wrong == (
        WrongScore(post, stored=Decimal("0.250001"), expected=Decimal("0.25")),
    )


def test_views_likes_and_comments_since_the_run_do_not_make_a_score_wrong(news: News) -> None:
    post = news.add(views={TODAY: 3}, comments=1)
    news.run()
    news.view(post, {day(-1): 70})
    news.set_likes(post, 8)
    news.execute(f"UPDATE {POSTS} SET comments_count = 9")
    assert ask(news, check_scores, TODAY, PARAMETERS).wrong == ()


def test_a_sample_is_of_bounded_size_and_follows_from_the_day(news: News) -> None:
    news.add_many(SAMPLE_SIZE + 50)
    news.run()
    news.execute(f"UPDATE {SIGNALS} SET score = 1")
    first = ask(news, check_scores, TODAY, PARAMETERS)
    assert first.sampled == len(first.wrong) == SAMPLE_SIZE
    assert ask(news, check_scores, TODAY, PARAMETERS) == first
    # The same ages by another seed.
    news.execute(f"UPDATE {POSTS} SET published_at = published_at + interval '1 day'")
    assert {each.post_id for each in ask(news, check_scores, day(1), PARAMETERS).wrong} != {
        each.post_id for each in first.wrong
    }


def test_the_top_has_the_ten_posts_on_show_with_the_highest_scores_as_exact_decimals(news: News) -> None:
    posts = [news.add(published_at=noon(-n)) for n in range(12)]
    hidden = news.add(published_at=None)
    for n, post in enumerate(posts):
        news.set_likes(post, n)
    news.set_likes(hidden, 100)
    news.run()
    top = ask(news, top_posts)
    assert list(top.columns) == ["rank", "post_id", "title", "views_30d", "likes", "score"]
    assert list(top["post_id"]) == posts[:1:-1]
    assert list(top["rank"]) == list(range(1, 11))
    assert [str(score) for score in top["score"]][:2] == ["1.100000", "1.000000"]


def test_the_distribution_is_a_picture_also_of_nothing(news: News) -> None:
    news.run()
    assert ask(news, distribution_picture).startswith("![score distribution](data:image/png;base64,")
    for likes in (0, 1, 1000):
        news.set_likes(news.add(), likes)
    news.run()
    assert ask(news, distribution_picture).startswith("![score distribution](data:image/png;base64,")


@pytest.mark.parametrize(
    ("question", "arguments"),
    [(check_completeness, ()), (check_scores, (TODAY, PARAMETERS)), (top_posts, ()), (distribution_picture, ())],
)
def test_without_the_branch_of_migrations_the_error_says_which_command_to_run(
    plain_news: News, question: Any, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"):
        ask(plain_news, question, *arguments)
