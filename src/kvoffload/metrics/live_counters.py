"""Rates of a server, for each engine and tier, from two scrapes of the server's metrics.

Knows names of metrics, but fetches nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffload.metrics.families import (
    FAMILIES,
    LIBRARY_PREFIX,
    MISSES,
    NOT_PROMOTED,
    REFUSED,
    TENANT_COUNTERS,
    TENANT_GAUGES,
    TIER,
    VLLM_PREFIX,
    WHAT_IF,
    WHAT_IF_RATIO,
    Family,
)
from kvoffload.metrics.scrape import Sample

_VLLMS = {
    "vllm:request_success_total": "requests",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "device_tokens",
    "vllm:kv_offload_load_bytes_total": "load_bytes",
    "vllm:kv_offload_store_bytes_total": "store_bytes",
}
"""vLLM's name of a counter -> name in this module."""
_RATES = {name: name for name in _VLLMS.values()} | {"stored": "stored_blocks", "evicted": "evicted_blocks"}
"""Name of a rate in `EngineRates` -> name of the counter from which the rate is computed."""
_LABELS_OF_ENGINES = ("model_name", "engine", "manager")
_OWN_LABELS = ("tier", "reason", "name", "setting", "tenant")
_TIER_FAULTS = ("failed", "mismatches", "timeouts", "errors")
_FAULTS = ("verification_failures", "failed_load_blocks", "failed_store_blocks", "internal_errors")

Key = tuple[str, str]
"""Name of a metric without prefix, and the value of its label ("" for a metric without a label)."""


@dataclass
class Reading:
    """A scrape: the values of each engine, by metric and label.

    Attributes:
        time_s: monotonic time of the scrape.
        engines: mapping: name of an engine (``model 0``, or the name of a manager) -> values.
    """

    time_s: float
    engines: dict[str, dict[Key, float]] = field(default_factory=dict)


def read(samples: list[Sample], time_s: float) -> Reading:
    """Group the samples of a scrape by engine.

    Engines without metrics of kvoffload, and values that are not finite, are skipped.
    """
    values: dict[str, dict[Key, float]] = defaultdict(lambda: defaultdict(float))
    ours = set[str]()
    for sample in samples:
        name, is_ours = _plain_name(sample.name)
        if name is None:
            continue
        engine = " ".join(sample.labels[label] for label in _LABELS_OF_ENGINES if label in sample.labels)
        own = [sample.labels[label] for label in _OWN_LABELS if label in sample.labels]
        values[engine][name, own[0] if is_ours and own else ""] += sample.value
        if is_ours:
            ours.add(engine)
    finite = {
        engine: {key: value for key, value in own_values.items() if math.isfinite(value)}
        for engine, own_values in values.items()
        if engine in ours
    }
    return Reading(time_s, finite)


def _plain_name(name: str) -> tuple[str | None, bool]:
    """Return a metric's name without prefix and ``_total``, and True if it is a metric of kvoffload."""
    if name in _VLLMS:
        return _VLLMS[name], False
    for prefix in (VLLM_PREFIX, LIBRARY_PREFIX):
        if name.startswith(prefix) and (family := _KNOWN.get(name.removeprefix(prefix))):
            return family.name, True
    return None, False


_KNOWN: Mapping[str, Family] = {family.series_name(""): family for family in FAMILIES}


@dataclass(frozen=True)
class TierRates:
    """Rates of a tier in an interval, per second, and values of gauges at the end of the interval.

    A rate is None in the tier's first interval. A gauge is None if the server does not report it. `faults`
    are counts since the server's start.

    Attributes:
        capacity: None if unknown, as for a shared server.
        write_budget_bytes: None without a limit.
    """

    name: str
    hits: float | None
    bytes_read: float | None
    bytes_written: float | None
    ready: float | None
    capacity: float | None
    in_flight: float | None
    circuits_open: float
    faults: Mapping[str, float]
    write_budget_bytes: float | None


@dataclass(frozen=True)
class WhatIfShown:
    """The latest estimates for a setting of RAM: its hit ratio, and the gain over the current setting.

    The error of an estimate is half the width of its 95 % interval.
    """

    setting: str
    hit_ratio: float | None
    error: float | None
    gain: float | None
    gain_error: float | None


@dataclass(frozen=True)
class TenantShown:
    """A tenant's number of held blocks, and the tenant's loaded and evicted blocks per second."""

    tenant: str
    held: float | None
    loaded: float | None
    evicted: float | None


