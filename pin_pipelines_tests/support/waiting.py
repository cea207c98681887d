"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_PATIENCE_SECONDS = 60
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1


def until(condition: Callable[[], Any], what: str, *, seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait for a condition; fail by its name if it does not come. Asks less often the longer it takes."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain for: {what}")
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST_PAUSE_SECONDS)
