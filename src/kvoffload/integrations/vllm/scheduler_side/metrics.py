"""Our metrics in vLLM's ``/metrics``.

Owns names and meanings of our metrics, and the counts since vLLM last asked. Bytes and seconds of loads and
stores are vLLM's own metrics (``vllm:kv_offload_load_bytes`` and so on), from our worker's reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvoffload.core.plans import ManagerStats
from kvoffload.core.policy import EvictionPolicy
from kvoffload.tiering.lane import TieringCounts

PREFIX = "vllm:kvoffload_"
"""When an engine ends vLLM unregisters only metrics that have ``vllm`` in their names."""

COUNTERS = {
    "lookup_blocks": "Blocks of each request's first lookup; lookups repeated while it waits are left out.",
    "hit_blocks": "Blocks that were found and loaded.",
    "stored_blocks": "Blocks stored.",
    "evicted_blocks": "Blocks that left for others.",
    "discarded_blocks": "Blocks forgotten because they were damaged, or the cache was reset.",
    "verification_failures": "Blocks that were not what was stored: treated as misses.",
    "failed_load_blocks": "Blocks that a worker could not load: computed again.",
    "failed_store_blocks": "Blocks that a worker could not store: forgotten.",
    "lost_blocks": "With store on-device-eviction: blocks that the GPU dropped before they were offered.",
    "unrecorded_requests": "With record: requests that are not in the recording.",
    "internal_errors": "Errors of ours that were contained: offloading pauses until the cache is reset.",
}
NATIVE_GAUGES = {
    "cpu_cache_usage_perc": "Share of the blocks in RAM that transfers under way use.",
    "cpu_cache_write_usage_perc": "Share of the blocks in RAM that are being stored.",
    "cpu_cache_read_usage_perc": "Share of the blocks in RAM that are being loaded or verified.",
}
NATIVE_SKIPPED = "vllm:kv_offload_stores_skipped"
"""What vLLM's own manager calls the same: dashboards made for it go on."""
NATIVE_PREFIX = "vllm:kv_offload_"

REFUSED = "refused_blocks"
REASONS = {
    "admission": "refused by the admission rule or the policy",
    "no_room": "everything else was in use",
}
GAUGES = {
    "capacity_blocks": "Blocks that fit into RAM.",
    "ready_blocks": "Blocks that can be loaded.",
    "pinned_blocks": "Blocks that are being loaded or verified.",
    "writing_blocks": "Blocks that are being stored.",
}
POLICY = "policy_state"
NOT_PROMOTED = "not_promoted_blocks"
NOT_OFFERED = "not_offered_blocks"
NOT_PROMOTED_REASONS = {
    "no_room": "RAM had no room for them",
    "not_worth": "reading was expected to take longer than computing",
    "lost": "they could not be read, or were not what was stored",
    "stale": "they had left a tier that machines share",
}
TIER_COUNTERS = {
    "hits": "Blocks that requests got from this tier.",
    "written": "Blocks written.",
    "read": "Blocks read and found sound.",
    "evicted": "Blocks that left for others.",
    "refused": "Blocks refused by the tier's admission rule or policy.",
    "dropped": "Blocks not taken because the tier was too busy or its write budget was used up.",
    "failed": "Blocks that the medium failed to write or read.",
    "mismatches": "Blocks that were not what was stored: treated as misses.",
    "probes": "Blocks that a tier that machines share was asked for.",
    "probe_hits": "Of those, how many were there.",
    "stale": "Blocks that were believed to be there, and had left.",
    "timeouts": "Blocks of reads, writes and probes whose time was up.",
    "errors": "Calls of the tier that raised an exception.",
    "skipped": "Blocks not written because another machine had written them.",
    "bytes_written": "Bytes of blocks written.",
    "bytes_read": "Bytes of blocks read.",
    "outages": "How often nodes of a tier that machines share were left alone: they did not answer.",
    "outage_s": "Seconds for which they were left alone.",
    "puts": "Requests to a bucket that store.",
    "gets": "Requests to a bucket that read or ask.",
    "cost": "What these requests and the bytes received come to, at the prices that were given.",
}
TIER_GAUGES = {
    "capacity": "Blocks that fit.",
    "ready": "Blocks that can be read.",
    "free": "Blocks for which there is empty room.",
    "in_flight": "Blocks that are being written or read.",
    "circuit_open": "Nodes of a tier that machines share that are left alone: they did not answer.",
    "write_budget_bytes": "Bytes that may still be written in these 24 hours, if there is a limit.",
}
"""Of each tier behind RAM, with the prefix ``tier_``."""


