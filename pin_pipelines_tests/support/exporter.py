"""The exporter under test: what it says, as Prometheus is given it, in this process and in one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import requests
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pin_pipelines.observability.exporter import PipelinesCollector, connector
from pin_pipelines_tests.support.command_line import COMMAND
from pin_pipelines_tests.support.roles import READER, as_role

PROMTOOL = shutil.which("promtool")
needs_promtool = [
    pytest.mark.system_package,
    pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)"),
]

Samples = Mapping[str, float]


def exposition(url: str) -> str:
    """The text of one scrape, read under the role of production."""
    registry = CollectorRegistry()
    registry.register(PipelinesCollector(connector(as_role(url, READER))))
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    """Every sample by its series, labels in order: ``name{label="value"}``."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            series = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def scrape(url: str) -> Samples:
    return samples(exposition(url))


@contextmanager
def exporter(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`pin-pipelines exporter` with nothing but the address of the database; and where its metrics are."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIN_", "DAGSTER_"))}
    with subprocess.Popen(
        [*COMMAND, "exporter", "--port", "0"],
        env={**environment, "PIN_POSTGRES_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield process, next(word.rstrip(".") for word in said.split() if word.startswith("http://"))
        finally:
            process.kill()


def get(address: str) -> Samples:
    answer = requests.get(address, timeout=30)
    assert answer.status_code == 200
    return samples(answer.text)


def promtool(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )
