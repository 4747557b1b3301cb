"""Cost of one tenant's scan to another tenant: ``python bench/tenants.py [--quick]``.

Replays recordings as one tenant (``other``) while a second tenant, ``scan``, stores a million blocks that are
never used again, spread over the recording, in requests of 64 blocks. RAM holds 5 % of the unique blocks of
the recording; the optional disk holds 10 %. The quotas reserve all but 64 blocks of RAM and of the disk for
the recording. Prints the prefix hits of the recording, and their loss against the recording alone:

- reserved: alone, in caches of the reserved sizes: the cost of the scan's memory
- quota: with the scan, under quotas
- none: with the scan, without quotas

Recordings come from the folder KVOFFLOAD_TRACES.

Also measures the longest and the mean `prepare_store` of a scan that has to search past a million protected
blocks, all colder than the scan's blocks.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.tenants import OTHER, Quota
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.structures.keys import Keys
from kvoffload.tiers.spec import parse_tiers
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace, TraceHints, codes_by_appearance

TRACES = {
    "agentic_3h": "agentic_coding/agentic_3h.jsonl.xz",
    "conversation_first60": "mooncake_conversation/conversation_first60.jsonl",
}
POLICIES = ("lru", "arc", "hazard")
RAM_SHARE, DISK_SHARE, TARGET = 0.05, 0.10, 0.01
SCAN_BLOCKS, SCAN_REQUEST = 1_000_000, 64
SCAN = Hints(tenant="scan")


def with_scan(trace: Trace, scan_blocks: int) -> Trace:
    """Insert the requests of the scan into a recording, at even distances."""
    num_scans = scan_blocks // SCAN_REQUEST
    own, first = np.arange(trace.requests), int(trace.block_ids.max()) + 1
    after = (np.arange(1, num_scans + 1) * trace.requests // num_scans).clip(max=trace.requests) - 0.5
    order = np.argsort(np.concatenate([own, after]), kind="stable")
    scans = np.arange(first, first + num_scans * SCAN_REQUEST).reshape(-1, SCAN_REQUEST)
    requests = [*np.split(trace.block_ids[trace.refs], trace.offsets[1:-1]), *scans]
    lengths = np.array([len(requests[number]) for number in order])
    block_ids, refs, _ = codes_by_appearance(np.concatenate([requests[number] for number in order]))
    hints = trace.hints or TraceHints((NO_HINTS,), np.zeros(trace.requests, np.int32))
    of_scans = np.full(num_scans, len(hints.different), np.int32)
    arrivals = trace.timestamps_ms[np.maximum(after, 0).astype(np.int64)]
    return Trace(
        name=f"{trace.name} and a scan",
        block_tokens=trace.block_tokens,
        block_ids=block_ids,
        refs=refs,
        offsets=np.cumsum([0, *lengths]),
        timestamps_ms=np.concatenate([trace.timestamps_ms, arrivals])[order],
        output_tokens=np.concatenate([trace.output_tokens, np.ones(num_scans, np.int64)])[order],
        hints=TraceHints((*hints.different, SCAN), np.concatenate([hints.numbers, of_scans])[order]),
    )


def hits(trace: Trace, config: ReplayConfig) -> int:
    """Replay a recording with or without a scan; return the prefix hits of the recording."""
    report = Replay(trace, config).run()
    rows = {row.tenant: row.prefix_hit_blocks for row in report.tenants}
    return rows.get(OTHER, report.prefix_hit_blocks)


def config_of(policy: str, ram: int, disk: int, reserved: dict[str, int] | None = None) -> ReplayConfig:
    """Create a replay's configuration; no disk if `disk` is 0. `reserved`: the recording's blocks by tier."""
    config = ReplayConfig(ram, policy, tiers=tuple(parse_tiers("tiers", f"simulated:{disk}")) if disk else ())
    if reserved is None:
        return config
    quotas = {
        name: {OTHER: Quota(blocks), SCAN.tenant: Quota(0, SCAN_REQUEST)} for name, blocks in reserved.items()
    }
    return replace(config, tenants=quotas.pop("ram"), tier_tenants=quotas)


def measure_hits(trace: Trace, scanned: Trace, disk_share: float) -> bool:
    """Print the table of a recording; return True if the target is reached."""
    ram, disk = (int(share * trace.unique_blocks) for share in (RAM_SHARE, disk_share))
    reserved = {"ram": ram - SCAN_REQUEST} | ({"simulated": disk - SCAN_REQUEST} if disk else {})
    scan_blocks = scanned.block_refs - trace.block_refs
    print(
        f"\n{trace.name}: {trace.requests:,} requests, {ram:,} blocks of RAM, {disk:,} of disk, "
        f"scan of {scan_blocks:,} blocks"
    )
    print(f"{'':8}{'alone':>12}{'reserved':>12}{'loss':>8}{'quota':>12}{'loss':>8}{'none':>12}{'loss':>8}")
    is_good = True
    for policy in POLICIES:
        alone = hits(trace, config_of(policy, ram, disk))
        measured = [
            hits(trace, config_of(policy, reserved["ram"], reserved.get("simulated", 0))),
            hits(scanned, config_of(policy, ram, disk, reserved)),
            # The quota of an unused tenant changes no decision, but makes the report list hits by tenant.
            hits(scanned, replace(config_of(policy, ram, disk), tenants={"nobody": Quota()})),
        ]
        losses = [1 - count / alone for count in measured]
        is_good &= losses[1] <= TARGET
        columns = "".join(f"{count:12,}{loss:8.2%}" for count, loss in zip(measured, losses, strict=True))
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
    logging.getLogger("kvoffload.tiering").setLevel(logging.ERROR)
    is_good, folder = True, Path(os.environ.get("KVOFFLOAD_TRACES", "."))
    if not arguments.search:
        for name, file in TRACES.items():
            if not arguments.quick or name == "conversation_first60":
                trace = load_trace(str(folder / file))
                scanned = with_scan(trace, SCAN_BLOCKS // (10 if arguments.quick else 1))
                for disk_share in (0.0, DISK_SHARE):
                    is_good &= measure_hits(trace, scanned, disk_share)
        print(f"\nloss under quotas at most {TARGET:.0%} for every policy: {'yes' if is_good else 'NO'}\n")
    for policy in arguments.policies.split(","):
        measure_search(policy, 100_000 if arguments.quick else 1_000_000)


if __name__ == "__main__":
    main()
