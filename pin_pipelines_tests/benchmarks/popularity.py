"""How fast the popularity recompute is, beside a row-by-row version and beside one statement for a whole table.

    python -m pin_pipelines_tests.benchmarks.popularity --cards 300000 --days 31

Every contestant gets a copy of the same database (``catalogue`` says how it is laid out), begins after a
checkpoint, and runs in a process of its own; nothing else runs on the server, autovacuum included. What they leave
must be identical. Ratios compare whole runs, retention and ANALYZE included; those of the pass alone stand beside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from rich.console import Console
from rich.table import Table

from pin_pipelines.local.postgres import EmbeddedPostgres
from pin_pipelines_tests.benchmarks import catalogue
from pin_pipelines_tests.benchmarks.catalogue import Fingerprint, Size
from pin_pipelines_tests.benchmarks.contestants import (
    Job,
    Run,
    engine,
    measure,
    one_statement_at_once,
    one_statement_card_by_card,
    ready,
    row_by_row,
)
from pin_pipelines_tests.benchmarks.measuring import Consumer, percentile, server_cpu_seconds
from pin_pipelines_tests.benchmarks.processes import fresh_process
from pin_pipelines_tests.benchmarks.report import Target, figures_table, milliseconds, targets_table

ROW_BY_ROW = "(a) row by row"
LIMITS = {
    "(b) limit, card by card": one_statement_card_by_card,
    "(b) limit, all at once": one_statement_at_once,
}
_SETTINGS = (
    "shared_buffers",
    "effective_cache_size",
    "work_mem",
    "maintenance_work_mem",
    "wal_level",
    "max_wal_size",
    "checkpoint_timeout",
    "wal_compression",
    "full_page_writes",
    "fsync",
    "synchronous_commit",
    "jit",
    "random_page_cost",
    "max_parallel_workers",
    "max_parallel_workers_per_gather",
    "io_method",
    "autovacuum",
)
# As for a production server, whose memory holds the tables; the laptop's settings of the embedded default would
# measure their lack of it.
_SERVER_SETTINGS = {"shared_buffers": "6GB", "effective_cache_size": "12GB", "max_wal_size": "16GB"}
_TEMPLATE, _COPY = "benchmark_template", "benchmark_copy"

console = Console(width=120)


@dataclass(frozen=True)
class Result:
    """One run of one contestant, and what the server says of it."""

    run: Run
    wal_bytes: int
    cpu_seconds: float
    """Of the server and of the Python process: less sensitive to what else the machine does than the time."""
    fingerprint: Fingerprint
    waits: Sequence[float] = ()
    """How long each update of the consumer took."""


Results = Mapping[str, Result]


def engine_name(workers: int) -> str:
    return f"engine, {workers} worker{'s' if workers > 1 else ''}"


def rerun_name(workers: int) -> str:
    return f"{engine_name(workers)}, re-run"


def consumer_name(workers: int) -> str:
    return f"{engine_name(workers)} + consumer"


class Arena:
    """The server, and a template of one size on it."""

    def __init__(self, server: EmbeddedPostgres, data_dir: Path, size: Size) -> None:
        self.size = size
        self._server = server
        self._data_dir = data_dir

    @contextmanager
    def built(self) -> Iterator[None]:
        """The template, for as long as the context lasts."""
        with console.status(f"making {self.size.cards:,} cards and {self.size.days} nights"):
            catalogue.build(self._server, _TEMPLATE, self.size)
        try:
            yield
        finally:
            catalogue.drop_database(self._server, _TEMPLATE)

    def round(self, workers: Sequence[int]) -> dict[str, Result]:
        """Every contestant once."""
        results: dict[str, Result] = {}
        for number in workers:
            with self._copy() as url:
                results[engine_name(number)] = self._run(engine(number), url, engine_name(number))
                if number == workers[0]:
                    results[rerun_name(number)] = self._run(engine(number), url, rerun_name(number))
        for name, job in {ROW_BY_ROW: row_by_row, **LIMITS}.items():
            with self._copy() as url:
                results[name] = self._run(job, url, name)
        with self._copy() as url:
            name = consumer_name(workers[0])
            results[name] = self._run(engine(workers[0]), url, name, consumed=True)
        _check_identical(results)
        return results

    def engine_alone(self, workers: int, name: str) -> Result:
        with self._copy() as url:
            return self._run(engine(workers), url, name)

    @contextmanager
    def _copy(self) -> Iterator[str]:
        yield catalogue.copy_database(self._server, _TEMPLATE, _COPY)
        catalogue.drop_database(self._server, _COPY)

    def _run(self, job: Job, url: str, name: str, *, consumed: bool = False) -> Result:
        with console.status(name), psycopg.connect(url, autocommit=True) as connection, fresh_process(ready) as process:
            connection.execute("CHECKPOINT")
            before, cpu_before = _wal_position(connection), server_cpu_seconds(self._data_dir)
            waits: Sequence[float] = ()
            if consumed:
                with Consumer(url) as consumer:
                    run = process.submit(measure, job, url).result()
                waits = consumer.waits
            else:
                run = process.submit(measure, job, url).result()
            wal_bytes = _wal_position(connection) - before
            cpu_seconds = server_cpu_seconds(self._data_dir) - cpu_before + run.cpu_seconds
            result = Result(run, wal_bytes, cpu_seconds, catalogue.fingerprint(url), waits)
        console.print(f"{name}: {run.seconds:.1f} s", highlight=False)
        return result


def main(
    cards: Annotated[int, typer.Option(help="Property object cards to score.", min=1)] = 300_000,
    days: Annotated[int, typer.Option(help="Nights of history.", min=1, max=32)] = 31,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "1,2",
    repeat: Annotated[int, typer.Option(help="Rounds; of each contestant the median round counts.", min=1)] = 1,
    scaling: Annotated[str, typer.Option(help="Numbers of cards to compare the time per card at.")] = "100000,600000",
    no_scaling: Annotated[bool, typer.Option("--no-scaling", help="Leave the comparison of sizes out.")] = False,
) -> None:
    """Compare the popularity recompute with a row-by-row version and with its limit."""
    numbers = _numbers(workers)
    with _server() as (server, data_dir):
        arena = Arena(server, data_dir, Size(cards, days))
        with arena.built():
            # Whoever comes first would pay for the first touch of the server's memory.
            arena.engine_alone(numbers[0], "warm-up, not counted")
            rounds = [arena.round(numbers) for _ in range(repeat)]
        results = {name: _median([each[name] for each in rounds]) for name in rounds[0]}
        growth = {} if no_scaling else _grow(server, data_dir, _numbers(scaling), days, numbers[0])
        settings = _settings(server)
    console.print(_speed_table(results, arena.size))
    console.print(_cost_table(results))
    if growth:
        console.print(_growth_table(growth))
    console.print(targets_table([*_targets(results, numbers), *_growth_targets(growth)]))
    console.print(f"Ratios and targets are of whole runs. Settings: {settings}.", highlight=False)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@contextmanager
def _server() -> Iterator[tuple[EmbeddedPostgres, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="pin-benchmark-")).resolve()
    data_dir = folder / "postgres"
    try:
        with EmbeddedPostgres(data_dir, _SERVER_SETTINGS) as server:
            # Else it would come over one contestant and not over another.
            with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET autovacuum = off")
                connection.execute("SELECT pg_reload_conf()")
            yield server, data_dir
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wal_position(connection: psycopg.Connection[tuple[int]]) -> int:
    row = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").fetchone()
    assert row is not None
    return row[0]


def _check_identical(results: Results) -> None:
    fingerprints = {result.fingerprint for result in results.values()}
    if len(fingerprints) > 1:
        lines = "\n".join(f"  {name}: {result.fingerprint}" for name, result in results.items())
        raise SystemExit(f"the contestants disagree about snapshots or scores:\n{lines}")


def _median(results: Sequence[Result]) -> Result:
    return sorted(results, key=lambda result: result.run.seconds)[(len(results) - 1) // 2]


def _grow(
    server: EmbeddedPostgres, data_dir: Path, sizes: Sequence[int], days: int, workers: int
) -> dict[Size, Result]:
    growth = {}
    for cards in sizes:
        arena = Arena(server, data_dir, Size(cards, days))
        with arena.built():
            growth[arena.size] = arena.engine_alone(workers, f"{engine_name(workers)}, {cards:,} cards")
    return growth


def _limit(results: Results) -> Result:
    """The faster of the two ways to write it."""
    return min((results[name] for name in LIMITS), key=lambda result: result.run.seconds)


def _targets(results: Results, workers: Sequence[int]) -> Iterator[Target]:
    limit, slow = _limit(results).run, results[ROW_BY_ROW].run
    for number, at_most, at_least in ((1, 1.2, 2.0), (2, 0.7, 3.2)):
        if number in workers:
            seconds = results[engine_name(number)].run.seconds
            yield Target(f"{engine_name(number)}: time, of the limit's", at_most, seconds / limit.seconds, "x")
            yield Target(
                f"{engine_name(number)}: faster than row by row", at_least, slow.seconds / seconds, "x", at_least=True
            )
    first, again = results[engine_name(workers[0])].run, results[rerun_name(workers[0])].run
    lock_share = 100 * max(first.held) / max(limit.held)
    yield Target("longest batch, of the time the limit holds its locks", 1, lock_share, "%")
    yield Target("p99 batch", 150, 1000 * percentile(first.held, 0.99), "ms")
    yield Target("peak memory of the Python process", 300, first.memory.peak, "MB")
    yield Target("its growth after a quarter of the run (flat)", 5, first.memory.growth, "MB")
    yield Target("same-day re-run, of the first run's time", 1, again.seconds / first.seconds, "x")


def _growth_targets(growth: Mapping[Size, Result]) -> Iterator[Target]:
    if growth:
        per_card = [result.run.seconds / size.total for size, result in growth.items()]
        yield Target("time per card, largest over smallest catalogue", 1.15, per_card[-1] / per_card[0], "x")


def _speed_table(results: Results, size: Size) -> Table:
    table = figures_table(
        f"{size.cards:,} property objects, {size.projects:,} projects, {size.days} nights: seconds and ratios",
        *("total", "pass", "upkeep", "CPU", "cards/s", "of (b)", "pass of (b)", "CPU of (b)", "faster than (a)"),
    )
    limit, slow = _limit(results), results[ROW_BY_ROW]
    for name, result in results.items():
        run = result.run
        table.add_row(
            name,
            f"{run.seconds:.1f}",
            f"{run.pass_seconds:.1f}",
            f"{run.maintenance_seconds:.1f}",
            f"{result.cpu_seconds:.1f}",
            f"{size.total / run.seconds:,.0f}",
            f"{run.seconds / limit.run.seconds:.2f}",
            f"{run.pass_seconds / limit.run.pass_seconds:.2f}",
            f"{result.cpu_seconds / limit.cpu_seconds:.2f}",
            f"{slow.run.seconds / run.seconds:.2f}",
        )
    return table


def _cost_table(results: Results) -> Table:
    table = figures_table(
        "Milliseconds that a batch holds its locks; MB; scores changed",
        *("longest", "p99", "median", "WAL", "peak memory", "its growth", "scores"),
    )
    for name, result in results.items():
        memory = result.run.memory
        table.add_row(
            name,
            *milliseconds(result.run.held),
            f"{result.wal_bytes / 2**20:,.0f}",
            f"{memory.peak:.0f}",
            f"{memory.growth:.1f}",
            f"{result.run.updated:,}",
        )
    waits = next(result.waits for result in results.values() if result.waits)
    longest, p99, median = milliseconds(waits)
    table.caption = (
        f"The consumer's {len(waits):,} updates took {longest} ms at most, p99 {p99} ms, median {median} ms."
    )
    return table


def _growth_table(growth: Mapping[Size, Result]) -> Table:
    table = figures_table("Growth, engine alone", "total s", "pass s", "µs a card", "longest ms", "p99 ms", "peak MB")
    for size, result in growth.items():
        longest, p99, _ = milliseconds(result.run.held)
        table.add_row(
            f"{size.total:,} cards",
            f"{result.run.seconds:.1f}",
            f"{result.run.pass_seconds:.1f}",
            f"{1e6 * result.run.seconds / size.total:.1f}",
            longest,
            p99,
            f"{result.run.memory.peak:.0f}",
        )
    return table


def _settings(server: EmbeddedPostgres) -> str:
    with psycopg.connect(server.url("postgres")) as connection:
        shown = {name: connection.execute(f"SHOW {name}").fetchone() for name in ("server_version", *_SETTINGS)}
    values = ", ".join(f"{name} = {row[0]}" for name, row in shown.items() if row is not None)
    return f"{values}; in the session of every contestant: synchronous_commit = off, jit = off"


if __name__ == "__main__":
    typer.run(main)
