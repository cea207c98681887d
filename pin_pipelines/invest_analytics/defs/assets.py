"""The step that loads the starting prices and checks them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from uuid import UUID

import dagster as dg
from pydantic import Field

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import (
    FactsNotWrittenError,
    PriceBackfillCompletedDomainEvent,
    StopReason,
    Summary,
    run_backfill,
)
from pin_pipelines.invest_analytics.checkpoints import (
    Checkpoint,
    CheckpointHeldError,
    CheckpointStatus,
    ClaimLostError,
    PooledConnectionError,
    Range,
    checkpoint_of,
    checkpoint_rows,
)
from pin_pipelines.invest_analytics.defs.checks import evaluate_checks
from pin_pipelines.invest_analytics.defs.resources import ClickHouseResource, TalentResource
from pin_pipelines.invest_analytics.defs.specs import CHECKS, FACTS, FACTS_SPEC
from pin_pipelines.invest_analytics.snapshots import SourceError
from pin_pipelines.resources.clickhouse import ClickHouseUnavailableError
from pin_pipelines.resources.feature_flags import PRICE_BACKFILL
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.resources.run_logging import logging_aside
from pin_pipelines.resources.runs import refuse_if_off, within
from pin_pipelines.settings import MAX_BACKFILL_BATCH_SIZE, Settings, SettingsError

OP = "load_price_history"
DISABLED = "price-backfill-disabled"

# Each says what an operator can do; another attempt of the same run would end the same way.
_CLEAR_ERRORS = (
    *(SourceError, facts.FactTableError, FactsNotWrittenError, ClickHouseUnavailableError),
    *(ClaimLostError, CheckpointHeldError, PooledConnectionError, SettingsError),
)


class PriceBackfillConfig(dg.Config):
    """What an operator may set for one run."""

    from_property_object_id: str | None = Field(
        default=None,
        description="First PropertyObjectId (UUID) of the range, itself included. Leave it out to begin with the "
        "first one there is.",
    )
    to_property_object_id: str | None = Field(
        default=None,
        description="Last PropertyObjectId (UUID) of the range, itself included; not below the first. Leave it out "
        "to go on to the last one there is.",
    )
    batch_size: int | None = Field(
        default=None,
        description="Property objects in one page of the source, which is one insert: 1 to "
        f"{MAX_BACKFILL_BATCH_SIZE}; instead of PIN_BACKFILL_BATCH_SIZE.",
    )


def parse_range(lower: str | None, upper: str | None) -> Range:
    """The range of a run config.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    return Range(_uuid("from_property_object_id", lower), _uuid("to_property_object_id", upper))


