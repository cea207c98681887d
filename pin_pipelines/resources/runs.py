"""What the definitions of every context have in common: whose a run is, and what its config may hold."""

import warnings
from collections.abc import Collection

import dagster as dg

from pin_pipelines.database import Connect
from pin_pipelines.resources.feature_flags import evaluate

# Owners of schedules and sensors are new in Dagster; an operator wants to see them, and the version is pinned.
warnings.filterwarnings("ignore", message="Parameter `owners` of ", category=dg.BetaWarning)

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def makes_any(run: dg.DagsterRun, asset_keys: Collection[dg.AssetKey], *, job_name: str) -> bool:
    """Whether a run is one of these assets', whatever launched it.

    The UI's «Materialize» and backfills run an implicit job, without the name of the job that is there for it.
    """
    return run.job_name == job_name or not set(asset_keys).isdisjoint(run.asset_selection or ())


def within(field: str, value: int | None, default: int, maximum: int) -> int:
    """A number of the run config, or the configured one. The Launchpad cannot check ranges, so a run does, first.

    Raises:
        dagster.Failure: naming the field, the value and what is allowed.
    """
    if value is None:
        return default
    if not 1 <= value <= maximum:
        raise dg.Failure(
            f"{field}: {value} is not allowed; give a whole number from 1 to {maximum}, or leave it out for the "
            f"configured {default}",
            allow_retries=False,
        )
    return value


def refuse_if_off(connect: Connect, flag: str, code: str) -> None:
    """Let a run go on only while its feature flag is on.

    Args:
        connect: to the database of the flags; nothing else is read.
        flag: its name.
        code: what a refusal begins with, for those who search for it.

    Raises:
        dagster.Failure: saying why, and how to switch the flag on. It is not tried again.
    """
    stands = evaluate(connect, flag)
    if stands.enabled:
        return
    raise dg.Failure(
        f"{code}: the feature flag {flag} {stands.why_off}. Nothing was read or written. Switch it on with "
        f"`pin-pipelines flags set {flag} on`, then launch the job again.",
        allow_retries=False,
    )
