"""Bypass: the policy itself says whether a new block is worth the one that would leave for it."""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.errors import ConfigError
from kvoffload.structures.jit import Bools
from kvoffload.structures.keys import Keys


class BypassAdmission(Admission):
    """Leave a block out that would be the next victim: no gate of its own, a dial of the policy's.

    A policy that weighs blocks (`EvictionPolicy.refuses`) then takes a new block only if it is worth
    more than ``1 + write_cost`` times the block that would leave: 0 asks for the better of the two, 0.5
    saves writes at some cost in hits, a negative number writes more freely. Every other policy puts a new
    block where it is not the next victim, and takes it.
    """

    name = "bypass"
    good_for = "with policies that weigh blocks: the dial between hits and writes"

    def __init__(self, write_cost: float = 0.0) -> None:
        if not -1 <= write_cost <= 1000:
            raise ConfigError("write_cost", write_cost, "allowed: -1 to 1000")
        self.write_cost = write_cost

    def count(self, keys: Keys) -> None:
        """Nothing: the policy observes requests itself."""

    def admit(self, keys: Keys) -> Bools:
        """All of them; the policy is asked later."""
        return np.ones(len(keys), np.bool_)

    def reset(self) -> None:
        """Nothing to forget."""
