"""How fast the price history backfill is, beside each of its two ends alone and beside a plain loop.

    python -m pin_pipelines_tests.benchmarks.backfill --objects 200000

The source is the Talent stand-in in a process of its own, its pages rendered beforehand. Every contestant has a process
of its own too, with an empty ClickHouse folder (chDB, so the engine's threads count as the contestant's) and a fresh
PostgreSQL database; what those that load leave must be identical. A part a month a page is the price of the spec's one
insert a page: 150 months are reported, no target.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines.migrations import migrate
from pin_pipelines_tests.benchmarks.backfill_contestants import (
    PAGE,
    Job,
    Places,
    Run,
    engine,
    inserts_alone,
    mapped_inserts_alone,
    measure,
    plain_loop,
    ready,
    source_alone,
)
from pin_pipelines_tests.benchmarks.backfill_servers import Source, clickhouse, talent
from pin_pipelines_tests.benchmarks.measuring import percentile
from pin_pipelines_tests.benchmarks.processes import fresh_process
from pin_pipelines_tests.benchmarks.report import Target, figures_table, targets_table

ENGINE, SOURCE, LOOP = "engine", "(a) source alone", "(c) plain loop"
INSERTS, MAPPED_INSERTS = "(b) inserts alone", "(b) and mapping"
# Those who read from the source, whose latency matters to them; and those who have the pages in memory.
READERS: Mapping[str, Job] = {ENGINE: engine, SOURCE: source_alone, LOOP: plain_loop}
INSERTERS: Mapping[str, Job] = {INSERTS: inserts_alone, MAPPED_INSERTS: mapped_inserts_alone}

# More than so many months are reported, and have no targets.
_MOST_MONTHS_WITH_TARGETS = 24

console = Console(width=120)


@dataclass(frozen=True)
class Round:
    """What everybody took over the same objects, whose prices are of so many months."""

    months: int
    inserters: Mapping[str, Run]
    readers: Mapping[int, Mapping[str, Run]]
    """By milliseconds of latency a request, and by name."""

    def limit(self, latency: int) -> float:
        """The slower of the two ends, in seconds."""
        return max(self.inserters[INSERTS].seconds, self.readers[latency][SOURCE].seconds)

    def mapping(self, share: float) -> float:
        """Of the times that a page took while nothing else went on: the one that this share does not exceed, in
        milliseconds.
        """
        return 1000 * percentile(self.inserters[INSERTS].mapping, share)


class Arena:
    """A PostgreSQL server, and folders for ClickHouse."""

    def __init__(self, server: EmbeddedPostgres, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._numbers = count(1)

    def round(self, objects: int, months: int, latencies: Sequence[int]) -> Round:
        """Everybody once."""
        with ExitStack() as stack:
            sources = {
                latency: stack.enter_context(talent(objects, months, latency)) for latency in dict.fromkeys(latencies)
            }
            readers = {
                latency: {name: self.run(job, source, f"{name}, {latency} ms") for name, job in READERS.items()}
                for latency, source in sources.items()
            }
            inserters = {name: self.run(job, next(iter(sources.values())), name) for name, job in INSERTERS.items()}
        loaded = [*inserters.values(), *(runs[name] for runs in readers.values() for name in (ENGINE, LOOP))]
        if len({run.facts for run in loaded}) != 1 or loaded[0].facts[0] != objects:
            raise SystemExit(f"the contestants disagree about the facts: {[run.facts for run in loaded]}")
        return Round(months, inserters, readers)

    def engine_over_http(self, objects: int, months: int) -> Run:
        """The engine with ClickHouse in another process, as in production: what it needs for itself."""
        with talent(objects, months, 0) as source, self._places(source, over_http=True) as places:
            return self._measure(engine, places, f"{months} months, {ENGINE} over HTTP, {objects:,} objects")

    def run(self, job: Job, source: Source, name: str) -> Run:
        with self._places(source) as places:
            return self._measure(job, places, f"{source.months} months, {name}")

    @contextmanager
    def _places(self, source: Source, *, over_http: bool = False) -> Iterator[Places]:
        """Stores that nobody used before."""
        name = f"contestant_{next(self._numbers)}"
        self._server.ensure_database(name)
        migrate(self._server.url(name))
        folder = self._folder / name
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder)
            address = stack.enter_context(clickhouse(folder)) if over_http else f"chdb://{folder}"
            yield Places(source.url, source.token, address, self._server.url(name))

    def _measure(self, job: Job, places: Places, name: str) -> Run:
        with console.status(name), fresh_process(ready) as process:
            run: Run = process.submit(measure, job, places).result()
        console.print(f"{name}: {run.seconds:.1f} s", highlight=False)
        return run


def main(
    objects: Annotated[int, typer.Option(help="Property objects to load.", min=10 * PAGE)] = 200_000,
    months: Annotated[str, typer.Option(help="Months that their prices are spread over, by commas.")] = "1,24,150",
    latencies: Annotated[str, typer.Option(help="Milliseconds the source waits before an answer.")] = "0,20",
    repeat: Annotated[int, typer.Option(help="Rounds; the one with the median time counts.", min=1)] = 1,
) -> None:
    """Compare the price history backfill with its source, its inserts, and a plain loop."""
    spans, waits = _numbers(months), _numbers(latencies)
    with _arena() as arena:
        # Whoever comes first would pay for the first touch of files and memory.
        arena.engine_over_http(10 * PAGE, spans[0])
        rounds = [_median([arena.round(objects, span, _waits(span, waits)) for _ in range(repeat)]) for span in spans]
        sizes = (objects // 10, objects)
        alone = {size: arena.engine_over_http(size, spans[0]) for size in sizes}
    for each in rounds:
        console.print(_table(each, objects))
    console.print(targets_table([*_targets(rounds), *_memory_targets(alone)]))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _waits(months: int, waits: Sequence[int]) -> Sequence[int]:
    """With many months the inserts take so long that the source does not matter."""
    return waits if months <= _MOST_MONTHS_WITH_TARGETS else waits[:1]


@contextmanager
def _arena() -> Iterator[Arena]:
    folder = Path(tempfile.mkdtemp(prefix="pin-benchmark-")).resolve()
    try:
        with EmbeddedPostgres(folder / "postgres") as server:
            yield Arena(server, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _median(rounds: Sequence[Round]) -> Round:
    """Of each contestant the run with the median time."""
    first = rounds[0]
    return Round(
        months=first.months,
        inserters={name: _median_run([each.inserters[name] for each in rounds]) for name in INSERTERS},
        readers={
            latency: {name: _median_run([each.readers[latency][name] for each in rounds]) for name in runs}
            for latency, runs in first.readers.items()
        },
    )


def _median_run(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _targets(rounds: Sequence[Round]) -> Iterator[Target]:
    for each in rounds:
        if each.months > _MOST_MONTHS_WITH_TARGETS:
            continue
        for latency, runs in each.readers.items():
            where = f"{each.months} months, {latency} ms"
            seconds = runs[ENGINE].seconds
            yield Target(f"{where}: time, of the slower of (a) and (b)", 1.15, seconds / each.limit(latency), "x")
            yield Target(f"{where}: faster than (c)", 1, runs[LOOP].seconds / seconds, "x", at_least=True)
        yield Target(f"{each.months} months: mapping and validation of a page, p99", 10, each.mapping(0.99), "ms")


def _memory_targets(alone: Mapping[int, Run]) -> Iterator[Target]:
    (small, first), (large, second) = alone.items()
    growth = 100 * (second.memory.peak / first.memory.peak - 1)
    yield Target(
        f"memory, {large:,} beside {small:,} objects ({first.memory.peak:.0f} MB, ClickHouse apart)", 10, growth, "%"
    )


def _table(each: Round, objects: int) -> Table:
    table = figures_table(
        f"{objects:,} objects over {each.months} months, pages of {PAGE:,}",
        *("seconds", "objects/s", "CPU s", "of (a), (b)", "faster than (c)", "peak MB", "its growth", "parts left"),
    )
    table.caption = (
        f"Mapping and validation of a page, by itself: median {each.mapping(0.5):.1f}, p99 {each.mapping(0.99):.1f}, "
        f"longest {each.mapping(1):.1f} ms. Memory is with ClickHouse in the process."
    )
    for name, run in each.inserters.items():
        # Their memory is that of the pages.
        table.add_row(name, *_pace(run, objects), "", "", "", "", _parts(run))
    for latency, runs in each.readers.items():
        for name, run in runs.items():
            ratios = "", ""
            if name != SOURCE:
                ratios = f"{run.seconds / each.limit(latency):.2f}", f"{runs[LOOP].seconds / run.seconds:.2f}"
            memory = f"{run.memory.peak:.0f}", f"{run.memory.growth:.0f}"
            table.add_row(f"{name}, {latency} ms", *_pace(run, objects), *ratios, *memory, _parts(run))
    return table


def _pace(run: Run, objects: int) -> tuple[str, str, str]:
    return f"{run.seconds:.2f}", f"{objects / run.seconds:,.0f}", f"{run.cpu_seconds:.1f}"


def _parts(run: Run) -> str:
    active, all_of_them = run.parts
    return f"{active:,} of {all_of_them:,}" if all_of_them else ""


if __name__ == "__main__":
    typer.run(main)
