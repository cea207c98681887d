"""The popularity assets: three tables written in one transaction a batch, so one op makes them all."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from uuid import UUID

import dagster as dg
from pydantic import Field

from pin_pipelines.catalog import report
from pin_pipelines.catalog.ledger import RunKind
from pin_pipelines.catalog.partitions import History, RunDateRefusedError, decide
from pin_pipelines.catalog.recompute import (
    NoKnownCardsError,
    Parameters,
    StopReason,
    Summary,
    TooManyItemErrorsError,
    recompute,
)
from pin_pipelines.catalog.tables import SNAPSHOTS, CardKind
from pin_pipelines.database import Connection
from pin_pipelines.reporting import as_markdown
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.run_logging import logging_aside
from pin_pipelines.resources.runs import within
from pin_pipelines.settings import MAX_BATCH_SIZE, MAX_RUN_DURATION_SECONDS, Settings

GROUP = "catalog_popularity"
OWNER = "team:catalog-squad"

DAILY_VIEWS = dg.AssetKey(["catalog", "popularity_daily_views"])
POPULARITY = {
    CardKind.PROPERTY_OBJECT: dg.AssetKey(["catalog", "property_object_popularity"]),
    CardKind.PROJECT: dg.AssetKey(["catalog", "project_popularity"]),
}
ASSET_KEYS = (DAILY_VIEWS, *POPULARITY.values())

_VIEW_ENDED = dg.AssetKey(["user_activity", "property_object_view_ended"])
_CARDS = {
    CardKind.PROPERTY_OBJECT: dg.AssetKey(["catalog", "property_object_cards"]),
    CardKind.PROJECT: dg.AssetKey(["catalog", "project_cards"]),
}

SOURCES = (
    dg.AssetSpec(
        _VIEW_ENDED,
        group_name="user_activity",
        owners=[OWNER],
        kinds={"kafka"},
        description="Stream `pin.user-activity.property-object-view-ended.v1`: a view of a property object has ended. "
        "The consumer `user-activity-popularity` adds each to the counters of the object's and its project's card, "
        "10 to 15 minutes after the view.",
    ),
    dg.AssetSpec(
        _CARDS[CardKind.PROPERTY_OBJECT],
        deps=[_VIEW_ENDED],
        group_name="catalog",
        owners=[OWNER],
        kinds={"postgres"},
        description="Cards of property objects (`catalog.property_object_cards`), owned by the catalog service. "
        "`popularity_views` only grows; the recompute reads it and writes `popularity_score` and `updated_at`.",
    ),
    dg.AssetSpec(
        _CARDS[CardKind.PROJECT],
        deps=[_VIEW_ENDED],
        group_name="catalog",
        owners=[OWNER],
        kinds={"postgres"},
        description="Cards of projects (`catalog.project_cards`), owned by the catalog service. `popularity_views` "
        "counts the views of all the project's property objects.",
    ),
)


class PopularityRunConfig(dg.Config):
    """What an operator may set for one run."""

    card_ids: list[str] = Field(
        default_factory=list,
        description="Rebuild just these cards (UUIDs of property objects or projects), in today's partition or the "
        "newest one. Leave empty for the full recompute.",
    )
    batch_size: int | None = Field(
        default=None,
        description=f"Cards in one transaction, 1 to {MAX_BATCH_SIZE}; instead of PIN_POPULARITY_BATCH_SIZE. Writers "
        "of a card wait for one batch at the most: smaller batches, shorter waits.",
    )
    max_run_duration_seconds: int | None = Field(
        default=None,
        description=f"End in order after so many seconds, 1 to {MAX_RUN_DURATION_SECONDS}; instead of "
        "PIN_POPULARITY_MAX_RUN_DURATION_SECONDS. The next full run begins where this one stopped.",
    )


def build_popularity_assets(settings: Settings) -> dg.AssetsDefinition:
    """The op that makes all three assets."""
    partitions = dg.DailyPartitionsDefinition(
        # The nightly run of day D makes partition D, so the current day is one of them.
        start_date=settings.popularity_first_date.isoformat(),
        end_offset=1,
        timezone="UTC",
    )

    @dg.multi_asset(
        name="recompute_popularity",
        specs=_specs(settings),
        partitions_def=partitions,
        description="Takes a snapshot of every card's view counter and computes its popularity score again, batch by "
        "batch. A partition of the past is never captured: the newest one is scored again from what is stored, an "
        "older one is left as it is, and a missed night cannot be made up for.",
    )
    def recompute_popularity(
        context: dg.AssetExecutionContext, config: PopularityRunConfig, postgres: PostgresResource
    ) -> Iterator[dg.MaterializeResult[None]]:
        run_date = date.fromisoformat(context.partition_key)
        parameters = _parameters(settings, config)
        card_ids = _card_ids(config)
        try:
            with postgres.connect() as connection:
                work = decide(connection, run_date, today=datetime.now(UTC).date(), rebuild=bool(card_ids))
            if isinstance(work, History):
                _observe_history(context, run_date, work)
                return
            with logging_aside(context.log, "popularity") as logger:
                summary = recompute(
                    postgres.connect,
                    run_id=context.run.run_id,
                    run_date=run_date,
                    run_kind=work.run_kind,
                    capture=work.capture,
                    card_ids=card_ids,
                    parameters=parameters,
                    logger=logger,
                )
        except (RunDateRefusedError, NoKnownCardsError, TooManyItemErrorsError) as error:
            # Another attempt would end the same way.
            raise dg.Failure(str(error), allow_retries=False) from error
        if summary.stopped_reason is StopReason.SINGLE_FLIGHT:
            _observe(
                context, run_date, "Another instance is at work and single flight is on: this run did nothing.", {}
            )
            return
        if summary.run_kind is RunKind.REBUILD:
            # It makes no night complete: its figures must not stand for the partition's in the plots.
            processed = summary.property_object_cards_processed + summary.project_cards_processed
            _observe(context, run_date, f"Rebuilt {processed} cards by id.", _figures(summary))
            return
        with postgres.connect() as connection:
            yield from materialize_results(connection, summary)

    return recompute_popularity


def materialize_results(connection: Connection, summary: Summary) -> Iterator[dg.MaterializeResult[None]]:
    """What a run says of each asset: its figures as numbers that plot, and for the scores what people look at."""
    figures = _figures(summary)
    yield dg.MaterializeResult(asset_key=DAILY_VIEWS, metadata=figures)
    for kind, asset_key in POPULARITY.items():
        yield dg.MaterializeResult(
            asset_key=asset_key,
            metadata={
                **figures,
                "top_cards": dg.MetadataValue.md(as_markdown(report.top_cards(connection, kind))),
                "score_distribution": dg.MetadataValue.md(report.distribution_picture(connection, kind)),
            },
        )


def _specs(settings: Settings) -> list[dg.AssetSpec]:
    window, half_life = settings.popularity_window_days, settings.popularity_decay_half_life_days
    snapshots = _spec(
        DAILY_VIEWS,
        table=SNAPSHOTS,
        columns=_SNAPSHOT_COLUMNS,
        deps=list(_CARDS.values()),
        description=f"Snapshots of the view counters (`{SNAPSHOTS}`): one row a card and run date, kept for {window} + "
        "2 days. The difference of two neighbours is what the card gained in between.",
    )
    scores = (
        _spec(
            POPULARITY[kind],
            table=kind.table,
            columns=_SCORE_COLUMNS,
            deps=[DAILY_VIEWS, _CARDS[kind]],
            description=f"`popularity_score` of `{kind.table}`: the views of the last {window} days, a view losing "
            f"half its weight every {half_life} days. The only key by which the shop window sorts by popularity.",
        )
        for kind in CardKind
    )
    return [snapshots, *scores]


def _spec(
    key: dg.AssetKey, *, table: str, columns: dg.TableSchema, deps: list[dg.AssetKey], description: str
) -> dg.AssetSpec:
    return dg.AssetSpec(
        key,
        deps=deps,
        description=description,
        group_name=GROUP,
        owners=[OWNER],
        kinds={"postgres", "python"},
        metadata={"dagster/column_schema": columns, "dagster/table_name": table},
        # A run of a partition that is history makes nothing.
        skippable=True,
    )


_SNAPSHOT_COLUMNS = dg.TableSchema(
    [
        dg.TableColumn("id", "uuid", "Time-ordered id of the row."),
        dg.TableColumn("card_kind", "varchar(16)", "PropertyObject or Project."),
        dg.TableColumn("card_id", "uuid", "The card, by its kind's table."),
        dg.TableColumn("run_date", "date", "Run date D (UTC): the partition."),
        dg.TableColumn("cumulative_views", "bigint", "The card's counter as it stood at the run."),
        dg.TableColumn("created_at", "timestamptz", "When the row was last written."),
    ]
)
_SCORE_COLUMNS = dg.TableSchema(
    [
        dg.TableColumn("popularity_score", "numeric(12,4)", "Decayed sum of daily views; 0 beyond the window."),
        dg.TableColumn("updated_at", "timestamptz", "Moves only when the score changes."),
    ]
)


def configured_parameters(settings: Settings) -> Parameters:
    """The engine's parameters, as the settings have them."""
    return Parameters(
        window_days=settings.popularity_window_days,
        decay_half_life_days=settings.popularity_decay_half_life_days,
        batch_size=settings.popularity_batch_size,
        max_run_duration_seconds=settings.popularity_max_run_duration_seconds,
        workers=settings.popularity_workers,
        single_flight=settings.popularity_single_flight,
    )


