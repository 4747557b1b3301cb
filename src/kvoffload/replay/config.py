"""Configuration of a replay: capacities, policies, engines, quotas, and settings to try.

Owns the checks of options that exclude each other, and the capacities that are computed from several options.
Does not know how a replay runs, and opens no tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.quotas import ONE_OWNER
from kvoffload.core.tenants import OTHER, Quota, check_quotas
from kvoffload.errors import ConfigError, Problems
from kvoffload.replay.ends import DecodeSpeed
from kvoffload.replay.engines import QueueLength
from kvoffload.replay.members import may_be_shared
from kvoffload.replay.routing import SESSION, Instances, Routing
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.settings.read import check_fields
from kvoffload.tiers.spec import TierOptions, names_of
from kvoffload.traces.trace import Trace
from kvoffload.whatif import WhatIf
from kvoffload.whatif.setting import OneIn
from kvoffload.whatif.shadows import ONE_IN

NEEDS_INSTANCES = "it needs several engines: set instances to 2 or more"
ONE_DEVICE = f"with shared-ram allowed: {ON_COMPUTE}, because a victim tier follows one device"
_SHARES = "with shared-ram there are no quotas, because the engines of a pool have shares instead"


@dataclass(frozen=True)
class ReplayConfig:
    """Configuration of a replay: its caches, and its assumptions about engines and requests.

    Attributes:
        capacity_blocks: number of slots of the RAM tier.
        policy, admission: arguments of `OffloadingManager`.
        device_blocks: capacity of an LRU device cache in front of RAM; 0 for no device cache.
        store: the event after which blocks are offered to RAM: ``on-compute`` or ``on-device-eviction``.
        tiers: tiers behind RAM, fastest first; capacities are numbers of blocks (`TierOptions.in_blocks`).
        decode_tokens_per_s: the speed at which each request is assumed to generate its tokens, which
            determines when the request ends. If 0, a request ends as soon as its blocks are loaded or
            computed. From this moment on the device may drop the blocks, even if the request ends later.
        queue_requests: the number of requests that are assumed to wait in the engine's queue. The manager
            expects the blocks of these requests (`OffloadingManager.expect`).
        instances: number of engines. Each engine has its own device, RAM and tiers, but all engines share the
            last tier if this tier is simulated (`may_be_shared`). `SharedReplay` replays several engines.
        routing: rule that assigns requests to instances (`replay.routing`).
        shared_ram: True if the instances share one RAM pool of ``instances * capacity_blocks`` slots.
            Each instance still has its own device, admission rule and tiers. Allowed with ``on-compute``
            only, because a victim tier belongs to one device.
        tenants: for each tenant, by name (`Hints.tenant`), its quota of RAM in blocks. The quotas hold for
            the RAM of each instance. Allowed with ``on-compute`` only, and not with `shared_ram`.
        tier_tenants: for each tier behind RAM, by name, the quotas of tenants. A tenant with a quota of a
            tier must also have a quota of RAM, which may be empty. Allowed with one instance only.
        machines: with `shared_ram`, the number of machines. Each machine has its own RAM pool for an equal
            share of the instances; the first machine runs the instances with the lowest numbers.
        what_if: other settings of RAM; the replay estimates their hit ratios from a sample of the blocks.
            Allowed with one instance and ``on-compute`` only.
        what_if_sample: if this is `n`, the sample contains about one block in `n`.

    Raises: `ConfigError` if a field is out of range, or if fields exclude each other. But the values of the
    fields before `decode_tokens_per_s` are checked only when the caches are created.
    """

    capacity_blocks: int
    policy: str | type[EvictionPolicy] = "lru"
    admission: str = "all"
    device_blocks: int = 0
    store: str = ON_COMPUTE
    tiers: tuple[TierOptions, ...] = ()
    decode_tokens_per_s: DecodeSpeed = field(default=0.0, metadata={"option": "decode-tokens-per-s"})
    queue_requests: QueueLength = field(default=0, metadata={"option": "queue"})
    instances: Instances = 1
    routing: Routing = SESSION
    shared_ram: bool = False
    machines: Instances = 1
    tenants: Mapping[str, Quota] = field(default_factory=dict)
    tier_tenants: Mapping[str, Mapping[str, Quota]] = field(default_factory=dict)
    what_if: tuple[WhatIf, ...] = ()
    what_if_sample: OneIn = ONE_IN

    def __post_init__(self) -> None:
        check_fields(self, "replay")
        if self.tenants or self.tier_tenants:
            self._check_tenants()
        if self.shared_ram or self.machines > 1:
            self._check_shared_ram()
        if self.what_if:
            self._check_what_if()

    def _check_tenants(self) -> None:
        if self.store == ON_DEVICE_EVICTION:
            raise ConfigError("tenants", ", ".join(self.tenants), ONE_OWNER)
        if self.shared_ram:
            raise ConfigError("tenants", ", ".join(self.tenants), _SHARES)
        check_quotas(self.tenants, self.capacity_blocks)
        if self.tier_tenants and self.instances > 1:
            raise ConfigError("instances", self.instances, "with quotas of tiers allowed: 1")
        blocks = dict(zip(names_of(self.tiers), (tier.num_blocks for tier in self.tiers), strict=True))
        for tier, quotas in self.tier_tenants.items():
            if tier not in blocks:
                raise ConfigError("tenants", tier, f"allowed as tiers: {', '.join(blocks) or 'none'}")
            for name in quotas.keys() - {*self.tenants, OTHER}:
                why = "a tenant of a tier needs a quota of RAM, which may be empty"
                raise ConfigError("tenants", name, why)
            check_quotas(quotas, blocks[tier])

    def _check_shared_ram(self) -> None:
        problems = Problems("replay")
        if self.instances == 1:
            problems.add("shared-ram", self.shared_ram, NEEDS_INSTANCES)
        if self.instances % self.machines or not self.shared_ram:
            why = f"with shared-ram allowed: a divisor of {self.instances}, the number of instances"
            problems.add("machines", self.machines, why)
        if self.store != ON_COMPUTE:
            problems.add("store", self.store, ONE_DEVICE)
        problems.check()

    def _check_what_if(self) -> None:
        problems = Problems("replay")
        if self.store != ON_COMPUTE:
            problems.add("store", self.store, f"with what-if allowed: {ON_COMPUTE}")
        if self.instances > 1:
            problems.add("instances", self.instances, "with what-if allowed: 1")
        problems.check()

    @property
    def engines_of_pool(self) -> int:
        """Number of engines that use the same RAM."""
        return self.instances // self.machines if self.shared_ram else 1

    @property
    def shares_last_tier(self) -> bool:
        """True if several engines share the last tier."""
        return bool(self.tiers) and may_be_shared(self.tiers[-1])

    @property
    def pool_blocks(self) -> int:
        """Capacity in blocks of one engine's RAM or, with `shared_ram`, of the RAM of one machine."""
        return self.capacity_blocks * self.engines_of_pool

    @property
    def tier_blocks(self) -> int:
        """Sum of the capacities of one engine's tiers behind RAM, in blocks."""
        return sum(tier.num_blocks for tier in self.tiers)

    @property
    def offload_blocks(self) -> int:
        """Sum of the capacities of one RAM and of all tiers behind it, in blocks.

        If several engines use the RAM, the tiers of each engine are included, but a shared last tier counts
        once.
        """
        shared = self.tiers[-1].num_blocks if self.shares_last_tier else 0
        return self.pool_blocks + self.engines_of_pool * (self.tier_blocks - shared) + shared

    def manager_options(self, num_slots: int) -> dict[str, Any]:
        """Return the keyword arguments of an `OffloadingManager` with this many slots."""
        return {
            "key_bytes": KEY_BYTES,
            "policy": self.policy,
            "admission": self.admission,
            "store": self.store,
            "tenants": quotas_for(num_slots, self.capacity_blocks, self.tenants),
        }

    def columns(self) -> dict[str, Any]:
        """Return the fields that replay reports and rows of a sweep repeat as columns of the same name."""
        return {
            "admission": self.admission,
            "store": self.store,
            "capacity_blocks": self.capacity_blocks,
            "device_blocks": self.device_blocks,
            "decode_tokens_per_s": float(self.decode_tokens_per_s),
            "queue_requests": self.queue_requests,
            "shared_ram": self.shared_ram,
        }


def quotas_for(num_slots: int, capacity_blocks: int, quotas: Mapping[str, Quota]) -> Mapping[str, Quota]:
    """Return the quotas for a cache with `num_slots` slots, the result of `slots_needed`.

    If `num_slots` is less than `capacity_blocks`, the cache can hold all blocks of the trace. Then no tenant
    needs a guaranteed minimum, so the result has no minimums.
    """
    if num_slots >= capacity_blocks:
        return quotas
    return {name: Quota(0, quota.max_blocks) for name, quota in quotas.items()}


def slots_needed(trace: Trace, capacity_blocks: int) -> int:
    """Return `capacity_blocks`, but not more than the trace has unique blocks, and at least 1.

    A cache with more slots than unique blocks would leave slots unused. Raises: `ConfigError` for a capacity
    below 1.
    """
    if capacity_blocks < 1:
        raise ConfigError("capacity_blocks", capacity_blocks, "allowed: 1 or more")
    return max(1, min(capacity_blocks, trace.unique_blocks))
