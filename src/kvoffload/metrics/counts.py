"""Values of metrics, computed from the counters of a manager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from kvoffload.core.miss_reasons import LIVE_REASONS
from kvoffload.core.tenants import TenantStats
from kvoffload.metrics.families import (
    MISSES,
    NOT_OFFERED,
    NOT_PROMOTED,
    NOT_PROMOTED_REASONS,
    POLICY,
    REFUSED,
    TENANT_TIER,
    TIER,
    TIER_COUNTERS,
    TIER_GAUGES,
)
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager


class Value(NamedTuple):
    """A value of a metric: the name of the metric family, the values of its labels, and the number."""

    name: str
    labels: tuple[str, ...]
    value: float


def manager_values(manager: AnyManager) -> Iterator[Value]:
    """Return the values of RAM, of its policy, and of the tiers.

    Thread: the scheduler's, because tiers may change while their counters are read.
    """
    # In a shared pool `stats` has sums over all engines. A sum over the engines' metrics would then count
    # each block several times.
    stats, own = manager.stats(), manager.counters()
    tiered = manager if isinstance(manager, TieredManager) else None
    plain = {
        "hit_blocks": own.loaded if tiered is None else sum(tiered.hit_blocks),
        "stored_blocks": own.stored,
        "evicted_blocks": own.evicted,
        "discarded_blocks": own.discarded,
        "failed_store_blocks": own.store_failed,
        "capacity_blocks": own.capacity,
        "ready_blocks": own.ready,
        "pinned_blocks": own.ready - own.evictable,
        "writing_blocks": own.writing,
    }
    for name, value in plain.items():
        yield Value(name, (), value)
    yield Value(REFUSED, ("admission",), own.refused)
    yield Value(REFUSED, ("no_room",), own.dropped)
    for reason in LIVE_REASONS:
        yield Value(MISSES, (reason,), stats.misses.get(reason, 0))
    for name, number in stats.policy.items():
        yield Value(POLICY, (manager.policy.name, name), number)
    for tenant, counts in stats.tenants.items():
        for name, number in tenant_values(counts).items():
            yield Value(name, (tenant,), number)
    if tiered is not None:
        yield from _tiered_values(tiered)


def tenant_values(counts: TenantStats) -> dict[str, int]:
    """Return the values of a tenant's metrics by name."""
    return {
        "tenant_loaded_blocks": counts.loaded,
        "tenant_evicted_blocks": counts.evicted,
        "tenant_held_blocks": counts.held,
    }


def _tiered_values(manager: TieredManager) -> Iterator[Value]:
    yield Value(NOT_OFFERED, (), manager.counts.not_offered)
    for reason in NOT_PROMOTED_REASONS:
        yield Value(NOT_PROMOTED, (reason,), getattr(manager.counts, reason))
    for tier, counts in tier_counts(manager).items():
        yield from tier_values(tier, counts)
    for (tier, tenant), held in tier_tenants(manager).items():
        yield Value(TENANT_TIER, (tier, tenant), held)


def tier_values(tier: str, counts: Mapping[str, Any]) -> Iterator[Value]:
    """Yield the values of a tier. `counts`: the tier's counters from `tier_counts`."""
    for name in (*TIER_COUNTERS, *TIER_GAUGES):
        if counts[name] is not None:
            yield Value(TIER + name, (tier,), counts[name])


def tier_tenants(manager: TieredManager) -> dict[tuple[str, str], int]:
    """Return a mapping ``(tier, tenant)`` -> number of the tenant's blocks, for all tiers with quotas."""
    tenants = zip(manager.tier_names, manager.tier_tenants(), strict=True)
    return {(tier, name): counts.held for tier, of_tier in tenants for name, counts in of_tier.items()}


def tier_counts(manager: TieredManager) -> dict[str, dict[str, Any]]:
    """Return a mapping: name of a tier behind RAM (`kvoffload.tiers.spec.names_of`) -> counters of the tier.

    If two tiers have the same name, the name of the second tier gets a number as suffix.
    """
    counts: dict[str, dict[str, Any]] = {}
    tiers = zip(manager.tier_names, manager.hit_blocks[1:], manager.tier_stats(), strict=True)
    for number, (name, hits, stats) in enumerate(tiers):
        counts[name if name not in counts else f"{name}-{number}"] = {"hits": hits, **asdict(stats)}
    return counts
