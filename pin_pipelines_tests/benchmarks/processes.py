"""A process of its own for whatever is measured."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def fresh_process(ready: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """A process that has called ``ready``, and so has the imports behind it, before anything is measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(ready).result()
        yield process
