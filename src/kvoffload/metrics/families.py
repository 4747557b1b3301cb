"""Names, types and meanings of all metrics. Names have no prefix.

vLLM's plug-in adds `VLLM_PREFIX`, and the collector for other engines adds `LIBRARY_PREFIX`. This module
knows no manager and no Prometheus client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvoffload.core.miss_reasons import LIVE_REASONS

VLLM_PREFIX: Final = "vllm:kvoffload_"
"""Prefix of the metrics in vLLM.

The prefix contains ``vllm`` because vLLM, when an engine ends, unregisters only metrics whose names contain
``vllm``.
"""
LIBRARY_PREFIX: Final = "kvoffload_"

UNRECORDED = "unrecorded_requests"
COUNTERS = {
    "lookup_blocks": "Blocks looked up by requests that began: hit_blocks and miss_blocks together.",
    "hit_blocks": "Blocks found and loaded.",
    "stored_blocks": "Blocks stored.",
    "evicted_blocks": "Blocks evicted to make room.",
    "discarded_blocks": "Blocks forgotten because they were damaged or the cache was reset.",
    "verification_failures": "Blocks whose checksum did not match: treated as misses.",
    "failed_load_blocks": "Blocks that a worker could not load: computed again.",
    "failed_store_blocks": "Blocks that a worker could not store: forgotten.",
    "lost_blocks": "With store on-device-eviction: blocks that the GPU dropped before they were offered.",
    UNRECORDED: "With record: requests missing from the recording.",
    "internal_errors": "Errors inside kvoffload: offloading pauses until the cache is reset.",
}
"""Counters without labels."""
MISSES, REACH = "miss_blocks", "miss_record_reach_s"
REFUSED = "refused_blocks"
REASONS = {
    "admission": "refused by the admission rule or the policy",
    "no_room": "all other blocks were in use",
}
GAUGES = {
    "capacity_blocks": "Capacity of RAM in blocks.",
    "ready_blocks": "Blocks that can be loaded.",
    "pinned_blocks": "Blocks being loaded or verified.",
    "writing_blocks": "Blocks being stored.",
}
"""Gauges without labels."""
PAUSED = "paused"
KV_HINT_ACTIONS = "kv_hint_actions"
KV_HINTS = {
    "retain": "priority and time to live of the request's blocks",
    "demote": "priority below all requests without a hint",
    "prefetch": "no effect: it arrives with its request, whose lookup reads the blocks ahead",
    "end_session": "the conversation is over",
    "unknown": "not known to this version, ignored",
    "invalid": "wrong payload, ignored",
}
AUDITED_REQUESTS, AUDITED_BLOCKS, AUDIT_DIFFERENCE = "audited_requests", "audited_blocks", "audit_difference"
AUDIT_RESULTS = {
    "equal": "all bytes are equal",
    "close": "the difference is as small as that of rounding",
    "unjudged": "bytes differ, and the type of the values is unknown",
    "different": "the stored block is wrong, or the computed one",
    "not_compared": "the comparison failed or came too late",
}
POLICY = "policy_state"
TENANT_COUNTERS = {
    "tenant_loaded_blocks": "With tenants: undamaged blocks loaded by requests of the tenant.",
    "tenant_evicted_blocks": "With tenants: blocks of the tenant that were evicted.",
}
TENANT_GAUGES = {"tenant_held_blocks": "With tenants: blocks of the tenant in RAM, readable or being stored."}
"""Metrics with the label ``tenant``: the name of a tenant with a quota, or ``other`` for all other tenants.

