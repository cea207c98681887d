"""PostReaction: the like of a user for a post, and the counter of likes that the post carries along.

A like inserts a row and an unlike deletes it; doing either again is a no-op (spec, INV-1). The counter moves in the
same transaction (INV-2), by what actually happened. The signals of the post are not touched: the next recompute reads
the counter.

Kinds of reaction may be added by later versions. Such a row is passed over when it is read, and still is the one
reaction that its user may have to the post.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid4

import psycopg

from pin_pipelines.database import Connection, fetch_one
from pin_pipelines.news import statements
from pin_pipelines.news.tables import ranking_tables_needed

_ONE_A_USER = "ux_post_reactions_user"


class ReactionKind(StrEnum):
    """Kinds of reaction, stored as text."""

    LIKE = "Like"


class DuplicateReactionError(ValueError):
    """The user has a reaction to the post already (spec, INV-1)."""

    code = "NEWS_POST_REACTION_DUPLICATE"


class PostNotFoundError(LookupError):
    """There is no such post."""


@dataclass(frozen=True)
class PostReaction:
    """A reaction of a user whose reactions were asked for."""

    id: UUID
    post_id: UUID
    kind: ReactionKind
    created_at: datetime


@dataclass(frozen=True)
class PostReactionChangedEvent:
    """A reaction came (Delta +1) or went (−1); raised in process."""

    post_id: UUID
    user_id: UUID
    kind: ReactionKind
    delta: int


@dataclass(frozen=True)
class Toggled:
    """What a like or an unlike came to: whether it changed anything, and the post's likes as they stand."""

    changed: bool
    likes_count: int


# Called within the transaction of the change: what it raises takes the change back.
OnChanged = Callable[[PostReactionChangedEvent], None]


def like(connection: Connection, post_id: UUID, user_id: UUID, on_changed: OnChanged | None = None) -> Toggled:
    """Let a user like a post; nothing changes if the user has a reaction to it already, of whatever kind.

    Args:
        connection: the change is a transaction of its own, or a part of the caller's if one is open.
        post_id: the post.
        user_id: who likes it (JWT sub).
        on_changed: hears of the change.

    Raises:
        PostNotFoundError: there is no such post.
        RankingTablesMissingError: the branch of migrations was not applied.
    """
    return _toggle(connection, statements.ADD_FIRST_REACTION, _liked(post_id, user_id, +1), on_changed)


def unlike(connection: Connection, post_id: UUID, user_id: UUID, on_changed: OnChanged | None = None) -> Toggled:
    """Take a user's like back; nothing changes if there is none. Arguments and errors as of ``like``."""
    return _toggle(connection, statements.REMOVE_REACTION, _liked(post_id, user_id, -1), on_changed)


def add_reaction(connection: Connection, post_id: UUID, user_id: UUID, on_changed: OnChanged | None = None) -> Toggled:
    """Insert a like that is known to be new. Arguments and errors as of ``like``, and:

    Raises:
        DuplicateReactionError: the user has a reaction to the post already; nothing was changed.
    """
    try:
        return _toggle(connection, statements.ADD_REACTION, _liked(post_id, user_id, +1), on_changed)
    except psycopg.errors.UniqueViolation as error:
        if error.diag.constraint_name != _ONE_A_USER:
            raise
        raise DuplicateReactionError(
            f"{DuplicateReactionError.code}: user {user_id} has a reaction to post {post_id} already"
        ) from error


def reactions_of_user(connection: Connection, user_id: UUID) -> list[PostReaction]:
    """A user's reactions, the newest first; those of an unknown kind are left out.

    Raises:
        RankingTablesMissingError: the branch of migrations was not applied.
    """
    with ranking_tables_needed():
        rows = connection.execute(statements.REACTIONS_OF_USER, {"user_id": user_id}).fetchall()
    return [
        PostReaction(reaction_id, post_id, ReactionKind(kind), created_at)
        for reaction_id, post_id, kind, created_at in rows
        if kind in set(ReactionKind)
    ]


def _liked(post_id: UUID, user_id: UUID, delta: int) -> PostReactionChangedEvent:
    return PostReactionChangedEvent(post_id, user_id, ReactionKind.LIKE, delta)


def _toggle(
    connection: Connection, statement: str, change: PostReactionChangedEvent, on_changed: OnChanged | None
) -> Toggled:
    reaction = {"id": uuid4(), "post_id": change.post_id, "user_id": change.user_id, "kind": change.kind}
    with ranking_tables_needed(), connection.transaction():
        if connection.execute(statements.LOCK_POST, {"post_id": change.post_id}).fetchone() is None:
            raise PostNotFoundError(f"there is no post {change.post_id}")
        changed = connection.execute(statement, reaction).rowcount == 1
        if changed:
            connection.execute(statements.MOVE_LIKES_COUNT, {"post_id": change.post_id, "delta": change.delta})
        (likes,) = fetch_one(connection, statements.LIKES_COUNT, {"post_id": change.post_id})
        if changed and on_changed is not None:
            on_changed(change)
    return Toggled(changed, likes)
