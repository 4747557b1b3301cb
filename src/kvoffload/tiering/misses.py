"""Reasons of misses with tiers behind RAM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.core.miss_record import BEHIND_A_GAP, NUM_CODES, READY, TIER_GAVE_UP, CountArray
from kvoffload.tiers.contract import Mask


def change_of(codes: npt.NDArray[np.int32], in_tier: Mask) -> CountArray:
    """Return the change of the counts by code, for the blocks of a prefix that are in a tier and not in RAM.

    Args:
        codes: codes of `miss_record` of the prefix in RAM.
    """
    gaps = np.flatnonzero((codes != READY) & ~in_tier)
    first_gap = int(gaps[0]) if len(gaps) else len(codes)
    rows = np.flatnonzero(in_tier)
    changed = np.where(rows < first_gap, TIER_GAVE_UP, BEHIND_A_GAP)
    added = np.bincount(changed, minlength=NUM_CODES) - np.bincount(codes[rows], minlength=NUM_CODES)
    return added.astype(np.int64)
