"""How far a hit ratio would move on another stretch of the same traffic: a bootstrap over windows.

Requests are not independent: a session comes back, the load swells and ebbs, a cache remembers. So what
is drawn again with replacement is not requests but *windows*, runs of neighbouring requests long enough
that one says little of the next. Knows sums and ratios; no traces, policies or caches.

Source: Kuensch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics
17(3), 1989, drawn from fixed, non-overlapping windows as in Carlstein, Annals of Statistics 14(3), 1986.
Why these: each request stands in one window, so the mean over all draws is the ratio itself, where
overlapping windows count the requests at both ends too rarely, and the first ones are those of a cold
cache; and a run is kept as a few dozen sums, from which it can be paired with any other run of its trace
later. Price: the width of an interval is itself a little less certain than with overlapping windows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.structures.draws import whole_numbers

Sums = npt.NDArray[np.int64]

WINDOWS = 32
"""Windows of a trace. More are shorter and depend on each other; fewer say little of the spread."""

FEWEST_WINDOWS = 10
"""Below this many windows a spread is no estimate of anything."""

RESAMPLES = 1000
CONFIDENCE = 0.95

CORRELATED = 0.35
"""Two standard errors for 32 windows: above it windows are not independent, and an interval is too narrow."""


class Interval(NamedTuple):
    """Where a value lies with the probability `CONFIDENCE`.

    Attributes:
        correlation: of each window with the next one, -1 to 1. Near 0, the windows are as good as
            independent and the interval means what it says. Above `CORRELATED`, the traffic changes slowly,
            the trace holds few independent stretches of it, and the interval is too narrow.
    """

    low: float
    high: float
    correlation: float


def window_sums(values: npt.NDArray[np.integer], windows: int = WINDOWS) -> Sums:
    """The sums of `values` over `windows` runs of neighbours, as equal in length as can be.

    Shape ``(min(windows, len(values)),)``, int64.
    """
    count = min(windows, len(values))
    if count == 0:
        return np.zeros(0, np.int64)
    sums: Sums = np.add.reduceat(values, np.arange(count) * len(values) // count, dtype=np.int64)
    return sums


class Resamples:
    """One set of draws of a trace's windows, shared by every run of that trace.

    Because all runs share the draws, the difference of two of them is a paired one: what the traffic does
    to both cancels out.

    The draws come from splitmix64 and not from numpy's generators, whose streams may change: equal
    arguments give equal intervals everywhere.

    Args:
        refs: references in each window, shape ``(windows,)``.
        resamples: how often to draw.
        seed: of the draws.

    Cost: O(resamples x windows), once here and once for each interval: well below a millisecond.
    """

    def __init__(self, refs: Sums, resamples: int = RESAMPLES, seed: int = 0) -> None:
        if resamples < 1:
            raise ConfigError("resamples", resamples, "at least 1")
        if not 0 <= seed < 2**64:
            raise ConfigError("seed", seed, "0 to 2**64 - 1")
        windows = len(refs)
        drawn = whole_numbers(resamples * windows, windows, seed).reshape(resamples, windows)
        # How often each window is in each draw: a sum over a draw is then one product of matrices. Sums
        # of integers below 2^53 are exact in floating point, whatever order they are added in.
        flat = (drawn + np.arange(resamples)[:, None] * windows).ravel()
        self._times = np.bincount(flat, minlength=resamples * windows).reshape(resamples, windows)
        self._times = self._times.astype(np.float64)
        self._window_refs = refs.astype(np.float64)
        self._refs = self._times @ self._window_refs

    def ratio(self, hits: Sums) -> Interval | None:
        """The interval of ``hits.sum() / refs.sum()``; None if there are too few windows.

        Args:
            hits: hits in each window, shape ``(windows,)``.
        """
        return self._interval(hits)

    def difference(self, hits: Sums, baseline: Sums) -> Interval | None:
        """The interval of the first run's ratio minus the second's, both of the same trace.

        The runs cannot be told apart if it contains 0. Two equal runs give exactly ``(0.0, 0.0, 0.0)``.
        """
        return self._interval(hits - baseline)

    def _interval(self, sums: Sums) -> Interval | None:
        if len(sums) != self._times.shape[1]:
            raise ConfigError("hits", len(sums), f"one sum for each of {self._times.shape[1]} windows")
        if len(sums) < FEWEST_WINDOWS:
            return None
        # A draw of nothing but empty windows has no ratio.
        drawn = self._refs > 0
        if not drawn.any():
            return None
        ratios = (self._times @ sums.astype(np.float64))[drawn] / self._refs[drawn]
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(ratios, (tail, 1 - tail))
        return Interval(float(low), float(high), self._correlation(sums))

    def _correlation(self, sums: Sums) -> float:
        """Of what each window has above its share, with that of the next window."""
        surplus = sums - self._window_refs * (sums.sum() / self._window_refs.sum())
        spread = float((surplus * surplus).sum())
        return float((surplus[1:] * surplus[:-1]).sum()) / spread if spread > 0 else 0.0
