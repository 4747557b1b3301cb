"""Admit every block."""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class AdmitAll(Admission):
    """Every block may enter."""

    name = "all"
    good_for = "tiers whose writes are cheap; the default"

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> None:
        """None: a cache without a rule does not ask one."""

    def count(self, keys: Keys) -> None:
        """Nothing to count."""

    def admit(self, keys: Keys) -> BoolArray:
        return np.ones(len(keys), np.bool_)

    def reset(self) -> None:
        """Nothing to forget."""
