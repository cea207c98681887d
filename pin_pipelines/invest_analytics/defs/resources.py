"""Where the backfill reads and writes, as Dagster resources: thin, the clients are plain.

Their variables may be missing, since everything else runs without them; a run says which are (``Settings``).
"""

import logging
import os
import threading
from contextlib import AbstractContextManager

import dagster as dg
from clickhouse_connect.driver.client import Client
from pydantic import Field

from pin_pipelines.invest_analytics.talent import TalentClient
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines.settings import Settings


class ClickHouseResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Opens the analytics ClickHouse."""

    url: str = Field(description="`http(s)://…` or `chdb:///folder`; give it by environment variable.")

    def open(self) -> AbstractContextManager[Client]:
        """A client of its own, closed on the way out.

        Raises:
            ClickHouseUnavailableError: see ``open_clickhouse``.
        """
        return open_clickhouse(self.url)


class TalentResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Reads the Talent API."""

    base_url: str = Field(description="`http(s)://…`; give it by environment variable.")
    path: str = Field(description="Path of the pages of prices.")
    token: str = Field(description="The bearer token; give it by environment variable.")

    def open(self, stop: threading.Event, logger: logging.Logger) -> TalentClient:
        """A client, to be closed; it gives up its page when ``stop`` is set."""
        return TalentClient(self.base_url, self.token, path=self.path, stop=stop, logger=logger)


def build_resources(settings: Settings) -> dict[str, dg.ConfigurableResource]:  # type: ignore[type-arg]
    """The real ones, by name."""
    return {
        "clickhouse": ClickHouseResource(url=_variable("PIN_CLICKHOUSE_URL")),
        "talent": TalentResource(
            base_url=_variable("PIN_TALENT_BASE_URL"), path=settings.talent_path, token=_variable("PIN_TALENT_TOKEN")
        ),
    }


def _variable(name: str) -> str:
    """The variable's name, which is what Dagster stores and shows; nothing where it is not set."""
    return dg.EnvVar(name) if os.environ.get(name) else ""
