"""Cases of the disk tier's adversary; a soak run sets their number."""

from __future__ import annotations

import os

import pytest

from support import disk_adversary

CASES = int(os.environ.get("KVOFFLOAD_DISK_CASES", "6"))


@pytest.mark.parametrize("cases", [1, pytest.param(CASES, marks=pytest.mark.slow)])
def test_no_block_is_wrong_or_lost_and_no_directory_too_large(cases: int) -> None:
    counts = disk_adversary.run(seed=1, cases=cases)
    assert counts.is_clean, "\n".join([str(counts), *counts.problems])
    assert counts.cases == cases
    assert counts.served > 0
