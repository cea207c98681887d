"""Runs beside the test: in a thread, where a result is wanted, and in a process, where it is to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from typing import Any, TypeVar
from uuid import uuid4

from pin_pipelines_tests.support.catalogue import TODAY, Catalogue

T = TypeVar("T")


@contextmanager
def background(*calls: Callable[[], T]) -> Iterator[list[Future[T]]]:
    """The calls, each in a thread. A test that fails leaves them: they end when its brakes and its database go."""
    pool = ThreadPoolExecutor(len(calls), thread_name_prefix="background")
    try:
        yield [pool.submit(call) for call in calls]
    finally:
        pool.shutdown(wait=False)


@contextmanager
def run_process(catalogue: Catalogue, run_date: date = TODAY, **parameters: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A run of the engine in a process of its own, which is gone with the context."""
    options = {"run_id": str(uuid4()), "run_date": run_date.isoformat(), "parameters": parameters}
    module = "pin_pipelines_tests.support.run_engine"
    command = [sys.executable, "-m", module, catalogue.pipeline_url, json.dumps(options)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
