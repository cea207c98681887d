"""What the benchmarks print alike: targets, and tables of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from pin_pipelines_tests.benchmarks.measuring import percentile


@dataclass(frozen=True)
class Target:
    """Something to reach, and what was measured."""

    name: str
    limit: float
    measured: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def figures_table(title: str, *columns: str) -> Table:
    """A column of names, and columns of figures."""
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def targets_table(targets: Sequence[Target]) -> Table:
    table = figures_table("Targets", "target", "measured", "")
    for target in targets:
        table.add_row(
            target.name,
            f"{'≥' if target.at_least else '≤'} {target.limit:g} {target.unit}",
            f"{target.measured:.2f} {target.unit}",
            "met" if target.met else "[bold red]missed[/]",
        )
    return table


def milliseconds(seconds: Sequence[float]) -> tuple[str, str, str]:
    """The longest, p99 and median."""
    longest, p99, median = (f"{1000 * percentile(seconds, share):.1f}" for share in (1, 0.99, 0.5))
    return longest, p99, median
