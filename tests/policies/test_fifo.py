"""FIFO: the worked example of its literature. test_twins.py compares all decisions with the twin."""

from __future__ import annotations

import pytest

from kvoffload.policies.fifo import FIFO
from support.letters import letters_at, make, use
from support.naive.fifo import NaiveFIFO


@pytest.mark.parametrize("policy", [FIFO, NaiveFIFO])
@pytest.mark.parametrize(("frames", "faults", "order"), [(3, 9, "ecd"), (4, 10, "bcde")])
def test_beladys_anomaly(policy: type[FIFO | NaiveFIFO], frames: int, faults: int, order: str) -> None:
    """Belady, Nelson and Shedler, CACM 12(6), 1969: four frames have more faults than three."""
    manager = make(policy, frames)
    use(manager, "abcdabeabcde")
    assert manager.stats().stored == faults
    assert letters_at(manager, manager.policy.order() or []) == order
