"""One stack and one browser for all of these tests; a page with a profile of its own for each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from pin_pipelines_tests.browser.stack import Served, chromium, opened, served


@pytest.fixture(scope="package")
def stack() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="pin-browser-"))
    try:
        with served(folder, property_objects=200, nights=4) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def operator(stack: Served, browser: Browser) -> Iterator[Page]:
    with opened(browser, stack.operators) as page:
        yield page


@pytest.fixture
def analyst(stack: Served, browser: Browser) -> Iterator[Page]:
    with opened(browser, stack.analysts) as page:
        yield page
