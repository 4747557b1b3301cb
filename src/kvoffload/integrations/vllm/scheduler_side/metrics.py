"""kvoffload's metrics in vLLM's ``/metrics``.

Owns the values that vLLM has already received. The names and descriptions of the metrics are in
`kvoffload.metrics.families`. vLLM's own metrics (``vllm:kv_offload_load_bytes`` and so on) count bytes and
seconds of transfers from the results of kvoffload's worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvoffload.core.miss_reasons import LIVE_REASONS
from kvoffload.integrations.vllm.scheduler_side.audits import Audits
from kvoffload.metrics.counts import Value, manager_values
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
    PAUSED,
    REACH,
    REFUSED,
    TENANT_GAUGES,
    TENANT_TIER,
    TIER_FAMILIES,
    WHAT_IF,
    Family,
)
from kvoffload.metrics.families import VLLM_PREFIX as PREFIX
from kvoffload.tiering.tiered_manager import AnyManager
from kvoffload.whatif import Estimate

NATIVE_PREFIX = "vllm:kv_offload_"
NATIVE_GAUGES = {
    "cpu_cache_usage_perc": "Share of the blocks in RAM that transfers in flight use.",
    "cpu_cache_write_usage_perc": "Share of the blocks in RAM that are being stored.",
    "cpu_cache_read_usage_perc": "Share of the blocks in RAM that are being loaded or verified.",
}
NATIVE_SKIPPED = f"{NATIVE_PREFIX}stores_skipped"
"""This counter and the gauges in `NATIVE_GAUGES` are metrics of vLLM's own manager. They are reported
under the same names, so that existing dashboards of vLLM still work."""

METRICS_INTERVAL_S = 0.1
"""Shortest time between two reports while requests run, in seconds. After a step without requests a report is
always due."""

_OF_MANAGER = ("stored_blocks", "evicted_blocks", "discarded_blocks")
"""Counters in `COUNTERS` that the manager maintains. The adapter maintains all others."""
_COUNTERS = {NATIVE_SKIPPED, *(PREFIX + family.name for family in FAMILIES if family.is_counter)}
_GAUGES_OF_TENANTS = {TENANT_TIER, *TENANT_GAUGES}


def definitions() -> dict[str, Any]:
    """Return the definitions of kvoffload's metrics in vLLM's form."""
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


class Reports:
    """Reports to vLLM: the increases of counters, and the gauges that have changed.

    The first report includes counters with the value 0, because an alert needs the counter to exist.

    Args:
        interval_s: shortest time between two reports while requests run, in seconds.
    """

    def __init__(self, interval_s: float = METRICS_INTERVAL_S) -> None:
        self.interval_s, self._reported_s = interval_s, 0.0
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}

    def is_due(self, now_s: float, *, is_idle: bool) -> bool:
        """Return True if a report is due: after every idle step, and otherwise once per `interval_s`."""
        if now_s - self._reported_s < self.interval_s and not is_idle:
            return False
        self._reported_s = now_s
        return True

    def take(self, values: Iterable[Value]) -> OffloadingConnectorStats:
        """Return the changes since the last report.

        Args:
            values: all counters, with their totals since the start, and all gauges.
        """
        taken = OffloadingConnectorStats()
        for plain_name, labels, value in values:
            name = plain_name if plain_name.startswith(NATIVE_PREFIX) else PREFIX + plain_name
            before, self._reported[name, labels] = self._reported.get((name, labels)), value
            if name not in _COUNTERS:
                if value != before:
                    taken.set_gauge(name, value, labels)
            elif before is None or value > before:
                taken.increase_counter(name, value - (before or 0), labels)
        return taken


class Metrics(Reports):
    """The metrics of an engine.

    Attributes:
        counts: totals of the adapter's own counters since the start, by their names in `COUNTERS`.
        kv_hints: for each name in `KV_HINTS`, the number of such actions in vLLM's ``kv_hints`` since the
            start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.kv_hints: Counter[str] = Counter()
        self._tenants: set[tuple[str, tuple[str, ...]]] = set()

    def of_adapter(self, misses: Mapping[str, int], is_paused: bool) -> Iterator[Value]:
        """Yield the counters of the adapter.

        Args:
            misses: number of missed blocks since the start, by reason.
        """
        for name in COUNTERS:
            if name not in _OF_MANAGER:
                yield Value(name, (), self.counts[name])
        for action in KV_HINTS:
            yield Value(KV_HINT_ACTIONS, (action,), self.kv_hints[action])
        for reason in LIVE_REASONS:
            yield Value(MISSES, (reason,), misses.get(reason, 0))
        yield Value(PAUSED, (), int(is_paused))

    def of_manager(self, manager: AnyManager) -> Iterator[Value]:
        """Yield the values of a manager and its tiers. Some values also appear under the names of vLLM's
        manager.

        The gauges of a tenant whose quota was removed are 0.
        """
        totals: dict[str, float] = {}
        tenants = set[tuple[str, tuple[str, ...]]]()
        for value in manager_values(manager):
            name, labels, number = value
            if name in _OF_MANAGER or (name not in COUNTERS and name != MISSES):
                yield value
            if not labels:
                totals[name] = number
            elif (name, labels) == (REFUSED, ("admission",)):
                yield Value(NATIVE_SKIPPED, (), number)
            elif name in _GAUGES_OF_TENANTS:
                tenants.add((name, labels))
        yield from (Value(name, labels, 0) for name, labels in self._tenants - tenants)
        self._tenants |= tenants
        capacity, writing, pinned = (totals[f"{kind}_blocks"] for kind in ("capacity", "writing", "pinned"))
        for name, blocks in zip(NATIVE_GAUGES, (pinned + writing, writing, pinned), strict=True):
            yield Value(NATIVE_PREFIX + name, (), blocks / capacity)


def values_of_what_if(found: Iterable[Estimate]) -> Iterator[Value]:
    """Yield the gauges of what-if settings, rounded so that they rarely change and are rarely reported."""
    for estimate in found:
        values = (estimate.hit_ratio, estimate.error, estimate.gain, estimate.gain_error)
        for name, value in zip(WHAT_IF, values, strict=True):
            yield Value(name, (estimate.setting,), round(value, 4))


def values_of_audits(audits: Audits) -> Iterator[Value]:
    """Yield the counters of audited requests and blocks, and the gauge of the largest difference."""
    yield Value(AUDITED_REQUESTS, (), audits.num_requests)
    for result in AUDIT_RESULTS:
        yield Value(AUDITED_BLOCKS, (result,), audits.results[result])
    yield Value(AUDIT_DIFFERENCE, (), audits.largest)


def value_of_reach(seconds: float) -> Value:
    """Return a gauge: for how many seconds the record of misses remembers an event.

    Rounded to two digits, so that it rarely changes and is rarely reported.
    """
    return Value(REACH, (), float(f"{seconds:.2g}"))
