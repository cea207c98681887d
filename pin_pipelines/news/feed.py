"""Pages of the global feed, by date of publication or by score.

``sort=recommended`` is the order by score while the ranking is enabled, and exactly ``sort=date`` while it is not
(spec, INV-4): no statement of that order mentions the tables of the ranking. A page begins behind the last item of the
page before, by its key and its id, so that posts with the same key are neither repeated nor left out. Nothing that is
returned names a user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

from pin_pipelines.database import Connection
from pin_pipelines.news import statements
from pin_pipelines.news.tables import ranking_tables_needed

MAX_PAGE_SIZE = 100


class PostSortField(StrEnum):
    """What a feed can be asked to be sorted by."""

    DATE = "date"
    RECOMMENDED = "recommended"


class FeedOrder(StrEnum):
    """What a feed is sorted by in fact, the largest first."""

    DATE = "date"
    SCORE = "score"


class FeedCursorError(ValueError):
    """The cursor is none, or one of another order."""


@dataclass(frozen=True)
class FeedCursor:
    """Where a page ended: the order, and the key and the id of the last item. ``str`` makes a text of it."""

    order: FeedOrder
    key: datetime | Decimal
    post_id: UUID

    def __str__(self) -> str:
        """As text, for ``parse``."""
        key = self.key.isoformat() if isinstance(self.key, datetime) else self.key
        return f"{self.order}~{key}~{self.post_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a cursor's text.

        Raises:
            FeedCursorError: it is none.
        """
        try:
            order, key, post_id = text.split("~")
            return cls(FeedOrder(order), _KEYS[FeedOrder(order)](key), UUID(post_id))
        except (ValueError, ArithmeticError) as error:
            raise FeedCursorError(f"{text!r} is no cursor; it must be the next_page of a page") from error


def _parse_date(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a moment without its time zone")
    return moment


def _parse_score(text: str) -> Decimal:
    score = Decimal(text)
    if not score.is_finite():
        raise ValueError("no score")
    return score


_KEYS: Mapping[FeedOrder, Callable[[str], datetime | Decimal]] = {
    FeedOrder.DATE: _parse_date,
    FeedOrder.SCORE: _parse_score,
}


@dataclass(frozen=True)
class FeedItem:
    """A post in the feed. Likes and score are there in the order by score alone."""

    post_id: UUID
    title: str
    category_id: UUID
    author_type: str
    published_at: datetime
    comments_count: int
    likes_count: int | None = None
    score: Decimal | None = None


@dataclass(frozen=True)
class FeedPage:
    """A page, and where the next one begins; None if this one is the last. A full page may be followed by none."""

    order: FeedOrder
    items: tuple[FeedItem, ...]
    next_page: FeedCursor | None


def read_feed(
    connection: Connection,
    sort: PostSortField,
    *,
    ranking_enabled: bool,
    size: int = 20,
    after: FeedCursor | None = None,
) -> FeedPage:
    """A page of the posts that are on show.

    Args:
        connection: to the marketplace's database.
        sort: what was asked for.
        ranking_enabled: how the flag stands.
        size: items, at the most.
        after: where the page before ended; None for the first page.

    Raises:
        ValueError: the size is out of bounds.
        FeedCursorError: the cursor is of another order, as after a turn of the flag; begin with the first page.
        RankingTablesMissingError: by score, but the branch of migrations was not applied.
    """
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise ValueError(f"size = {size} is not allowed; it must be a whole number from 1 to {MAX_PAGE_SIZE}")
    order = FeedOrder.SCORE if sort is PostSortField.RECOMMENDED and ranking_enabled else FeedOrder.DATE
    if after is not None and after.order is not order:
        raise FeedCursorError(f"the cursor is of the order by {after.order}, the feed is by {order} now")
    parameters: dict[str, Any] = {"size": size}
    if after is not None:
        parameters |= {"key": after.key, "post_id": after.post_id}
    with ranking_tables_needed():
        rows = connection.execute(_STATEMENTS[order, after is not None], parameters).fetchall()
    items = tuple(FeedItem(*row) for row in rows)
    return FeedPage(order, items, _cursor(order, items[-1]) if len(items) == size else None)


_STATEMENTS = {
    (FeedOrder.DATE, False): statements.FEED_BY_DATE,
    (FeedOrder.DATE, True): statements.FEED_BY_DATE_AFTER,
    (FeedOrder.SCORE, False): statements.FEED_BY_SCORE,
    (FeedOrder.SCORE, True): statements.FEED_BY_SCORE_AFTER,
}


def _cursor(order: FeedOrder, last: FeedItem) -> FeedCursor:
    return FeedCursor(order, last.published_at if last.score is None else last.score, last.post_id)
