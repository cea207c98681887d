"""Views of posts: a port, and its adapter to the daily aggregates of user-activity in PostgreSQL.

User-activity owns the tracking of views (ADR-0054); how it will hand them over is an assumption of the spec
(«Источники сигналов»). All that the ranking asks of it is in ``PostViews``: another adapter, to its events or to its
internal API, takes the place of ``PostgresPostViews`` and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple, Protocol
from uuid import UUID

from pin_pipelines.database import Connection
from pin_pipelines.news import statements
from pin_pipelines.news.ranking import LONG_WINDOW_DAYS, SHORT_WINDOW_DAYS


class ViewTotals(NamedTuple):
    """Views of a post in the two windows that end with a day."""

    views_7d: int
    views_30d: int


class PostViews(Protocol):
    """What the ranking and the recommendations need to know of views. Days are UTC."""

    def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
        """Views of posts over 7 and 30 days, ``as_of`` the last; a post that is not in it had none."""

    def of_user(self, user_id: UUID, first_day: date, last_day: date) -> Mapping[UUID, int]:
        """How often a user viewed which posts from one day to another, both included."""


class PostgresPostViews:
    """Reads ``user_activity.post_daily_views`` and ``user_activity.user_post_daily_views``."""

    def __init__(self, connection: Connection) -> None:
        """Read by this connection."""
        self._connection = connection

    def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
        """See ``PostViews``."""
        rows = self._connection.execute(
            statements.VIEW_TOTALS,
            {
                "post_ids": list(post_ids),
                "as_of": as_of,
                "first_of_short": as_of - timedelta(days=SHORT_WINDOW_DAYS - 1),
                "first_of_long": as_of - timedelta(days=LONG_WINDOW_DAYS - 1),
            },
            binary=True,
        )
        return {post_id: ViewTotals(short, long) for post_id, short, long in rows.fetchall()}

    def of_user(self, user_id: UUID, first_day: date, last_day: date) -> Mapping[UUID, int]:
        """See ``PostViews``."""
        rows = self._connection.execute(
            statements.VIEWS_OF_USER, {"user_id": user_id, "first_day": first_day, "last_day": last_day}
        )
        return dict(rows.fetchall())
