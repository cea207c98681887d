"""The marketplace's PostgreSQL, as a Dagster resource."""

from typing import Any

import dagster as dg
import psycopg
from pydantic import Field


class PostgresResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Opens connections to the marketplace's database."""

    url: str = Field(description="`postgresql://…`; give it by environment variable, it carries a password.")

    def connect(self) -> psycopg.Connection[Any]:
        """A new connection. Locks of a session are to last only as long as its host lives: keep-alive is set low."""
        return psycopg.connect(
            self.url,
            connect_timeout=10,
            keepalives=1,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            # Keep-alive says nothing while something that was sent waits to be acknowledged (milliseconds).
            tcp_user_timeout=30_000,
        )
