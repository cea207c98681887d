"""The checks of the signals. They belong to the step that makes them, so that the flag holds for them too."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import date

import dagster as dg

from pin_pipelines.database import Connection
from pin_pipelines.news import checks
from pin_pipelines.news.checks import Completeness, Scores
from pin_pipelines.news.defs.specs import COMPLETE, EXACT
from pin_pipelines.news.ranking import RankingParameters


@dataclass(frozen=True)
class LastRun:
    """What the checks need to know of the last run: its day, and how many posts there were when it began."""

    as_of: date
    posts_total: int


def evaluate_checks(
    connection: Connection, last: LastRun, parameters: RankingParameters, selected: Collection[dg.AssetCheckKey]
) -> Iterator[dg.AssetCheckResult]:
    """The checks of the signals as the last run left them, those that are asked for."""
    if COMPLETE.key in selected:
        yield _is_complete(checks.check_completeness(connection), last)
    if EXACT.key in selected:
        yield _is_exact(checks.check_scores(connection, last.as_of, parameters))


def _is_complete(found: Completeness, last: LastRun) -> dg.AssetCheckResult:
    # When a post was made is not known, only how many there are more. One that came ahead of the run's cursor has its
    # row, one that came behind it has none yet.
    came_since = max(found.posts - last.posts_total, 0)
    explained = found.missing <= came_since
    if not found.missing:
        description = f"All {found.posts} posts have their row."
    elif explained:
        description = f"{found.missing} posts have no row yet; {came_since} came since the last run began."
    else:
        description = (
            f"{found.missing} of {found.posts} posts have no row, and only {came_since} came since the last run began."
        )
    return dg.AssetCheckResult(
        asset_key=COMPLETE.asset_key,
        check_name=COMPLETE.name,
        passed=not found.missing,
        severity=dg.AssetCheckSeverity.WARN if found.missing and explained else dg.AssetCheckSeverity.ERROR,
        description=description,
        metadata={"posts": found.posts, "posts_missing": found.missing, "posts_since_run": came_since},
    )


def _is_exact(found: Scores) -> dg.AssetCheckResult:
    if found.wrong:
        first = found.wrong[0]
        description = (
            f"{len(found.wrong)} of {found.sampled} sampled scores differ from the reference, such as post "
            f"{first.post_id}: stored {first.stored}, expected {first.expected}."
        )
    else:
        description = f"{found.sampled} sampled scores equal the reference."
    return dg.AssetCheckResult(
        asset_key=EXACT.asset_key,
        check_name=EXACT.name,
        passed=not found.wrong,
        severity=dg.AssetCheckSeverity.ERROR,
        description=description,
        metadata={"posts_sampled": found.sampled, "posts_wrong": len(found.wrong)},
    )
