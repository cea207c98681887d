"""What the graph shows: the fact table, what it is made from, what reads it, and what is checked."""

import dagster as dg

from pin_pipelines.invest_analytics import facts

GROUP = "invest_analytics_prices"
OWNER = "team:invest-analytics"

FACTS = dg.AssetKey(["pin_analytics", "property_object_price_history_facts"])
CHART = dg.AssetKey(["pin_analytics", "property_object_price_daily"])
PRICES = dg.AssetKey(["talent", "property_object_prices"])
PRICE_CHANGED = dg.AssetKey(["chessboard", "property_object_price_changed"])

_MEANINGS = {
    "FactId": "`backfill:{PropertyObjectId}:{ChangedAt}`, or the id of the stream's event; the same fact has the same.",
    "SourceEventId": "The same as FactId.",
    "ChangeSource": "`backfill` for the starting price, `talent-sync` for a change from the stream.",
    "PropertyObjectId": "The property object.",
    "DeveloperId": "Its developer.",
    "ProjectId": "Its project.",
    "BuildingId": "Its building.",
    "LayoutGroupId": "Its group of layouts.",
    "LayoutId": "Its layout.",
    "TenantId": "DeveloperId as text.",
    "AreaTotal": "Area in m².",
    "NewPrice": "The price.",
    "NewPricePerMeter": "The price for 1 m²; worked out where the source has none.",
    "OldPrice": "The price before; NULL in a starting price.",
    "OldPricePerMeter": "The price for 1 m² before; NULL in a starting price.",
    "CurrencyId": "The currency's record; that of RUB in a starting price.",
    "CurrencyIsoCode": "The currency's code; RUB in a starting price.",
    "BrandId": "NULL in a starting price.",
    "EventTime": "When the price came to be, by the source (UTC): partition by its month.",
    "IngestionTime": "When the row was written (UTC).",
    "TransformVersion": "Version of the mapping.",
}

FACTS_SPEC = dg.AssetSpec(
    FACTS,
    deps=[PRICES, PRICE_CHANGED],
    group_name=GROUP,
    owners=[OWNER],
    kinds={"clickhouse", "python"},
    description=f"Prices of property objects over time (`{facts.TABLE}`), append-only. The backfill writes one "
    "starting fact for each object that Talent knows; the service's consumer writes the changes since. A fact that was "
    "written twice is one row after a merge, and every reader is right before it.",
    metadata={
        "dagster/column_schema": dg.TableSchema(
            [dg.TableColumn(name, type_, _MEANINGS[name]) for name, type_ in facts.COLUMNS.items()]
        ),
        "dagster/table_name": facts.TABLE,
    },
    # A run that finds another one at work on its range makes nothing.
    skippable=True,
)

EXTERNAL = (
    dg.AssetSpec(
        PRICES,
        group_name="talent",
        owners=[OWNER],
        kinds={"api"},
        description="Current prices of all property objects in the Talent Chessboard API, by pages in ascending order "
        "of PropertyObjectId. It tells neither history nor a total.",
    ),
    dg.AssetSpec(
        PRICE_CHANGED,
        group_name="chessboard",
        owners=[OWNER],
        kinds={"kafka"},
        description="Stream `pin.chessboard.property-object-price-changed.v1`: the price of a property object has "
        "changed. The service's consumer `chessboard-price-changed` writes each event into the same fact table "
        "(ChangeSource `talent-sync`), whether before, during or after the backfill: its FactIds are others.",
    ),
    dg.AssetSpec(
        CHART,
        deps=[FACTS],
        group_name=GROUP,
        owners=[OWNER],
        kinds={"clickhouse"},
        metadata={"dagster/table_name": facts.CHART_VIEW},
        description=f"View for the growth chart (`{facts.CHART_VIEW}`): the last price of a property object on each "
        "day that has one (UTC), by argMax over event and ingestion time.",
    ),
)

COMPLETE = dg.AssetCheckSpec(
    "one_row_per_processed_object",
    asset=FACTS,
    description="The range has a starting fact for as many property objects as were processed and not rejected. WARN: "
    "nobody is missing, but rows of the source were rejected; see `pin-pipelines backfill status`. ERROR: somebody "
    "deleted facts, or the table is not the one that was loaded; launch the range again, it doubles nothing.",
)
COLLAPSIBLE = dg.AssetCheckSpec(
    "duplicates_are_collapsible",
    asset=FACTS,
    description="All rows of a FactId share partition and sorting key, so a merge makes them one. ERROR: somebody "
    "wrote a FactId with another EventTime or PropertyObjectId; a reader would see both.",
)
NO_REJECTS = dg.AssetCheckSpec(
    "no_rejected_rows",
    asset=FACTS,
    description="Every row of the source became a fact. WARN: some could not, each is in "
    "`invest_analytics.price_backfill_rejects` with its reason (`pin-pipelines backfill status`). Have them mended in "
    "Talent, then launch the range again.",
)
NO_OLD_PRICE = dg.AssetCheckSpec(
    "old_price_is_null",
    asset=FACTS,
    description="A starting price has no past: OldPrice and OldPricePerMeter are NULL in all rows of the backfill. "
    "ERROR: somebody else writes rows as `backfill`.",
)
CHECKS = (COMPLETE, COLLAPSIBLE, NO_REJECTS, NO_OLD_PRICE)
