"""The price history backfill as Dagster sees it. Rules are the engine's; here is only what an operator meets."""

import dagster as dg

from pin_pipelines.invest_analytics.defs.assets import build_facts_asset
from pin_pipelines.invest_analytics.defs.sensor import backfill_job, build_backfill_sensor
from pin_pipelines.invest_analytics.defs.specs import EXTERNAL
from pin_pipelines.settings import Settings


def build_defs(settings: Settings) -> dg.Definitions:
    """The invest-analytics context's definitions; they need the resources ``postgres``, ``clickhouse``, ``talent``."""
    return dg.Definitions(
        assets=[*EXTERNAL, build_facts_asset(settings)],
        jobs=[backfill_job],
        sensors=[build_backfill_sensor(settings)],
    )
