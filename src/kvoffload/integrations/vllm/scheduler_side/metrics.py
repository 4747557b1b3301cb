"""Our metrics in vLLM's ``/metrics``.

Owns the counts since the last report; `kvoffload.metrics.families` has names and meanings. vLLM's own metrics
(``vllm:kv_offload_load_bytes`` and so on) count bytes and seconds of transfers, from our worker's results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvoffload.core.miss_reasons import LIVE_REASONS
from kvoffload.core.plans import ManagerStats
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.tenants import TenantStats
from kvoffload.metrics.counts import tenant_values
from kvoffload.metrics.families import (
    AUDIT_DIFFERENCE,
    AUDIT_RESULTS,
    AUDITED_BLOCKS,
    AUDITED_REQUESTS,
    COUNTERS,
    FAMILIES,
    KV_HINT_ACTIONS,
    KV_HINTS,
    MISSES,
    NOT_OFFERED,
    NOT_PROMOTED,
    NOT_PROMOTED_REASONS,
    PAUSED,
    POLICY,
    REACH,
    REFUSED,
    TENANT_COUNTERS,
    TENANT_GAUGES,
    TENANT_TIER,
    TIER,
    TIER_COUNTERS,
    TIER_FAMILIES,
    TIER_GAUGES,
    WHAT_IF,
    Family,
)
from kvoffload.metrics.families import VLLM_PREFIX as PREFIX
from kvoffload.tiering.lane import TieringCounts
from kvoffload.whatif import Estimate

NATIVE_GAUGES = {
    "cpu_cache_usage_perc": "Share of the blocks in RAM that transfers in flight use.",
    "cpu_cache_write_usage_perc": "Share of the blocks in RAM that are being stored.",
    "cpu_cache_read_usage_perc": "Share of the blocks in RAM that are being loaded or verified.",
}
NATIVE_SKIPPED = "vllm:kv_offload_stores_skipped"
"""This counter and `NATIVE_GAUGES` are metrics of vLLM's own manager, for existing dashboards of vLLM."""
NATIVE_PREFIX = "vllm:kv_offload_"

METRICS_INTERVAL_S = 0.1
"""Shortest time between two reports while requests run, in seconds."""


def definitions() -> dict[str, Any]:
    """Return the definitions of our metrics in vLLM's form."""
    made = _in_vllms_form(FAMILIES)
    for name, text in NATIVE_GAUGES.items():
        made[NATIVE_PREFIX + name] = OffloadingGaugeMetadata(documentation=text)
    made[NATIVE_SKIPPED] = OffloadingCounterMetadata(
        documentation=f"The same as {PREFIX}{REFUSED} with reason admission."
    )
    return made


def tier_definitions() -> dict[str, Any]:
    """Return the definitions of the metrics of tiers in vLLM's form."""
    return _in_vllms_form(TIER_FAMILIES)


def _in_vllms_form(families: Iterable[Family]) -> dict[str, Any]:
    return {
        PREFIX + family.name: (OffloadingCounterMetadata if family.is_counter else OffloadingGaugeMetadata)(
            documentation=family.documentation, labelnames=family.labels
        )
        for family in families
    }


class Gauges:
    """The last reported value of each gauge."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}

    def show(
        self, taken: OffloadingConnectorStats, name: str, value: float, labels: tuple[str, ...] = ()
    ) -> None:
        """Set a gauge if its value has changed."""
        if self._shown.get((name, labels)) != value:
            self._shown[name, labels] = value
            taken.set_gauge(name, value, labels)


class TierMetrics:
    """Counts of tiers since the last report to vLLM. The first report has all counters, even those at 0."""

    def __init__(self) -> None:
        self._before: Counter[tuple[str, str]] = Counter()
        self._gauges = Gauges()
        self._has_begun = False

    def add(self, taken: OffloadingConnectorStats, tiers: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the changes of each tier's counters and gauges. `tiers`: counts since the opening, by name."""
        is_first, self._has_begun = not self._has_begun, True
        for tier, counts in tiers.items():
            for name in TIER_COUNTERS:
                increase = counts[name] - self._before[tier, name]
                self._before[tier, name] = counts[name]
                if is_first or increase:
                    taken.increase_counter(f"{PREFIX}{TIER}{name}", increase, (tier,))
            for name in TIER_GAUGES:
                if counts[name] is not None:
                    self._gauges.show(taken, f"{PREFIX}{TIER}{name}", counts[name], (tier,))