def build_facts_asset(settings: Settings) -> dg.AssetsDefinition:
    """The op that loads the facts and checks them."""

    @dg.multi_asset(
        name=OP,
        specs=[FACTS_SPEC],
        check_specs=CHECKS,
        # A run that finds another one at work checks nothing either, which only a subset may.
        can_subset=True,
        description="Reads the current price of every property object from Talent, page by page, and writes one "
        "starting fact for each. It goes on where an unfinished run of the same range stopped; a range that is loaded "
        "is loaded again without doubling anything. With checks alone selected, it only evaluates them.",
    )
    def load_price_history(
        context: dg.AssetExecutionContext,
        config: PriceBackfillConfig,
        postgres: PostgresResource,
        clickhouse: ClickHouseResource,
        talent: TalentResource,
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        with _clear_failures():
            if context.selected_asset_keys:
                refuse_if_off(postgres.connect, PRICE_BACKFILL, DISABLED)
                price_range, batch_size = _input(config, settings)
                events: list[PriceBackfillCompletedDomainEvent] = []
                stop = threading.Event()
                currency = settings.for_backfill().rub_currency_id
                with logging_aside(context.log, "price-backfill") as logger, talent.open(stop, logger) as source:
                    summary = run_backfill(
                        run_id=UUID(context.run.run_id),
                        price_range=price_range,
                        batch_size=batch_size,
                        connect=postgres.connect,
                        source=source,
                        open_clickhouse=clickhouse.open,
                        rub_currency_id=currency,
                        stop=stop,
                        on_completed=events.append,
                        logger=logger,
                    )
                if summary.stopped_reason is StopReason.CLAIM_TAKEN:
                    _observe_no_op(context, postgres, price_range)
                    return
                yield dg.MaterializeResult(asset_key=FACTS, metadata=_figures(summary, *events))
            if context.selected_asset_check_keys:
                checkpoint = _completed_checkpoint(config, settings, postgres)
                with clickhouse.open() as client:
                    yield from evaluate_checks(client, checkpoint, context.selected_asset_check_keys)

    return load_price_history


@contextmanager
def _clear_failures() -> Iterator[None]:
    """What has a name fails the run with its message alone, and is not tried again."""
    try:
        yield
    except _CLEAR_ERRORS as error:
        raise dg.Failure(str(error), allow_retries=False) from error


def _input(config: PriceBackfillConfig, settings: Settings) -> tuple[Range, int]:
    """Range and page size (spec, step 2)."""
    try:
        price_range = parse_range(config.from_property_object_id, config.to_property_object_id)
    except ValueError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    return price_range, within("batch_size", config.batch_size, settings.backfill_batch_size, MAX_BACKFILL_BATCH_SIZE)


def _uuid(field: str, text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError:
        raise ValueError(
            f"{field}: {text!r} is not a UUID; give one such as 0190a6f2-7c1e-7d3a-9b54-3f0c2a1d4e5f, or leave it out "
            "for an open end"
        ) from None


def _observe_no_op(context: dg.AssetExecutionContext, postgres: PostgresResource, price_range: Range) -> None:
    with postgres.connect() as connection:
        running = [
            checkpoint
            for checkpoint in checkpoint_rows(connection)
            if checkpoint.price_range == price_range and checkpoint.status is CheckpointStatus.RUNNING
        ]
    holder = f"run {running[0].last_run_id} is" if running else "another run was"
    message = f"no-op: {holder} at work on this range, its claim is taken. This run read and wrote nothing."
    context.log.info(message)
    context.log_event(
        dg.AssetObservation(
            asset_key=FACTS,
            description=message,
            metadata={"stopped_reason": str(StopReason.CLAIM_TAKEN)}
            | ({"claimed_by_run_id": running[0].last_run_id} if running else {}),
        )
    )


def _completed_checkpoint(config: PriceBackfillConfig, settings: Settings, postgres: PostgresResource) -> Checkpoint:
    """What there is to check: the range as its last completed run left it."""
    price_range, _ = _input(config, settings)
    with postgres.connect() as connection:
        checkpoint = checkpoint_of(connection, price_range)
    if checkpoint is None or checkpoint.status is not CheckpointStatus.COMPLETED:
        raise dg.Failure(
            "This range has not been loaded completely: there is nothing to check yet. Launch the job "
            "price_history_backfill.",
            allow_retries=False,
        )
    return checkpoint


def _figures(summary: Summary, event: PriceBackfillCompletedDomainEvent) -> dict[str, int | float | str]:
    """The summary as metadata: numbers stay numbers; what is empty is left out."""
    figures = {name: value for name, value in asdict(summary).items() if type(value) is int}
    texts = {
        "stopped_reason": summary.stopped_reason,
        "checkpoint_id": summary.checkpoint_id,
        "cursor": summary.cursor,
        "resumed_from": summary.resumed_from,
        "from_property_object_id": event.price_range.lower,
        "to_property_object_id": event.price_range.upper,
        "completed_at": event.completed_at.isoformat(),
    }
    rate = {"objects_per_second": round(summary.rows / max(summary.duration_ms / 1000, 0.001), 1)}
    return {**figures, **rate, **{name: str(text) for name, text in texts.items() if text is not None}}
