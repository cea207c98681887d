"""What is asked of the signals after a run, and what the answers mean. Nothing here writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

from pin_pipelines.database import Connection, fetch_one
from pin_pipelines.news import statements
from pin_pipelines.news.affinity import read_affinity_inputs
from pin_pipelines.news.ranking import RankingParameters, recency_decay_of, reference_score
from pin_pipelines.news.tables import ranking_tables_needed

SAMPLE_SIZE = 200


@dataclass(frozen=True)
class Completeness:
    """Whether every post has its row (spec, INV-3); that none has two, its keys see to."""

    posts: int
    missing: int
    """Posts that came behind the run's cursor are among them."""


@dataclass(frozen=True)
class WrongScore:
    """A stored score that the reference does not confirm."""

    post_id: UUID
    stored: Decimal
    expected: Decimal


@dataclass(frozen=True)
class Scores:
    """Stored scores beside the pure-Python reference, on a sample."""

    sampled: int
    wrong: tuple[WrongScore, ...]


def check_completeness(connection: Connection) -> Completeness:
    """Count the posts without signals.

    Raises:
        RankingTablesMissingError: the branch of migrations was not applied.
    """
    with ranking_tables_needed():
        posts, missing = fetch_one(connection, statements.COUNT_MISSING)
    return Completeness(posts, missing)


def check_scores(connection: Connection, as_of: date, parameters: RankingParameters) -> Scores:
    """Compute the scores of a sample again, as of the day that the last run was as of.

    Views, likes and comments are those that the run stored, so what came since does not matter. PromotionBoost and the
    day of publication are not stored: a post where they were changed since the run is among the wrong.
    The day is the seed: a re-run of the check looks at the same posts, the next night at others.

    Raises:
        RankingTablesMissingError: the branch of migrations was not applied.
        AffinityInputsRefusedError: a stored document is not as it should be.
    """
    with ranking_tables_needed():
        rows = connection.execute(
            statements.SAMPLE_SIGNALS, {"seed": as_of.toordinal(), "size": SAMPLE_SIZE}
        ).fetchall()
    return Scores(len(rows), tuple(_wrong(rows, as_of, parameters)))


def _wrong(rows: list[tuple[Any, ...]], as_of: date, parameters: RankingParameters) -> Iterator[WrongScore]:
    for post_id, published_at, promotion_boost, views_30d, likes, comments_rate, stored, affinity_inputs in rows:
        expected = reference_score(
            views_30d=views_30d,
            likes=likes,
            comments_rate=comments_rate,
            recency_decay=recency_decay_of(published_at, as_of, parameters.half_life_days),
            promotion_boost=promotion_boost,
            author_type=read_affinity_inputs(affinity_inputs).author_type,
            parameters=parameters,
        )
        if stored != expected:
            yield WrongScore(post_id, stored, expected)
