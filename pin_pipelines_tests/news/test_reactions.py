"""Likes: one a user and post, and a counter that says how many there are, whoever likes at the same time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pin_pipelines.news.reactions import (
    DuplicateReactionError,
    PostNotFoundError,
    PostReactionChangedEvent,
    ReactionKind,
    Toggled,
    add_reaction,
    like,
    reactions_of_user,
    unlike,
)
from pin_pipelines.news.tables import POSTS, REACTIONS, RankingTablesMissingError
from pin_pipelines_tests.support.news import News

ANN, BOB = UUID(int=0xA), UUID(int=0xB)
THREADS = 8


def toggle(news: News, act: Callable[..., Toggled], post: UUID, user: UUID, **options: Any) -> Toggled:
    with news.connect() as connection:
        return act(connection, post, user, **options)


def react(news: News, post: UUID, user: UUID, kind: str) -> None:
    """A reaction that a later version of the service stored."""
    news.execute(
        f"INSERT INTO {REACTIONS} (id, post_id, user_id, kind) VALUES (gen_random_uuid(), %s, %s, %s)", post, user, kind
    )


def at_once(news: News, calls: Iterable[tuple[Callable[..., Toggled], UUID, UUID]]) -> list[PostReactionChangedEvent]:
    """The calls by several threads, each with a connection of its own; returns the events that were raised."""
    events: list[PostReactionChangedEvent] = []
    queue = list(calls)

    def work() -> None:
        with news.connect() as connection:
            connection.autocommit = True
            with suppress(IndexError):
                while True:
                    act, post, user = queue.pop()
                    act(connection, post, user, on_changed=events.append)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work) for _ in range(THREADS)]:
            done.result()
    return events


# Toggles


def test_a_like_is_stored_and_counted_with_the_time_of_the_server(news: News) -> None:
    post = news.add()
    assert toggle(news, like, post, ANN) == Toggled(changed=True, likes_count=1)
    assert news.reactions(post) == [(ANN, "Like")]
    with news.connect() as connection:
        (reaction,) = reactions_of_user(connection, ANN)
    assert (reaction.post_id, reaction.kind) == (post, ReactionKind.LIKE)
    assert abs(datetime.now(UTC) - reaction.created_at) < timedelta(minutes=5)


def test_inv_1_single_reaction_per_user_a_second_like_is_a_no_op(news: News) -> None:
    post = news.add()
    toggle(news, like, post, ANN)
    stored = news.execute(f"SELECT * FROM {REACTIONS}")
    assert toggle(news, like, post, ANN) == Toggled(changed=False, likes_count=1)
    assert news.execute(f"SELECT * FROM {REACTIONS}") == stored


def test_inv_1_a_direct_double_insert_raises_news_post_reaction_duplicate_and_changes_nothing(news: News) -> None:
    post, events = news.add(), list[PostReactionChangedEvent]()
    assert toggle(news, add_reaction, post, ANN) == Toggled(changed=True, likes_count=1)
    with news.connect() as connection:
        with pytest.raises(DuplicateReactionError, match="NEWS_POST_REACTION_DUPLICATE") as refused:
            add_reaction(connection, post, ANN, on_changed=events.append)
        assert refused.value.code == "NEWS_POST_REACTION_DUPLICATE"
        # The connection is still good for more.
        assert like(connection, post, BOB).likes_count == 2
    assert (news.likes_count(post), events) == (2, [])


def test_inv_1_the_table_itself_refuses_a_second_reaction_of_a_user(news: News) -> None:
    post = news.add()
    react(news, post, ANN, "Like")
    with pytest.raises(psycopg.errors.UniqueViolation, match="ux_post_reactions_user"):
        react(news, post, ANN, "Like")


def test_an_unlike_takes_the_row_and_the_count_back_and_a_second_one_is_a_no_op(news: News) -> None:
    post = news.add()
    toggle(news, like, post, ANN)
    toggle(news, like, post, BOB)
    assert toggle(news, unlike, post, ANN) == Toggled(changed=True, likes_count=1)
    assert toggle(news, unlike, post, ANN) == Toggled(changed=False, likes_count=1)
    assert news.reactions(post) == [(BOB, "Like")]


def test_likes_of_one_post_are_none_of_another(news: News) -> None:
    post, other = news.add(), news.add()
    toggle(news, like, post, ANN)
    assert (news.likes_count(post), news.likes_count(other)) == (1, 0)
    assert toggle(news, unlike, other, ANN) == Toggled(changed=False, likes_count=0)


@pytest.mark.parametrize("act", [like, unlike, add_reaction])
def test_a_post_that_does_not_exist_is_named(news: News, act: Callable[..., Toggled]) -> None:
    stranger = uuid4()
    with pytest.raises(PostNotFoundError, match=f"there is no post {stranger}"):
        toggle(news, act, stranger, ANN)


@pytest.mark.parametrize("act", [like, unlike, add_reaction])
def test_without_its_branch_of_migrations_a_reaction_says_which_command_to_run(
    plain_news: News, act: Callable[..., Toggled]
) -> None:
    post = plain_news.add()
    with pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"):
        toggle(plain_news, act, post, ANN)


# INV-2: the counter moves with the rows


def test_inv_2_counter_consistency_row_and_count_are_one_transaction(news: News) -> None:
    post = news.add()
    with news.connect() as connection:
        like(connection, post, ANN)
        connection.execute("SELECT 1")
    with news.connect() as connection:
        connection.execute("SELECT 1")
        like(connection, post, BOB)
        unlike(connection, post, ANN)
        connection.rollback()
    assert (news.likes_count(post), news.reactions(post)) == (1, [(ANN, "Like")])


def test_inv_2_a_listener_that_fails_takes_row_and_count_back(news: News) -> None:
    def fail(_: PostReactionChangedEvent) -> None:
        raise RuntimeError("not now")

    post = news.add()
    with news.connect() as connection:
        with pytest.raises(RuntimeError, match="not now"):
            like(connection, post, ANN, on_changed=fail)
        connection.commit()
    assert (news.likes_count(post), news.reactions(post)) == (0, [])


def test_post_reaction_changed_event_is_raised_for_each_change_and_for_no_no_op(news: News) -> None:
    post, events = news.add(), list[PostReactionChangedEvent]()
    for act in (like, like, unlike, unlike, add_reaction):
        toggle(news, act, post, ANN, on_changed=events.append)
    assert events == [PostReactionChangedEvent(post, ANN, ReactionKind.LIKE, delta) for delta in (1, -1, 1)]


def test_inv_2_a_thousand_toggles_at_once_of_the_same_user_end_with_counter_equal_rows(news: News) -> None:
    post, luck = news.add(), random.Random(4)
    events = at_once(news, [(luck.choice([like, unlike]), post, ANN) for _ in range(1000)])
    rows = len(news.reactions(post))
    assert rows in (0, 1)
    assert news.likes_count(post) == rows == sum(event.delta for event in events)


def test_inv_2_a_thousand_likes_at_once_of_a_thousand_users_are_all_counted(news: News) -> None:
    post = news.add()
    at_once(news, [(like, post, UUID(int=n)) for n in range(1000)])
    assert news.likes_count(post) == len(news.reactions(post)) == 1000


def test_inv_2_a_thousand_toggles_at_once_of_a_few_users_and_posts_end_with_counter_equal_rows(news: News) -> None:
    posts, luck = [news.add() for _ in range(3)], random.Random(5)
    calls = [(luck.choice([like, unlike]), luck.choice(posts), UUID(int=luck.randrange(20))) for _ in range(1000)]
    events = at_once(news, calls)
    for post in posts:
        moved = sum(event.delta for event in events if event.post_id == post)
        assert news.likes_count(post) == len(news.reactions(post)) == moved


def test_a_post_may_be_deleted_while_it_is_liked_and_unliked(news: News) -> None:
    for _ in range(5):
        post = news.add()

        def toggle_or_find_it_gone(connection: Any, post: UUID, user: UUID, **options: Any) -> Toggled:
            act = random.choice([like, unlike])
            with suppress(PostNotFoundError):
                return act(connection, post, user, **options)
            return Toggled(changed=False, likes_count=0)

        def delete(connection: Any, post: UUID, user: UUID, **options: Any) -> Toggled:
            connection.execute(f"DELETE FROM {POSTS} WHERE id = %s", [post])
            return Toggled(changed=True, likes_count=0)

        toggles = [(toggle_or_find_it_gone, post, UUID(int=n % 16)) for n in range(100)]
        at_once(news, [*toggles, (delete, post, ANN), *toggles])
        assert news.reactions(post) == []


# Kinds, and posts that go


def test_unknown_reaction_a_kind_of_a_later_version_is_ignored_when_read(news: News) -> None:
    post, other = news.add(), news.add()
    toggle(news, like, post, ANN)
    react(news, other, ANN, "Bookmark")
    with news.connect() as connection:
        assert [reaction.post_id for reaction in reactions_of_user(connection, ANN)] == [post]


def test_unknown_reaction_a_like_or_an_unlike_over_one_is_a_no_op(news: News) -> None:
    post = news.add()
    react(news, post, ANN, "Bookmark")
    assert toggle(news, like, post, ANN) == Toggled(changed=False, likes_count=0)
    assert toggle(news, unlike, post, ANN) == Toggled(changed=False, likes_count=0)
    assert news.reactions(post) == [(ANN, "Bookmark")]


def test_cascade_deleting_a_post_removes_its_reactions_and_its_signals_row(news: News) -> None:
    post, other = news.add(), news.add()
    for each in (post, other):
        toggle(news, like, each, ANN)
    news.run()
    news.execute(f"DELETE FROM {POSTS} WHERE id = %s", post)
    assert (news.reactions(post), news.reactions(other)) == ([], [(ANN, "Like")])
    assert set(news.all_signals()) == {other}


def test_likes_touch_no_signals(news: News) -> None:
    post = news.add()
    news.run()
    before = news.execute("SELECT xmin::text, * FROM news.post_ranking_signals")
    toggle(news, like, post, ANN)
    assert news.execute("SELECT xmin::text, * FROM news.post_ranking_signals") == before
