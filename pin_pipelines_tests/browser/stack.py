"""The local stack as a browser meets it: a catalogue with some nights and a run of today, and both webservers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from pin_pipelines.local.demo import ensure_catalogue, let_views_come_in, missing_history, play_night, run_today
from pin_pipelines.local.ownership import owned
from pin_pipelines.local.servers import HOST, Server, find_port, start_servers, start_webserver, wait_until_answering
from pin_pipelines.local.stack import LocalStack, local_stack
from pin_pipelines.settings import load_settings

CHROMIUM = shutil.which("chromium")
needs_chromium = [
    pytest.mark.system_package,
    # They share a stack.
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]

PATIENCE_SECONDS = 120
"""For anything that the UI is to show: a run needs a process of its own, which a busy machine starts slowly."""
LOCATION = "/locations/__repository__@pin_pipelines"


@dataclass(frozen=True)
class Served:
    """The stack with both webservers.

    Attributes:
        operators: address of the webserver that lets everything be done.
        analysts: of the one with ``--read-only``.
        nights: run dates behind today, the oldest first.
    """

    stack: LocalStack
    operators: str
    analysts: str
    nights: list[date]


@contextmanager
def served(data_dir: Path, *, property_objects: int, nights: int) -> Iterator[Served]:
    """Run all of it; when left, nothing is left running."""
    servers: list[Server] = []
    with owned(data_dir, "browser tests") as ownership, local_stack(ownership, print) as stack:
        played = _play(stack, property_objects, nights)
        ports = {name: find_port(0) for name in ("operators", "analysts")}
        servers += start_servers(stack, ports["operators"])
        # One after the other: both would make the same tables of Dagster's.
        wait_until_answering(servers, ports["operators"])
        servers.append(start_webserver(stack, ports["analysts"], read_only=True))
        wait_until_answering(servers, ports["analysts"])
        addresses = {name: f"http://{HOST}:{port}" for name, port in ports.items()}
        yield Served(stack, addresses["operators"], addresses["analysts"], played)
    for server in servers:
        server.process.wait()


def _play(stack: LocalStack, property_objects: int, nights: int) -> list[date]:
    connect = partial(psycopg.connect, stack.postgres_url)
    settings, today = load_settings(), datetime.now(UTC).date()
    catalogue, _ = ensure_catalogue(connect, property_objects, property_objects, today)
    with dg.DagsterInstance.get() as instance:
        played = missing_history(instance, catalogue, settings)[-nights:]
        for night in played:
            play_night(connect, instance, catalogue, night, settings)
        let_views_come_in(connect, catalogue, today)
        # The checks are evaluated by a run alone.
        outcome = run_today(instance, connect, settings, today)
    assert outcome.failure is None, outcome.failure
    return played


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    expect.set_options(timeout=PATIENCE_SECONDS * 1000)
    with sync_playwright() as playwright:
        # No sandbox: tests may run as root, and Chromium's refuses to.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """A page with a profile of its own; its addresses are relative to this one."""
    context = browser.new_context(
        base_url=address, viewport={"width": 1440, "height": 900}, timezone_id="UTC", locale="en-GB"
    )
    context.set_default_timeout(PATIENCE_SECONDS * 1000)
    try:
        yield context.new_page()
    finally:
        context.close()