class Metrics:
    """Counts since the last report to vLLM.

    Args:
        interval_s: shortest time between two reports while requests run, in seconds.

    Attributes:
        counts: the adapter's own counts since the last report; keys as in `COUNTERS`.
        kv_hints: actions in vLLM's ``kv_hints`` since the last report; keys as in `KV_HINTS`.
        misses: missed blocks by reason since the last report; keys as in `LIVE_REASONS`.
    """

    def __init__(self, interval_s: float = METRICS_INTERVAL_S) -> None:
        self.counts: Counter[str] = Counter()
        self.kv_hints: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.interval_s, self._reported_s = interval_s, 0.0
        self._before = ManagerStats()
        self._gauges, self._tiers = Gauges(), TierMetrics()
        self._not_promoted_before: Counter[str] = Counter()
        self._has_begun = self._has_begun_tiers = False
        self._audits_before: Counter[str] | None = None
        self._tenants_before: dict[str, dict[str, int]] = {}
        self._tier_tenants: Mapping[tuple[str, str], int] = {}

    def is_due(self, now_s: float, *, is_idle: bool) -> bool:
        """Return True if a report is due: after every idle step, otherwise once an interval."""
        if now_s - self._reported_s < self.interval_s and not is_idle:
            return False
        self._reported_s = now_s
        return True

    def take(self, counters: ManagerStats | None = None) -> OffloadingConnectorStats:
        """Return the increase of each counter since the last report.

        The first report has all counters, even those at 0, because an alert needs an existing counter.
        `counters`: the manager's counters; None if the manager has failed.
        """
        counters = counters or self._before
        counts, self.counts = self.counts, Counter()
        before, self._before = self._before, counters
        taken = OffloadingConnectorStats()
        counts["stored_blocks"] += counters.stored - before.stored
        counts["evicted_blocks"] += counters.evicted - before.evicted
        counts["discarded_blocks"] += counters.discarded - before.discarded
        is_first, self._has_begun = not self._has_begun, True
        for name in COUNTERS if is_first else counts:
            if is_first or counts[name]:
                taken.increase_counter(PREFIX + name, counts[name])
        misses, self.misses = self.misses, Counter()
        for reason in LIVE_REASONS if is_first else misses:
            taken.increase_counter(PREFIX + MISSES, misses[reason], (reason,))
        kv_hints, self.kv_hints = self.kv_hints, Counter()
        for action in KV_HINTS if is_first else kv_hints:
            taken.increase_counter(PREFIX + KV_HINT_ACTIONS, kv_hints[action], (action,))
        refused = {
            "admission": counters.refused - before.refused,
            "no_room": counters.dropped - before.dropped,
        }
        for reason, count in refused.items():
            if is_first or count:
                taken.increase_counter(PREFIX + REFUSED, count, (reason,))
        if is_first or refused["admission"]:
            taken.increase_counter(NATIVE_SKIPPED, refused["admission"])
        return taken

    def show(self, taken: OffloadingConnectorStats, counters: ManagerStats, policy: EvictionPolicy) -> None:
        """Add the gauges of the manager and the policy that have changed."""
        self._show(taken, "capacity_blocks", counters.capacity)
        self._show(taken, "ready_blocks", counters.ready)
        self._show(taken, "pinned_blocks", counters.ready - counters.evictable)
        self._show(taken, "writing_blocks", counters.writing)
        pinned = counters.ready - counters.evictable
        for name, count in zip(
            NATIVE_GAUGES, (pinned + counters.writing, counters.writing, pinned), strict=True
        ):
            self._show(taken, name, count / counters.capacity, prefix=NATIVE_PREFIX)
        for name, value in policy.stats().items():
            self._show(taken, POLICY, value, (policy.name, name))

    def add_misses(self, num_lookups: int, misses: Counter[str]) -> None:
        """Add the number of looked-up blocks, and the numbers of missed blocks by reason."""
        self.counts["lookup_blocks"] += num_lookups
        self.misses += misses

    def add_tenants(self, taken: OffloadingConnectorStats, tenants: Mapping[str, TenantStats]) -> None:
        """Add the counters and gauges of each tenant. Tenants without a quota count as ``other``."""
        names = dict.fromkeys([*tenants, *self._tenants_before])
        for tenant in names:
            counts = tenant_values(tenants[tenant]) if tenant in tenants else {}
            for name in TENANT_GAUGES:
                self._show(taken, name, counts.get(name, 0), (tenant,))
            if not counts:
                continue
            before = self._tenants_before.get(tenant)
            for name in TENANT_COUNTERS:
                increase = counts[name] - (before or {}).get(name, 0)
                if before is None or increase > 0:
                    taken.increase_counter(PREFIX + name, max(0, increase), (tenant,))
            self._tenants_before[tenant] = counts

    def show_tier_tenants(self, taken: OffloadingConnectorStats, held: Mapping[tuple[str, str], int]) -> None:
        """Set the gauges of tenants in tiers, by tier and tenant. If a quota was removed, the gauge is 0."""
        for labels in dict.fromkeys([*held, *self._tier_tenants]):
            self._show(taken, TENANT_TIER, held.get(labels, 0), labels)
        self._tier_tenants = held

    def show_paused(self, taken: OffloadingConnectorStats, is_paused: bool) -> None:
        """Set the gauge that shows whether offloading is paused."""
        self._show(taken, PAUSED, int(is_paused))

    def show_reach(self, taken: OffloadingConnectorStats, seconds: float) -> None:
        """Set the gauge of the miss record's time span, rounded to two digits so that it changes rarely."""
        self._show(taken, REACH, float(f"{seconds:.2g}"))

    def show_what_if(self, taken: OffloadingConnectorStats, found: Iterable[Estimate]) -> None:
        """Set the gauges of what-if settings, rounded so that they change rarely."""
        for estimate in found:
            values = (estimate.hit_ratio, estimate.error, estimate.gain, estimate.gain_error)
            for name, value in zip(WHAT_IF, values, strict=True):
                self._show(taken, name, round(value, 4), (estimate.setting,))

    def add_audits(
        self, taken: OffloadingConnectorStats, num_requests: int, results: Counter[str], largest: float
    ) -> None:
        """Add the new audited requests and blocks, and set the gauge of the largest difference.

        `num_requests`, `results`: counts since the start.
        """
        is_first, before = self._audits_before is None, self._audits_before or Counter()
        self._audits_before = Counter(results, **{AUDITED_REQUESTS: num_requests})
        increase = num_requests - before[AUDITED_REQUESTS]
        if is_first or increase:
            taken.increase_counter(PREFIX + AUDITED_REQUESTS, increase)
        for result in AUDIT_RESULTS:
            increase = results[result] - before[result]
            if is_first or increase:
                taken.increase_counter(PREFIX + AUDITED_BLOCKS, increase, (result,))
        self._show(taken, AUDIT_DIFFERENCE, largest)

    def add_tiers(
        self,
        taken: OffloadingConnectorStats,
        tiers: Mapping[str, Mapping[str, Any]],
        promotions: TieringCounts,
    ) -> None:
        """Add the changed counters and gauges of promotions and of tiers behind RAM.

        `tiers`, `promotions`: counts since the opening of the tiers; `tiers` by name.
        """
        is_first, self._has_begun_tiers = not self._has_begun_tiers, True
        not_offered = promotions.not_offered - self._not_promoted_before[NOT_OFFERED]
        self._not_promoted_before[NOT_OFFERED] += not_offered
        if is_first or not_offered:
            taken.increase_counter(PREFIX + NOT_OFFERED, not_offered)
        for reason in NOT_PROMOTED_REASONS:
            increase = getattr(promotions, reason) - self._not_promoted_before[reason]
            self._not_promoted_before[reason] += increase
            if is_first or increase:
                taken.increase_counter(PREFIX + NOT_PROMOTED, increase, (reason,))
        self._tiers.add(taken, tiers)

    def _show(
        self,
        taken: OffloadingConnectorStats,
        name: str,
        value: float,
        labels: tuple[str, ...] = (),
        prefix: str = PREFIX,
    ) -> None:
        self._gauges.show(taken, prefix + name, value, labels)
