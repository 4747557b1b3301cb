"""Sampling of long parameter lists: a few cases in each run, all of them with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Mark all cases but each `every`-th one as slow, beginning with the first."""
    return [
        case if n % every == 0 else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(cases)
    ]
