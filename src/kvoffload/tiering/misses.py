"""Reasons of misses with tiers behind RAM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_record import BEHIND_A_GAP, NUM_CODES, READY, TIER_GAVE_UP, CountArray
from kvoffload.tiers.contract import Mask


def change_of(codes: npt.NDArray[np.int32], in_tier: Mask) -> CountArray:
    """Return the change of the miss counts, by code, from a recount of a prefix with the blocks of tiers.

    Args:
        codes: `miss_record` code of each block of the prefix, as RAM counted it.
        in_tier: mask of the blocks that a tier has and RAM lacks. They count as `TIER_GAVE_UP`, or as
            `BEHIND_A_GAP` behind the first block that is nowhere.
    """
    gaps = np.flatnonzero((codes != READY) & ~in_tier)
    first_gap = int(gaps[0]) if len(gaps) else len(codes)
    rows = np.flatnonzero(in_tier)
    changed = np.where(rows < first_gap, TIER_GAVE_UP, BEHIND_A_GAP)
    added = np.bincount(changed, minlength=NUM_CODES) - np.bincount(codes[rows], minlength=NUM_CODES)
    return added.astype(np.int64)
