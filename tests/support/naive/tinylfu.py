"""The twin of TinyLFU admission."""

from __future__ import annotations

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys
from support.naive.sketch import NaiveSketch


class NaiveTinyLFU(Admission):
    """Twin of `admission.TinyLFUAdmission`: the first blocks enter unchecked, later ones if seen twice."""

    name = "naive-tinylfu"

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.sketch = NaiveSketch(capacity_blocks)
        self.num_lookups = 0

    def count(self, keys: Keys) -> None:
        for key in keys:
            self.sketch.add(key)

    def admit(self, keys: Keys) -> BoolArray:
        allowed = [
            number < self.capacity_blocks or self.sketch.estimate(key) >= 2
            for number, key in enumerate(keys, self.num_lookups)
        ]
        self.num_lookups += len(keys)
        return np.array(allowed, np.bool_)

    def reset(self) -> None:
        self.sketch.clear()
        self.num_lookups = 0
