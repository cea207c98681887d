"""Folders that commands work in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pin_pipelines.local.ownership import end_marked_processes, postgres_dir
from pin_pipelines.local.postgres import EmbeddedPostgres


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data folder for `pin-pipelines` commands; nothing of theirs outlives the test."""
    folder = Path(tempfile.mkdtemp(prefix="pin-stack-"))
    try:
        yield folder
    finally:
        end_marked_processes(folder)
        EmbeddedPostgres(postgres_dir(folder)).stop()
        shutil.rmtree(folder, ignore_errors=True)
