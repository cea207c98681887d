"""The popularity recompute as Dagster sees it. Rules are the engine's; here is only what an operator meets."""

import dagster as dg

from pin_pipelines.catalog.defs.assets import SOURCES, build_popularity_assets
from pin_pipelines.catalog.defs.checks import build_data_checks, freshness_checks
from pin_pipelines.catalog.defs.schedules import (
    build_recompute_job,
    freshness_hourly,
    freshness_job,
    recompute_nightly,
    run_watchdog,
)
from pin_pipelines.settings import Settings


def build_defs(settings: Settings) -> dg.Definitions:
    """The catalog context's definitions; they need the resource ``postgres``."""
    data_checks = build_data_checks(settings)
    recompute_job = build_recompute_job(data_checks)
    return dg.Definitions(
        assets=[*SOURCES, build_popularity_assets(settings)],
        asset_checks=[*data_checks, freshness_checks],
        jobs=[recompute_job, freshness_job],
        schedules=[recompute_nightly, freshness_hourly],
        sensors=[run_watchdog],
    )
