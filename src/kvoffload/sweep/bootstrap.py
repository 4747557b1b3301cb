"""Confidence intervals of hit ratios, by a bootstrap over windows of a trace.

Requests are not independent: sessions return, the load varies, caches have memory. The bootstrap resamples
*windows* of consecutive requests. Windows are so long that they are nearly independent. Knows sums and
ratios; no traces, policies or caches.

Source: Kuensch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics
17(3), 1989, with fixed, non-overlapping windows as in Carlstein, Annals of Statistics 14(3), 1986. Each
request is in exactly one window, so all requests have equal weight. Overlapping windows would give
less weight to the first and last requests of a trace, but slightly more exact bounds of the intervals. A
comparison of replays needs only one sum for each window and replay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, check_integer
from kvoffload.structures.draws import whole_numbers

Sums = npt.NDArray[np.int64]

WINDOWS = 32
"""Number of windows.

With more windows, each window would be shorter, and neighbouring windows would be correlated. With fewer
windows, the spread would be estimated badly.
"""

FEWEST_WINDOWS = 10
"""Number of windows below which no interval is computed."""

RESAMPLES, MOST_RESAMPLES = 1000, 1_000_000
CONFIDENCE = 0.95

CORRELATED = 0.35
"""If the correlation of neighbouring windows exceeds this value, the windows are not independent, and the
interval is too narrow. The value is two standard errors of the correlation for 32 windows."""


class Interval(NamedTuple):
    """Confidence interval with the coverage `CONFIDENCE`.

    Attributes:
        low, high: ends of the interval.
        correlation: correlation of neighbouring windows, -1 to 1. Above `CORRELATED` the interval is too
            narrow, because the traffic changes slowly and neighbouring windows are not independent.
    """

    low: float
    high: float
    correlation: float


def window_sums(values: npt.NDArray[np.integer], windows: int = WINDOWS) -> Sums:
    """Return the sum of `values` in each of `windows` windows of nearly equal length.

    If there are fewer values than windows, each value is a window.
    """
    count = min(windows, len(values))
    if count == 0:
        return np.zeros(0, np.int64)
    sums: Sums = np.add.reduceat(values, np.arange(count) * len(values) // count, dtype=np.int64)
    return sums


class Resamples:
    """Random draws of a trace's windows. All replays of the trace use the same draws.

    With shared draws, the difference of two replays is a paired difference: variation that the traffic causes
    in both replays cancels. The draws come from splitmix64, not from numpy, whose streams may change between
    versions. Equal arguments therefore give equal intervals everywhere.

    Args:
        refs: number of block references in each window.
        resamples: number of draws, up to `MOST_RESAMPLES`. A million draws need 1 GB.
        seed: seed of the draws.
        fewest_windows: number of windows below which no interval is computed.
        confidence: coverage of the intervals.

    Cost: O(resamples x windows) for the construction and for each interval, well below a millisecond.
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
        """Compute the interval of the hit ratio ``hits.sum() / refs.sum()``.

        Returns None if there are too few windows.

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
        """Compute the confidence interval of a difference: hit ratio of one replay minus that of another.

        The interval is paired: each resample takes the same windows for both replays. If the interval
        contains 0, the difference is not significant. Equal replays give ``(0.0, 0.0, 0.0)``.

        Args:
            hits, baseline: number of hits in each window, in the first and in the second replay.
        """
        return self.ratio(hits - baseline)

    def _correlation(self, sums: Sums) -> float:
        """Compute the autocorrelation, at lag 1, of the windows' deviations from the mean ratio."""
        surplus = sums - self._window_refs * (sums.sum() / self._window_refs.sum())
        spread = float((surplus * surplus).sum())
        return float((surplus[1:] * surplus[:-1]).sum()) / spread if spread > 0 else 0.0
