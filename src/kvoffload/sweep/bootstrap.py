"""Confidence intervals of hit ratios, by a bootstrap over windows of a trace.

Single requests cannot be resampled, because they are not independent: sessions return, the load varies, and
caches have memory. Therefore the bootstrap resamples *windows* of consecutive requests, which are so long
that they are nearly independent. This module knows sums and ratios, but no traces, policies or caches.

Source: Kuensch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics
17(3), 1989. The windows are fixed and do not overlap, as in Carlstein, Annals of Statistics 14(3), 1986. So
each request is in exactly one window, all requests have equal weight, and a comparison of replays needs only
one sum for each window and replay. Overlapping windows would make the intervals slightly more exact, but
would give less weight to the first and last requests of a trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, check_integer
from kvoffload.structures.draws import whole_numbers

Sums = npt.NDArray[np.int64]

WINDOWS = 32
"""Number of windows into which a trace is divided.

With more and therefore shorter windows, neighbouring windows would be correlated. With fewer windows, the
spread of the hit ratio would be estimated badly.
"""

FEWEST_WINDOWS = 10
"""Number of windows below which no interval is computed."""

RESAMPLES, MOST_RESAMPLES = 1000, 1_000_000
CONFIDENCE = 0.95

CORRELATED = 0.35
"""Limit of the correlation of neighbouring windows. Above it, confidence intervals are too narrow.

The limit is two standard errors of the correlation of 32 independent windows. If the correlation exceeds it,
the windows are probably not independent.
"""


class Interval(NamedTuple):
    """Confidence interval of a hit ratio, or of the difference of two hit ratios.

    Attributes:
        low, high: ends of the interval.
        correlation: correlation of neighbouring windows, from -1 to 1. If it exceeds `CORRELATED`, the
            traffic changes so slowly that neighbouring windows are not independent; the interval is then too
            narrow.
    """

    low: float
    high: float
    correlation: float


def window_sums(values: npt.NDArray[np.integer], windows: int = WINDOWS) -> Sums:
    """Divide `values` into windows of nearly equal length, and return the sum of each window.

    There are `windows` windows or, if there are fewer values, one window for each value.
    """
    count = min(windows, len(values))
    if count == 0:
        return np.zeros(0, np.int64)
    sums: Sums = np.add.reduceat(values, np.arange(count) * len(values) // count, dtype=np.int64)
    return sums


class Resamples:
    """Random draws of a trace's windows, from which confidence intervals are computed.

    A draw picks as many windows as the trace has, at random and with repetition. All replays of the trace use
    the same draws. Therefore variation that the traffic causes in two replays alike cancels out in their
    difference. The draws come from splitmix64, not from numpy, whose random numbers may change between
    versions. So equal arguments give equal intervals on every machine.

    Args:
        refs: number of block references in each window.
        resamples: number of draws, up to `MOST_RESAMPLES`. A million draws need 1 GB.
        seed: seed of the random numbers.
        fewest_windows: if the trace has fewer windows, no interval is computed.
        confidence: probability that an interval contains the true value.

    Cost: O(resamples x windows) for the construction and again for each interval; with the default number of
    draws this is well below a millisecond.
    """

    def __init__(
        self,
        refs: Sums,
        resamples: int = RESAMPLES,
        seed: int = 0,
        *,
        fewest_windows: int = FEWEST_WINDOWS,
        confidence: float = CONFIDENCE,
    ) -> None:
        check_integer("resamples", resamples, MOST_RESAMPLES)
        if not 0 <= seed < 2**64:
            raise ConfigError("seed", seed, "allowed: 0 to 2**64 - 1")
        self._fewest_windows, self._tail = fewest_windows, (1 - confidence) / 2
        windows = len(refs)
        drawn = whole_numbers(resamples * windows, windows, seed).reshape(resamples, windows)
        # Count how often each draw has each window. The sums of all draws are then one matrix product. Sums
        # of integers below 2^53 are exact in floating point, in any order.
        flat = (drawn + np.arange(resamples)[:, None] * windows).ravel()
        self._times = np.bincount(flat, minlength=resamples * windows).reshape(resamples, windows)
        self._times = self._times.astype(np.float64)
        self._window_refs = refs.astype(np.float64)
        self._refs = self._times @ self._window_refs

    def ratio(self, hits: Sums) -> Interval | None:
        """Compute the confidence interval of the hit ratio ``hits.sum() / refs.sum()``.

        Returns None if there are too few windows, or no references.

        Args:
            hits: number of hits in each window.
        """
        if len(hits) != self._times.shape[1]:
            raise ConfigError(
                "hits", len(hits), f"allowed: one sum for each of {self._times.shape[1]} windows"
            )
        if len(hits) < self._fewest_windows:
            return None
        # A draw has no ratio if all its windows have no references.
        drawn = self._refs > 0
        if not drawn.any():
            return None
        ratios = (self._times @ hits.astype(np.float64))[drawn] / self._refs[drawn]
        low, high = np.quantile(ratios, (self._tail, 1 - self._tail))
        return Interval(float(low), float(high), self._correlation(hits))

    def difference(self, hits: Sums, baseline: Sums) -> Interval | None:
        """Compute the confidence interval of the hit ratio of one replay minus the hit ratio of another.

        The interval is paired: each draw picks the same windows for both replays. If the interval contains 0,
        the difference is not significant. If both replays have the same hits, the result is ``(0.0, 0.0,
        0.0)``.

        Args:
            hits: number of hits of the first replay in each window.
            baseline: number of hits of the second replay in each window.
        """
        return self.ratio(hits - baseline)

    def _correlation(self, sums: Sums) -> float:
        """Compute the correlation of neighbouring windows: of their deviations from the mean hit ratio."""
        surplus = sums - self._window_refs * (sums.sum() / self._window_refs.sum())
        spread = float((surplus * surplus).sum())
        return float((surplus[1:] * surplus[:-1]).sum()) / spread if spread > 0 else 0.0
