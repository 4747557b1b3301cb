"""CPU time of a plan's replays on a trace, extrapolated to ten million references.

    python bench/plan.py conversation_first60.jsonl
    python bench/plan.py chat --gpus 8
    python bench/plan.py chat --sessions 270000

Runs ``kvoffload plan`` with its defaults, for Llama-3.1-8B, in one process. ``--sample 1`` searches on all
sessions, even of a long trace; ``--sessions`` makes a built-in workload longer.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from kvoffload.model.kv_bytes import block_bytes
from kvoffload.plan.fleet import Fleet
from kvoffload.plan.plan import Plan
from kvoffload.plan.prices import Prices
from kvoffload.plan.targets import Target
from kvoffload.sweep.measuring import Work
from kvoffload.sweep.task import TraceSource
from kvoffload.traces.formats.mooncake import write_trace
from kvoffload.traces.sessions import generate
from kvoffload.traces.sources import block_tokens_of
from kvoffload.traces.workloads import builtin

MODEL = "meta-llama/Llama-3.1-8B"
LARGE_REFS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--target-of-ceiling", type=float, default=0.8)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--sessions", type=int)
    given = parser.parse_args()
    size = block_bytes(MODEL, None, block_tokens_of(given.trace))
    assert size is not None
    fleet = Fleet(given.gpus, 64 * 10**9, size, Prices())
    target = Target(of_ceiling=given.target_of_ceiling)
    with tempfile.TemporaryDirectory() as home:
        trace = given.trace
        if given.sessions:
            trace = str(Path(home) / "longer.jsonl")
            write_trace(generate(builtin(given.trace, sessions=given.sessions)), Path(trace))
        source = TraceSource(trace, None, False)
        output = Path(home) / "plan.csv"
        plan = Plan(source, fleet, target, work=Work(output=output, jobs=1), one_in=given.sample)
        start = time.process_time()
        result = plan.run()
        cpu_s = time.process_time() - start
        assert plan.journal_path is not None
        replays = len(plan.journal_path.read_bytes().splitlines())
    print(f"{result.trace}: {result.requests:,} requests, {result.block_refs:,} references")
    where = f"one of {result.one_in:,} sessions: {len(result.sampled):,} rows there,"
    print(f"searched on {where} {len(result.rows):,} on all sessions")
    print(f"{replays:,} different replays, {cpu_s:.1f} s of CPU time")
    row = result.chosen
    bought = f"{row.ram_modules} modules, {row.ssd_drives} drives for {row.price:,.0f}"
    print(f"{bought}, {row.setup}: {row.saved:.4f}")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory at most")
    if result.one_in == 1:
        minutes = cpu_s * LARGE_REFS / result.block_refs / 60
        print(f"{LARGE_REFS:,} references of this kind: {minutes:.0f} minutes of CPU time")


if __name__ == "__main__":
    main()
