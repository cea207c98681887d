"""What the sensor of the price history backfill does next: a pure function of what it sees.

The sensor is the only thing that restarts the job, so what it must not do is as much part of the rule: ask for a run
beside one that is alive, ask for ever, or hammer a source that is down.

flag off                                        wait
range completed                                 wait, for good
its advisory lock is held                       wait: a run is at work, whatever launched it
a run of Dagster has not ended, and is no dead  wait: it is on its way to the claim, or on its way out
attempts without progress used up               wait until somebody launches it by hand, or switches the flag
the pause after the last attempt is not over    wait
else                                            ask for a run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pin_pipelines.invest_analytics.checkpoints import Checkpoint, CheckpointStatus

MAX_ATTEMPTS_WITHOUT_PROGRESS = 5
"""Runs in a row that did not move the cursor; then a person has to look."""

PAUSES = (timedelta(seconds=30), timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
"""Between the end of an attempt and the next one, by the number of attempts without progress; the last one stays."""

# The heartbeat moves with every page, every failed insert and every claim. In between lies at the most, in this
# order: a page that is fetched (5 attempts of 65 s each and 60 s between two of them: 565 s), one attempt at the insert
# (which the client makes twice, of 70 s each) with the pause after it (30 s), and the wait for the row of the
# checkpoint (20 s). That is 755 s; the rest is for a machine that is slow.
STALE_AFTER = timedelta(minutes=15)
"""Without a sign of life for so long, and without the lock, a run that Dagster shows as STARTED is dead."""


@dataclass(frozen=True)
class Run:
    """A run of the configured range as Dagster has it, whatever launched it; aware times.

    Attributes:
        started_at: None while it is queued or starting.
        ended_at: None while Dagster shows it as not ended.
    """

    run_id: str
    requested_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True)
class Situation:
    """What the sensor sees in one tick.

    Attributes:
        now: the time, aware.
        enabled: the feature flag.
        switched_at: when the flag was last switched; None if it never was.
        checkpoint: where the configured range stands (``checkpoints.checkpoint_of``).
        alive: its advisory lock is held (``checkpoints.alive``).
        runs: those of the range.
    """

    now: datetime
    enabled: bool
    switched_at: datetime | None = None
    checkpoint: Checkpoint | None = None
    alive: bool = False
    runs: Sequence[Run] = ()


@dataclass(frozen=True)
class Request:
    """Ask for a run.

    Attributes:
        attempt: its number since the range last progressed or the flag was last switched, from 1.
        key: what makes its run key another one than that of every run before: a key whose run failed is never
            retried by Dagster.
        dead_runs: run ids to report as failed before.
    """

    attempt: int
    key: str
    dead_runs: Sequence[str] = ()


@dataclass(frozen=True)
class Wait:
    """Ask for nothing; the reason is for people. ``dead_runs`` are to be reported as failed all the same."""

    reason: str
    dead_runs: Sequence[str] = ()


def decide(seen: Situation) -> Request | Wait:
    """Say what to do in this tick."""
    dead = [] if seen.alive else [run.run_id for run in seen.runs if _is_dead(run, seen)]
    reason = _reason_to_wait(seen, dead)
    if reason is not None:
        return Wait(reason, dead)
    attempt = len(_attempts(seen)) + 1
    since = _counting_since(seen)
    return Request(attempt, f"{since.isoformat() if since else 'first'}:{attempt}", dead)


def _reason_to_wait(seen: Situation, dead: Sequence[str]) -> str | None:
    checkpoint = seen.checkpoint
    if not seen.enabled:
        return "the feature flag is off: no run is asked for, and one that is at work goes on"
    if checkpoint is not None and checkpoint.status is CheckpointStatus.COMPLETED:
        return (
            f"the range was completed at {_shown(checkpoint.completed_at)}: "
            f"{checkpoint.processed_property_object_count} property objects, of them {checkpoint.rejected_row_count} "
            "rejected. Nothing is left to do; a re-run is launched by hand"
        )
    if seen.alive:
        beat = f"; run {checkpoint.last_run_id}, last beat {_shown(checkpoint.updated_at)}" if checkpoint else ""
        return f"a run is at work on the range{beat}"
    on_its_way = [run.run_id for run in seen.runs if run.ended_at is None and run.run_id not in dead]
    if on_its_way:
        return f"run {on_its_way[0]} has not ended yet"
    attempts = _attempts(seen)
    if len(attempts) >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
        last_error = f"; last error: {checkpoint.last_error}" if checkpoint and checkpoint.last_error else ""
        return (
            f"given up after {len(attempts)} attempts without progress{last_error}. When the cause is mended, launch "
            "the job by hand, or switch the flag off and on"
        )
    resume_at = _resume_at(seen, attempts)
    if resume_at is not None and seen.now < resume_at:
        return f"attempt {len(attempts) + 1} is due at {_shown(resume_at)}"
    return None


def _is_dead(run: Run, seen: Situation) -> bool:
    """Whether a run that Dagster shows as STARTED has shown no life for longer than a page can take."""
    return run.ended_at is None and run.started_at is not None and seen.now - _last_sign(run, seen) > STALE_AFTER


def _last_sign(run: Run, seen: Situation) -> datetime:
    signs = [run.requested_at, run.started_at, run.ended_at]
    if seen.checkpoint is not None and seen.checkpoint.last_run_id == run.run_id:
        signs.append(seen.checkpoint.updated_at)
    return max(sign for sign in signs if sign is not None)


def _attempts(seen: Situation) -> list[Run]:
    """The runs of the range that were asked for since it last progressed, or the flag was last switched."""
    since = _counting_since(seen)
    return [run for run in seen.runs if since is None or run.requested_at > since]


def _counting_since(seen: Situation) -> datetime | None:
    progressed_at = seen.checkpoint.progressed_at if seen.checkpoint else None
    return max((time for time in (seen.switched_at, progressed_at) if time is not None), default=None)


def _resume_at(seen: Situation, attempts: Sequence[Run]) -> datetime | None:
    """When the pause after the last attempt is over. Whoever switches the flag does not want to wait."""
    ends = [_last_sign(run, seen) for run in attempts]
    if seen.checkpoint is not None:
        ends.append(seen.checkpoint.updated_at)
    ends = [end for end in ends if seen.switched_at is None or end > seen.switched_at]
    pause = PAUSES[min(max(len(attempts), 1), len(PAUSES)) - 1]
    return max(ends) + pause if ends else None


def _shown(time: datetime | None) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if time else "an unknown time"
