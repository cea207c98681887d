"""The claim on a range, on a real server: who gets it, who keeps it, and what a runner that lost it can still do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pin_pipelines.invest_analytics import checkpoints
from pin_pipelines.invest_analytics.checkpoints import (
    CHECKPOINTS,
    REJECTS,
    CheckpointHeldError,
    CheckpointStatus,
    Claim,
    ClaimLostError,
    Range,
    alive,
    checkpoint_of,
    checkpoint_rows,
    reject_rows,
)
from pin_pipelines.invest_analytics.snapshots import BadRow
from pin_pipelines.migrations import downgrade, migrate
from pin_pipelines_tests.support.price_backfill import EVERYTHING, Backfill, object_id
from pin_pipelines_tests.support.processes import background
from pin_pipelines_tests.support.roles import MIGRATIONS, apply_roles, as_role
from pin_pipelines_tests.support.waiting import until

# When each statement began that waits for a lock now.
WAITING = (
    "SELECT query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database() "
    "AND application_name LIKE 'price backfill%%'"
)
REJECT = BadRow(object_id(2), "areaTotal = 0: must be above 0", '{"areaTotal": 0.10, "note": "\\u0000"}')


@pytest.fixture
def backfill(database_url: str) -> Backfill:
    return Backfill(database_url)


@contextmanager
def taken(backfill: Backfill, price_range: Range = EVERYTHING, run_id: UUID | None = None) -> Iterator[Claim]:
    """A claim that somebody holds."""
    with Claim(backfill.connect, price_range, run_id=run_id or uuid4()) as claim:
        assert claim.take(1000)
        yield claim


def take(backfill: Backfill, price_range: Range = EVERYTHING, batch_size: int = 1000) -> bool:
    """Try to claim, and let go at once."""
    with Claim(backfill.connect, price_range, run_id=uuid4()) as claim:
        return claim.take(batch_size)


@contextmanager
def stranger(backfill: Backfill) -> Iterator[psycopg.Connection[Any]]:
    """Somebody who looks at the checkpoints, and holds them for as long as the context lasts."""
    with backfill.connect() as connection:
        connection.execute(f"SELECT id FROM {CHECKPOINTS} FOR UPDATE")
        yield connection
        connection.rollback()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are waited for a tenth of a second, five times."""
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(checkpoints, "MAX_LOCK_ATTEMPTS", 5)


def terminate(backfill: Backfill, claim: Claim) -> None:
    """End the session of the claim, as a restart of the server or a cut network does."""
    backfill.execute("SELECT pg_terminate_backend(%s, 10000)", claim._connection.info.backend_pid)


# Ranges


def test_range_whose_from_is_beyond_its_to_is_refused_with_both_fields_named() -> None:
    with pytest.raises(ValueError, match=r"FromPropertyObjectId = .*2-.* is beyond ToPropertyObjectId = .*1-"):
        Range(object_id(2), object_id(1))
    assert Range(object_id(1), object_id(1)).lower == object_id(1)


@pytest.mark.parametrize(
    ("lower", "cursor"),
    [
        (None, None),
        ("00000000-0000-0000-0000-000000000000", None),
        ("00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000000"),
        ("12345678-0000-4000-8000-000000000000", "12345678-0000-4000-7fff-ffffffffffff"),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", "ffffffff-ffff-ffff-ffff-fffffffffffe"),
    ],
)
def test_from_is_part_of_the_range_and_the_first_cursor_lies_before_it(lower: str | None, cursor: str | None) -> None:
    assert Range(UUID(lower) if lower else None).before_first == (UUID(cursor) if cursor else None)


def test_range_ends_where_the_cursor_reaches_to() -> None:
    bounded = Range(object_id(1), object_id(3))
    assert [bounded.ends_at(object_id(n)) for n in (2, 3, 4)] == [False, True, True]
    assert not bounded.ends_at(None)
    assert not EVERYTHING.ends_at(UUID(int=2**128 - 1))


# Taking it


