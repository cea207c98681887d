"""Whom the contestants of the backfill's benchmark talk to, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pin_pipelines.local.talent import TalentStandIn


@dataclass(frozen=True)
class Source:
    """Where the objects are, and what they are like."""

    url: str
    token: str
    objects: int
    months: int
    latency: int
    """Milliseconds that each answer takes longer."""


@contextmanager
def talent(objects: int, months: int, latency: int) -> Iterator[Source]:
    """The Talent stand-in with so many objects, written beforehand, whose prices are of so many months."""
    with _process(_serve_talent, objects, months, latency) as source:
        yield source


@contextmanager
def clickhouse(folder: Path) -> Iterator[str]:
    """The address of a ClickHouse over HTTP."""
    with _process(_serve_clickhouse, folder) as url:
        yield url


@contextmanager
def _process(serve: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process that serves as long as the context lasts; what it has to say once it does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    # Its copy is the only one then: should it fail to start, there is an end to wait for.
    theirs.close()
    said = ours.recv()
    try:
        yield said
    finally:
        ours.close()
        process.join()


def _serve_talent(connection: Connection, objects: int, months: int, latency: int) -> None:
    with TalentStandIn(objects, months=months, latency=latency / 1000) as stand_in:
        connection.send(Source(stand_in.url, stand_in.token, objects, months, latency))
        _wait_for_the_end(connection)


def _serve_clickhouse(connection: Connection, folder: Path) -> None:
    # Here alone, so that no other process has chDB in its memory.
    from pin_pipelines_tests.support.clickhouse_front import ClickHouseFront

    with ClickHouseFront(folder) as front:
        connection.send(front.url)
        _wait_for_the_end(connection)


def _wait_for_the_end(connection: Connection) -> None:
    """Until the other end is closed, or its process gone."""
    connection.poll(None)
