"""Reasons of misses, if there are tiers behind RAM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_record import BEHIND_A_GAP, NUM_CODES, READY, TIER_GAVE_UP, CountArray
from kvoffload.tiers.contract import Mask


def change_of(codes: npt.NDArray[np.int32], in_tier: Mask) -> CountArray:
    """Return the corrections to add to the miss counts, by code, for one prefix.

    RAM's manager has counted the blocks that a tier has as if there were no tiers. The corrections move these
    blocks to two other codes. The first block that is neither in RAM nor in a tier is the gap. A block in a
    tier counts as `TIER_GAVE_UP` if it precedes the gap, and as `BEHIND_A_GAP` if it follows the gap.

    Args:
        codes: `miss_record` code that RAM counted for each block of the prefix.
        in_tier: mask of the blocks that a tier has and RAM lacks.
    """
    gaps = np.flatnonzero((codes != READY) & ~in_tier)
    first_gap = int(gaps[0]) if len(gaps) else len(codes)
    rows = np.flatnonzero(in_tier)
    changed = np.where(rows < first_gap, TIER_GAVE_UP, BEHIND_A_GAP)
    added = np.bincount(changed, minlength=NUM_CODES) - np.bincount(codes[rows], minlength=NUM_CODES)
    return added.astype(np.int64)
