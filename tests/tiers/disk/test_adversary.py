"""A few cases of the adversary of the disk tier; a soak run gives it a seed and a count."""

from __future__ import annotations

import os

from support import disk_adversary

CASES = int(os.environ.get("KVOFFLOAD_DISK_CASES", "6"))


def test_nothing_wrong_lost_or_too_large() -> None:
    counts = disk_adversary.run(seed=1, cases=CASES)
    assert counts.is_clean, "\n".join([str(counts), *counts.problems])
    assert counts.cases == CASES
    assert counts.served > 0
