"""What a plan costs: CPU time of its replays on a trace, and what that would be for ten million references.

    python bench/plan.py conversation_first60.jsonl
    python bench/plan.py chat --gpus 8

The plan is that of ``kvoffload plan`` with its defaults, for Llama-3.1-8B, in one process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from kvoffload.models import block_bytes
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.plan import Plan
from kvoffload.plan.prices import Prices
from kvoffload.plan.targets import Target
from kvoffload.sweep.task import TraceSource
from kvoffload.traces.sources import block_tokens_of

MODEL = "meta-llama/Llama-3.1-8B"
LARGE_REFS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--target-of-ceiling", type=float, default=0.8)
    given = parser.parse_args()
    size = block_bytes(MODEL, None, block_tokens_of(given.trace))
    assert size is not None
    fleet = Fleet(given.gpus, 64 * 10**9, size, Prices())
    target = Target(of_ceiling=given.target_of_ceiling)
    with tempfile.TemporaryDirectory() as home:
        plan = Plan(
            TraceSource(given.trace, None, False), fleet, target, output=Path(home) / "plan.csv", jobs=1
        )
        start = time.process_time()
        found = plan.run()
        cpu_s = time.process_time() - start
        assert plan.journal_path is not None
        replays = len(plan.journal_path.read_bytes().splitlines())
    each_us = 1e6 * cpu_s / replays
    print(f"{found.trace}: {found.requests:,} requests, {found.block_refs:,} references")
    print(f"{len(found.rows):,} rows, {replays:,} different replays, {cpu_s:.1f} s of CPU time")
    print(f"{each_us / found.block_refs:.2f} us a reference, {each_us / found.requests:.0f} us a request")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at most")
    minutes = cpu_s * LARGE_REFS / found.block_refs / 60
    print(f"{LARGE_REFS:,} references like these: {minutes:.0f} minutes of CPU time, on two cores half")


if __name__ == "__main__":
    main()
