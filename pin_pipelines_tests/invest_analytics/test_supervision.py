"""What the sensor decides, state by state (DESIGN §4, «The sensor»)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from pin_pipelines.invest_analytics import backfill, checkpoints
from pin_pipelines.invest_analytics.checkpoints import Checkpoint, CheckpointStatus
from pin_pipelines.invest_analytics.supervision import STALE_AFTER, Request, Run, Situation, Wait, decide
from pin_pipelines.invest_analytics.talent import Limits
from pin_pipelines.resources import clickhouse

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
RUN_ID = "11111111-1111-4111-8111-111111111111"
NEVER_SWITCHED = Situation(NOW, enabled=True)


def ago(**span: float) -> datetime:
    return NOW - timedelta(**span)


def checkpoint(status: CheckpointStatus, *, updated_at: datetime, **fields: Any) -> Checkpoint:
    given: dict[str, Any] = {
        "id": UUID(RUN_ID),
        "from_property_object_id": None,
        "to_property_object_id": None,
        "last_processed_property_object_id": None,
        "processed_property_object_count": 0,
        "ingested_fact_count": 0,
        "rejected_row_count": 0,
        "started_at": updated_at,
        "completed_at": updated_at if status is CheckpointStatus.COMPLETED else None,
        "version": 1,
        "batch_size": 1000,
        "last_run_id": RUN_ID,
        "attempts_without_progress": 1,
        "insert_errors": 0,
        "last_error": None,
        "failed_at": updated_at if status is CheckpointStatus.FAILED else None,
        "progressed_at": None,
    }
    return Checkpoint(status=status, updated_at=updated_at, **{**given, **fields})


def failed(updated_at: datetime, **fields: Any) -> Checkpoint:
    return checkpoint(CheckpointStatus.FAILED, updated_at=updated_at, last_error="SourceError: 503", **fields)


def running(updated_at: datetime, **fields: Any) -> Checkpoint:
    return checkpoint(CheckpointStatus.RUNNING, updated_at=updated_at, **fields)


def attempts(number: int, *, last_ended_at: datetime) -> list[Run]:
    """So many runs that have failed, one every half hour."""
    ends = [last_ended_at - timedelta(minutes=30 * n) for n in reversed(range(number))]
    return [
        Run(f"attempt {n}", end - timedelta(minutes=2), end - timedelta(minutes=1), end)
        for n, end in enumerate(ends, start=1)
    ]


def reason(seen: Situation) -> str:
    decision = decide(seen)
    assert isinstance(decision, Wait), decision
    return decision.reason


def attempt(seen: Situation) -> int:
    decision = decide(seen)
    assert isinstance(decision, Request), decision
    return decision.attempt


def test_flag_off_asks_for_nothing() -> None:
    assert "flag is off" in reason(replace(NEVER_SWITCHED, enabled=False))


def test_flag_on_and_nothing_begun_asks_for_the_first_run_at_once() -> None:
    assert attempt(NEVER_SWITCHED) == 1
    assert attempt(replace(NEVER_SWITCHED, switched_at=ago(seconds=1))) == 1


def test_run_that_is_queued_or_starting_is_waited_for() -> None:
    for run in (Run("queued", ago(hours=2)), Run("starting", ago(seconds=5), started_at=ago(seconds=1))):
        assert f"run {run.run_id} has not ended yet" in reason(replace(NEVER_SWITCHED, runs=[run]))


def test_run_that_holds_the_lock_is_waited_for_whatever_launched_it() -> None:
    seen = replace(NEVER_SWITCHED, checkpoint=running(ago(seconds=3)), alive=True)
    assert f"a run is at work on the range; run {RUN_ID}, last beat 2026-11-30 11:59:57 UTC" in reason(seen)
    assert "a run is at work on the range" in reason(replace(seen, checkpoint=None))


def test_stale_row_whose_process_lives_is_left_alone() -> None:
    run = Run(RUN_ID, ago(hours=9), started_at=ago(hours=8))
    seen = replace(NEVER_SWITCHED, checkpoint=running(ago(hours=7)), alive=True, runs=[run])
    assert decide(seen) == Wait(reason(seen), dead_runs=[])
    assert "a run is at work" in reason(seen)


def test_run_killed_in_the_middle_is_dead_once_its_heartbeat_is_older_than_a_page_can_take() -> None:
    run = Run(RUN_ID, ago(hours=2), started_at=ago(hours=1))
    fresh = replace(NEVER_SWITCHED, checkpoint=running(NOW - STALE_AFTER, progressed_at=ago(hours=1)), runs=[run])
    assert "has not ended yet" in reason(fresh)

    beat = NOW - STALE_AFTER - timedelta(seconds=1)
    stale = replace(fresh, checkpoint=running(beat, progressed_at=ago(hours=1)))
    decision = decide(stale)
    assert isinstance(decision, Request)
    assert (decision.attempt, decision.dead_runs) == (1, [RUN_ID])


def test_run_killed_before_it_claimed_the_range_is_dead_too() -> None:
    run = Run("killed early", ago(minutes=17), started_at=ago(minutes=16))
    decision = decide(replace(NEVER_SWITCHED, runs=[run]))
    assert isinstance(decision, Request)
    assert (decision.attempt, decision.dead_runs) == (2, ["killed early"])


def test_run_that_waits_for_a_slot_is_never_dead() -> None:
    assert "has not ended yet" in reason(replace(NEVER_SWITCHED, runs=[Run("queued", ago(days=9))]))


def test_row_left_as_running_by_a_run_that_has_ended_is_resumed() -> None:
    ended = Run(RUN_ID, ago(minutes=10), ago(minutes=9), ago(minutes=2))
    assert attempt(replace(NEVER_SWITCHED, checkpoint=running(ago(minutes=3)), runs=[ended])) == 2


@pytest.mark.parametrize(
    ("number", "pause"),
    [
        (1, timedelta(seconds=30)),
        (2, timedelta(minutes=1)),
        (3, timedelta(minutes=5)),
        (4, timedelta(minutes=15)),
    ],
)
def test_failed_range_is_resumed_after_a_pause_that_grows(number: int, pause: timedelta) -> None:
    ended_at = NOW - pause
    seen = replace(NEVER_SWITCHED, checkpoint=failed(ended_at), runs=attempts(number, last_ended_at=ended_at))
    assert attempt(seen) == number + 1
    assert f"attempt {number + 1} is due at 2026-11-30 12:00:00 UTC" in reason(
        replace(seen, now=NOW - timedelta(seconds=1))
    )


def test_attempts_used_up_end_the_matter_until_a_person_acts() -> None:
    seen = replace(NEVER_SWITCHED, checkpoint=failed(ago(days=1)), runs=attempts(5, last_ended_at=ago(days=1)))
    given_up = reason(seen)
    assert "given up after 5 attempts without progress; last error: SourceError: 503" in given_up
    assert "launch the job by hand, or switch the flag off and on" in given_up


def test_attempts_are_used_up_also_where_none_came_as_far_as_a_checkpoint() -> None:
    assert "given up after 5 attempts" in reason(replace(NEVER_SWITCHED, runs=attempts(5, last_ended_at=ago(days=1))))


def test_switching_the_flag_off_and_on_begins_anew_without_a_pause() -> None:
    seen = replace(NEVER_SWITCHED, checkpoint=failed(ago(seconds=9)), runs=attempts(5, last_ended_at=ago(seconds=9)))
    assert attempt(replace(seen, switched_at=ago(seconds=1))) == 1


def test_progress_begins_the_count_anew_and_the_pause_with_it() -> None:
    runs = attempts(4, last_ended_at=ago(seconds=31))
    progressed = failed(ago(seconds=31), progressed_at=ago(seconds=40))
    assert attempt(replace(NEVER_SWITCHED, checkpoint=progressed, runs=runs)) == 1
    assert "attempt 1 is due" in reason(replace(NEVER_SWITCHED, now=ago(seconds=2), checkpoint=progressed, runs=runs))


def test_completed_range_is_left_alone_for_good() -> None:
    completed = checkpoint(
        CheckpointStatus.COMPLETED,
        updated_at=ago(days=1),
        processed_property_object_count=200_000,
        rejected_row_count=3,
    )
    seen = replace(NEVER_SWITCHED, checkpoint=completed, runs=attempts(2, last_ended_at=ago(days=1)))
    assert "completed at 2026-11-29 12:00:00 UTC: 200000 property objects, of them 3 rejected" in reason(seen)
    assert "completed at" in reason(replace(seen, switched_at=ago(seconds=1)))


def test_flag_switched_off_in_the_middle_of_a_run_leaves_it_alone_and_asks_for_no_other() -> None:
    seen = Situation(
        NOW,
        enabled=False,
        switched_at=ago(minutes=1),
        checkpoint=running(ago(seconds=3)),
        alive=True,
        runs=[Run(RUN_ID, ago(hours=2), started_at=ago(hours=1))],
    )
    assert decide(seen) == Wait(reason(seen), dead_runs=[])
    assert "one that is at work goes on" in reason(seen)
    ended = replace(seen, alive=False, checkpoint=failed(ago(hours=1)), runs=attempts(1, last_ended_at=ago(hours=1)))
    assert "flag is off" in reason(ended)


def test_dead_run_is_reported_also_where_no_other_is_asked_for() -> None:
    run = Run(RUN_ID, ago(hours=2), started_at=ago(hours=1))
    seen = replace(NEVER_SWITCHED, enabled=False, checkpoint=running(ago(minutes=16)), runs=[run])
    assert decide(seen) == Wait(reason(seen), dead_runs=[RUN_ID])


def test_no_two_requests_of_a_range_have_the_same_key() -> None:
    keys = []
    for switched_at, progressed_at in (
        (None, None),
        (ago(days=9), None),
        (ago(days=8), None),
        (ago(days=8), ago(days=7)),
        (ago(days=8), ago(days=6)),
    ):
        runs = attempts(4, last_ended_at=ago(hours=1))
        for number in range(5):
            stands = failed(ago(hours=1), progressed_at=progressed_at)
            decision = decide(Situation(NOW, True, switched_at, stands, runs=runs[:number]))
            assert isinstance(decision, Request)
            keys.append(decision.key)
    assert len(set(keys)) == len(keys) == 25


def test_a_heartbeat_is_stale_only_after_longer_than_a_page_can_take() -> None:
    limits = Limits()
    pause = max(limits.longest_pause_seconds, limits.retry_after_seconds)
    fetch = limits.attempts * (limits.connect_seconds + limits.page_seconds) + (limits.attempts - 1) * pause
    # clickhouse-connect repeats an insert once by itself.
    insert = 2 * (clickhouse.CONNECT_TIMEOUT_SECONDS + clickhouse.READ_TIMEOUT_SECONDS) + backfill.LONGEST_PAUSE_SECONDS
    row = checkpoints.MAX_LOCK_ATTEMPTS * checkpoints.LOCK_TIMEOUT_SECONDS
    assert timedelta(seconds=fetch + insert + row) < STALE_AFTER
