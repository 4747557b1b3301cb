"""The twin of the reuse rule."""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.structures.jit import BoolArray
from kvoffload.structures.keys import Keys


class NaiveReuse(Admission):
    """Twin of `admission.ReuseAdmission`: the last keys that requests referred to, with their counts."""

    name = "naive-reuse"

    def __init__(self, store_threshold: int, max_tracker_size: int) -> None:
        self.store_threshold, self.max_tracker_size = store_threshold, max_tracker_size
        self.counts: dict[bytes, int] = {}
        """Most recent first."""

    def count(self, keys: Keys) -> None:
        # The request's keys become the most recent, the head foremost. Surplus keys drop off the end.
        order = dict.fromkeys([*islice(keys, self.max_tracker_size), *self.counts])
        known = set(islice(keys, self.max_tracker_size))
        counted = {key: self.counts.get(key, 0) + (key in known) for key in order}
        self.counts = dict(islice(counted.items(), self.max_tracker_size))

    def refresh(self, keys: Keys) -> None:
        order = dict.fromkeys([*(key for key in keys if key in self.counts), *self.counts])
        self.counts = {key: self.counts[key] for key in order}

    def admit(self, keys: Keys) -> BoolArray:
        return np.array([self.counts.get(key, 0) >= self.store_threshold for key in keys], np.bool_)

    def reset(self) -> None:
        self.counts.clear()

    def tracked(self) -> dict[bytes, int]:
        """Return every tracked key with its count, most recent first."""
        return dict(self.counts)
