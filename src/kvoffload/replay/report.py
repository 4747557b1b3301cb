"""Report of a replay: counters of the whole replay, of each tier and of each tenant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvoffload.text import Report
from kvoffload.whatif.estimate import Estimate


def sums_of(reports: Iterable[object], *names: str) -> dict[str, Any]:
    """Return the sum of each field in `names` over several reports."""
    listed = list(reports)
    return {name: sum(getattr(report, name) for report in listed) for name in names}


class HeldBlocks(msgspec.Struct, frozen=True):
    """Blocks of a tenant in RAM, or in a tier with quotas.

    Attributes:
        min_blocks, max_blocks: the quota; `max_blocks` null for no limit.
        blocks_held: number of blocks that the tenant owns at the end.
        blocks_evicted: number of the tenant's blocks that were evicted.
    """

    tenant: str
    min_blocks: int
    max_blocks: int | None
    blocks_held: int
    blocks_evicted: int


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tier.

    Attributes:
        name: ``ram``, or the tier's name (`kvoffload.tiers.spec.names_of`).
        hit_blocks: block references served from this tier. If a faster tier also has the block, the reference
            counts for the faster tier.
        blocks_written, blocks_evicted: blocks written to the tier, and blocks evicted from it. The counters
            of RAM include promotions and the evictions that they cause.
        bytes_written, bytes_read: 0 without data.
        mismatches_caught: blocks that failed their checksum and became misses.
        unanswered_blocks: number of blocks in probes, reads and writes that exceeded their deadline.
        outages, outage_s: number of outages, and their total duration in seconds. During an outage all blocks
            of the tier are misses.
        requests: requests to a bucket.
        cost: price of these requests and of the bytes received, at the tier's prices.
        tenants: blocks of each tenant, for a tier behind RAM with quotas.
    """

    name: str
    hit_blocks: int
    blocks_written: int
    blocks_evicted: int
    bytes_written: int
    bytes_read: int
    mismatches_caught: int
    requests: int = 0
    cost: float = 0.0
    unanswered_blocks: int = 0
    outages: int = 0
    outage_s: float = 0.0
    tenants: list[HeldBlocks] = []


class TenantReport(HeldBlocks, frozen=True, kw_only=True):
    """Counters of a tenant with a quota of RAM.

    Each instance has the same quota. The tenant ``other`` stands for the requests of all other tenants.

    Attributes:
        block_refs: block references of the tenant's requests.
        prefix_hit_blocks: number of these block references that were prefix hits.
    """

    block_refs: int
    prefix_hit_blocks: int


class ReplayReport(Report, frozen=True, kw_only=True):
    """Outcome of one replay; the fields are the keys of its JSON object.

    A *block reference* is one block of one request. Hits are counted along the prefix: a request hits its
    leading run of blocks on the device, then in the tiers. Ratios are shares of all block references.

    Attributes:
        assumed: assumptions of the conversion that made the trace.
        capacity_blocks, device_blocks: sizes of the RAM tier and of the device cache.
        store: moment at which blocks are offered to RAM.
        skipped_lines: malformed lines of the trace, left out.
        prefix_hit_blocks, prefix_hit_ratio: references served by the device and all tiers.
        device_hit_blocks: prefix hits of the device.
        offload_hit_blocks: prefix hits of all tiers.
        block_hit_ratio: share of the references whose block was resident, even if an earlier block of the
            request was absent. Resident means in RAM, also by promotion for this request. For a victim tier,
            blocks on the device are resident, too.
        infinite_hit_ratio: prefix-hit ratio of an unlimited cache.
        optimum_hit_ratio: upper bound of the prefix-hit ratio for any policy behind this device, in a cache
            with the capacity of all tiers together. The bound assumes that the cache is empty at the start,
            so hits may exceed it if a disk has blocks of an earlier run.
        tokens: prompt tokens in full blocks.
        tokens_saved: number of these prompt tokens whose block was a prefix hit.
        share_outside_blocks: share of the prompt tokens that are in no whole block; null if it is unknown.
        blocks_written, blocks_evicted, blocks_refused, blocks_dropped: counters of RAM. A block is refused by
            the admission rule or the policy, and dropped if there is no room.
        blocks_promoted: blocks among `blocks_written` that came from lower tiers.
        writes_per_ref: blocks written per block reference.
        block_bytes, bytes_stored, bytes_loaded: 0 without data.
        blocks_verified: blocks whose checksum was compared when they were read.
        mismatches_caught: damaged blocks that became misses.
        mismatches_served: blocks served with wrong bytes; more than 0 is a bug.
        damage_injected: blocks damaged on purpose; some are evicted before they are read.
        control_plane_s: CPU time of decisions.
        data_plane_s: CPU time of moving and checking bytes, plus elapsed time of waits for lower tiers.
        decisions_sha256: digest of the decision log.
        version: version of kvoffload.
        decode_tokens_per_s, queue_requests: assumptions, as in `ReplayConfig`.
        policy_state: statistics of the policy at the end.
        instances: number of engines. Sizes are per instance; all other numbers are sums or means over all
            instances.
        routing: rule that assigned requests to instances; empty for one engine.
        shared_ram: True if the instances of a machine share one RAM pool. The pool has `capacity_blocks` for
            each instance.
        hit_blocks_of_others: references served from blocks that another instance wrote to the shared RAM or
            the shared tier.
        tiers: RAM and the tiers behind it, fastest first; their `hit_blocks` add up to `offload_hit_blocks`.
        what_if_sample: one block in this many was sampled for `what_if`; 0 if `what_if` is empty.
        what_if: estimates for the current setting of RAM, then for other settings.
        tenants: counters of each tenant with a quota, then of all other requests; empty without quotas.
    """

    trace: str
    policy: str
    admission: str
    capacity_blocks: int
    device_blocks: int
    store: str
    requests: int
    block_refs: int
    unique_blocks: int
    skipped_lines: int
    prefix_hit_blocks: int
    prefix_hit_ratio: float
    device_hit_blocks: int
    offload_hit_blocks: int
    block_hit_ratio: float
    infinite_hit_ratio: float
    optimum_hit_ratio: float
    tokens: int
    tokens_saved: int
    share_outside_blocks: float | None = None
    assumed: str = ""
    blocks_written: int
    blocks_evicted: int
    blocks_refused: int
    blocks_dropped: int
    blocks_promoted: int = 0
    writes_per_ref: float
    block_bytes: int
    bytes_stored: int
    bytes_loaded: int
    blocks_verified: int
    mismatches_caught: int
    mismatches_served: int
    damage_injected: int
    control_plane_s: float
    data_plane_s: float
    decisions_sha256: str
    version: str
    decode_tokens_per_s: float
    queue_requests: int
    policy_state: dict[str, float]
    tiers: list[TierReport]
    instances: int = 1
    routing: str = ""
    shared_ram: bool = False
    hit_blocks_of_others: int = 0
    what_if_sample: int = 0
    what_if: list[Estimate] = msgspec.field(default_factory=list)
    tenants: list[TenantReport] = msgspec.field(default_factory=list)