@dataclass(frozen=True)
class EngineRates:
    """Rates of an engine in an interval, in blocks per second unless the name has another unit.

    A rate is None unless the server reported the metric at the start and at the end of the interval.

    Attributes:
        hit_ratio: hits in the interval, divided by the blocks looked up; None without lookups.
        ram_hits: hits that came from RAM.
        capacity, ready, pinned, writing: blocks of RAM at the end of the interval.
        faults: counts since the server's start.
        what_if: estimates for the current setting of RAM, then for each setting to try. Empty without the
            option ``what_if``.
        tenants: tenants with quotas, the tenant with the most blocks first. In a shared pool with shares,
            each engine is a tenant.
        is_restarted: True if a counter decreased, because the engine was restarted and counts from 0 again.
    """

    engine: str
    seconds: float
    is_restarted: bool
    requests: float | None
    prompt_tokens: float | None
    device_tokens: float | None
    lookups: float | None
    hits: float | None
    ram_hits: float | None
    hit_ratio: float | None
    stored: float | None
    evicted: float | None
    misses: Mapping[str, float | None]
    refused: Mapping[str, float | None]
    not_promoted: Mapping[str, float | None]
    load_bytes: float | None
    store_bytes: float | None
    capacity: float | None
    ready: float | None
    pinned: float | None
    writing: float | None
    faults: Mapping[str, float]
    tiers: tuple[TierRates, ...]
    what_if: tuple[WhatIfShown, ...] = ()
    tenants: tuple[TenantShown, ...] = ()


def rates(before: Reading, after: Reading) -> list[EngineRates]:
    """Compute the rates between two scrapes, for each engine of the later scrape, sorted by name."""
    return [
        _Engine(engine, before.engines.get(engine, {}), values, after.time_s - before.time_s).rates()
        for engine, values in sorted(after.engines.items())
    ]


class _Engine:
    """The values of an engine at two times."""

    def __init__(
        self, name: str, before: Mapping[Key, float], after: Mapping[Key, float], seconds: float
    ) -> None:
        self._name, self._before, self._after, self._seconds = name, before, after, seconds

    def rates(self) -> EngineRates:
        tiers = tuple(self._tier(name) for name in self._tiers())
        hits, lookups = self._rate("hit_blocks"), self._rate("lookup_blocks")
        return EngineRates(
            engine=self._name,
            seconds=self._seconds,
            is_restarted=any(
                self._after.get(key, value) < value
                for key, value in self._before.items()
                if key[0] in _COUNTING
            ),
            lookups=lookups,
            hits=hits,
            ram_hits=_without(hits, [tier.hits for tier in tiers]),
            hit_ratio=min(1.0, hits / lookups) if hits is not None and lookups else None,
            misses=self._by_label(MISSES),
            refused=self._by_label(REFUSED),
            not_promoted=self._by_label(NOT_PROMOTED),
            **{name: self._rate(metric) for name, metric in _RATES.items()},
            **{name: self._value(f"{name}_blocks") for name in ("capacity", "ready", "pinned", "writing")},
            faults={name: value for name in _FAULTS if (value := self._value(name)) is not None},
            tiers=tiers,
            what_if=self._what_if(),
            tenants=self._tenants(),
        )

    def _tier(self, name: str) -> TierRates:
        return TierRates(
            name=name,
            hits=self._rate(f"{TIER}hits", name),
            bytes_read=self._rate(f"{TIER}bytes_read", name),
            bytes_written=self._rate(f"{TIER}bytes_written", name),
            ready=self._value(f"{TIER}ready", name),
            capacity=self._value(f"{TIER}capacity", name) or None,
            in_flight=self._value(f"{TIER}in_flight", name),
            circuits_open=self._value(f"{TIER}circuit_open", name) or 0.0,
            faults={fault: self._value(TIER + fault, name) or 0.0 for fault in _TIER_FAULTS},
            write_budget_bytes=self._value(f"{TIER}write_budget_bytes", name),
        )

    def _tiers(self) -> list[str]:
        return sorted({label for name, label in self._after if name.startswith(TIER)})

    def _what_if(self) -> tuple[WhatIfShown, ...]:
        settings = sorted(self._labels(WHAT_IF_RATIO), key=lambda setting: (setting != "current", setting))
        return tuple(
            WhatIfShown(setting, *(self._value(name, setting) for name in WHAT_IF)) for setting in settings
        )

    def _tenants(self) -> tuple[TenantShown, ...]:
        [held] = TENANT_GAUGES
        shown = [
            TenantShown(
                name, self._value(held, name), *(self._rate(count, name) for count in TENANT_COUNTERS)
            )
            for name in sorted(self._labels(held))
        ]
        return tuple(sorted(shown, key=lambda tenant: -(tenant.held or 0.0)))

    def _labels(self, metric: str) -> list[str]:
        return [label for name, label in self._after if name == metric]

    def _value(self, metric: str, label: str = "") -> float | None:
        return self._after.get((metric, label))

    def _rate(self, metric: str, label: str = "") -> float | None:
        """Return the increase per second; None if a scrape lacks the metric. A decrease means a restart."""
        value, before = self._value(metric, label), self._before.get((metric, label))
        if value is None or before is None:
            return None
        rate = (value - before if value >= before else value) / self._seconds
        return rate if math.isfinite(rate) else None

    def _by_label(self, metric: str) -> dict[str, float | None]:
        return {label: self._rate(metric, label) for label in self._labels(metric)}


def _without(hits: float | None, parts: list[float | None]) -> float | None:
    """Return `hits` minus the sum of `parts`; None if a number is unknown."""
    known = [part for part in parts if part is not None]
    return None if hits is None or len(known) < len(parts) else max(0.0, hits - sum(known))


_COUNTING = {family.name for family in FAMILIES if family.is_counter} | set(_VLLMS.values())
