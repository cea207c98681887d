"""The formula of a post's score (spec, «Целевой алгоритм»), made exact: decimals, rounded half away from zero.

    Views7d, Views30d = views of the days D−6 … D and D−29 … D
    CommentsRate      = round( comments / max(Views30d, 1) , 4 )
    RecencyDecay      = round( 2^(−age/H) , 5 )                    age = D − day of publication, not below 0
    Promotion         = min( max(PromotionBoost, 0) / FullBoost , 1 )
    Score             = round( w1·ln(Views30d + 1)·RecencyDecay + w2·Likes + w3·CommentsRate
                               + w4·(Promotion + AuthorTrust) , 6 )

D is the day that the run is as of, in UTC. Score is made of CommentsRate and RecencyDecay as they are stored. A value
beyond what its column holds is stored as the largest that it holds: every post has its row, whatever its counters.

PostgreSQL evaluates the same formula for every post (``statements.RANK_PAGE``); what is here is the plain version that
the tests and the check of the scores hold it against, and the table of decays that both look up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from functools import lru_cache
from itertools import count, takewhile

SHORT_WINDOW_DAYS = 7
LONG_WINDOW_DAYS = 30

DECAY_QUANTUM = Decimal("0.00001")
RATE_QUANTUM = Decimal("0.0001")
SCORE_QUANTUM = Decimal("0.000001")

MAX_RATE = Decimal("9999.9999")
MAX_SCORE = Decimal("99999999.999999")
MAX_VIEWS = 2**63 - 1

MAX_WEIGHT = 1000
MAX_HALF_LIFE_DAYS = 365
MAX_FULL_BOOST = 1_000_000_000

# Wide enough for every product of the formula; only logarithms, roots and endless quotients are rounded, and those
# far behind the last decimal that counts.
_CONTEXT = Context(prec=60, rounding=ROUND_HALF_UP)


@dataclass(frozen=True)
class RankingParameters:
    """Weights and parameters of the score; the names are the spec's.

    Attributes:
        w1: weight of popularity times freshness.
        w2: weight of a like; likes are not normalised.
        w3: weight of comments a view.
        w4: weight of promotion and the author's trust.
        half_life_days: H, the age in days at which popularity counts half.
        full_boost: PromotionBoost from which on Promotion is 1.
        author_trust: AuthorTrust by author type, in 0 … 1; a type that is not in it has 0.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    w1: Decimal = Decimal(1)
    w2: Decimal = Decimal("0.1")
    w3: Decimal = Decimal(1)
    w4: Decimal = Decimal("0.5")
    half_life_days: int = 7
    full_boost: Decimal = Decimal(100)
    author_trust: Mapping[str, Decimal] = field(
        default_factory=lambda: {"Platform": Decimal(1), "Developer": Decimal("0.5")}
    )

    def __post_init__(self) -> None:
        """Check every number."""
        for name in ("w1", "w2", "w3", "w4"):
            _check_number(name, getattr(self, name), MAX_WEIGHT)
        if not 1 <= self.half_life_days <= MAX_HALF_LIFE_DAYS:
            raise ValueError(
                f"half_life_days = {self.half_life_days} is not allowed; "
                f"it must be a whole number from 1 to {MAX_HALF_LIFE_DAYS}"
            )
        _check_number("full_boost", self.full_boost, MAX_FULL_BOOST)
        if not self.full_boost:
            raise ValueError(f"full_boost = {self.full_boost} is not allowed; it must be above 0")
        for author_type, trust in self.author_trust.items():
            _check_number(f"author_trust[{author_type}]", trust, 1)


def _check_number(name: str, value: Decimal, largest: int) -> None:
    # No score has more than six decimals, and with more in the weights the formula would no longer be exact.
    if not (value.is_finite() and 0 <= value <= largest and value == value.quantize(SCORE_QUANTUM)):
        raise ValueError(
            f"{name} = {value} is not allowed; it must be a number from 0 to {largest} with at most 6 decimals"
        )


@dataclass(frozen=True)
class PostInputs:
    """What the signals of a post are made of.

    Attributes:
        published_at: with its time zone; None if the post is not published.
        daily_views: views by day; days outside the windows are ignored.
    """

    published_at: datetime | None
    daily_views: Mapping[date, int]
    comments_count: int
    likes_count: int
    promotion_boost: Decimal
    author_type: str


