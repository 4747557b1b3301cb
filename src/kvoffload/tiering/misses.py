"""Corrects RAM's counts of misses by reason, which ignore the tiers behind RAM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_record import BEHIND_A_GAP, NUM_CODES, READY, TIER_GAVE_UP, CountArray
from kvoffload.tiers.contract import Mask


def change_of(codes: npt.NDArray[np.int32], in_tier: Mask) -> CountArray:
    """Return, for each code, the number to add to RAM's miss counts after the lookup of a prefix.

    RAM has counted the blocks as if there were no tiers. If a tier has a block, the correction subtracts the
    block from the code that RAM counted. It adds the block to `BEHIND_A_GAP` if an earlier block of the
    prefix is neither in RAM nor in a tier, otherwise to `TIER_GAVE_UP`.

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
