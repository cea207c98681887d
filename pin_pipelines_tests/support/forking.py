"""Processes of a test's own that need not import everything again: they fork from a server that has.

The embedded ClickHouse is not among what it has imported: the import alone opens one, with threads that a fork would
lose. A child imports that itself.
"""

from __future__ import annotations

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        # A child imports its parent's __main__.
        "pytest",
        "pin_pipelines.cli",
        "pin_pipelines.definitions",
        "pin_pipelines_tests.support.command_line",
        "pin_pipelines_tests.support.price_backfill_child",
    ]
)
