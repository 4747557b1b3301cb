"""Random numbers that are the same on every machine and with every numpy version, unlike numpy's own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def whole_numbers(count: int, below: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw `count` uniform integers from 0 to ``below - 1`` with splitmix64.

    The probability of an integer differs from ``1 / below`` by at most 2^-32.
    """
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    drawn: npt.NDArray[np.int64] = ((state >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(
        np.int64
    )
    return drawn
