"""Estimates of hit ratios from the misses in a sample, with their errors.

The hit ratio is 1 minus the miss ratio. The miss ratio is the number of sampled misses times the sampling
factor, divided by the number of *all* looked-up blocks. Hits are not counted, because their number depends
strongly on chance: a block of the system prompt, which every request hits, may be in the sample or not.
Misses of such blocks are rare (SHARDS-adj, Waldspurger et al., FAST'15).

The error of an estimate is half the width of a 95 % interval. It has three independent parts:

- *misses*: another sample would have other misses. This part is estimated from the spread of the misses over
  groups of keys (random groups: Wolter, Introduction to Variance Estimation, 2007, chapter 2).
- *capacity*: of the blocks in a real cache, a varying number belongs to the sample, but a shadow has a fixed
  number of slots. Therefore a shadow with `n` slots behaves like a cache whose capacity has a relative error
  of ``sqrt((1 - 1 / one_in) / n)``. To compute the effect on the hit ratio `h`, the curve
  ``h = 1 - exp(-capacity)`` is assumed. On this curve, the derivative of `h` by the logarithm of the capacity
  is ``-(1 - h) log(1 - h)``.
- *bias*: a small cache does not behave exactly like a large cache, and a policy learns less from a sample
  than from all blocks. The assumed error is `BIAS` times the miss ratio.

Knows only counts; no managers, policies or requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

GROUPS = 64
BIAS = 0.0075
_WIDTH = 1.96
"""Half the width of a 95 % interval, as a multiple of the standard error."""

MissArray = npt.NDArray[np.int64]
"""Number of sampled misses in each group of keys, shape ``(GROUPS,)``."""


class Estimate(msgspec.Struct, frozen=True):
    """Estimated hit ratio of a setting: the share of the looked-up blocks that would be hits.

    Attributes:
        setting: label of the setting.
        hit_ratio: from 0 to 1.
        error: half the width of the 95 % interval of `hit_ratio`.
        gain: `hit_ratio` minus the current setting's hit ratio, which is estimated from the same sample.
        gain_error: half the width of the 95 % interval of `gain`.
        is_better: True if `gain` exceeds `gain_error`.
    """

    setting: str
    hit_ratio: float
    error: float
    gain: float = 0.0
    gain_error: float = 0.0
    is_better: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "is_better", self.gain > self.gain_error)


def with_error(share: float, error: float, sign: str = "") -> str:
    """Format a share and its error in percent, such as ``16.6 ±2.2 %``."""
    return f"{100 * share:{sign}.1f} ±{100 * error:.1f} %"


@dataclass(frozen=True)
class Counted:
    """Counts of one shadow.

    Attributes:
        setting: label of the setting.
        missed: number of sampled misses in each group of keys.
        num_slots: number of slots of the shadow.
    """

    setting: str
    missed: MissArray
    num_slots: int


def estimates(counted: list[Counted], num_looked_up: int, one_in: int) -> list[Estimate]:
    """Estimate the hit ratio of each shadow's setting.

    Args:
        counted: the counts of shadows with a common sample. The first shadow has the current setting.
        num_looked_up: number of looked-up blocks of all requests, sampled or not.
        one_in: one block in this many is sampled.
    """
    per_block = one_in / max(1, num_looked_up)
    current = counted[0]
    current_ratio = _ratio(current, per_block)
    estimates = list[Estimate]()
    for shadow in counted:
        ratio = _ratio(shadow, per_block)
        of_capacity = _slope(ratio) * _off(shadow, one_in)
        variance = _spread(shadow.missed, one_in, per_block) + of_capacity**2 + (BIAS * (1 - ratio)) ** 2
        estimate = Estimate(shadow.setting, ratio, _WIDTH * math.sqrt(variance))
        if shadow is not current:
            variance = _spread(shadow.missed - current.missed, one_in, per_block)
            variance += _difference_of_capacity(shadow, current, ratio, current_ratio, one_in)
            variance += (BIAS * (1 - min(ratio, current_ratio))) ** 2
            estimate = Estimate(
                shadow.setting, ratio, estimate.error, ratio - current_ratio, _WIDTH * math.sqrt(variance)
            )
        estimates.append(estimate)
    return estimates


def _ratio(shadow: Counted, per_block: float) -> float:
    return min(1.0, max(0.0, 1.0 - int(shadow.missed.sum()) * per_block))


def _spread(missed: MissArray, one_in: int, per_block: float) -> float:
    """Return the part of a hit ratio's variance that is due to the choice of the sampled blocks.

    Args:
        missed: number of misses in each group of keys. For the variance of a gain, pass the difference of two
            shadows' numbers.
        per_block: amount by which one sampled miss increases the miss ratio.
    """
    groups = len(missed)
    deviations = missed - missed.mean()
    return float((deviations**2).sum()) * groups / (groups - 1) * (1 - 1 / one_in) * per_block**2


def _slope(ratio: float) -> float:
    """Return the derivative of a hit ratio by the logarithm of the capacity, on the assumed curve."""
    return -(1 - ratio) * math.log(1 - ratio) if 0 < ratio < 1 else 0.0


def _off(shadow: Counted, one_in: int) -> float:
    """Return the relative standard error of the capacity that a shadow represents (see the module)."""
    return math.sqrt((1 - 1 / one_in) / shadow.num_slots)


def _difference_of_capacity(
    shadow: Counted, current: Counted, ratio: float, current_ratio: float, one_in: int
) -> float:
    """Return the part of a gain's variance that is due to errors of the two capacities (`_off`).

    The errors of the two shadows are correlated, because both shadows hold many of the same blocks. This
    function assumes that the larger shadow holds all blocks of the smaller shadow, and that shadows of equal
    size have half of their blocks in common.
    """
    one, other = _slope(ratio) * _off(shadow, one_in), _slope(current_ratio) * _off(current, one_in)
    smaller, larger = sorted((shadow.num_slots, current.num_slots))
    shared = 0.5 if smaller == larger else math.sqrt(smaller / larger)
    return one**2 + other**2 - 2 * shared * one * other
