"""Cost of one tenant's scan to another tenant: ``python bench/tenants.py [--quick]``.

Replays recordings as one tenant (``other``) while a second tenant, ``scan``, stores blocks that nobody uses
again: a million blocks, spread over the recording, in requests of 64 blocks. The capacity is 5 % of the
unique blocks of the recording. The quotas reserve all of it but 64 blocks for the recording. Prints the
prefix hits of the recording, and their losses against a cache that the recording has alone:

- reserved: alone, in a cache of the reserved size; this is what the memory of the scan costs
- quota: with the scan, under quotas
- none: with the scan, without quotas

Recordings are read from the folder that KVOFFLOAD_TRACES names.

Also measures the longest and the mean `prepare_store` of a scan past a million protected blocks, which are
colder than all blocks of the scan.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.tenants import OTHER, Quota
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.structures.keys import Keys
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

TRACES = {
    "agentic_3h": "agentic_coding/agentic_3h.jsonl.xz",
    "conversation_first60": "mooncake_conversation/conversation_first60.jsonl",
}
POLICIES = ("lru", "arc", "hazard")
CAPACITY_SHARE, TARGET = 0.05, 0.01
SCAN_BLOCKS, SCAN_REQUEST = 1_000_000, 64
SCAN = Hints(tenant="scan")


class Scan:
    """A tenant that stores new blocks and uses none again."""

    def __init__(self, manager: OffloadingManager, num_blocks: int) -> None:
        self._manager, self._left = manager, num_blocks
        self._random = np.random.default_rng(7)

    def store(self, num_blocks: int) -> None:
        """Store this many blocks, in requests of `SCAN_REQUEST` blocks."""
        manager = self._manager
        while num_blocks > 0 and self._left > 0:
            count = min(SCAN_REQUEST, num_blocks, self._left)
            words = self._random.integers(0, 2**63, (count, KEY_BYTES // 8), np.uint64)
            keys = Keys(words, KEY_BYTES)
            ctx = manager.begin_request("scan", keys, hints=SCAN)
            manager.lookup(keys, ctx)
            plan = manager.prepare_store(keys, ctx)
            if plan is not None:
                manager.complete_store(plan)
            manager.finish_request(ctx)
            num_blocks -= count
            self._left -= count


def hits(trace: Trace, policy: str, capacity: int, quotas: dict[str, Quota], scan_blocks: int) -> int:
    """Replay a recording with a scan beside it; return the prefix hits of the recording."""
    replay = Replay(trace, ReplayConfig(capacity, policy))
    manager = replay.manager
    assert isinstance(manager, OffloadingManager)
    manager.set_tenants(quotas)
    scan = Scan(manager, scan_blocks)
    due = 0.0
    for request in range(trace.requests):
        replay.serve(request)
        due += scan_blocks / trace.requests
        if due >= SCAN_REQUEST:
            scan.store(int(due))
            due -= int(due)
    replay.finish()
    return int(replay.hits_per_request.sum())


def measure_hits(path: Path, name: str, scan_blocks: int) -> bool:
    trace = load_trace(str(path))
    capacity = int(CAPACITY_SHARE * trace.unique_blocks)
    reserved = capacity - SCAN_REQUEST
    quotas = {OTHER: Quota(reserved), "scan": Quota(0, SCAN_REQUEST)}
    print(f"\n{name}: {trace.requests:,} requests, {capacity:,} slots, scan of {scan_blocks:,} blocks")
    print(f"{'':8}{'alone':>12}{'reserved':>12}{'loss':>8}{'quota':>12}{'loss':>8}{'none':>12}{'loss':>8}")
    is_good = True
    for policy in POLICIES:
        alone = hits(trace, policy, capacity, {}, 0)
        others = [
            hits(trace, policy, reserved, {}, 0),
            hits(trace, policy, capacity, quotas, scan_blocks),
            hits(trace, policy, capacity, {}, scan_blocks),
        ]
        losses = [1 - count / alone for count in others]
        is_good &= losses[1] <= TARGET
        columns = "".join(f"{count:12,}{loss:8.2%}" for count, loss in zip(others, losses, strict=True))
        print(f"{policy:8}{alone:12,}{columns}", flush=True)
    return is_good


def measure_search(policy: str, num_protected: int) -> None:
    """Measure the stores of a scan whose searches pass many protected blocks."""
    manager = OffloadingManager(
        num_protected + 20_000,
        key_bytes=KEY_BYTES,
        policy=policy,
        tenants={OTHER: Quota(num_protected), "scan": Quota()},
    )
    random = np.random.default_rng(3)
    for _ in range(num_protected // 1000):
        keys = Keys(random.integers(0, 2**63, (1000, KEY_BYTES // 8), np.uint64), KEY_BYTES)
        ctx = manager.begin_request("protected", keys)
        plan = manager.prepare_store(keys, ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)
    times = []
    for _ in range(3000):
        keys = Keys(random.integers(0, 2**63, (SCAN_REQUEST, KEY_BYTES // 8), np.uint64), KEY_BYTES)
        ctx = manager.begin_request("scan", keys, hints=SCAN)
        start = time.thread_time_ns()
        plan = manager.prepare_store(keys, ctx)
        times.append((time.thread_time_ns() - start) / 1e6)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
    held = manager.stats().tenants[OTHER].held
    print(
        f"{policy:10}{held:12,} protected: prepare_store of {SCAN_REQUEST} blocks: "
        f"median {statistics.median(times):.3f} ms, mean {statistics.mean(times):.3f} ms, "
        f"second longest {sorted(times)[-2]:.2f} ms, longest {max(times):.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the short recording, 100,000 blocks")
    parser.add_argument("--search", action="store_true", help="only the searches")
    parser.add_argument("--policies", default=",".join(POLICIES), help="policies of the searches")
    arguments = parser.parse_args()
    is_good, folder = True, Path(os.environ.get("KVOFFLOAD_TRACES", "."))
    if not arguments.search:
        for name, file in TRACES.items():
            if not arguments.quick or name == "conversation_first60":
                is_good &= measure_hits(folder / file, name, SCAN_BLOCKS // (10 if arguments.quick else 1))
        print(f"\nloss under quotas at most {TARGET:.0%} for every policy: {'yes' if is_good else 'NO'}\n")
    for policy in arguments.policies.split(","):
        measure_search(policy, 100_000 if arguments.quick else 1_000_000)


if __name__ == "__main__":
    main()