In a shared pool whose engines have shares, the label instead has the value ``own`` (this engine), ``others``
(other running engines) or ``ended`` (ended engines).
"""
TENANT_TIER = "tenant_tier_held_blocks"
WHAT_IF_RATIO, WHAT_IF_GAIN = "what_if_hit_ratio", "what_if_gain"
WHAT_IF = {
    WHAT_IF_RATIO: "With what_if: estimated share of the looked-up blocks that RAM would serve, by setting.",
    "what_if_hit_ratio_error": "With what_if: half the width of the hit ratio's 95 % interval, by setting.",
    WHAT_IF_GAIN: "With what_if: estimated hit ratio minus that of the current setting, by setting.",
    "what_if_gain_error": "With what_if: half the width of the gain's 95 % interval, by setting.",
}
"""Gauges with the label ``setting``: ``current``, or a setting to try, such as ``policy=hazard``."""
NOT_PROMOTED = "not_promoted_blocks"
NOT_OFFERED = "not_offered_blocks"
NOT_PROMOTED_REASONS = {
    "no_room": "RAM had no room",
    "not_worth": "reading was expected to take longer than computing",
    "lost": "the read failed or the checksum did not match",
    "stale": "the block had left a shared tier",
}
TIER = "tier_"
TIER_COUNTERS = {
    "hits": "Blocks that requests loaded from this tier.",
    "written": "Blocks written.",
    "read": "Blocks read whose checksum matched.",
    "evicted": "Blocks evicted to make room.",
    "refused": "Blocks refused by the tier's admission rule or policy.",
    "dropped": "Blocks not written because the tier was too busy or its write budget was used up.",
    "failed": "Blocks that the medium failed to write or read.",
    "mismatches": "Blocks whose checksum did not match: treated as misses.",
    "probes": "Blocks probed for in a shared tier.",
    "probe_hits": "Probed blocks that were present.",
    "stale": "Blocks that had left a shared tier although the presence cache listed them.",
    "timeouts": "Blocks of reads, writes and probes that exceeded their deadline.",
    "errors": "Calls of the tier that raised an exception.",
    "skipped": "Blocks not written because another machine had written them.",
    "bytes_written": "Bytes of blocks written.",
    "bytes_read": "Bytes of blocks read.",
    "outages": "Times that the circuit breaker of a shared tier's node has opened.",
    "outage_s": "Seconds for which circuit breakers were open.",
    "puts": "Write requests to a bucket.",
    "gets": "Read and probe requests to a bucket.",
    "cost": "Cost of the bucket's requests and received bytes, at the configured prices.",
}
TIER_GAUGES = {
    "capacity": "Capacity in blocks.",
    "ready": "Blocks that can be read.",
    "free": "Free slots, in blocks.",
    "in_flight": "Blocks being written or read.",
    "circuit_open": "Nodes of a shared tier whose circuit breaker is open.",
    "write_budget_bytes": "Bytes that may still be written in these 24 hours, if there is a limit.",
}
"""Metrics of each tier behind RAM. Their names begin with `TIER`; their label is ``tier``."""


@dataclass(frozen=True)
class Family:
    """A metric: its name without prefix, type, meaning and labels.

    Attributes:
        is_counter: False for a gauge. Prometheus appends ``_total`` to the names of counters.
        labels: names of the labels, without the labels that name the engine or manager.
        values: value of the label -> meaning, for a metric with one label. Empty if the label may have any
            value.
        is_of_vllm: True if only vLLM's plug-in reports the metric.
    """

    name: str
    is_counter: bool
    meaning: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    is_of_vllm: bool = False

    @property
    def documentation(self) -> str:
        """The help text in ``/metrics``: the metric's meaning, then the meaning of each label value."""
        if not self.values:
            return self.meaning
        explained = "; ".join(f"{value}: {meaning}" for value, meaning in self.values.items())
        return f"{self.meaning.removesuffix('.')} ({explained})."

    def series_name(self, prefix: str) -> str:
        """Return the name of the series in PromQL."""
        return f"{prefix}{self.name}{'_total' if self.is_counter else ''}"


def _families() -> Iterator[Family]:
    for name, text in COUNTERS.items():
        yield Family(name, True, text, is_of_vllm=name == UNRECORDED)
    for name, text in GAUGES.items():
        yield Family(name, False, text)
    yield Family(MISSES, True, "Blocks looked up and not loaded, by reason.", ("reason",), LIVE_REASONS)
    yield Family(REFUSED, True, "Blocks offered and not stored, by reason.", ("reason",), REASONS)
    text = "Blocks found in a tier and not loaded from it, by reason."
    yield Family(NOT_PROMOTED, True, text, ("reason",), NOT_PROMOTED_REASONS)
    text = "Blocks evicted from RAM before a tier could take them: the tier writes too slowly."
    yield Family(NOT_OFFERED, True, text)
    yield Family(POLICY, False, "State of the eviction policy.", ("policy", "name"))
    for name, text in TENANT_COUNTERS.items():
        yield Family(name, True, text, ("tenant",))
    for name, text in TENANT_GAUGES.items():
        yield Family(name, False, text, ("tenant",))
    text = "With quotas of a tier behind RAM: blocks of the tenant in the tier."
    yield Family(TENANT_TIER, False, text, ("tier", "tenant"))
    yield from _families_of_vllm()


def _families_of_vllm() -> Iterator[Family]:
    for name, text in WHAT_IF.items():
        yield Family(name, False, text, ("setting",), is_of_vllm=True)
    text = "1 while offloading is paused, after an internal error or an audit that stops it, until a reset."
    yield Family(PAUSED, False, text, is_of_vllm=True)
    text = "Seconds for which the reason of an absent block is remembered; older reasons are unknown."
    yield Family(REACH, False, text, is_of_vllm=True)
    text = "Actions in the kv_hints of requests."
    yield Family(KV_HINT_ACTIONS, True, text, ("action",), KV_HINTS, is_of_vllm=True)
    text = "With audit: blocks compared with computed ones, by result."
    yield Family(AUDITED_BLOCKS, True, text, ("result",), AUDIT_RESULTS, is_of_vllm=True)
    text = "With audit: requests that were computed although RAM held their blocks."
    yield Family(AUDITED_REQUESTS, True, text, is_of_vllm=True)
    text = "With audit: largest difference that counted as rounding, relative to the values."
    yield Family(AUDIT_DIFFERENCE, False, text, is_of_vllm=True)


TIER_FAMILIES = [
    *(Family(TIER + name, True, text, ("tier",)) for name, text in TIER_COUNTERS.items()),
    *(Family(TIER + name, False, text, ("tier",)) for name, text in TIER_GAUGES.items()),
]
FAMILIES = [*_families(), *TIER_FAMILIES]
