"""The checks of a loaded range. They belong to the step that loads it, so that nothing else opens ClickHouse."""

from collections.abc import Collection, Iterator

import dagster as dg
from clickhouse_connect.driver.client import Client

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.checkpoints import Checkpoint
from pin_pipelines.invest_analytics.defs.specs import COLLAPSIBLE, COMPLETE, NO_OLD_PRICE, NO_REJECTS


def evaluate_checks(
    client: Client, loaded: Checkpoint, selected: Collection[dg.AssetCheckKey]
) -> Iterator[dg.AssetCheckResult]:
    """The checks of a completed range, those that are asked for."""
    for spec, check in (
        (COMPLETE, _is_complete),
        (COLLAPSIBLE, _are_collapsible),
        (NO_REJECTS, _has_no_rejects),
        (NO_OLD_PRICE, _have_no_past),
    ):
        if spec.key in selected:
            yield check(client, loaded)


def _is_complete(client: Client, loaded: Checkpoint) -> dg.AssetCheckResult:
    stored = facts.count_objects(client, loaded.from_property_object_id, loaded.to_property_object_id)
    expected = loaded.ingested_fact_count
    missing = max(expected - stored, 0)
    if missing:
        description = f"{missing} property objects have no starting fact: {expected} were ingested, {stored} are there."
    elif loaded.rejected_row_count:
        description = f"{stored} property objects have a starting fact; {loaded.rejected_row_count} rows were rejected."
    else:
        description = f"{stored} property objects have a starting fact, {expected} were ingested."
    return dg.AssetCheckResult(
        asset_key=COMPLETE.asset_key,
        check_name=COMPLETE.name,
        passed=not missing and not loaded.rejected_row_count,
        severity=dg.AssetCheckSeverity.WARN
        if loaded.rejected_row_count and not missing
        else dg.AssetCheckSeverity.ERROR,
        description=description,
        metadata={
            "objects_with_fact": stored,
            "objects_missing": missing,
            "processed_property_object_count": loaded.processed_property_object_count,
            "rejected_row_count": loaded.rejected_row_count,
        },
    )


def _are_collapsible(client: Client, loaded: Checkpoint) -> dg.AssetCheckResult:
    fact_ids = facts.uncollapsible_duplicates(client, loaded.from_property_object_id, loaded.to_property_object_id)
    return dg.AssetCheckResult(
        asset_key=COLLAPSIBLE.asset_key,
        check_name=COLLAPSIBLE.name,
        passed=not fact_ids,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"No merge can make one row of these facts: {', '.join(fact_ids)}"
        if fact_ids
        else "Whatever was written twice is one row after a merge.",
        metadata={"uncollapsible_facts_found": len(fact_ids)},
    )


def _has_no_rejects(_: Client, loaded: Checkpoint) -> dg.AssetCheckResult:
    rejected, processed = loaded.rejected_row_count, loaded.processed_property_object_count
    return dg.AssetCheckResult(
        asset_key=NO_REJECTS.asset_key,
        check_name=NO_REJECTS.name,
        passed=not rejected,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{rejected} of {processed} rows of the source were rejected."
        if rejected
        else "No row of the source was rejected.",
        metadata={"rejected_row_count": rejected},
    )


def _have_no_past(client: Client, loaded: Checkpoint) -> dg.AssetCheckResult:
    rows = facts.rows_with_old_price(client, loaded.from_property_object_id, loaded.to_property_object_id)
    return dg.AssetCheckResult(
        asset_key=NO_OLD_PRICE.asset_key,
        check_name=NO_OLD_PRICE.name,
        passed=not rows,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"{rows} rows of the backfill have an old price." if rows else "No starting price has a past.",
        metadata={"rows_with_old_price": rows},
    )
