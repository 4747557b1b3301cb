"""Recordings for tests of plans."""

from __future__ import annotations

import pytest

from support.plan_rows import written
from support.shared_plans import STEP_S, asked_twice


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the recording of `asked_twice`."""
    path = tmp_path_factory.mktemp("shared") / "twice.jsonl"
    return written(path, asked_twice()[0], step_ms=1000 * STEP_S)
