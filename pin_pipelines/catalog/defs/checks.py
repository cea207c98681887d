"""Asset checks: two that follow every run, and the freshness that is watched by the hour."""

from collections.abc import Iterator

import dagster as dg

from pin_pipelines.catalog import checks
from pin_pipelines.catalog.checks import MAX_HOURS_SINCE_FULL_RUN, MAX_STALENESS_HOURS, Completeness, Drift, Freshness
from pin_pipelines.catalog.defs.assets import DAILY_VIEWS, POPULARITY
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.settings import Settings

_NO_FULL_RUN = "No full run has ended yet. Launch today's partition of the job popularity_recompute."

FRESHNESS_SPECS = (
    dg.AssetCheckSpec(
        f"full_run_within_{MAX_HOURS_SINCE_FULL_RUN}_hours",
        asset=POPULARITY[CardKind.PROPERTY_OBJECT],
        description=f"A full run completed in the last {MAX_HOURS_SINCE_FULL_RUN} hours. ERROR: a night failed or was "
        "missed; look at the runs of popularity_recompute and launch today's partition.",
    ),
    dg.AssetCheckSpec(
        f"scores_within_{MAX_STALENESS_HOURS}_hours",
        asset=POPULARITY[CardKind.PROPERTY_OBJECT],
        description=f"The scores reflect views of the last {MAX_STALENESS_HOURS} hours: the last full run that "
        "completed began no longer ago. ERROR: visitors see a stale order; launch today's partition.",
    ),
)


def build_data_checks(settings: Settings) -> list[dg.AssetChecksDefinition]:
    """The checks that belong to a run: nobody was missed, and the scores are right."""
    return [_every_card_has_a_snapshot, *(_scores_equal_reference(kind, settings) for kind in CardKind)]


@dg.asset_check(
    asset=DAILY_VIEWS,
    name="every_card_has_a_snapshot",
    description="Every Published or Hidden card has a snapshot of the newest full run. WARN: as many cards as are "
    "missing were reported by the run itself, as poison, locked, or left over when it was cut; the next run takes "
    "them up. ERROR: cards are missing that no run reported.",
)
def _every_card_has_a_snapshot(postgres: PostgresResource) -> dg.AssetCheckResult:
    with postgres.connect() as connection:
        completeness = checks.check_completeness(connection)
    if completeness is None:
        return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.ERROR, description=_NO_FULL_RUN)
    return dg.AssetCheckResult(
        passed=completeness.complete,
        severity=dg.AssetCheckSeverity.WARN if completeness.explained else dg.AssetCheckSeverity.ERROR,
        description=_describe_completeness(completeness),
        metadata={
            "cards_missing": completeness.missing,
            "item_errors": completeness.item_errors,
            "cards_left_locked": completeness.cards_left_locked,
            "cards_remaining": completeness.cards_remaining,
            "run_date": str(completeness.run_date),
            "run_id": completeness.run_id,
        },
    )


def _describe_completeness(completeness: Completeness) -> str:
    if completeness.complete:
        return f"Every card on show has a snapshot of {completeness.run_date}."
    reported = (
        f"the run reported {completeness.item_errors} poison, {completeness.cards_left_locked} locked and "
        f"{completeness.cards_remaining} left over"
    )
    if completeness.explained:
        return f"{completeness.missing} cards have no snapshot of {completeness.run_date}; {reported}."
    return (
        f"{completeness.missing} cards have no snapshot of {completeness.run_date}, which is more than was reported: "
        f"{reported}. Did the run fail? Launch the partition again, and look for who deletes snapshots."
    )


def _scores_equal_reference(kind: CardKind, settings: Settings) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=POPULARITY[kind],
        name="scores_equal_reference",
        description=f"The stored scores of a sample of {checks.SAMPLE_SIZE} cards, another one each run date, equal "
        "the plain reference of the formula to the last digit. ERROR: somebody else writes scores or snapshots, or "
        "window or half-life were changed since the last run; rebuild the cards by id, or launch today's partition.",
    )
    def scores_equal_reference(postgres: PostgresResource) -> dg.AssetCheckResult:
        with postgres.connect() as connection:
            drift = checks.check_drift(
                connection,
                kind,
                window_days=settings.popularity_window_days,
                half_life_days=settings.popularity_decay_half_life_days,
            )
        if drift is None:
            return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.ERROR, description=_NO_FULL_RUN)
        return dg.AssetCheckResult(
            passed=not drift.wrong,
            severity=dg.AssetCheckSeverity.ERROR,
            description=_describe_drift(drift),
            metadata={"cards_sampled": drift.sampled, "cards_wrong": len(drift.wrong)},
        )

    return scores_equal_reference


def _describe_drift(drift: Drift) -> str:
    if not drift.wrong:
        return f"{drift.sampled} sampled scores equal the reference."
    first = drift.wrong[0]
    return (
        f"{len(drift.wrong)} of {drift.sampled} sampled scores differ from the reference, such as card "
        f"{first.card_id}: stored {first.stored}, expected {first.expected}."
    )


@dg.multi_asset_check(
    specs=FRESHNESS_SPECS,
    name="popularity_freshness_checks",
    description="How long ago the last full run completed, by the ledger: re-running an old day makes nothing fresh.",
)
def freshness_checks(postgres: PostgresResource) -> Iterator[dg.AssetCheckResult]:
    """Both limits of the spec on the age of the scores."""
    with postgres.connect() as connection:
        freshness = checks.check_freshness(connection)
    ages = (freshness.hours_since_full_run, freshness.staleness_hours) if freshness else (None, None)
    limits = (MAX_HOURS_SINCE_FULL_RUN, MAX_STALENESS_HOURS)
    for spec, age, limit in zip(FRESHNESS_SPECS, ages, limits, strict=True):
        yield dg.AssetCheckResult(
            asset_key=spec.asset_key,
            check_name=spec.name,
            passed=age is not None and age <= limit,
            severity=dg.AssetCheckSeverity.ERROR,
            description=_describe_age(freshness, age, limit),
            metadata={"limit_hours": limit} | ({} if age is None else {"age_hours": round(age, 2)}),
        )


def _describe_age(freshness: Freshness | None, age: float | None, limit: int) -> str:
    if freshness is None or age is None:
        return "No full run has completed yet. Launch today's partition of the job popularity_recompute."
    return (
        f"{age:.1f} hours, the limit is {limit}: the last full run that completed is {freshness.run_id}, ended "
        f"{freshness.finished_at:%Y-%m-%d %H:%M} UTC."
    )
