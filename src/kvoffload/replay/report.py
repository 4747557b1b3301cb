"""Report of a replay: counters of the whole replay, of each tier and of each tenant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvoffload.text import Report
from kvoffload.whatif.estimate import Estimate


def sums_of(reports: Iterable[object], *names: str) -> dict[str, Any]:
    """Return, for each field in `names`, the sum of its values in all reports."""
    listed = list(reports)
    return {name: sum(getattr(report, name) for report in listed) for name in names}


class HeldBlocks(msgspec.Struct, frozen=True):
    """Quota and blocks of a tenant, in RAM or in a tier behind RAM.

    Attributes:
        min_blocks, max_blocks: the tenant's quota. If `max_blocks` is null, there is no upper limit.
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
        hit_blocks: number of block references served from this tier. If a faster tier also has the block, the
            reference counts for the faster tier.
        blocks_written, blocks_evicted: blocks written to the tier, and blocks evicted from it. In RAM,
            promotions count as writes, and the evictions that they cause count, too.
        bytes_written, bytes_read: bytes written to the tier and read from it; 0 if the replay moves no bytes.
        mismatches_caught: blocks that failed their checksum and became misses.
        unanswered_blocks: number of blocks in those probes, reads and writes that exceeded their deadline.
        outages, outage_s: number of outages, and their total duration in seconds. During an outage all blocks
            of the tier are misses.
        requests: if the tier is a bucket, the number of requests sent to it.
        cost: price of these requests and of the bytes received, at the prices in the tier's options.
        tenants: if the tier is behind RAM and has quotas, the blocks of each tenant.
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

    The quota is the quota on one instance, and is the same on each. The tenant ``other`` stands for the
    requests of all tenants without a quota.

    Attributes:
        block_refs: block references of the tenant's requests.
        prefix_hit_blocks: number of these block references that were prefix hits.
    """

    block_refs: int
    prefix_hit_blocks: int


class ReplayReport(Report, frozen=True, kw_only=True):
    """Outcome of one replay; the fields are the keys of its JSON object.

    A *block reference* is one block of one request. A reference is a prefix hit if its block and all blocks
    before it in the request were found on the device or in the tiers. Ratios are shares of all block
    references.

    Attributes:
        assumed: assumptions that were made when the trace was converted from another format.
        capacity_blocks, device_blocks: sizes of the RAM tier and of the device cache.
        store: the event after which blocks are offered to RAM, as in `ReplayConfig`.
        skipped_lines: number of malformed lines of the trace, which were ignored.
        prefix_hit_blocks, prefix_hit_ratio: prefix hits on the device and in all tiers together.
        device_hit_blocks: prefix hits on the device.
        offload_hit_blocks: prefix hits in RAM and all tiers behind it.
        block_hit_ratio: share of the references whose block was resident, even if an earlier block of the
            request was absent. A block is resident if it is in RAM, also if it was promoted for this request.
            For a victim tier, blocks on the device are resident, too.
        infinite_hit_ratio: prefix-hit ratio of a cache without a limit of size.
        optimum_hit_ratio: upper bound of the prefix-hit ratio: no policy exceeds it with this device cache
            and one cache as large as all tiers together. The bound assumes that the cache is empty at the
            start, so the hits may exceed it if a disk has blocks of an earlier run.
        tokens: number of prompt tokens in full blocks.
        tokens_saved: number of those prompt tokens whose block was a prefix hit.
        share_outside_blocks: share of the prompt tokens that are in no full block; null if it is unknown.
        blocks_written, blocks_evicted, blocks_refused, blocks_dropped: counters of RAM. A block is refused by
            the admission rule or the policy, and dropped if there is no room.
        blocks_promoted: the part of `blocks_written` that was promoted from tiers behind RAM.
        writes_per_ref: `blocks_written`, divided by the number of block references.
        block_bytes, bytes_stored, bytes_loaded: size of a block, and bytes written to RAM and read from RAM;
            0 if the replay moves no bytes.
        blocks_verified: number of blocks whose checksum was verified when they were read.
        mismatches_caught: damaged blocks that became misses.
        mismatches_served: blocks served with wrong bytes; more than 0 is a bug.
        damage_injected: number of blocks damaged on purpose. Not all are caught, because some are evicted
            before they are read.
        control_plane_s: CPU seconds spent on decisions.
        data_plane_s: CPU seconds spent on moving and checking bytes, plus the elapsed seconds of waits for
            the tiers behind RAM.
        decisions_sha256: SHA-256 of the decision log (`DecisionLog`).
        version: version of kvoffload.
        decode_tokens_per_s, queue_requests: assumptions of the replay, as in `ReplayConfig`.
        policy_state: statistics of the policy at the end.
        instances: number of engines. Sizes of caches are sizes on one instance; all other numbers are sums or
            means over all instances.
        routing: rule that assigned requests to instances; empty for one engine.
        shared_ram: True if the instances of a machine share one RAM pool, which has room for
            `capacity_blocks` blocks per instance.
        hit_blocks_of_others: number of references served from blocks that another instance had written to the
            shared RAM or the shared tier.
        tiers: reports of RAM and the tiers behind it, fastest first; their `hit_blocks` add up to
            `offload_hit_blocks`.
        what_if_sample: if this is `n`, about one block in `n` was sampled for `what_if`; 0 if `what_if` is
            empty.
        what_if: estimated hit ratios: first for the current setting of RAM, then for other settings.
        tenants: reports of each tenant with a quota, then of all other requests; empty without quotas.
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
