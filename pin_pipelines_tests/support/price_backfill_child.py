"""Runs of the backfill in processes of their own, to be killed or stopped.

A child imports the embedded ClickHouse itself, and may be made ready while another one runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Self
from uuid import uuid4

import psycopg

from pin_pipelines.invest_analytics.backfill import StopReason, run_backfill
from pin_pipelines.invest_analytics.talent import TalentClient
from pin_pipelines.local.talent import TalentStandIn
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines_tests.support.forking import SERVER
from pin_pipelines_tests.support.price_backfill import EVERYTHING, RUB, Backfill

BATCH = 4
EXIT_CODES = {StopReason.COMPLETED: 0, StopReason.CLAIM_TAKEN: 3, StopReason.STOP_SIGNAL: 4}
INTERRUPTED = 5


class Interrupted(BaseException):
    """Stands for DagsterExecutionInterruptedError."""


class Child:
    """A process that loads everything in pages of ``BATCH`` when it is told to; a context manager that kills it.

    SIGTERM interrupts its main thread by an exception, as Dagster does.
    """

    def __init__(self, backfill: Backfill, talent: TalentStandIn) -> None:
        self._wire, end = SERVER.Pipe()
        arguments = end, backfill.pipeline_url, backfill.clickhouse_url, talent.url, talent.token
        self.process = SERVER.Process(target=_load, args=arguments)
        self.process.start()
        end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.close()
        self._wire.close()

    def go(self) -> None:
        self._wire.send("go")

    def interrupt(self) -> None:
        """Returns when the run knows that it is to stop."""
        self.process.terminate()
        self._wire.poll(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def is_alive(self) -> bool:
        return self.process.is_alive()


@contextmanager
def running(backfill: Backfill, talent: TalentStandIn) -> Iterator[Child]:
    """A child that was told to go."""
    with Child(backfill, talent) as child:
        child.go()
        yield child


def _load(wire: Connection, url: str, clickhouse_url: str, talent_url: str, token: str) -> None:
    if clickhouse_url.startswith("chdb:"):
        import chdb  # noqa: F401
    signal.signal(signal.SIGTERM, _interrupt)
    wire.recv()
    stop = threading.Event()
    threading.Thread(target=lambda: stop.wait() and wire.send("stopping"), daemon=True).start()
    try:
        with TalentClient(talent_url, token, stop=stop) as source:
            summary = run_backfill(
                run_id=uuid4(),
                price_range=EVERYTHING,
                batch_size=BATCH,
                connect=partial(psycopg.connect, url),
                source=source,
                open_clickhouse=partial(open_clickhouse, clickhouse_url),
                rub_currency_id=RUB,
                stop=stop,
            )
    except Interrupted:
        sys.exit(INTERRUPTED)
    sys.exit(EXIT_CODES[summary.stopped_reason])


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted
