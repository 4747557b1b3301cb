"""What a replay found."""

from __future__ import annotations

import msgspec


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier did.

    Attributes:
        name: ``ram``, ``disk``, ``simulated``.
        hit_blocks: references that were served from here, not from a tier above.
        blocks_written, blocks_evicted: of RAM also what came up from below.
        bytes_written, bytes_read: 0 without data.
        mismatches_caught: blocks that were not what had been stored, and became misses.
        unanswered_blocks: blocks of probes, reads and writes that were not answered in time.
        outages: how often the tier was given up because it did not answer; outage_s: for how many seconds it
            was unavailable. All its blocks were misses then.
        requests: to a bucket; cost: what they and the bytes received come to, at the tier's prices.
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


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one replay; the fields are the keys of its JSON object.

    A *block reference* is one block of one request. Hits are counted along the prefix: a request hits its
    leading run of blocks that the device, and then the tier, hold.

    Attributes:
        trace, policy, admission: what was replayed through what.
        capacity_blocks, device_blocks: sizes of the RAM tier, and of the device cache in front of it.
        store: when a block is offered to the tier.
        requests, block_refs, unique_blocks: size of the trace.
        skipped_lines: bad lines of the trace that were left out.
        prefix_hit_blocks: references served by device and tier together; prefix_hit_ratio: their share.
        device_hit_blocks, offload_hit_blocks: the same by place.
        block_hit_ratio: share of references whose block the tier held, at any depth; of a victim tier,
            device and tier together.
        infinite_hit_ratio: prefix-hit ratio of a cache that never evicts.
        optimum_hit_ratio: the most that any policy could reach from empty with the capacity of all tiers
            together, behind this device; what a disk holds from an earlier run may lift it above that.
        tokens, tokens_saved: prompt tokens in full blocks, and those that need not be computed.
        blocks_written, blocks_evicted, blocks_refused, blocks_dropped: what the tier did; refused by the
            admission rule or the policy, dropped for want of room.
        writes_per_ref: blocks written per block reference.
        block_bytes, bytes_stored, bytes_loaded: 0 without data.
        blocks_verified: blocks compared with their checksum when they were read.
        mismatches_caught: blocks found damaged by that, and turned into misses.
        mismatches_served: blocks handed out although their bytes were wrong. Anything but 0 is a bug.
        damage_injected: blocks damaged on purpose; those that were evicted first are never read.
        control_plane_s: CPU time spent deciding. data_plane_s: CPU time spent moving and checking bytes, and
            the time for which tiers behind RAM were waited for.
        decisions_sha256: digest of the decision log.
        version: of kvoffload.
        decode_tokens_per_s: the speed at which requests were assumed to generate their answers; 0: they ended
            as soon as they were served.
        queue_requests: how many requests were assumed to wait in the engine's queue.
        policy_state: what the policy says of itself at the end.
        instances: of the engine; routing: which of them served what. Sizes are of each; all else is of all
            together.
        hit_blocks_of_others: references served from blocks that another instance wrote to the shared tier.
        tiers: RAM and what is behind it, top to bottom; their `hit_blocks` add up to `offload_hit_blocks`.
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
    blocks_written: int
    blocks_evicted: int
    blocks_refused: int
    blocks_dropped: int
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
    hit_blocks_of_others: int = 0

    def to_json(self) -> bytes:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
