"""The recompute on a real database: one row a post, made of its sources alone, whatever happens meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pin_pipelines.database import Connection
from pin_pipelines.news import statements
from pin_pipelines.news.reactions import like, unlike
from pin_pipelines.news.recompute import MAX_ATTEMPTS, MAX_BATCH_SIZE, Progress, StopReason, recompute
from pin_pipelines.news.tables import POSTS, SIGNALS, RankingTablesMissingError
from pin_pipelines.news.views import PostgresPostViews, ViewTotals
from pin_pipelines_tests.support.news import CATEGORY, TODAY, News, Recorder, day, noon, scans

LATE = UUID("ffffffff-0000-4000-8000-000000000000")


class Meanwhile:
    """Views of the database; something else happens each time when a page is read and before it is written."""

    def __init__(self, happens: Callable[[Sequence[UUID]], object]) -> None:
        self._happens = happens

    def __call__(self, connection: Connection) -> Meanwhile:
        self._views = PostgresPostViews(connection)
        return self

    def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
        self._happens(post_ids)
        return self._views.totals(post_ids, as_of)

    def of_user(self, user_id: UUID, first_day: date, last_day: date) -> Mapping[UUID, int]:
        raise NotImplementedError


def once(action: Callable[[], object]) -> Callable[[Sequence[UUID]], None]:
    """The action at the first call only."""
    left = [action]
    return lambda _: left.pop()() and None if left else None


# INV-3 and INV-5


def test_inv_3_signals_per_post_every_post_has_exactly_one_row_published_or_not(news: News) -> None:
    posts = {news.add(), news.add(published_at=None), news.add(published_at=noon(5)), *news.add_many(23)}
    summary = news.run(batch_size=5)
    assert set(news.all_signals()) == posts
    assert (summary.posts_total, summary.posts_ranked, summary.signals_created) == (26, 26, 26)
    assert summary.stopped_reason is StopReason.COMPLETED

    again = news.run(batch_size=5)
    assert set(news.all_signals()) == posts
    assert (again.posts_ranked, again.signals_created) == (26, 0)


def test_inv_5_score_bounds_no_score_is_below_0_and_the_table_refuses_one(news: News) -> None:
    post = news.add(published_at=None, boost=-1000, author_type="Stranger")
    news.run()
    assert news.signals(post).score == 0
    with pytest.raises(psycopg.errors.CheckViolation, match="ck_post_ranking_signals_score"):
        news.execute(f"UPDATE {SIGNALS} SET score = -0.000001")


def test_inv_5_a_second_run_changes_nothing_but_the_time_of_the_recompute(news: News) -> None:
    news.add(views={TODAY: 10}, comments=3, boost=20, author_type="Developer")
    news.add_many(7)
    news.run()
    first, times = news.stored(), recomputed_at(news)
    news.run()
    assert news.stored() == first
    assert all(later > earlier for earlier, later in zip(times, recomputed_at(news), strict=True))


def test_inv_5_whatever_stands_in_a_row_the_recompute_makes_it_anew_from_the_sources(news: News) -> None:
    post = news.add(views={TODAY: 10}, comments=3, boost=20, author_type="Developer", blocks=["Text"])
    news.run()
    first = news.stored()
    news.execute(
        f"UPDATE {SIGNALS} SET views_7d = 1, views_30d = 2, likes = 3, comments_rate = 4, recency_decay = 0.5, "
        "score = 6, affinity_inputs = '{\"ContractVersion\": 7}'"
    )
    news.run()
    assert news.stored() == first
    assert news.affinity_inputs(post)["ContractVersion"] == 1


def test_signals_follow_the_day_from_run_to_run_and_do_not_pile_up(news: News) -> None:
    post = news.add(views={day(-1): 5, day(0): 7})
    views = []
    for offset in (-1, 0, 6, 7, 29, 30, 0):
        news.run(day(offset))
        views.append((news.signals(post).views_7d, news.signals(post).views_30d))
    assert views == [(5, 5), (12, 12), (7, 12), (0, 12), (0, 7), (0, 0), (12, 12)]


@pytest.mark.parametrize("batch_size", [1, 4, 12, 13])
def test_the_size_of_a_batch_changes_nothing(news: News, batch_size: int) -> None:
    for post in news.add_many(12):
        news.view(post, {TODAY: post.int >> 64})
    news.run()
    first = news.stored()
    news.execute(f"DELETE FROM {SIGNALS}")
    assert news.run(batch_size=batch_size).posts_ranked == 12
    assert news.stored() == first


def test_without_posts_a_run_is_a_successful_no_op(news: News) -> None:
    summary = news.run()
    assert (summary.stopped_reason, summary.posts_total, summary.posts_ranked) == (StopReason.COMPLETED, 0, 0)


def recomputed_at(news: News) -> list[Any]:
    return [each for (each,) in news.execute(f"SELECT recomputed_at FROM {SIGNALS} ORDER BY id")]


# What a post is about


def test_affinity_inputs_are_a_document_of_version_1_of_what_the_post_is_about(news: News) -> None:
    projects = [UUID(int=2), UUID(int=1)]
    post = news.add(author_type="Developer", blocks=["Text", "Image", "Text"], projects=projects)
    news.run()
    assert news.affinity_inputs(post) == {
        "ContractVersion": 1,
        "CategoryId": str(CATEGORY),
        "BlockKinds": ["Image", "Text"],
        "ProjectIds": [str(UUID(int=1)), str(UUID(int=2))],
        "AuthorType": "Developer",
    }


def test_affinity_inputs_of_a_post_without_blocks_and_projects_have_empty_lists(news: News) -> None:
    post = news.add()
    news.run()
    document = news.affinity_inputs(post)
    assert (document["BlockKinds"], document["ProjectIds"]) == ([], [])


def test_affinity_inputs_hold_at_most_32_kinds_of_block_and_20_projects(news: News) -> None:
    post = news.add(blocks=[f"Kind{n:02}" for n in range(40)], projects=[UUID(int=n) for n in reversed(range(1, 31))])
    news.run()
    document = news.affinity_inputs(post)
    assert document["BlockKinds"] == [f"Kind{n:02}" for n in range(32)]
    assert document["ProjectIds"] == [str(UUID(int=n)) for n in range(1, 21)]


# Likes, posts and other runs meanwhile


def test_a_like_that_lands_before_its_batch_is_written_counts_in_this_run(news: News) -> None:
    post = news.add()

    def like_it() -> None:
        with news.connect() as connection:
            like(connection, post, uuid4())

    news.run(open_views=Meanwhile(once(like_it)))
    assert (news.signals(post).likes, news.likes_count(post)) == (1, 1)


def test_a_like_that_lands_behind_its_batch_is_kept_and_counts_in_the_next_run(news: News) -> None:
    post, later = news.add_many(2)

    def like_the_first(ids: Sequence[UUID]) -> None:
        if ids == [later]:
            with news.connect() as connection:
                like(connection, post, uuid4())

    news.run(batch_size=1, open_views=Meanwhile(like_the_first))
    assert (news.signals(post).likes, news.likes_count(post), len(news.reactions(post))) == (0, 1, 1)
    news.run()
    assert (news.signals(post).likes, news.signals(post).score) == (1, Decimal("0.1"))


def test_a_like_waits_for_no_batch_that_is_written_and_not_yet_committed(news: News) -> None:
    post, liker = news.add(), uuid4()
    news.run()
    with news.connect() as batch, news.connect() as reader:
        batch.execute(f"UPDATE {SIGNALS} SET score = 1 WHERE id = %s", [post])
        reader.execute("SET lock_timeout = '1s'")
        assert like(reader, post, liker).likes_count == 1
        assert unlike(reader, post, liker).likes_count == 0


def test_likes_during_runs_are_never_lost(news: News) -> None:
    posts = news.add_many(5)
    done = threading.Event()

    def keep_running() -> None:
        while not done.is_set():
            news.run(batch_size=2)

    runner = threading.Thread(target=keep_running)
    runner.start()
    try:
        with news.connect() as connection:
            connection.autocommit = True
            for n in range(100):
                like(connection, posts[n % 5], uuid4())
    finally:
        done.set()
        runner.join()
    assert [(news.likes_count(post), len(news.reactions(post))) for post in posts] == [(20, 20)] * 5
    news.run()
    assert {each.likes for each in news.all_signals().values()} == {20}


def test_a_row_that_another_writer_changed_since_it_was_read_is_read_again(news: News) -> None:
    post, _ = news.add_many(2)
    news.run()
    other_writer = once(lambda: news.execute(f"UPDATE {SIGNALS} SET likes = 99 WHERE id = %s", post))
    summary = news.run(open_views=Meanwhile(other_writer))
    assert (summary.posts_ranked, summary.conflicts) == (2, 1)
    assert news.signals(post).likes == 0


def test_a_row_that_another_run_made_since_the_page_was_read_is_read_again(news: News) -> None:
    post = news.add(views={TODAY: 4})
    summary = news.run(open_views=Meanwhile(once(news.run)))
    assert (summary.posts_ranked, summary.conflicts) == (1, 1)
    assert news.signals(post).views_30d == 4


def test_a_post_that_is_deleted_during_the_run_leaves_no_row_and_stops_nothing(news: News) -> None:
    gone, stays = news.add_many(2)
    summary = news.run(open_views=Meanwhile(once(lambda: news.execute(f"DELETE FROM {POSTS} WHERE id = %s", gone))))
    assert set(news.all_signals()) == {stays}
    assert (summary.posts_ranked, summary.conflicts) == (1, 0)


def test_a_post_that_comes_ahead_of_the_cursor_is_ranked_by_this_run(news: News) -> None:
    post = news.add_many(1)[0]
    news.run(batch_size=1, open_views=Meanwhile(once(lambda: news.add(LATE))))
    assert set(news.all_signals()) == {post, LATE}


def test_two_runs_at_once_leave_the_same_as_one(news: News) -> None:
    for post in news.add_many(40):
        news.view(post, {TODAY: post.int >> 64})
    runs = [threading.Thread(target=lambda: news.run(batch_size=3)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    together = news.stored()
    news.run()
    assert len(together) == 40
    assert news.stored() == together


# How a run goes and ends


def test_a_stop_signal_ends_the_run_after_the_batch_in_hand(news: News) -> None:
    posts, stop = news.add_many(10), threading.Event()
    summary = news.run(batch_size=3, stop=stop, on_progress=lambda _: stop.set())
    assert (summary.stopped_reason, summary.posts_ranked, summary.posts_total) == (StopReason.STOP_SIGNAL, 3, 10)
    assert set(news.all_signals()) == set(posts[:3])


def test_a_run_after_one_that_was_stopped_leaves_the_same_as_a_run_that_was_not(news: News) -> None:
    news.add_many(10)
    news.run()
    whole = news.stored()
    news.execute(f"DELETE FROM {SIGNALS}")
    stop = threading.Event()
    news.run(batch_size=3, stop=stop, on_progress=lambda _: stop.set())
    news.run()
    assert news.stored() == whole


def test_progress_is_told_after_each_batch(news: News) -> None:
    news.add_many(10)
    told: list[Progress] = []
    news.run(batch_size=4, on_progress=told.append)
    assert [(each.posts_done, each.posts_total) for each in told] == [(4, 10), (8, 10), (10, 10)]
    assert all(each.posts_per_second > 0 for each in told)


def test_what_is_committed_stays_when_a_later_batch_fails(news: News) -> None:
    posts = news.add_many(4)

    def fail(ids: Sequence[UUID]) -> None:
        if posts[2] in ids:
            raise psycopg.OperationalError("the server is gone")

    with pytest.raises(psycopg.OperationalError, match="the server is gone"):
        news.run(batch_size=2, open_views=Meanwhile(fail))
    assert set(news.all_signals()) == set(posts[:2])


def test_a_deadlock_is_tried_again(news: News) -> None:
    news.add_many(4)

    def deadlock() -> None:
        raise psycopg.errors.DeadlockDetected

    summary = news.run(batch_size=2, open_views=Meanwhile(once(deadlock)))
    assert (summary.retries, summary.posts_ranked) == (1, 4)


def test_a_batch_that_fails_at_every_attempt_fails_the_run(news: News) -> None:
    news.add_many(1)
    tries: list[Sequence[UUID]] = []

    def deadlock(ids: Sequence[UUID]) -> None:
        tries.append(ids)
        raise psycopg.errors.DeadlockDetected

    with pytest.raises(psycopg.errors.DeadlockDetected):
        news.run(open_views=Meanwhile(deadlock))
    assert len(tries) == MAX_ATTEMPTS


@pytest.mark.parametrize("batch_size", [0, -1, MAX_BATCH_SIZE + 1])
def test_a_batch_size_out_of_bounds_is_refused_before_anything_is_opened(batch_size: int) -> None:
    message = f"batch_size = {batch_size} is not allowed; it must be a whole number from 1 to {MAX_BATCH_SIZE}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        News("postgresql://nowhere.invalid/x").run(batch_size=batch_size)


def test_without_its_branch_of_migrations_a_run_says_which_command_to_run(plain_news: News) -> None:
    with pytest.raises(RankingTablesMissingError, match="`pin-pipelines migrate --with-news-ranking`"):
        plain_news.run()


def test_views_come_from_whatever_source_is_given(news: News) -> None:
    class Elsewhere:
        def totals(self, post_ids: Sequence[UUID], as_of: date) -> Mapping[UUID, ViewTotals]:
            assert as_of == TODAY
            return {post_ids[0]: ViewTotals(3, 5)}

        def of_user(self, user_id: UUID, first_day: date, last_day: date) -> Mapping[UUID, int]:
            raise NotImplementedError

    viewed, other = news.add_many(2)
    news.run(open_views=lambda _: Elsewhere())
    assert (news.signals(viewed).views_7d, news.signals(viewed).views_30d) == (3, 5)
    assert (news.signals(other).views_7d, news.signals(other).views_30d) == (0, 0)


def test_daily_views_of_posts_that_are_gone_do_no_harm(news: News) -> None:
    news.view(uuid4(), {TODAY: 5})
    post = news.add()
    news.run()
    assert set(news.all_signals()) == {post}


# What a batch costs


@pytest.mark.slow
def test_a_batch_reads_its_own_posts_and_no_others(news: News) -> None:
    posts = news.add_many(20_000)
    for table, columns, value in [
        ("news.post_blocks", "post_id, position, kind", "0, 'Text'"),
        ("news.post_project_refs", "post_id, project_id", "post"),
        ("user_activity.post_daily_views", "post_id, day, views", f"DATE '{TODAY}', 7"),
    ]:
        news.execute(f"INSERT INTO {table} ({columns}) SELECT post, {value} FROM unnest(%s::uuid[]) post", posts)
    news.run()
    with psycopg.connect(news.url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")

    recorders, stop = [], threading.Event()

    def connect() -> psycopg.Connection[Any]:
        connection = news.connect()
        recorders.append(Recorder(connection))
        return connection

    recompute(connect, as_of=TODAY, batch_size=100, stop=stop, on_progress=lambda _: stop.set())

    (recorder,) = recorders
    of_a_batch = [statements.FIRST_PAGE, statements.VIEW_TOTALS, statements.RANK_PAGE]
    batch = [call for call in recorder.calls if call[0] in of_a_batch]
    assert [statement for statement, _ in batch] == of_a_batch
    batch.append((statements.NEXT_PAGE, {"after": posts[9_000], "size": 100}))
    with news.connect() as connection:
        connection.execute(statements.WORKER_SESSION)
        for statement, parameters in batch:
            read = {
                (node.get("Relation Name"), node["Actual Rows"] * node["Actual Loops"])
                for node in scans(connection, statement, parameters)
            }
            assert all(rows <= 100 for _, rows in read), read