def _parameters(settings: Settings, config: PopularityRunConfig) -> Parameters:
    return replace(
        configured_parameters(settings),
        batch_size=within("batch_size", config.batch_size, settings.popularity_batch_size, MAX_BATCH_SIZE),
        max_run_duration_seconds=within(
            "max_run_duration_seconds",
            config.max_run_duration_seconds,
            settings.popularity_max_run_duration_seconds,
            MAX_RUN_DURATION_SECONDS,
        ),
    )


def _card_ids(config: PopularityRunConfig) -> list[UUID]:
    try:
        # A card named twice is one card.
        return list(dict.fromkeys(_uuid(card_id) for card_id in config.card_ids))
    except ValueError as error:
        raise dg.Failure(str(error), allow_retries=False) from None


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ValueError(
            f"card_ids: {text!r} is not a UUID; give ids such as 0190a6f2-7c1e-7d3a-9b54-3f0c2a1d4e5f"
        ) from None


def _figures(summary: Summary) -> dict[str, int | float | str]:
    """The summary as metadata: numbers stay numbers; what is empty is left out."""
    values = asdict(summary)
    seconds = max(summary.duration_ms, 1) / 1000
    processed = summary.property_object_cards_processed + summary.project_cards_processed
    figures = {name: value for name, value in values.items() if type(value) is int}
    texts = {
        "run_kind": str(summary.run_kind),
        "stopped_reason": str(summary.stopped_reason),
        "unknown_card_ids": ", ".join(map(str, summary.unknown_card_ids)),
        "passed_over_card_ids": ", ".join(map(str, summary.passed_over_card_ids)),
    }
    rate = {"cards_per_second": round(processed / seconds, 1)}
    return {**figures, **rate, **{name: text for name, text in texts.items() if text}}


def _observe_history(context: dg.AssetExecutionContext, run_date: date, history: History) -> None:
    stored = {f"{kind.prefix}_snapshots_stored": count for kind, count in history.snapshots.items()}
    message = (
        f"Nothing was written: partition {run_date} is history. Its snapshots stay as they were taken, and the scores "
        f"stand as of {history.superseded_by}, which superseded it."
    )
    _observe(context, run_date, message, {"superseded_by": str(history.superseded_by), **stored})


def _observe(
    context: dg.AssetExecutionContext, run_date: date, message: str, metadata: Mapping[str, str | int | float]
) -> None:
    context.log.info(message)
    for asset_key in ASSET_KEYS:
        context.log_event(
            dg.AssetObservation(
                asset_key=asset_key, partition=run_date.isoformat(), description=message, metadata=metadata
            )
        )
