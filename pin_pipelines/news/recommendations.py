"""Posts for one user: content-based, without a model to train (spec, «Целевой алгоритм»).

What a user viewed in the last 30 days gives the affinity: the share of those views that each category and each type of
author had. The relevance of a fresh post that the user has not viewed is

    ( affinity of its category + affinity of its author's type ) · RecencyDecay

and posts of neither are no candidates. They are taken in the order of relevance, then of score, then of id; one whose
category or author is in the list as often as allowed is passed over. The same data give the same list.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from pin_pipelines.database import Connection
from pin_pipelines.news import statements
from pin_pipelines.news.affinity import (
    AffinityInputsRefusedError,
    PostRankingAffinityInputsDocument,
    read_affinity_inputs,
)
from pin_pipelines.news.feed import MAX_PAGE_SIZE, FeedItem, PostSortField, read_feed
from pin_pipelines.news.ranking import LONG_WINDOW_DAYS
from pin_pipelines.news.tables import ranking_tables_needed
from pin_pipelines.news.views import PostgresPostViews, PostViews

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecommendationParameters:
    """How long a list is, how mixed, and how fresh.

    Attributes:
        size: posts, at the most.
        max_per_category: posts of one category, at the most.
        max_per_author: posts of one author, at the most.
        fresh_days: age of a post in days, at the most; no more than the days of views that are looked at, so that a
            post that was viewed is known to be.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    size: int = 10
    max_per_category: int = 4
    max_per_author: int = 2
    fresh_days: int = 14

    def __post_init__(self) -> None:
        """Check every number."""
        for each in fields(self):
            value = getattr(self, each.name)
            largest = LONG_WINDOW_DAYS if each.name == "fresh_days" else MAX_PAGE_SIZE
            if not 1 <= value <= largest:
                raise ValueError(f"{each.name} = {value} is not allowed; it must be a whole number from 1 to {largest}")


@dataclass(frozen=True)
class Recommendations:
    """Posts for a user, the first first. ``personal`` is False where the list is the first page of the feed."""

    personal: bool
    items: tuple[FeedItem, ...]


def recommend(
    connection: Connection,
    user_id: UUID,
    *,
    as_of: date,
    ranking_enabled: bool,
    parameters: RecommendationParameters | None = None,
    open_views: Callable[[Connection], PostViews] = PostgresPostViews,
) -> Recommendations:
    """Posts for a user; the feed for one without a history, and for everybody while the ranking is not enabled.

    Args:
        connection: to the marketplace's database.
        user_id: whose list.
        as_of: the last day of the history, and the day that ages are counted to; today, in UTC.
        ranking_enabled: how the flag stands.
        parameters: length and mixture of the list.
        open_views: makes the source of views, of the connection if it has use for it.

    Raises:
        RankingTablesMissingError: the ranking is enabled, but the branch of migrations was not applied.
    """
    parameters = parameters or RecommendationParameters()
    if ranking_enabled:
        history = open_views(connection).of_user(user_id, as_of - timedelta(days=LONG_WINDOW_DAYS - 1), as_of)
        with ranking_tables_needed():
            affinity = _affinity(connection, history)
            candidates = _candidates(connection, history, as_of, parameters) if affinity else []
        chosen = tuple(_choose(candidates, affinity, parameters))
        if chosen:
            return Recommendations(True, chosen)
    feed = read_feed(connection, PostSortField.RECOMMENDED, ranking_enabled=ranking_enabled, size=parameters.size)
    return Recommendations(False, feed.items)


@dataclass(frozen=True)
class _Candidate:
    item: FeedItem
    score: Decimal
    inputs: PostRankingAffinityInputsDocument
    recency_decay: Decimal
    author_id: UUID


class _Affinity:
    """Views of a user by category and by type of author. All shares are of the same total, so counts rank alike."""

    def __init__(self) -> None:
        self._categories: Counter[UUID] = Counter()
        self._author_types: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._categories)

    def add(self, inputs: PostRankingAffinityInputsDocument, views: int) -> None:
        self._categories[inputs.category_id] += views
        self._author_types[inputs.author_type] += views

    def relevance(self, candidate: _Candidate) -> Decimal:
        inputs = candidate.inputs
        return (self._categories[inputs.category_id] + self._author_types[inputs.author_type]) * candidate.recency_decay


def _affinity(connection: Connection, history: Mapping[UUID, int]) -> _Affinity:
    affinity = _Affinity()
    if history:
        rows = connection.execute(statements.AFFINITY_INPUTS, {"ids": list(history)}).fetchall()
        for inputs, (post_id,) in _readable(rows):
            affinity.add(inputs, history[post_id])
    return affinity


def _candidates(
    connection: Connection, history: Mapping[UUID, int], as_of: date, parameters: RecommendationParameters
) -> list[_Candidate]:
    rows = connection.execute(
        statements.CANDIDATES,
        {
            "first_day": as_of - timedelta(days=parameters.fresh_days),
            "viewed": list(history),
            "depth": min(parameters.max_per_category, parameters.max_per_author),
        },
    ).fetchall()
    return [
        _Candidate(FeedItem(*item), item[-1], inputs, recency_decay, author_id)
        for inputs, (recency_decay, author_id, *item) in _readable(rows)
    ]


def _choose(
    candidates: Iterable[_Candidate], affinity: _Affinity, parameters: RecommendationParameters
) -> Iterator[FeedItem]:
    def place(candidate: _Candidate) -> tuple[Decimal, Decimal, UUID]:
        return affinity.relevance(candidate), candidate.score, candidate.item.post_id

    categories: Counter[UUID] = Counter()
    authors: Counter[UUID] = Counter()
    for candidate in sorted(candidates, key=place, reverse=True):
        category, author = candidate.item.category_id, candidate.author_id
        if not affinity.relevance(candidate) or categories.total() == parameters.size:
            return
        if categories[category] < parameters.max_per_category and authors[author] < parameters.max_per_author:
            categories[category] += 1
            authors[author] += 1
            yield candidate.item


def _readable(
    rows: Iterable[tuple[Any, ...]],
) -> Iterator[tuple[PostRankingAffinityInputsDocument, tuple[Any, ...]]]:
    """Rows that begin with a document that can be read; a post whose document is refused takes no part."""
    for document, *row in rows:
        try:
            inputs = read_affinity_inputs(document)
        except AffinityInputsRefusedError as error:
            _logger.warning("a post takes no part in recommendations: %s", error)
            continue
        yield inputs, tuple(row)
