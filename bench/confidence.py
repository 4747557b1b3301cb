"""Coverage of a sweep's 95 % confidence intervals: stretches of long traffic against the whole.

The interval of a stretch should contain the hit ratio of the whole traffic in 95 of 100 cases. Prints the
measured share, for LRU's prefix-hit ratio and for the paired difference of ARC and LRU, and the correlation
of neighbouring windows; docs/sweep.md quotes it. Takes minutes.

    python bench/confidence.py                     built-in workloads, far longer than usual
    python bench/confidence.py TRACE CAPACITY      a recording, in ten stretches
    python bench/confidence.py --later TRACE...    the interval of the first 60 % of a recording against the
                                                   ratio of the last 40 %, by policy
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.sweep.bootstrap import Interval, Resamples, window_sums
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace
from kvoffload.traces.workloads import builtin

WINDOWS = (10, 16, 32, 64, 128)
PER_STRETCH = {"chat": (52_000, 1_543, 40), "rag": (80_000, 1_511, 40), "agent": (1_200, 360, 30)}
"""Sessions of the whole, capacity in blocks (5 % of the default trace), and number of stretches."""
STRETCHES_OF_A_RECORDING = 10
LATER_POLICIES, LATER_SHARES = ("lru", "arc", "hazard"), (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
FIRST_PART = 0.6

Counts = npt.NDArray[np.int64]


def hits(trace: Trace, policy: str, capacity_blocks: int) -> Counts:
    """Replay a trace; returns the prefix hits of each request."""
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
        pairs: list[tuple[Interval, Interval]] = []
        for number in range(stretches):
            stretch = slice(number * length, (number + 1) * length)
            in_refs, in_lru, in_arc = (window_sums(values[stretch], windows) for values in (refs, lru, arc))
            draws = Resamples(in_refs)
            ratio_interval, difference_interval = draws.ratio(in_lru), draws.difference(in_arc, in_lru)
            if ratio_interval is not None and difference_interval is not None:
                pairs.append((ratio_interval, difference_interval))
        cells = []
        for which, truth in enumerate((ratio, difference)):
            intervals = [pair[which] for pair in pairs]
            coverage = np.mean([interval.low <= truth <= interval.high for interval in intervals])
            width = np.mean([interval.high - interval.low for interval in intervals])
            correlation = np.mean([interval.correlation for interval in intervals])
            cells.append(f"{coverage:12.2f}  {width:.4f}  {correlation:11.2f}")
        print(f"{windows:7}   " + "   ".join(cells), flush=True)


def later(trace: Trace) -> None:
    """Print, by policy, how often the interval of the first section contains the ratio of the second.

    Each section is replayed with an empty cache, as in a plan. A capacity is a share of the unique blocks.
    """
    cut = round(trace.requests * FIRST_PART)
    sections = [trace.of_requests(np.arange(cut)), trace.of_requests(np.arange(cut, trace.requests))]
    print(f"\n{trace.name}: {cut:,} requests against the next {trace.requests - cut:,}")
    for policy in LATER_POLICIES:
        num_right, gaps = 0, []
        for share in LATER_SHARES:
            capacity_blocks = round(share * trace.unique_blocks)
            first_hits, later_hits = (hits(section, policy, capacity_blocks) for section in sections)
            refs, later_refs = (np.diff(section.offsets).astype(np.int64) for section in sections)
            draws = Resamples(window_sums(refs, 32))
            interval = draws.ratio(window_sums(first_hits, 32))
            ratio = later_hits.sum() / later_refs.sum()
            if interval is not None:
                num_right += interval.low <= ratio <= interval.high
                gaps.append(
                    f"{first_hits.sum() / refs.sum():.3f} "
                    f"({interval.low:.3f}-{interval.high:.3f}) {ratio:.3f}"
                )
        print(f"{policy:7} {num_right} of {len(gaps)}:  " + "  ".join(gaps), flush=True)


def main() -> None:
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
        # Skip the first stretch: the cache is cold.
        cold = trace.requests // (stretches + 1)
        report(name, np.diff(trace.offsets)[cold:], lru[cold:], arc[cold:], stretches)


if __name__ == "__main__":
    main()
