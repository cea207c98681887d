"""A newsroom to show the ranking with: posts of the last weeks, readers who view and like them, and paid boosts.

All of it follows from the titles and the day by hashing, so the same newsroom comes out each time. The engine treats
the posts like any others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from uuid import UUID, uuid5

from pin_pipelines.database import Connection
from pin_pipelines.news.reactions import like
from pin_pipelines.news.tables import (
    POST_BLOCKS,
    POST_DAILY_VIEWS,
    POST_PROJECT_REFS,
    POSTS,
    USER_POST_DAILY_VIEWS,
)

_NAMESPACE = UUID("6f0f8a52-4b4f-4c52-9d5e-0d1c8a6f2b11")

VIEW_DAYS = 30
# The oldest post is of so many days before today.
_OLDEST_DAYS = 45
_LIKERS = 60

_TITLES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "New buildings": (
            "Riverside Quarter opens sales in its third block",
            "Harbour Towers: what the show flats look like",
            "Linden Park hands over keys two months early",
            "Five projects that start sales this autumn",
            "North Mill: a factory becomes two hundred lofts",
            "How Amber Heights plans a courtyard without cars",
            "Silver Embankment raises its tallest tower",
        ),
        "Mortgages": (
            "Key rate stays: what that means for your loan",
            "Family mortgage: who may still apply, and until when",
            "Fixed or floating: a calculation for ten years",
            "How banks look at a down payment made of savings",
            "Refinancing in five steps",
            "Instalments from the developer, read closely",
        ),
        "Market": (
            "Prices a square metre in October, district by district",
            "Why one-room flats sell out first",
            "Rents catch up with loans in the centre",
            "Supply of finished flats at a three-year low",
            "What the last thirty days of viewings tell",
            "Second homes by the sea: demand after the season",
            "How long a flat stays on sale",
        ),
        "Living": (
            "A kitchen of six square metres that works",
            "Quiet windows: what to ask before you buy",
            "A balcony garden for the winter",
            "Moving with children: a list for the last week",
            "Storage rooms, and what they save you",
        ),
        "Law": (
            "The contract with a developer, clause by clause",
            "What to check at the handover of a flat",
            "Shared ownership: how to sell a part",
            "Tax deduction for a flat bought together",
            "A register extract, and how to read it",
        ),
        "Cities": (
            "A new metro line, and the projects along it",
            "Parks that open next spring",
            "Schools within a walk: a map",
            "What the embankment will look like in two years",
            "Cycle paths reach the northern districts",
            "Old depots with new lives",
        ),
    }
)

# Names of the authors by type; a developer pays for a boost now and then.
_AUTHORS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "Platform": ("Editors",),
        "Developer": ("Riverside Group", "Harbour Invest", "Amber Homes"),
        "Agency": ("Key & Co", "City Brokers", "First Floor", "Home Point"),
    }
)
_AUTHOR_TYPES = ("Platform", "Developer", "Agency", "Platform", "Agency")
_BLOCK_KINDS = ("Heading", "Text", "Image", "Gallery", "Quote", "Video", "ProjectCard")
_BOOSTS = (0, 0, 0, 0, 0, 25, 0, 100, 0, 250)


def _id(*key: str) -> UUID:
    return uuid5(_NAMESPACE, "/".join(key))


def _chance(*key: str) -> float:
    """A number in [0, 1) that looks random and follows from the key alone."""
    digits: int = int.from_bytes(hashlib.sha256("/".join(key).encode()).digest()[:6])
    return digits / (1 << 48)


@dataclass(frozen=True)
class Reader:
    """Somebody who has viewed posts; what they like to read is what they should be recommended.

    Attributes:
        name: what the demo calls them.
        favourites: categories that they read, the favourite first; a newcomer has none.
    """

    name: str
    favourites: tuple[str, ...]

    @property
    def id(self) -> UUID:
        """The user's id."""
        return _id("reader", self.name)


READERS = (
    Reader("first-time buyer", ("Mortgages", "Law")),
    Reader("investor", ("Market", "New buildings")),
    Reader("newcomer", ()),
)


