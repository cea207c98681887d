"""Who takes part in the backfill's benchmark: the engine, each of its two ends alone, and a plain loop.

Each runs in a process of its own, on a ClickHouse folder and a PostgreSQL database that nobody used before. All parse,
map and insert with the project's own functions, so that what differs is the loop around them.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import requests
from clickhouse_connect.driver.client import Client

from pin_pipelines.invest_analytics import facts
from pin_pipelines.invest_analytics.backfill import run_backfill
from pin_pipelines.invest_analytics.checkpoints import CHECKPOINTS, Range
from pin_pipelines.invest_analytics.snapshots import RawItem, check_page
from pin_pipelines.invest_analytics.talent import TalentClient
from pin_pipelines.resources.clickhouse import open_clickhouse
from pin_pipelines_tests.benchmarks.measuring import Memory, MemorySampler

T = TypeVar("T")

PAGE = 1000
_RUB = UUID("00000000-0000-4000-8000-000000000643")
_TIMEOUT_SECONDS = 60

# What is stored, whatever order and however often it came. Times of insertion are each contestant's own.
_FINGERPRINT = f"""
SELECT count(), sum(row) FROM (
    SELECT DISTINCT cityHash64(toString(tuple(* EXCEPT IngestionTime))) AS row FROM {facts.TABLE}
)"""
_PARTS = f"SELECT countIf(active), count() FROM system.parts WHERE concat(database, '.', table) = '{facts.TABLE}'"

_BEGIN = f"""
INSERT INTO {CHECKPOINTS} (id, status, batch_size, last_run_id) VALUES (%(id)s, 'Running', %(size)s, %(id)s)"""
_ADVANCE = f"""
UPDATE {CHECKPOINTS}
SET last_processed_property_object_id = %(cursor)s, updated_at = clock_timestamp(), version = version + 1,
    processed_property_object_count = processed_property_object_count + %(rows)s,
    ingested_fact_count = ingested_fact_count + %(rows)s
WHERE id = %(id)s"""
_COMPLETE = f"""
UPDATE {CHECKPOINTS} SET status = 'Completed', completed_at = clock_timestamp() WHERE id = %(id)s"""


@dataclass(frozen=True)
class Places:
    """Where a contestant reads and writes."""

    source_url: str
    source_token: str
    clickhouse_url: str
    postgres_url: str


@dataclass
class Notes:
    """What a contestant notes while it runs, in seconds."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    mapping: list[float] = field(default_factory=list)
    """Of each page: its validation against the contract, and its mapping."""

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """What counts; what comes before it is preparation."""
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began


Job = Callable[[Places, Notes], None]


@dataclass(frozen=True)
class Run:
    """What a contestant took, and what it left."""

    seconds: float
    cpu_seconds: float
    """Of the process, ClickHouse's engine included."""
    memory: Memory
    mapping: Sequence[float]
    facts: tuple[int, int]
    """How many, and the sum of their hashes; nobody has any where the source was read alone."""
    parts: tuple[int, int]
    """Active ones, and all that the engine has not removed yet."""


def ready() -> None:
    """Do nothing: whoever calls it has this module's imports behind it."""


def measure(job: Job, places: Places) -> Run:
    """Do a job from beginning to end; to be called in a process that does nothing else."""
    with open_clickhouse(places.clickhouse_url) as client:
        facts.create(client, None)
    notes = Notes()
    with MemorySampler() as sampler:
        job(places, notes)
    with open_clickhouse(places.clickhouse_url) as client:
        return Run(
            seconds=notes.seconds,
            cpu_seconds=notes.cpu_seconds,
            memory=sampler.memory,
            mapping=notes.mapping,
            facts=_two_numbers(client, _FINGERPRINT),
            parts=_two_numbers(client, _PARTS),
        )


def engine(places: Places, notes: Notes) -> None:
    with notes.clocked(), TalentClient(places.source_url, places.source_token) as source:
        run_backfill(
            run_id=uuid4(),
            price_range=Range(),
            batch_size=PAGE,
            connect=partial(psycopg.connect, places.postgres_url),
            source=source,
            open_clickhouse=partial(open_clickhouse, places.clickhouse_url),
            rub_currency_id=_RUB,
            stop=threading.Event(),
        )


def source_alone(places: Places, notes: Notes) -> None:
    """(a) All pages, read and parsed, and nothing done with them."""
    with notes.clocked():
        for _ in _pages(places):
            pass


def inserts_alone(places: Places, notes: Notes) -> None:
    """(b) All pages inserted that were read and mapped before."""
    batches = _kept(_mapped(after, page, notes) for after, page in _pages(places))
    with notes.clocked(), open_clickhouse(places.clickhouse_url) as client:
        for batch in batches:
            facts.insert(client, batch, now=datetime.now(UTC))


def mapped_inserts_alone(places: Places, notes: Notes) -> None:
    """The same, of pages that were read before and not mapped."""
    pages = _kept(_pages(places))
    with notes.clocked(), open_clickhouse(places.clickhouse_url) as client:
        for after, page in pages:
            facts.insert(client, _mapped(after, page, notes), now=datetime.now(UTC))


def plain_loop(places: Places, notes: Notes) -> None:
    """(c) Page by page: read, map, insert, move the cursor, one after the other."""
    run_id = uuid4()
    with notes.clocked(), ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(places.postgres_url))
        client = stack.enter_context(open_clickhouse(places.clickhouse_url))
        connection.execute(_BEGIN, {"id": run_id, "size": PAGE})
        connection.commit()
        for after, page in _pages(places):
            cursor = check_page(page, after=after, to=None, take=PAGE)
            batch = facts.map_page(page, rub_currency_id=_RUB)
            written = facts.insert(client, batch, now=datetime.now(UTC))
            assert written == batch.size
            connection.execute(_ADVANCE, {"id": run_id, "cursor": cursor, "rows": batch.size})
            connection.commit()
        connection.execute(_COMPLETE, {"id": run_id})


def _pages(places: Places) -> Iterator[tuple[UUID | None, list[RawItem]]]:
    """Every page, and the cursor that it was asked for with, as a plain loop reads them."""
    after: UUID | None = None
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {places.source_token}"
        while True:
            parameters: dict[str, Any] = {"take": PAGE} | ({"after": str(after)} if after else {})
            response = session.get(
                f"{places.source_url}/api/v1/property-object-prices", params=parameters, timeout=_TIMEOUT_SECONDS
            )
            response.raise_for_status()
            items = json.loads(response.content, parse_float=Decimal)["items"]
            if not items:
                return
            yield after, items
            after = UUID(items[-1]["propertyObjectId"])


def _kept(things: Iterable[T]) -> list[T]:
    """In memory, where the garbage collector does not go through all of them again and again."""
    kept = []
    for thing in things:
        kept.append(thing)
        gc.freeze()
    return kept


def _mapped(after: UUID | None, page: Sequence[RawItem], notes: Notes) -> facts.FactBatch:
    began = time.perf_counter()
    check_page(page, after=after, to=None, take=PAGE)
    batch = facts.map_page(page, rub_currency_id=_RUB)
    notes.mapping.append(time.perf_counter() - began)
    return batch


def _two_numbers(client: Client, query: str) -> tuple[int, int]:
    first, second = client.query(query).result_rows[0]
    return int(first), int(second)
