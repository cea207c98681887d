"""The formula of the score: worked cases, its Python reference, and the SQL path against the reference."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pin_pipelines.news.ranking import (
    PostInputs,
    RankingParameters,
    Signals,
    recency_decay,
    recency_decays,
    reference_signals,
)
from pin_pipelines_tests.support.news import TODAY, GoldenCase, News, day, golden_cases, noon

GOLDEN = golden_cases()

ONLY_VIEWS = RankingParameters(w2=Decimal(0), w3=Decimal(0), w4=Decimal(0))


def inputs(**given: Any) -> PostInputs:
    """A post that nothing speaks for, but for what is given."""
    nothing: dict[str, Any] = {
        "published_at": noon(0),
        "daily_views": {},
        "comments_count": 0,
        "likes_count": 0,
        "promotion_boost": Decimal(0),
        "author_type": "Agency",
    }
    return PostInputs(**{**nothing, **given})


def both_ways(news: News, given: PostInputs, parameters: RankingParameters | None = None) -> Signals:
    """The signals by the engine, once the reference has said the same."""
    parameters = parameters or RankingParameters()
    post = news.add_inputs(given)
    news.run(parameters=parameters)
    found = news.signals(post)
    assert found == reference_signals(given, TODAY, parameters)
    return found


# Worked cases


@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_reference_agrees_with_golden_case(case: GoldenCase) -> None:
    assert reference_signals(case.inputs, case.as_of, RankingParameters()) == case.expected


def test_engine_agrees_with_every_golden_case(news: News) -> None:
    posts = [news.add_inputs(case.inputs) for case in GOLDEN]
    wrong = {}
    for as_of in {case.as_of for case in GOLDEN}:
        news.run(as_of)
        signals = news.all_signals()
        wrong |= {
            number: (signals[post], case.expected)
            for number, (post, case) in enumerate(zip(posts, GOLDEN, strict=True))
            if case.as_of == as_of and signals[post] != case.expected
        }
    assert wrong == {}


# The terms, one by one


def test_views_of_7_days_are_those_of_today_and_the_6_days_before_and_of_30_those_of_29_before(news: News) -> None:
    views = {day(1): 10**6, day(0): 1, day(-6): 10, day(-7): 100, day(-29): 1000, day(-30): 10**5}
    found = both_ways(news, inputs(daily_views=views))
    assert (found.views_7d, found.views_30d) == (11, 1111)


@pytest.mark.parametrize(("age", "decay"), [(0, "1.00000"), (7, "0.50000"), (14, "0.25000"), (70, "0.00098")])
def test_decay_halves_with_each_half_life(age: int, decay: str) -> None:
    assert str(recency_decay(age, 7)) == decay


@given(age=st.integers(0, 5000), half_life=st.integers(1, 365))
def test_decay_is_the_nearest_of_five_decimals_by_exact_fractions(age: int, half_life: int) -> None:
    # 2^(−age/H) is between two bounds where 2^(−age) is between their H-th powers.
    stored, half = Fraction(recency_decay(age, half_life)), Fraction(1, 200_000)
    exact = Fraction(1, 2**age)
    assert exact < (stored + half) ** half_life
    assert stored == 0 or (stored - half) ** half_life <= exact


def test_decays_go_on_to_the_last_age_that_is_above_0() -> None:
    # 2^(−age/7) is at least 0.000005 up to age 7·log2(200000) = 123.27.
    decays = recency_decays(7)
    assert len(decays) == 124
    assert all(earlier >= later > 0 for earlier, later in pairwise(decays))


@pytest.mark.parametrize(("age", "decay"), [(123, "0.00001"), (124, "0.00000"), (4000, "0.00000")])
def test_a_post_older_than_the_decays_go_has_a_decay_of_0(news: News, age: int, decay: str) -> None:
    found = both_ways(news, inputs(published_at=noon(-age), daily_views={TODAY: 10**6}))
    assert found.recency_decay == Decimal(decay)


def test_a_post_published_after_the_day_is_as_fresh_as_one_of_the_day(news: News) -> None:
    assert both_ways(news, inputs(published_at=noon(3))).recency_decay == 1


def test_a_post_that_is_not_published_has_a_decay_of_0(news: News) -> None:
    found = both_ways(news, inputs(published_at=None, daily_views={TODAY: 100}, likes_count=3))
    assert (found.recency_decay, found.score) == (0, Decimal("0.3"))


def test_age_is_counted_in_days_of_utc_whatever_the_zones_of_author_and_database(news: News) -> None:
    news.execute(f"ALTER DATABASE {news.name} SET timezone TO 'Asia/Tokyo'")
    late_in_brazil = datetime(2024, 11, 29, 22, 30, tzinfo=timezone(timedelta(hours=-3)))
    assert late_in_brazil.astimezone(UTC).date() == TODAY
    assert both_ways(news, inputs(published_at=late_in_brazil)).recency_decay == 1


def test_comments_rate_is_comments_a_view_of_30_days_with_a_tie_rounded_up(news: News) -> None:
    found = both_ways(news, inputs(comments_count=1, daily_views={day(-29): 20_000}))
    assert found.comments_rate == Decimal("0.0001")


def test_comments_without_views_count_as_of_one_view(news: News) -> None:
    found = both_ways(news, inputs(comments_count=17))
    assert (found.comments_rate, found.score) == (17, 17)


def test_likes_weigh_by_their_number(news: News) -> None:
    assert both_ways(news, inputs(likes_count=12_345)).score == Decimal("1234.5")


@pytest.mark.parametrize(
    ("boost", "score"), [("-3", "0"), ("0", "0"), ("12.5", "0.0625"), ("100", "0.5"), ("250", "0.5")]
)
def test_promotion_grows_with_the_boost_up_to_the_full_one(news: News, boost: str, score: str) -> None:
    assert both_ways(news, inputs(promotion_boost=Decimal(boost))).score == Decimal(score)


@pytest.mark.parametrize(("author_type", "score"), [("Platform", "0.5"), ("Developer", "0.25"), ("Stranger", "0")])
def test_trust_goes_by_the_type_of_the_author(news: News, author_type: str, score: str) -> None:
    assert both_ways(news, inputs(author_type=author_type)).score == Decimal(score)


def test_a_tie_in_the_score_is_rounded_up(news: News) -> None:
    # 0.000001 · 0.5
    parameters = RankingParameters(w4=Decimal("0.000001"))
    assert both_ways(news, inputs(author_type="Developer"), parameters).score == Decimal("0.000001")


@pytest.mark.parametrize("views", [1, 9, 1_543_091, 10**9, 10**15, 2**62])
def test_logarithm_is_exact_beyond_the_last_decimal_under_the_largest_weight(news: News, views: int) -> None:
    context = Context(prec=50, rounding=ROUND_HALF_UP)
    expected = context.multiply(Decimal(999), context.ln(Decimal(views + 1)))
    post = news.add_inputs(inputs(daily_views={TODAY: views}))
    news.run(parameters=RankingParameters(w1=Decimal(999)))
    assert news.signals(post).score == expected.quantize(Decimal("0.000001"), context=context)


# What no column holds


def test_views_beyond_a_long_are_stored_as_the_largest_long(news: News) -> None:
    found = both_ways(news, inputs(daily_views={day(-n): 2**62 for n in range(3)}), ONLY_VIEWS)
    assert (found.views_7d, found.views_30d) == (2**63 - 1, 2**63 - 1)


def test_a_rate_and_a_score_beyond_their_columns_are_stored_as_the_largest_that_these_hold(news: News) -> None:
    found = both_ways(news, inputs(comments_count=10**9, likes_count=2**31 - 1), RankingParameters(w2=Decimal(1000)))
    assert (found.comments_rate, found.score) == (Decimal("9999.9999"), Decimal("99999999.999999"))


# Any post, any parameters

_amounts = st.integers(0, 3) | st.integers(0, 10**7)
_decimals = st.decimals(0, 10, places=6) | st.sampled_from([Decimal(0), Decimal("0.5"), Decimal(1)])
_posts = st.builds(
    PostInputs,
    published_at=st.none() | st.integers(-200, 3).map(noon),
    daily_views=st.dictionaries(st.integers(-32, 1).map(day), _amounts, max_size=8),
    comments_count=_amounts,
    likes_count=_amounts,
    promotion_boost=st.decimals(-10, 300, places=4),
    author_type=st.sampled_from(["Platform", "Developer", "Agency", "Stranger"]),
)
_parameters = st.builds(
    RankingParameters,
    w1=_decimals,
    w2=_decimals,
    w3=_decimals,
    w4=_decimals,
    half_life_days=st.integers(1, 365),
    full_boost=st.decimals("0.000001", 300, places=6),
    author_trust=st.dictionaries(st.sampled_from(["Platform", "Agency"]), st.decimals(0, 1, places=6)),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(posts=st.lists(_posts, min_size=1, max_size=5), parameters=_parameters)
def test_engine_equals_the_reference_for_any_posts_and_parameters_and_no_score_is_negative(
    news: News, posts: list[PostInputs], parameters: RankingParameters
) -> None:
    ids = [news.add_inputs(post) for post in posts]
    news.run(parameters=parameters)
    signals = news.all_signals()
    assert [signals[post] for post in ids] == [reference_signals(post, TODAY, parameters) for post in posts]
    assert all(each.score >= 0 for each in signals.values())
    news.execute("DELETE FROM news.posts")


# Parameters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w1": Decimal(-1)}, "w1 = -1 is not allowed; it must be a number from 0 to 1000 with at most 6 decimals"),
        ({"w2": Decimal(1001)}, "w2 = 1001 is not allowed"),
        ({"w3": Decimal("NaN")}, "w3 = NaN is not allowed"),
        ({"w4": Decimal("Infinity")}, "w4 = Infinity is not allowed"),
        ({"w4": Decimal("0.0000001")}, "w4 = 1E-7 is not allowed"),
        ({"half_life_days": 0}, "half_life_days = 0 is not allowed; it must be a whole number from 1 to 365"),
        ({"half_life_days": 366}, "half_life_days = 366 is not allowed"),
        ({"full_boost": Decimal(0)}, "full_boost = 0 is not allowed; it must be above 0"),
        ({"full_boost": Decimal(-1)}, "full_boost = -1 is not allowed"),
        ({"author_trust": {"Agency": Decimal("1.1")}}, "author_trust[Agency] = 1.1 is not allowed"),
        ({"author_trust": {"Agency": Decimal("-0.1")}}, "author_trust[Agency] = -0.1 is not allowed"),
    ],
)
def test_a_parameter_out_of_bounds_is_refused_by_name_with_its_value_and_what_is_allowed(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"is not allowed; it must be") as refused:
        RankingParameters(**given)
    assert str(refused.value).startswith(message)


def test_the_parameters_are_those_of_the_spec_unless_others_are_given() -> None:
    parameters = RankingParameters()
    assert (parameters.w1, parameters.w2, parameters.w3, parameters.w4) == (1, Decimal("0.1"), 1, Decimal("0.5"))
    assert (parameters.half_life_days, parameters.full_boost) == (7, 100)
    assert parameters.author_trust == {"Platform": 1, "Developer": Decimal("0.5")}
