"""The ranking of posts as Dagster sees it. Rules are the engine's; here is only what an operator meets."""

import dagster as dg

from pin_pipelines.news.defs.assets import build_signals_asset
from pin_pipelines.news.defs.schedules import recompute_job, recompute_nightly
from pin_pipelines.news.defs.specs import EXTERNAL
from pin_pipelines.settings import Settings


def build_defs(settings: Settings) -> dg.Definitions:
    """The news context's definitions; they need the resource ``postgres``."""
    return dg.Definitions(
        assets=[*EXTERNAL, build_signals_asset(settings)],
        jobs=[recompute_job],
        schedules=[recompute_nightly],
    )
