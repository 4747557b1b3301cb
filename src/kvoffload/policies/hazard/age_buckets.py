"""Age buckets: ranges of the time since a block's last use. Each bucket is a column of the policy's tables.

The unit of time is one block reference that a policy has observed. Owns no clock.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import F64Array, I64Array, inline

NUM_AGES = 48


def age_bounds() -> npt.NDArray[np.int64]:
    """Return the start of each bucket, then the end of the last: 0, 8, 11, 16, ... (two per octave)."""
    octaves = [8 << octave for octave in range(NUM_AGES // 2 + 1)]
    return np.array([0, *(b for o in octaves for b in (o, math.isqrt(2 * o * o)))][: NUM_AGES + 1], np.int64)


@inline
def bucket_of_age(bounds: I64Array, age: int) -> int:
    """Return the number of the bucket that contains an age. The last bucket has no upper limit."""
    low, high = 0, NUM_AGES
    while high - low > 1:
        middle = (low + high) // 2
        if age < bounds[middle]:
            high = middle
        else:
            low = middle
    return low


@inline
def at_age(table: F64Array, bounds: I64Array, row: int, age: int) -> float:
    """Return ``table[row]`` at an age, interpolated linearly; constant in the last bucket."""
    bucket = bucket_of_age(bounds, age)
    if bucket == NUM_AGES - 1:
        return table[row, bucket]
    weight = (age - bounds[bucket]) / (bounds[bucket + 1] - bounds[bucket])
    return table[row, bucket] * (1.0 - weight) + table[row, bucket + 1] * weight
