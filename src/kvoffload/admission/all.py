"""Admission rule without a condition."""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class AdmitAll(Admission):
    """Admits every block."""

    name = "all"
    good_for = "tiers whose writes are cheap; the default"

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> None:
        """Return None, because a cache without a rule admits every block."""

    def count(self, keys: Keys) -> None:
        """Do nothing."""

    def admit(self, keys: Keys) -> BoolArray:
        return np.ones(len(keys), np.bool_)

    def reset(self) -> None:
        """Do nothing."""
