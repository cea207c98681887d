"""The front door: puts the contexts together. ``workspace.yaml`` names this module."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from pin_pipelines.catalog.defs import build_defs as build_catalog_defs
from pin_pipelines.invest_analytics.defs import build_defs as build_invest_analytics_defs
from pin_pipelines.invest_analytics.defs.resources import build_resources
from pin_pipelines.news.defs import build_defs as build_news_defs
from pin_pipelines.resources.postgres import PostgresResource
from pin_pipelines.settings import Settings, load_settings
from pin_pipelines.tracing import export_spans


def build_definitions(settings: Settings | None = None, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
    """All definitions of the pipelines.

    Args:
        settings: by default read from the environment, and checked.
        resources: in place of the real ones, by name.

    Raises:
        SettingsError: a variable is missing or out of bounds.
    """
    settings = settings or load_settings()
    # Every process that runs a run loads its definitions first.
    export_spans()
    shared = dg.Definitions(
        resources={
            # The variable's name, not its value, is what Dagster stores and shows.
            "postgres": PostgresResource(url=dg.EnvVar("PIN_POSTGRES_URL")),
            **build_resources(settings),
            **(resources or {}),
        },
        # One op does all the work of a run: a process of its own for each check would only cost time.
        executor=dg.in_process_executor,
    )
    return dg.Definitions.merge(
        shared, build_catalog_defs(settings), build_invest_analytics_defs(settings), build_news_defs(settings)
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Read the environment when the code location loads, not when this module is imported."""
    return build_definitions()