@dataclass(frozen=True)
class _Post:
    title: str
    category: str
    age_days: int

    @property
    def id(self) -> UUID:
        return _id("post", self.title)

    @property
    def author_type(self) -> str:
        return _AUTHOR_TYPES[int(_chance(self.title, "type") * len(_AUTHOR_TYPES))]

    @property
    def author_id(self) -> UUID:
        names = _AUTHORS[self.author_type]
        return _id("author", names[int(_chance(self.title, "author") * len(names))])

    @property
    def boost(self) -> Decimal:
        """Only developers pay for one."""
        chosen = _BOOSTS[int(_chance(self.title, "boost") * len(_BOOSTS))]
        return Decimal(chosen if self.author_type == "Developer" else 0)

    @property
    def fame(self) -> float:
        """Views of its first day; a few posts have most of them."""
        return 40 / math.pow(max(_chance(self.title, "fame"), 0.01), 0.8)

    def published_at(self, today: date) -> datetime:
        minute = int(_chance(self.title, "minute") * 12 * 60)
        # In the night of the day, so that a post of today is on show whenever the demo is made.
        of_day = time(0, 0) if self.age_days == 0 else time(8 + minute // 60, minute % 60)
        return datetime.combine(today - timedelta(days=self.age_days), of_day, UTC)

    def views(self, today: date) -> Iterator[tuple[date, int]]:
        """Views by day since the post's publication, fewer from day to day; posts are forgotten, but not at once."""
        for days_ago in range(min(self.age_days, VIEW_DAYS - 1), -1, -1):
            since = self.age_days - days_ago
            luck = 0.6 + 0.8 * _chance(self.title, "luck", str(since))
            views = int(self.fame * luck / (1 + since) ** 0.9)
            if views:
                yield today - timedelta(days=days_ago), views


def make_news(connection: Connection, today: date) -> int:
    """Make the newsroom, unless it is there; the caller commits.

    Args:
        connection: to the marketplace's database, with the stand-ins and the branch of the ranking.
        today: the day that ages are counted to.

    Returns:
        How many posts were made.
    """
    if connection.execute(f"SELECT FROM {POSTS} LIMIT 1").fetchone() is not None:
        return 0
    posts = list(_posts())
    _insert_posts(connection, posts, today)
    _insert_contents(connection, posts)
    _insert_views(connection, posts, today)
    _like(connection, posts)
    return len(posts)


def _posts() -> Iterator[_Post]:
    for category, titles in _TITLES.items():
        for place, title in enumerate(titles):
            # Each category has something new and something old, the younger half of the days most of it.
            share = (place + _chance(title, "age")) / len(titles)
            yield _Post(title, category, int(_OLDEST_DAYS * share**1.7))


def _insert_posts(connection: Connection, posts: Sequence[_Post], today: date) -> None:
    cursor = connection.cursor()
    cursor.executemany(
        "INSERT INTO news.post_categories (id, name) VALUES (%s, %s)",
        [(_id("category", category), category) for category in _TITLES],
    )
    cursor.executemany(
        f"INSERT INTO {POSTS} (id, title, category_id, author_id, author_type, published_at, comments_count, "
        "promotion_boost) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
        [
            (
                post.id,
                post.title,
                _id("category", post.category),
                post.author_id,
                post.author_type,
                post.published_at(today),
                int(post.fame * 0.1 * _chance(post.title, "comments")),
                post.boost,
            )
            for post in posts
        ],
    )


def _insert_contents(connection: Connection, posts: Sequence[_Post]) -> None:
    cursor = connection.cursor()
    cursor.executemany(
        f"INSERT INTO {POST_BLOCKS} (post_id, position, kind) VALUES (%s, %s, %s)",
        [
            (post.id, position, kind)
            for post in posts
            for position, kind in enumerate(kind for kind in _BLOCK_KINDS if _chance(post.title, kind) < 0.5)
        ],
    )
    cursor.executemany(
        f"INSERT INTO {POST_PROJECT_REFS} (post_id, project_id) VALUES (%s, %s)",
        [
            (post.id, _id("project", str(n)))
            for post in posts
            for n in range(8)
            if _chance(post.title, "project", str(n)) < 0.2
        ],
    )


def _insert_views(connection: Connection, posts: Sequence[_Post], today: date) -> None:
    cursor = connection.cursor()
    cursor.executemany(
        f"INSERT INTO {POST_DAILY_VIEWS} (post_id, day, views) VALUES (%s, %s, %s)",
        [(post.id, day, views) for post in posts for day, views in post.views(today)],
    )
    # A reader has seen much of what their favourites had until the day before yesterday, the first of them more often.
    cursor.executemany(
        f"INSERT INTO {USER_POST_DAILY_VIEWS} (user_id, day, post_id, views) VALUES (%s, %s, %s, %s)",
        [
            (reader.id, today - timedelta(days=min(post.age_days, VIEW_DAYS - 1)), post.id, 3 - 2 * place)
            for reader in READERS
            for place, category in enumerate(reader.favourites)
            for post in posts
            if post.category == category and post.age_days > 1 and _chance(reader.name, post.title) < 0.6
        ],
    )


def _like(connection: Connection, posts: Sequence[_Post]) -> None:
    """Likes go the way that they always go, and are counted there."""
    for post in posts:
        share = min(post.fame / 1000, 0.6) * (0.3 + _chance(post.title, "charm"))
        for n in range(_LIKERS):
            if _chance(post.title, "like", str(n)) < share:
                like(connection, post.id, _id("liker", str(n)))
