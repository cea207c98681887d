"""What a run costs: the time its locks were held, the memory of its process, and how long a consumer waits."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from psycopg.pq import TransactionStatus

from pin_pipelines.catalog import statements
from pin_pipelines.catalog.tables import CardKind
from pin_pipelines.local.postgres import server_processes

_SAMPLE_SECONDS = 0.05
_CONSUMER_PAUSE_SECONDS = 0.002
_CONSUMER_CARDS = 20_000


@dataclass
class BatchTimes:
    """When a run's transactions held locks, and when its maintenance began (seconds of ``time.perf_counter``)."""

    held: list[float] = field(default_factory=list)
    """Of each transaction: from sending the statement that locks to the answer to COMMIT."""
    maintenance_at: float | None = None


class TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that notes how long each of its transactions held locks; the engine is not aware of it."""

    times: BatchTimes
    _locked_at: float | None = None

    @classmethod
    def open(cls, url: str, times: BatchTimes) -> Self:
        connection = cls.connect(url)
        connection.times = times
        return connection

    def execute(self, query: Any, *arguments: Any, **options: Any) -> psycopg.Cursor[tuple[Any, ...]]:
        if query == statements.MAINTENANCE_SESSION:
            self.times.maintenance_at = time.perf_counter()
        if self._locked_at is None and "FOR UPDATE" in query:
            self._locked_at = time.perf_counter()
        return super().execute(query, *arguments, **options)

    @contextmanager
    def transaction(self, *arguments: Any, **options: Any) -> Iterator[psycopg.Transaction]:
        outermost = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(*arguments, **options) as transaction:
            yield transaction
        if outermost and self._locked_at is not None:
            self.times.held.append(time.perf_counter() - self._locked_at)
            self._locked_at = None


@dataclass(frozen=True)
class Memory:
    """Resident memory of the process that ran a contestant, in MB."""

    peak: float
    growth: float
    """From a quarter of the run on."""


class _Background:
    """Does something in a thread of its own, for as long as the context lasts."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        raise NotImplementedError


class MemorySampler(_Background):
    """Samples the memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: list[int] = []

    @property
    def memory(self) -> Memory:
        warm = max(self._samples[: len(self._samples) // 4 + 1])
        peak = max(self._samples)
        return Memory(peak=peak / 2**20, growth=(peak - warm) / 2**20)

    def _work(self) -> None:
        process = psutil.Process()
        while True:
            self._samples.append(process.memory_info().rss)
            if self._done.wait(_SAMPLE_SECONDS):
                return


class Consumer(_Background):
    """Updates cards at random, one a transaction, and notes how long each had to wait.

    It leaves the counters as they are, so that the results stay comparable.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._url = url

    def _work(self) -> None:
        table = CardKind.PROPERTY_OBJECT.table
        with psycopg.connect(self._url) as connection:
            connection.execute("SET synchronous_commit = off")
            ids = connection.execute(f"SELECT id FROM {table} ORDER BY random() LIMIT {_CONSUMER_CARDS}").fetchall()
            connection.commit()
            while not self._done.wait(_CONSUMER_PAUSE_SECONDS):
                began = time.perf_counter()
                connection.execute(
                    f"UPDATE {table} SET popularity_views = popularity_views + 0 WHERE id = %s", secrets.choice(ids)
                )
                self.waits.append(time.perf_counter() - began)
                connection.commit()


def server_cpu_seconds(data_dir: Path) -> float:
    """Processor time that a server's processes, living and ended, have used so far."""
    seconds = 0.0
    for process in server_processes(data_dir):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
