"""One run of the engine in a process of its own, to be killed; it is given the address and its options as JSON.

SIGTERM becomes an exception in the main thread, and no ``Exception``, which is what Dagster makes of it.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import date
from types import FrameType

import psycopg

from pin_pipelines.catalog import recompute as engine
from pin_pipelines.catalog.recompute import Parameters, recompute


class Interrupted(BaseException):
    """Stands for DagsterExecutionInterruptedError."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def main(url: str, options: str) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    # What a test holds the run by is not let go within any time.
    engine.STOP_GRACE_SECONDS = 0.2
    given = json.loads(options)
    recompute(
        lambda: psycopg.connect(url),
        run_id=given["run_id"],
        run_date=date.fromisoformat(given["run_date"]),
        parameters=Parameters(**given["parameters"]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