def test_claim_of_a_range_that_nobody_began_begins_it_under_the_id_of_the_run(backfill: Backfill) -> None:
    run_id, price_range = uuid4(), Range(object_id(1), object_id(9))
    (before,) = backfill.execute("SELECT clock_timestamp()")[0]
    with Claim(backfill.connect, price_range, run_id=run_id) as claim:
        assert claim.take(500)
        (row,) = backfill.checkpoints()
        assert row == claim.checkpoint
    (after,) = backfill.execute("SELECT clock_timestamp()")[0]
    assert (row.id, row.last_run_id, row.status) == (run_id, str(run_id), CheckpointStatus.RUNNING)
    assert (row.price_range, row.batch_size) == (price_range, 500)
    assert (row.last_processed_property_object_id, row.processed_property_object_count) == (None, 0)
    assert (row.version, row.attempts_without_progress, row.insert_errors) == (1, 1, 0)
    assert before < row.started_at <= row.updated_at < after
    assert (row.completed_at, row.failed_at, row.progressed_at, row.last_error) == (None, None, None, None)


def test_range_that_is_claimed_is_not_claimed_again_and_other_ranges_are(backfill: Backfill) -> None:
    ends = None, object_id(1), object_id(9)
    ranges = [Range(lower, upper) for lower in ends for upper in ends if not (lower and upper and lower > upper)]
    with taken(backfill) as claim:
        before = claim.checkpoint
        assert not take(backfill)
        assert backfill.checkpoints() == [before]
        assert all(take(backfill, other) for other in ranges if other != EVERYTHING)
        assert alive_ranges(backfill, ranges) == [EVERYTHING]
    assert len(backfill.checkpoints()) == len(ranges)
    assert alive_ranges(backfill, ranges) == []


def alive_ranges(backfill: Backfill, ranges: list[Range]) -> list[Range]:
    with backfill.connect() as connection:
        return [each for each in ranges if alive(connection, each)]


def test_of_many_claims_at_once_one_is_granted(backfill: Backfill) -> None:
    tried, begin = threading.Barrier(8), threading.Barrier(8)

    def contend() -> bool:
        with Claim(backfill.connect, EVERYTHING, run_id=uuid4()) as claim:
            begin.wait()
            granted = claim.take(1000)
            tried.wait()
            return granted

    for _ in range(5):
        with background(*[contend] * 8) as claims:
            assert sum(claim.result() for claim in claims) == 1
    (row,) = backfill.checkpoints()
    assert row.version == 5


def test_running_row_whose_process_is_dead_is_resumed_at_its_cursor(backfill: Backfill) -> None:
    with taken(backfill) as dead:
        dead.advance(object_id(5), ingested=5)
    (left,) = backfill.checkpoints()
    assert left.status is CheckpointStatus.RUNNING

    with taken(backfill) as claim:
        row = claim.checkpoint
    assert (row.id, row.last_processed_property_object_id) == (left.id, object_id(5))
    assert row.last_run_id != left.last_run_id
    assert (row.version, row.attempts_without_progress) == (left.version + 1, 1)
    assert backfill.checkpoints() == [row]


