"""Runs a job of Dagster's in this process, into its history: for the command line, where somebody waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster_shared.error import SerializableErrorInfo

# Dagster's debug lines would go through what the command line shows; the run's own lines are in its history.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_UNSAID = "its history in Dagster says why"


@dataclass(frozen=True)
class Execution:
    """A run that has ended, and why it failed, if it did."""

    result: dg.ExecuteInProcessResult
    failure: str | None


def execute(
    job: dg.JobDefinition, instance: dg.DagsterInstance, *, run_config: Mapping[str, Any], **run: Any
) -> Execution:
    """Run a job to its end.

    Args:
        job: the job.
        instance: whose history the run is in.
        run_config: as in the Launchpad.
        run: partition key, tags and run id, as ``execute_in_process`` takes them.

    Raises:
        KeyboardInterrupt: the run was interrupted; it is in the history as failed.
    """
    result = job.execute_in_process(instance=instance, raise_on_error=False, run_config={**run_config, **_QUIET}, **run)
    failures = [event for event in result.all_events if event.is_failure]
    errors = [_innermost(error) for event in failures if (error := _error_of(event))]
    if any(error.cls_name == dg.DagsterExecutionInterruptedError.__name__ for error in errors):
        # Dagster took the signal for itself, and has written down that the run failed of it.
        raise KeyboardInterrupt
    if result.success:
        return Execution(result, None)
    said = [text for event in failures if (text := _said_of(event))]
    # The step's comes first; the run's says the same again.
    return Execution(result, next(iter([*said, *(error.message.strip() for error in errors)]), _UNSAID))


def _said_of(event: dg.DagsterEvent) -> str | None:
    """What the code that failed has to say to people, where it does."""
    failure = event.step_failure_data.user_failure_data if event.is_step_failure else None
    return failure.description if failure else None


def _error_of(event: dg.DagsterEvent) -> SerializableErrorInfo | None:
    if event.is_step_failure:
        return event.step_failure_data.error
    return event.job_failure_data.error if event.is_job_failure else None


def _innermost(error: SerializableErrorInfo) -> SerializableErrorInfo:
    """What was raised, without what Dagster says about it."""
    return _innermost(error.cause) if error.cause else error
