"""Posts under test: what readers do with them, what the pipeline makes of it, and what is stored afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg

from pin_pipelines.news.ranking import PostInputs, Signals
from pin_pipelines.news.recompute import Summary, recompute
from pin_pipelines.news.tables import POST_DAILY_VIEWS, POSTS, REACTIONS, SIGNALS, USER_POST_DAILY_VIEWS
from pin_pipelines_tests.support import PROJECT_ROOT
from pin_pipelines_tests.support.databases import Database

# In the past by any clock: a post that is published later than now is not on show.
TODAY = date(2024, 11, 30)
CATEGORY = UUID(int=0xCA7)


def day(offset: int) -> date:
    """The day so many days from TODAY."""
    return TODAY + timedelta(days=offset)


def noon(offset: int) -> datetime:
    """Noon of that day, UTC."""
    return datetime.combine(day(offset), time(12), UTC)


_NOON = noon(0)
_GOLDEN = PROJECT_ROOT / "pin_pipelines_tests" / "news" / "golden" / "ranking.json"


@dataclass(frozen=True)
class GoldenCase:
    """A case that was worked out apart from this code."""

    as_of: date
    inputs: PostInputs
    expected: Signals


def golden_cases() -> list[GoldenCase]:
    cases = json.loads(_GOLDEN.read_text())
    return [
        GoldenCase(
            date.fromisoformat(case["as_of"]),
            PostInputs(
                datetime.fromisoformat(case["published_at"]),
                {date.fromisoformat(each): views for each, views in case["daily_views"].items()},
                case["comments_count"],
                case["likes_count"],
                Decimal(case["promotion_boost"]),
                case["author_type"],
            ),
            Signals(
                case["expected"]["views_7d"],
                case["expected"]["views_30d"],
                case["likes_count"],
                Decimal(case["expected"]["comments_rate"]),
                Decimal(case["expected"]["recency_decay"]),
                Decimal(case["expected"]["score"]),
            ),
        )
        for case in cases
    ]


class News(Database):
    """The posts and what is stored of them."""

    @property
    def name(self) -> str:
        """The database's."""
        return str(self.execute("SELECT current_database()")[0][0])

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url)

    def add_category(self, new: UUID) -> UUID:
        self.execute("INSERT INTO news.post_categories VALUES (%s, 'category') ON CONFLICT DO NOTHING", new)
        return new

    def add(
        self,
        new: UUID | None = None,
        *,
        published_at: datetime | None = _NOON,
        category: UUID = CATEGORY,
        author: UUID | None = None,
        author_type: str = "Agency",
        comments: int = 0,
        boost: Decimal | int = 0,
        views: Mapping[date, int] | None = None,
        blocks: Iterable[str] = (),
        projects: Iterable[UUID] = (),
    ) -> UUID:
        """A post, and the views of it by day."""
        new = new or uuid4()
        self.add_category(category)
        self.execute(
            f"INSERT INTO {POSTS} (id, title, category_id, author_id, author_type, published_at, comments_count, "
            "promotion_boost) VALUES (%s, 'post', %s, %s, %s, %s, %s, %s)",
            new,
            category,
            author or uuid4(),
            author_type,
            published_at,
            comments,
            boost,
        )
        self.view(new, views or {})
        with self.connect() as connection:
            connection.cursor().executemany(
                "INSERT INTO news.post_blocks (post_id, position, kind) VALUES (%s, %s, %s)",
                [(new, position, kind) for position, kind in enumerate(blocks)],
            )
            connection.cursor().executemany(
                "INSERT INTO news.post_project_refs VALUES (%s, %s)", [(new, project) for project in projects]
            )
        return new

    def add_inputs(self, inputs: PostInputs) -> UUID:
        """A post that has these inputs. The likes are counted without their rows."""
        new = self.add(
            published_at=inputs.published_at,
            author_type=inputs.author_type,
            comments=inputs.comments_count,
            boost=inputs.promotion_boost,
            views=inputs.daily_views,
        )
        self.set_likes(new, inputs.likes_count)
        return new

    def add_many(self, number: int) -> list[UUID]:
        """Posts of one moment and category, each of its own author, with ids that ascend."""
        return self.add_many_in(CATEGORY, number)

    def add_many_in(self, category: UUID, number: int) -> list[UUID]:
        """The same in a category."""
        ids = [UUID(int=n << 64 | 0x8000_0000_0000_0000) for n in range(1, number + 1)]
        self.add_category(category)
        self.execute(
            f"INSERT INTO {POSTS} (id, title, category_id, author_id, author_type, published_at) "
            "SELECT id, 'post', %s, id, 'Agency', %s FROM unnest(%s::uuid[]) id",
            category,
            _NOON,
            ids,
        )
        return ids

    def view(self, post: UUID, views: Mapping[date, int]) -> None:
        with self.connect() as connection:
            connection.cursor().executemany(
                f"INSERT INTO {POST_DAILY_VIEWS} (post_id, day, views) VALUES (%s, %s, %s)",
                [(post, each, times) for each, times in views.items()],
            )

    def view_as(self, user: UUID, post: UUID, times: int = 1, *, on: date = TODAY) -> None:
        self.execute(
            f"INSERT INTO {USER_POST_DAILY_VIEWS} (user_id, day, post_id, views) VALUES (%s, %s, %s, %s)",
            user,
            on,
            post,
            times,
        )

    def set_likes(self, post: UUID, likes: int) -> None:
        self.execute(f"UPDATE {POSTS} SET likes_count = %s WHERE id = %s", likes, post)

    def likes_count(self, post: UUID) -> int:
        return int(self.execute(f"SELECT likes_count FROM {POSTS} WHERE id = %s", post)[0][0])

    def reactions(self, post: UUID) -> list[tuple[UUID, str]]:
        """Who reacted how."""
        return self.execute(f"SELECT user_id, kind FROM {REACTIONS} WHERE post_id = %s ORDER BY user_id", post)

    def run(self, as_of: date = TODAY, **options: Any) -> Summary:
        return recompute(self.connect, as_of=as_of, **options)

    def signals(self, post: UUID) -> Signals:
        return self.all_signals()[post]

    def all_signals(self) -> dict[UUID, Signals]:
        rows = self.execute(
            f"SELECT id, views_7d, views_30d, likes, comments_rate, recency_decay, score FROM {SIGNALS}"
        )
        return {post: Signals(*numbers) for post, *numbers in rows}

    def affinity_inputs(self, post: UUID) -> dict[str, Any]:
        document: dict[str, Any] = self.execute(f"SELECT affinity_inputs FROM {SIGNALS} WHERE id = %s", post)[0][0]
        return document

    def stored(self) -> list[tuple[Any, ...]]:
        """All that a run leaves, without times."""
        return self.execute(
            "SELECT id, views_7d, views_30d, likes, comments_rate, recency_decay, score, affinity_inputs::text "
            f"FROM {SIGNALS} ORDER BY id"
        )

    def tables(self) -> set[str]:
        """Tables of the news schema."""
        return {
            name for (name,) in self.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'news' ORDER BY 1")
        }


class Recorder:
    """A connection's statements with their parameters, as they are sent from now on."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.calls: list[tuple[str, Any]] = []
        record = self.calls.append

        class RecordingCursor(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                record((str(query), params))
                return super().execute(query, params, **options)

        connection.cursor_factory = RecordingCursor

    def mentioning(self, *names: str) -> list[str]:
        """Statements that have one of the names in them."""
        return [statement for statement, _ in self.calls if any(name in statement for name in names)]


def scans(connection: psycopg.Connection[Any], statement: str, parameters: Any) -> list[dict[str, Any]]:
    """The nodes that read a table or an index, as the statement is carried out."""
    plan = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).fetchone()
    assert plan is not None
    return [node for node in _nodes(plan[0][0]["Plan"]) if "Scan" in node["Node Type"]]


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", []):
        yield from _nodes(below)