def definitions() -> dict[str, Any]:
    """The definitions of our metrics, in vLLM's form."""
    made: dict[str, Any] = {
        PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
    }
    made |= {PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}
    why = "; ".join(f"{reason}: {text}" for reason, text in REASONS.items())
    made[PREFIX + REFUSED] = OffloadingCounterMetadata(
        documentation=f"Blocks offered and not stored, by reason ({why}).", labelnames=("reason",)
    )
    why = "; ".join(f"{reason}: {text}" for reason, text in NOT_PROMOTED_REASONS.items())
    made[PREFIX + NOT_PROMOTED] = OffloadingCounterMetadata(
        documentation=f"Blocks found in a tier and not loaded from it, by reason ({why}).",
        labelnames=("reason",),
    )
    made[PREFIX + NOT_OFFERED] = OffloadingCounterMetadata(
        documentation="Blocks that left RAM before a tier could take them: it writes slower than blocks come."
    )
    for name, text in NATIVE_GAUGES.items():
        made[NATIVE_PREFIX + name] = OffloadingGaugeMetadata(documentation=text)
    made[NATIVE_SKIPPED] = OffloadingCounterMetadata(documentation=f"As {PREFIX}{REFUSED}, by admission.")
    made[PREFIX + POLICY] = OffloadingGaugeMetadata(
        documentation="State of the eviction policy.", labelnames=("policy", "name")
    )
    for name, text in TIER_COUNTERS.items():
        made[f"{PREFIX}tier_{name}"] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    for name, text in TIER_GAUGES.items():
        made[f"{PREFIX}tier_{name}"] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
    return made


class Metrics:
    """Counts since vLLM last asked.

    Attributes:
        counts: the adapter's own counts since vLLM last asked; keys as in `COUNTERS`.
        num_lookups: ``lookup_blocks``; an attribute because it is counted for each block.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_lookups = 0
        self._before = ManagerStats()
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}
        self._tiers_before: Counter[tuple[str, str]] = Counter()
        self._not_promoted_before: Counter[str] = Counter()
        self._has_begun = self._has_begun_tiers = False

    def take(self, counters: ManagerStats) -> OffloadingConnectorStats:
        """Counters since the last call. At first all of them, as zeros: alerts have to see them."""
        counts, self.counts = self.counts, Counter()
        counts["lookup_blocks"], self.num_lookups = self.num_lookups, 0
        before, self._before = self._before, counters
        taken = OffloadingConnectorStats()
        counts["stored_blocks"] += counters.stored - before.stored
        counts["evicted_blocks"] += counters.evicted - before.evicted
        counts["discarded_blocks"] += counters.discarded - before.discarded
        begins, self._has_begun = not self._has_begun, True
        for name in COUNTERS if begins else counts:
            if begins or counts[name]:
                taken.increase_counter(PREFIX + name, counts[name])
        refused = {
            "admission": counters.refused - before.refused,
            "no_room": counters.dropped - before.dropped,
        }
        for reason, count in refused.items():
            if begins or count:
                taken.increase_counter(PREFIX + REFUSED, count, (reason,))
        if begins or refused["admission"]:
            taken.increase_counter(NATIVE_SKIPPED, refused["admission"])
        return taken

    def show(self, taken: OffloadingConnectorStats, counters: ManagerStats, policy: EvictionPolicy) -> None:
        """Gauges of the present state."""
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

    def add_tiers(
        self,
        taken: OffloadingConnectorStats,
        tiers: Mapping[str, Mapping[str, Any]],
        promotions: TieringCounts,
    ) -> None:
        """The same for each tier behind RAM, from its name and its counters since it was opened."""
        begins, self._has_begun_tiers = not self._has_begun_tiers, True
        not_offered = promotions.not_offered - self._not_promoted_before[NOT_OFFERED]
        self._not_promoted_before[NOT_OFFERED] += not_offered
        if begins or not_offered:
            taken.increase_counter(PREFIX + NOT_OFFERED, not_offered)
        for reason in NOT_PROMOTED_REASONS:
            since = getattr(promotions, reason) - self._not_promoted_before[reason]
            self._not_promoted_before[reason] += since
            if begins or since:
                taken.increase_counter(PREFIX + NOT_PROMOTED, since, (reason,))
        for tier, counts in tiers.items():
            for name in TIER_COUNTERS:
                since = counts[name] - self._tiers_before[tier, name]
                self._tiers_before[tier, name] = counts[name]
                if begins or since:
                    taken.increase_counter(f"{PREFIX}tier_{name}", since, (tier,))
            for name in TIER_GAUGES:
                if counts[name] is not None:
                    self._show(taken, f"tier_{name}", counts[name], (tier,))

    def _show(
        self,
        taken: OffloadingConnectorStats,
        name: str,
        value: float,
        labels: tuple[str, ...] = (),
        prefix: str = PREFIX,
    ) -> None:
        """Set a gauge if it has changed: it keeps its value, and this is called after every step."""
        if self._shown.get((name, labels)) != value:
            self._shown[name, labels] = value
            taken.set_gauge(prefix + name, value, labels)