def test_stale_running_row_whose_process_lives_is_not_taken_over(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        backfill.execute(f"UPDATE {CHECKPOINTS} SET updated_at = now() - interval '1 year'")
        assert not take(backfill)
        claim.advance(object_id(1), ingested=1)


def test_failed_row_of_the_range_is_resumed_and_remembers_why_it_failed(backfill: Backfill) -> None:
    with taken(backfill) as failed:
        failed.advance(object_id(5), ingested=5)
        failed.fail("SourceError: 503")
    (left,) = backfill.checkpoints()
    assert (left.status, left.last_error) == (CheckpointStatus.FAILED, "SourceError: 503")
    assert left.failed_at is not None

    with taken(backfill) as claim:
        row = claim.checkpoint
    assert (row.id, row.status, row.version) == (left.id, CheckpointStatus.RUNNING, left.version + 1)
    assert (row.last_error, row.failed_at) == (left.last_error, left.failed_at)


def test_claims_that_come_to_nothing_are_counted_until_the_cursor_moves(backfill: Backfill) -> None:
    for number in (1, 2, 3):
        with taken(backfill) as claim:
            assert claim.checkpoint.attempts_without_progress == number
    with taken(backfill) as claim:
        claim.advance(object_id(1), ingested=1)
        assert claim.checkpoint.attempts_without_progress == 0


def test_completed_range_is_begun_anew_under_another_id(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        claim.advance(object_id(5), ingested=5)
        claim.complete()
    with taken(backfill) as again:
        assert again.checkpoint.last_processed_property_object_id is None
    assert [row.status for row in backfill.checkpoints()] == [CheckpointStatus.COMPLETED, CheckpointStatus.RUNNING]


def test_run_id_begins_one_range_only(backfill: Backfill) -> None:
    with taken(backfill, run_id=(run_id := uuid4())) as claim:
        claim.complete()
    with Claim(backfill.connect, EVERYTHING, run_id=run_id) as again, pytest.raises(psycopg.errors.UniqueViolation):
        again.take(1000)


@pytest.mark.parametrize("status", ["Running", "Failed"])
def test_claim_is_refused_at_once_while_a_stranger_holds_the_row(
    backfill: Backfill, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT_SECONDS", 600)
    with taken(backfill) as claim:
        if status == "Failed":
            claim.fail("for a test")
    (before,) = backfill.checkpoints()
    with stranger(backfill):
        assert not take(backfill)
    assert backfill.checkpoints() == [before]
    assert take(backfill)


INSERT = (
    f"INSERT INTO {CHECKPOINTS} (id, status, from_property_object_id, to_property_object_id, batch_size, last_run_id) "
    "VALUES (%s, 'Running', %s, %s, 1, 'by hand')"
)


@pytest.mark.usefixtures("impatient")
def test_claim_is_not_granted_while_somebody_else_inserts_the_range(backfill: Backfill) -> None:
    with backfill.connect() as other:
        other.execute(INSERT, [uuid4(), None, None])
        assert not take(backfill)
        other.rollback()
    assert take(backfill)


def test_claim_that_meets_the_insert_of_another_leaves_the_range_to_it(
    backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT_SECONDS", 60)
    with backfill.connect() as other:
        other.execute(INSERT, [uuid4(), None, None])
        with background(partial(take, backfill)) as (claim,):
            until(lambda: backfill.execute(WAITING), "the claim to wait for the other's insert")
            other.commit()
            assert not claim.result()
    (row,) = backfill.checkpoints()
    assert row.last_run_id == "by hand"


def test_two_running_rows_of_a_range_are_impossible_open_ends_included(backfill: Backfill) -> None:
    for lower, upper in ((None, None), (object_id(1), None), (None, object_id(1)), (object_id(1), object_id(1))):
        backfill.execute(INSERT, uuid4(), lower, upper)
        with pytest.raises(psycopg.errors.UniqueViolation):
            backfill.execute(INSERT, uuid4(), lower, upper)


# Keeping it


def test_advance_moves_cursor_counts_and_rejects_together(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        claim.advance(object_id(3), ingested=2, rejects=[REJECT])
        claim.advance(object_id(4), ingested=1)
        assert backfill.checkpoints() == [claim.checkpoint]
    (row,) = backfill.checkpoints()
    assert row.last_processed_property_object_id == object_id(4)
    assert (row.processed_property_object_count, row.ingested_fact_count, row.rejected_row_count) == (4, 3, 1)
    assert row.version == 3
    assert row.progressed_at is not None
    # Each is a reading of the clock of its own.
    assert row.started_at < min(row.progressed_at, row.updated_at)
    (reject,) = backfill.rejects()
    assert (reject.checkpoint_id, reject.property_object_id) == (row.id, REJECT.property_object_id)
    assert (reject.reason, reject.payload) == (REJECT.reason, REJECT.payload)


def test_newest_rejects_come_first_and_no_more_than_asked_for(backfill: Backfill) -> None:
    rows = [BadRow(None, f"reason {n}", "{}") for n in range(5)]
    with taken(backfill) as claim:
        claim.advance(object_id(1), ingested=0, rejects=rows)
    with backfill.connect() as connection:
        assert [reject.reason for reject in reject_rows(connection, 2)] == ["reason 4", "reason 3"]


def test_insert_errors_are_counted_at_once_and_beat(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        before = claim.checkpoint.updated_at
        claim.count_insert_error()
        claim.count_insert_error()
        (row,) = backfill.checkpoints()
    assert row.insert_errors == 2
    assert row.updated_at > before
    assert row.progressed_at is None


def test_changed_version_means_that_the_claim_is_lost_and_nothing_moves_any_more(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        claim.advance(object_id(1), ingested=1)
        backfill.execute(f"UPDATE {CHECKPOINTS} SET version = version + 1, last_run_id = 'another'")
        before = backfill.checkpoints()
        writes = (
            partial(claim.advance, object_id(2), ingested=0, rejects=[REJECT]),
            claim.count_insert_error,
            claim.complete,
        )
        for write in writes:
            with pytest.raises(ClaimLostError, match=r"Version is 3 instead of 2; the row is Running and run another"):
                write()
        claim.fail("too late")
    assert backfill.checkpoints() == before
    assert backfill.rejects() == []


@pytest.mark.parametrize("taken_by_another", [False, True])
def test_runner_without_its_lock_has_lost_the_claim_though_the_row_is_as_it_left_it(
    backfill: Backfill, taken_by_another: bool
) -> None:
    with taken(backfill) as claim, backfill.connect() as another:
        claim._connection.execute("SELECT pg_advisory_unlock_all()")
        if taken_by_another:
            another.execute(checkpoints._TAKE_LOCK, {"lock_key": checkpoints._lock_key(EVERYTHING)})
        with pytest.raises(ClaimLostError, match="its advisory lock is not held by this connection any more"):
            claim.advance(object_id(1), ingested=1)
        assert backfill.checkpoints() == [claim.checkpoint]


def test_row_that_was_deleted_is_a_lost_claim(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        backfill.execute(f"DELETE FROM {CHECKPOINTS}")
        with pytest.raises(ClaimLostError, match="the row is gone"):
            claim.advance(object_id(1), ingested=1)


def test_lost_connection_is_a_lost_claim_and_the_row_becomes_failed_over_another(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        terminate(backfill, claim)
        with pytest.raises(ClaimLostError, match="the connection that held the claim is gone"):
            claim.advance(object_id(1), ingested=1)
        claim.fail("ClaimLostError: gone")
    (row,) = backfill.checkpoints()
    assert (row.status, row.last_error) == (CheckpointStatus.FAILED, "ClaimLostError: gone")
    assert row.last_processed_property_object_id is None


def test_runner_that_lost_its_connection_cannot_fail_the_row_of_the_next_one(backfill: Backfill) -> None:
    with taken(backfill) as first:
        terminate(backfill, first)
        with taken(backfill) as second:
            first.fail("too late")
            assert backfill.checkpoints() == [second.checkpoint]
            with pytest.raises(ClaimLostError):
                first.advance(object_id(1), ingested=1)
            second.advance(object_id(2), ingested=2)
            assert backfill.checkpoints() == [second.checkpoint]


def test_completed_row_does_not_become_failed(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        claim.complete()
        claim.fail("interrupted a moment later")
    (row,) = backfill.checkpoints()
    assert (row.status, row.last_error) == (CheckpointStatus.COMPLETED, None)


def test_advance_waits_for_somebody_who_is_looking_at_the_row(
    backfill: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LOCK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(checkpoints, "MAX_LOCK_ATTEMPTS", 10_000)
    with taken(backfill) as claim, stranger(backfill) as other:
        advance = partial(claim.advance, object_id(1), ingested=1, rejects=[])
        with background(advance) as (advancing,):
            seen: set[object] = set()

            def waits_again() -> bool:
                seen.update(backfill.execute(WAITING))
                return len(seen) >= 3

            until(waits_again, "three attempts at the row")
            assert not advancing.done()
            other.rollback()
            advancing.result()
    assert backfill.checkpoints() == [claim.checkpoint]


@pytest.mark.usefixtures("impatient")
def test_row_that_is_held_for_too_long_stops_the_runner_and_is_left_as_it_was(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        with stranger(backfill):
            with pytest.raises(CheckpointHeldError, match="another session has held the row"):
                claim.advance(object_id(1), ingested=1, rejects=[REJECT])
            claim.fail("CheckpointHeldError")
        assert backfill.checkpoints() == [claim.checkpoint]
        assert backfill.rejects() == []
        claim.advance(object_id(1), ingested=1)


def test_last_error_is_kept_whatever_characters_are_in_it_and_cut_to_a_sane_length(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        claim.fail("a\0b\ud800c" + "x" * 10_000)
    (row,) = backfill.checkpoints()
    assert row.last_error == "a\N{REPLACEMENT CHARACTER}b?c" + "x" * 1995


def test_sessions_of_a_claim_read_committed_and_are_not_ended_for_being_idle(backfill: Backfill) -> None:
    name = psycopg.conninfo.conninfo_to_dict(backfill.url)["dbname"]
    backfill.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    backfill.execute(f"ALTER DATABASE {name} SET idle_session_timeout = '1s'")
    with taken(backfill) as claim:
        shown = [
            claim._connection.execute(f"SHOW {each}").fetchone()
            for each in ("transaction_isolation", "idle_session_timeout")
        ]
    assert shown == [("read committed",), ("0",)]


# Asked from outside


def test_loaded_range_stays_loaded_whatever_became_of_a_re_run(backfill: Backfill) -> None:
    with backfill.connect() as connection:
        assert checkpoint_of(connection, EVERYTHING) is None
    with taken(backfill, Range(None, object_id(9))):
        pass
    with taken(backfill) as claim:
        claim.complete()
    with taken(backfill) as again:
        again.fail("for a test")
    with backfill.connect() as connection:
        found = checkpoint_of(connection, EVERYTHING)
        assert [row.price_range for row in checkpoint_rows(connection)] == [
            EVERYTHING,
            EVERYTHING,
            Range(None, object_id(9)),
        ]
    assert found is not None
    assert (found.id, found.status) == (claim.checkpoint.id, CheckpointStatus.COMPLETED)


def test_of_unfinished_checkpoints_the_newest_says_where_the_range_stands(backfill: Backfill) -> None:
    with taken(backfill) as claim:
        pass
    with backfill.connect() as connection:
        assert checkpoint_of(connection, EVERYTHING) == claim.checkpoint


@pytest.mark.parametrize(
    "change",
    [
        "status = 'Paused'",
        "status = 'Completed'",
        "status = 'Failed'",
        "batch_size = 0",
        "batch_size = 1001",
        "processed_property_object_count = 1",
        f"from_property_object_id = '{object_id(2)}', to_property_object_id = '{object_id(1)}'",
    ],
)
def test_row_that_says_what_cannot_be_is_refused_by_the_table(backfill: Backfill, change: str) -> None:
    assert take(backfill)
    with pytest.raises(psycopg.errors.CheckViolation):
        backfill.execute(f"UPDATE {CHECKPOINTS} SET {change}")


def test_migration_can_be_taken_back_and_applied_again(backfill: Backfill) -> None:
    # What may be done with a database itself is not copied with it.
    apply_roles(backfill.url)
    url = as_role(backfill.url, MIGRATIONS)
    migrate(url)
    assert take(backfill)
    downgrade(url)
    assert backfill.execute("SELECT to_regclass(%s), to_regclass(%s)", CHECKPOINTS, REJECTS) == [(None, None)]
    migrate(url)
    assert take(backfill)
