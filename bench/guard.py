"""The guard of `hazard` over many sizes of RAM: monotone hits, the lag behind LRU, and the mean lead.

Replays the first references of each recording at sizes in a geometric sequence, on three sides: on compute,
on compute behind a device, and as a victim tier behind that device. Prints the hit ratio of every policy at
every size, and for each policy a summary:

- drops: sizes whose hits are more than half a point below the hits of a smaller size, and the largest drop;
- lag: the largest number of points below `lru`;
- lead: the mean over all sizes and sides, in points.

    python bench/guard.py TRACES                                  about three minutes
    python bench/guard.py TRACES --policies lru hazard,promise=1  other variants
    python bench/guard.py --synthetic 40                          mixed traffic from 40 seeds

`TRACES` is the folder of the recordings. ``--synthetic`` replays 15 runs for each seed of
`tests/support/mixed`, and prints for each policy the mean and the lowest lead over the first policy, and the
number of low leads.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace

RECORDINGS = (
    "mooncake_conversation/conversation_first60.jsonl",
    "agentic_coding/agentic_3h.jsonl.xz",
    "agentic_coding/agentic_12h.jsonl.xz",
)
POLICIES = ("lru", "hazard", "hazard,promise=0.003", "hazard,promise=1")
SIDES = {
    "on-compute": (ON_COMPUTE, 0),
    "on-compute, device": (ON_COMPUTE, 1),
    "victim, device": (ON_DEVICE_EVICTION, 1),
}
DEVICE_SHARE = 0.02
SMALLEST, LARGEST, SIZES = 0.01, 0.6, 12
TOLERATED_DROP = 0.005
SYNTHETIC_SHARES = (0.005, 0.02, 0.05, 0.1, 0.4)
LOW_LEADS = (-0.003, -0.005, -0.01)
ROOT = Path(__file__).resolve().parent.parent


def first(trace: Trace, references: int) -> Trace:
    """Return the first requests of a trace, with at most `references` references."""
    requests = int(np.searchsorted(trace.offsets, references, "right")) - 1
    if requests == trace.requests:
        return trace
    refs = trace.refs[: trace.offsets[requests]]
    # Codes are numbered in order of first appearance, so the first requests have the first codes.
    return replace(
        trace,
        block_ids=trace.block_ids[: refs.max() + 1],
        refs=refs,
        offsets=trace.offsets[: requests + 1],
        timestamps_ms=trace.timestamps_ms[:requests],
        output_tokens=trace.output_tokens[:requests],
        hints=None,
    )


def sizes(trace: Trace) -> list[int]:
    shares = np.geomspace(SMALLEST, LARGEST, SIZES)
    return [max(4, round(share * trace.unique_blocks)) for share in shares]


def hits(trace: Trace, capacity: int, policy: str, side: str) -> float:
    store, device = SIDES[side]
    device_blocks = round(device * DEVICE_SHARE * trace.unique_blocks)
    return Replay(trace, ReplayConfig(capacity, policy, "all", device_blocks, store)).run().prefix_hit_ratio


def drops(ratios: list[float]) -> list[float]:
    """Subtract each ratio from the best ratio up to its size; 0 if it is the best."""
    best = accumulate(ratios, max)
    return [most - ratio for most, ratio in zip(best, ratios, strict=True)]


class Summary:
    """Drops, lag and lead of a policy."""

    def __init__(self) -> None:
        self.num_drops, self.drop, self.lag, self.leads = 0, 0.0, 0.0, list[float]()

    def add(self, ratios: list[float], lru: list[float]) -> None:
        self.num_drops += sum(drop > TOLERATED_DROP for drop in drops(ratios))
        self.drop = max(self.drop, *drops(ratios))
        leads = [ratio - other for ratio, other in zip(ratios, lru, strict=True)]
        self.leads += leads
        self.lag = max(self.lag, -min(leads))

    def __str__(self) -> str:
        return (
            f"drops {self.num_drops} (largest {self.drop * 100:.2f}), lag {self.lag * 100:.2f},"
            f" lead {np.mean(self.leads) * 100:+.2f}"
        )


def report(trace: Trace, policies: list[str], totals: dict[str, Summary]) -> None:
    print(f"\n## {trace.name}: {trace.block_refs:,} references, {trace.unique_blocks:,} unique blocks")
    capacities = sizes(trace)
    for side in SIDES:
        print(f"\n| {side} | {' | '.join(f'{each:,}' for each in capacities)} | |", flush=True)
        print("|---" * (len(capacities) + 2) + "|")
        lru: list[float] = []
        for policy in policies:
            ratios = [hits(trace, capacity, policy, side) for capacity in capacities]
            lru = lru or ratios
            of_side = Summary()
            of_side.add(ratios, lru)
            totals[policy].add(ratios, lru)
            print(f"| {policy} | {' | '.join(f'{each:.4f}' for each in ratios)} | {of_side} |", flush=True)


def replay_synthetic(seeds: int, policies: list[str]) -> None:
    """Replay mixed traffic; a device is as large as the tier."""
    sys.path.insert(0, str(ROOT / "tests"))
    support: Any = importlib.import_module("support.mixed")
    rows = []
    for seed in range(seeds):
        trace = support.mixed(seed)
        for share in SYNTHETIC_SHARES:
            capacity = max(4, round(share * trace.unique_blocks))
            for store, device in SIDES.values():
                configs = [ReplayConfig(capacity, each, "all", device * capacity, store) for each in policies]
                rows.append([Replay(trace, config).run().prefix_hit_ratio for config in configs])
    leads = np.array(rows) - np.array(rows)[:, :1]
    print(f"{len(rows)} runs, leads over {policies[0]} in points")
    for policy, of_policy in zip(policies, leads.T, strict=True):
        low = ", ".join(f"{(of_policy < bound).sum()} below {bound * 100:g}" for bound in LOW_LEADS)
        print(f"{policy}: mean {of_policy.mean() * 100:+.2f}, lowest {of_policy.min() * 100:.2f}; {low}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--synthetic", type=int, metavar="SEEDS")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="the first is the baseline")
    parser.add_argument(
        "--references", type=int, default=300_000, help="references of each recording, from its beginning"
    )
    args = parser.parse_args()
    if args.synthetic:
        replay_synthetic(args.synthetic, list(args.policies))
        return
    if args.traces is None:
        parser.error("TRACES or --synthetic is missing")
    totals = {policy: Summary() for policy in args.policies}
    for name in RECORDINGS:
        report(first(read_trace(args.traces / name), args.references), list(args.policies), totals)
    print("\n## All, in points")
    for policy, summary in totals.items():
        print(f"{policy}: {summary}")


if __name__ == "__main__":
    main()
