"""How often a confidence interval of a sweep is right: stretches of long traffic against all of it.

The interval of a stretch claims to hold, in 95 of 100 cases, the ratio of the traffic that the stretch is
taken from. Prints how often it does, for LRU's prefix-hit ratio and for the paired difference of ARC and
LRU, and the correlation of neighbouring windows; docs/sweep.md quotes it. Takes minutes.

    python bench/confidence.py                     built-in workloads, far longer than usual
    python bench/confidence.py TRACE CAPACITY      a recording, whose stretches are few
    python bench/confidence.py --later TRACE...    as for a purchase: the interval of the first 60 % of a
                                                   recording against the ratio of the last 40 %, by policy
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.sweep.bootstrap import Interval, Resamples, window_sums
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin

WINDOWS = (10, 16, 32, 64, 128)
PER_STRETCH = {"chat": (52_000, 1_543, 40), "rag": (80_000, 1_511, 40), "agent": (1_200, 360, 30)}
"""Sessions of the whole, capacity in blocks (5 % of the default trace's), stretches about as long as that."""
STRETCHES_OF_A_RECORDING = 10
LATER_POLICIES, LATER_SHARES = ("lru", "arc", "hazard"), (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
FIRST_PART = 0.6

Counts = npt.NDArray[np.int64]


def hits(trace: Trace, policy: str, capacity_blocks: int) -> Counts:
    """Prefix hits of each request."""
    run = Replay(trace, ReplayConfig(capacity_blocks, policy))
    run.run()
    return run.hits_per_request.astype(np.int64)


def report(name: str, refs: Counts, lru: Counts, arc: Counts, stretches: int) -> None:
    """Print a line for each number of windows."""
    ratio, difference = lru.sum() / refs.sum(), (arc - lru).sum() / refs.sum()
    length = len(refs) // stretches
    print(f"\n{name}: {stretches} stretches of {length:,} requests; LRU {ratio:.4f}, ARC {difference:+.4f}")
    print("windows   ratio: right  width  correlation   difference: right  width  correlation")
    for windows in WINDOWS:
        found: list[tuple[Interval, Interval]] = []
        for number in range(stretches):
            part = slice(number * length, (number + 1) * length)
            in_refs, in_lru, in_arc = (window_sums(values[part], windows) for values in (refs, lru, arc))
            draws = Resamples(in_refs)
            one, two = draws.ratio(in_lru), draws.difference(in_arc, in_lru)
            if one is not None and two is not None:
                found.append((one, two))
        parts = []
        for which, truth in enumerate((ratio, difference)):
            intervals = [pair[which] for pair in found]
            right = np.mean([one.low <= truth <= one.high for one in intervals])
            width = np.mean([one.high - one.low for one in intervals])
            correlation = np.mean([one.correlation for one in intervals])
            parts.append(f"{right:12.2f}  {width:.4f}  {correlation:11.2f}")
        print(f"{windows:7}   " + "   ".join(parts), flush=True)


def later(trace: Trace) -> None:
    """Print, by policy, how often the interval of the first part contains the ratio of the rest.

    Both parts are replayed with an empty cache, as by a plan. A capacity is a share of the unique blocks.
    """
    cut = round(trace.requests * FIRST_PART)
    parts = [trace.of_requests(np.arange(cut)), trace.of_requests(np.arange(cut, trace.requests))]
    print(f"\n{trace.name}: {cut:,} requests against the next {trace.requests - cut:,}")
    for policy in LATER_POLICIES:
        right, gaps = 0, []
        for share in LATER_SHARES:
            capacity_blocks = round(share * trace.unique_blocks)
            first, rest = (hits(part, policy, capacity_blocks) for part in parts)
            refs, rest_refs = (np.diff(part.offsets).astype(np.int64) for part in parts)
            draws = Resamples(window_sums(refs, 32))
            interval = draws.ratio(window_sums(first, 32))
            ratio = rest.sum() / rest_refs.sum()
            if interval is not None:
                right += interval.low <= ratio <= interval.high
                gaps.append(
                    f"{first.sum() / refs.sum():.3f} ({interval.low:.3f}-{interval.high:.3f}) {ratio:.3f}"
                )
        print(f"{policy:7} {right} of {len(gaps)}:  " + "  ".join(gaps), flush=True)


def main() -> None:
    """Run."""
    if sys.argv[1:2] == ["--later"]:
        for name in sys.argv[2:]:
            later(load_trace(name))
        return
    if len(sys.argv) == 3:
        trace, capacity_blocks = load_trace(sys.argv[1]), int(sys.argv[2])
        lru, arc = (hits(trace, policy, capacity_blocks) for policy in ("lru", "arc"))
        report(trace.name, np.diff(trace.offsets), lru, arc, STRETCHES_OF_A_RECORDING)
        return
    for name, (sessions, capacity_blocks, stretches) in PER_STRETCH.items():
        trace = generate(builtin(name, sessions=sessions))
        lru, arc = (hits(trace, policy, capacity_blocks) for policy in ("lru", "arc"))
        # The first stretch is the one in which the cache is cold.
        cold = trace.requests // (stretches + 1)
        report(name, np.diff(trace.offsets)[cold:], lru[cold:], arc[cold:], stretches)


if __name__ == "__main__":
    main()
