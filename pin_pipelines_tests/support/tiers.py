"""Which half of the suite a test belongs to (see the marker ``slow`` in pyproject.toml)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_is_fast(*cases: Any) -> list[Any]:
    """Cases of one rule for ``parametrize``: the fast half shows it by the first, the slow one by all the others."""
    return [cases[0], *(pytest.param(*_arguments(case), marks=pytest.mark.slow) for case in cases[1:])]


def _arguments(case: Any) -> Sequence[Any]:
    return case if isinstance(case, tuple) else (case,)