@dataclass(frozen=True)
class Signals:
    """A row of ``news.post_ranking_signals``, as far as it is numbers."""

    views_7d: int
    views_30d: int
    likes: int
    comments_rate: Decimal
    recency_decay: Decimal
    score: Decimal


def recency_decay(age_days: int, half_life_days: int) -> Decimal:
    """RecencyDecay at an age, with five decimals."""
    half_lives, days = divmod(age_days, half_life_days)
    decay = _CONTEXT.divide(_decay_within_half_life(days, half_life_days), Decimal(2**half_lives))
    return decay.quantize(DECAY_QUANTUM, rounding=ROUND_HALF_UP)


@lru_cache(maxsize=1024)
def _decay_within_half_life(days: int, half_life_days: int) -> Decimal:
    """2^(−days/H). A run looks up all ages, some 18 half-lives of them, and a power takes 90 µs."""
    return _CONTEXT.power(Decimal(2), _CONTEXT.divide(Decimal(-days), Decimal(half_life_days)))


def recency_decay_of(published_at: datetime | None, as_of: date, half_life_days: int) -> Decimal:
    """RecencyDecay of a post as of a day; 0 of one that is not published: nothing of it is fresh yet."""
    if published_at is None:
        return Decimal(0).quantize(DECAY_QUANTUM)
    age = (as_of - published_at.astimezone(UTC).date()).days
    return recency_decay(max(age, 0), half_life_days)


def recency_decays(half_life_days: int) -> list[Decimal]:
    """RecencyDecay at the ages 0, 1, 2 …, up to the last that is above 0.

    PostgreSQL looks the decays up: how many digits its ``power`` gets right is not said anywhere.
    """
    return list(takewhile(bool, (recency_decay(age, half_life_days) for age in count())))


def reference_signals(inputs: PostInputs, as_of: date, parameters: RankingParameters) -> Signals:
    """The signals of one post, the plain way.

    Args:
        inputs: what they are made of.
        as_of: D.
        parameters: weights and parameters.
    """
    short, long = (_views(inputs.daily_views, as_of, days) for days in (SHORT_WINDOW_DAYS, LONG_WINDOW_DAYS))
    likes = max(inputs.likes_count, 0)
    with localcontext(_CONTEXT):
        rate = Decimal(max(inputs.comments_count, 0)) / max(long, 1)
        comments_rate = min(rate.quantize(RATE_QUANTUM), MAX_RATE)
    decay = recency_decay_of(inputs.published_at, as_of, parameters.half_life_days)
    score = reference_score(
        views_30d=long,
        likes=likes,
        comments_rate=comments_rate,
        recency_decay=decay,
        promotion_boost=inputs.promotion_boost,
        author_type=inputs.author_type,
        parameters=parameters,
    )
    return Signals(short, long, likes, comments_rate, decay, score)


def reference_score(
    *,
    views_30d: int,
    likes: int,
    comments_rate: Decimal,
    recency_decay: Decimal,
    promotion_boost: Decimal,
    author_type: str,
    parameters: RankingParameters,
) -> Decimal:
    """The score that follows from stored signals, with six decimals; what is not a signal is the post's own."""
    boost = min(max(promotion_boost, Decimal(0)), parameters.full_boost)
    trust = parameters.author_trust.get(author_type, Decimal(0))
    with localcontext(_CONTEXT):
        score = (
            parameters.w1 * Decimal(views_30d + 1).ln() * recency_decay
            + parameters.w2 * likes
            + parameters.w3 * comments_rate
            # Multiplied before it is divided: a quotient that ends is then exact, and a tie is seen as one.
            + parameters.w4 * boost / parameters.full_boost
            + parameters.w4 * trust
        )
        return min(score.quantize(SCORE_QUANTUM), MAX_SCORE)


def _views(daily_views: Mapping[date, int], as_of: date, days: int) -> int:
    first = as_of - timedelta(days=days - 1)
    return min(sum(max(views, 0) for day, views in daily_views.items() if first <= day <= as_of), MAX_VIEWS)
