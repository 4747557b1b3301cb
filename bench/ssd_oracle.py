"""Upper limits of an SSD's admission rule with a write budget, with and without knowledge of the future.

Replays RAM without the SSD, then chooses the blocks to write among the blocks that RAM misses. Prints the
additional hits, in points of all block references, for four choices:

- oracle: the blocks with the most missed uses, all written at the start of the recording (the `oracle` of
  `kvoffload plan`);
- oracle, even budget: the best choice if the budget is spent evenly and a block hits only after its write;
  exact, by an assignment of writes to blocks (``--exact``, needs scipy, 20 s);
- future known, counts: a block is written when its future missed uses reach the best threshold;
- counts: a block is written when its past uses reach the best threshold.

The last two also spend the budget evenly, serve a block only behind its served parent, and know their best
threshold in advance. An admission rule without knowledge of the future can hardly exceed `counts`.

    python bench/ssd_oracle.py conversation_first60.jsonl --ram 409 --device 1907 --writes 2247
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.replay.write_bound import oracle_within_writes
from kvoffload.traces.format import read_trace
from kvoffload.traces.trace import Trace

Ints = npt.NDArray[np.int64]
THRESHOLDS = range(1, 21)


class Misses:
    """Block references, with the past and future uses of each block.

    Attributes:
        is_offered: RAM alone misses the block, so the engine computes it.
        past, future: earlier requests for the block; later requests that RAM alone misses.
    """

    def __init__(self, trace: Trace, hits_per_request: npt.NDArray[np.int32]) -> None:
        self.trace, self.hits = trace, hits_per_request
        lengths = np.diff(trace.offsets)
        depth = np.arange(trace.block_refs) - np.repeat(trace.offsets[:-1], lengths)
        self.is_offered = depth >= np.repeat(hits_per_request, lengths)
        order = np.argsort(trace.refs, kind="stable")
        sorted_refs = trace.refs[order]
        begins = np.flatnonzero(np.r_[True, sorted_refs[1:] != sorted_refs[:-1]])
        group = np.repeat(begins, np.diff(np.r_[begins, trace.block_refs]))
        self.past = np.empty(trace.block_refs, np.int64)
        self.past[order] = np.arange(trace.block_refs) - group
        is_missed_use = self.is_offered & (self.past > 0)
        until_here: Ints = np.cumsum(is_missed_use[order])
        until_group: Ints = until_here[group] - is_missed_use[order][group]
        total = np.bincount(trace.refs[is_missed_use], minlength=trace.unique_blocks)
        self.future = np.empty(trace.block_refs, np.int64)
        self.future[order] = total[sorted_refs] - (until_here - until_group)

    def hits_by_threshold(self, scores: Ints, least: int, num_writes: int) -> int:
        """Count the hits if blocks with at least this score are written while the even budget lasts."""
        trace = self.trace
        is_written = np.zeros(trace.unique_blocks, np.bool_)
        written = hits = 0
        for request in range(trace.requests):
            begin, end = trace.offsets[request] + self.hits[request], trace.offsets[request + 1]
            budget = num_writes * (request + 1) // trace.requests
            is_prefix = True
            for at in range(begin, end):
                block = trace.refs[at]
                is_prefix &= bool(is_written[block])
                hits += is_prefix
                if not is_written[block] and scores[at] >= least and written < budget:
                    is_written[block] = True
                    written += 1
        return hits

    def best_threshold(self, scores: Ints, num_writes: int) -> tuple[int, int]:
        """Return the most hits, and their threshold."""
        return max((self.hits_by_threshold(scores, least, num_writes), least) for least in THRESHOLDS)

    def even_oracle(self, num_writes: int) -> int:
        """Compute an upper bound of the hits of an evenly spent budget, by an assignment of writes to blocks.

        Write `n` is possible from request `n * requests / num_writes` on. Ignores that a block hits only
        behind its parent, so no rule exceeds the result.
        """
        from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

        trace = self.trace
        request_of = np.repeat(np.arange(trace.requests), np.diff(trace.offsets))
        offers = np.flatnonzero(self.is_offered & (self.future > 0))[::-1]
        blocks, columns = np.unique(trace.refs[offers], return_inverse=True)
        values = np.zeros((num_writes, len(blocks)), np.int16)
        current, at = np.zeros(len(blocks), np.int16), 0
        for write in range(num_writes - 1, -1, -1):
            earliest = -(-(write + 1) * trace.requests // num_writes) - 1
            while at < len(offers) and request_of[offers[at]] >= earliest:
                current[columns[at]] = self.future[offers[at]]
                at += 1
            values[write] = current
        rows, chosen = linear_sum_assignment(values, maximize=True)
        return int(values[rows, chosen].sum())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--ram", type=int, required=True, help="slots of RAM")
    parser.add_argument("--device", type=int, required=True, help="blocks of the device cache")
    parser.add_argument(
        "--writes", type=int, required=True, help="budget: blocks written during the recording"
    )
    parser.add_argument("--policy", default="hazard", help="policy of RAM")
    parser.add_argument("--exact", action="store_true", help="also the exact oracle with an even budget")
    options = parser.parse_args(arguments)
    trace = read_trace(options.trace)
    config = ReplayConfig(
        capacity_blocks=options.ram,
        policy=options.policy,
        device_blocks=options.device,
        store=ON_DEVICE_EVICTION,
    )
    alone = Replay(trace, config)
    alone.run()
    in_ram = int(alone.hits_per_request.sum())
    misses = Misses(trace, alone.hits_per_request)

    def show(name: str, hits: int, note: str = "") -> None:
        print(f"{name:24} {100 * hits / trace.block_refs:6.2f} points {note}".rstrip())

    print(f"RAM alone hits {100 * in_ram / trace.block_refs:.2f} % of {trace.block_refs:,} block references")
    show("oracle", oracle_within_writes(trace, alone.hits_per_request, options.writes) - in_ram)
    if options.exact:
        show("oracle, even budget", misses.even_oracle(options.writes))
    for name, scores in (("future known, counts", misses.future), ("counts", misses.past)):
        hits, least = misses.best_threshold(scores, options.writes)
        show(name, hits, f"(threshold {least})")


if __name__ == "__main__":
    main(sys.argv[1:])
