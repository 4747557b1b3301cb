"""A `prometheus_client` collector for engines other than vLLM."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvoffload.errors import ConfigError
from kvoffload.metrics.families import FAMILIES, LIBRARY_PREFIX, Family

if TYPE_CHECKING:
    from kvoffload.cache.cache import KVCache
    from kvoffload.tiering.tiered_manager import AnyManager

ENGINE_COUNTERS = (
    "lookup_blocks",
    "verification_failures",
    "failed_load_blocks",
    "lost_blocks",
    "internal_errors",
)
"""Counters that only the engine knows. The engine counts with `Collector.count`."""
_LABEL = "manager"


class Collector:
    """The metrics of a manager for `prometheus_client`, with the prefix ``kvoffload_`` and the label
    ``manager``::

        metrics = Collector(manager, name="chat")
        prometheus_client.REGISTRY.register(metrics)
        prometheus_client.start_http_server(9400, addr="127.0.0.1")
        ...
        metrics.count("lookup_blocks", len(keys))   # for each new request
        manager.count_misses(ctx, num_ready)        # for each request with missing blocks (explain_misses)
        metrics.update()                            # once a step

    A `KVCache` calls `count` and `update` itself: ``Collector(cache, name="chat")`` is enough.

    ``kvoffload metrics --source library`` lists the metrics. A registry accepts one `Collector`, so each
    manager of a process needs its own registry and HTTP address.

    Args:
        manager: a manager, or the cache of `kvoffload.open`.
        name: value of the label ``manager``. The label identifies the manager even if the process restarts
            and then has another address.

    Thread: call `update` and `count` on the scheduler's thread, like all methods of the manager. `collect`
    may run on any thread, at any time. A scrape never calls the manager or a tier: it returns the values of
    the last `update`. Before the first `update` the metrics have no values.

    Raises: `ConfigError` if `prometheus_client` is not installed.
    """

    def __init__(self, manager: AnyManager | KVCache, *, name: str = "kvoffload") -> None:
        # Imported late: the commands that read names of metrics start without numba.
        from kvoffload.cache.cache import KVCache
        from kvoffload.metrics.counts import manager_values

        self._families, self._name = _client(), name
        read_from = manager.manager if isinstance(manager, KVCache) else manager
        self._read = functools.partial(manager_values, read_from)
        self._counted = Counter[str](dict.fromkeys(ENGINE_COUNTERS, 0))
        self._values: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        if isinstance(manager, KVCache):
            manager.observe(self)

    def count(self, metric: str, number: int = 1) -> None:
        """Add `number` to a metric of `ENGINE_COUNTERS`: blocks or errors that only the engine notices.

        Raises: `ConfigError` if `metric` is not in `ENGINE_COUNTERS`, or if `number` is not an integer of at
        least 0.
        """
        if metric not in self._counted:
            raise ConfigError("metric", metric, f"allowed: {', '.join(ENGINE_COUNTERS)}")
        try:
            increase = operator.index(number)
        except TypeError:
            increase = -1
        if increase < 0:
            raise ConfigError("number", number, "allowed: an integer of at least 0")
        self._counted[metric] += increase

    def update(self) -> None:
        """Copy the counters of the manager and its tiers for the next scrapes. Call it once a step."""
        values: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, labels, value in self._read():
            values.setdefault(name, []).append((labels, value))
        for name, number in self._counted.items():
            values[name] = [((), number)]
        self._values = values

    def describe(self) -> list[Any]:
        """Return the metrics without values. A registry uses this method to detect duplicate names."""
        return [self._family(family, ()) for family in FAMILIES if not family.is_of_vllm]

    def collect(self) -> list[Any]:
        """Return the metrics with the values of the last `update`."""
        values = self._values
        return [self._family(family, values[family.name]) for family in FAMILIES if family.name in values]

    def _family(self, family: Family, values: Iterable[tuple[tuple[str, ...], float]]) -> Any:
        make = self._families.CounterMetricFamily if family.is_counter else self._families.GaugeMetricFamily
        made = make(LIBRARY_PREFIX + family.name, family.documentation, labels=[_LABEL, *family.labels])
        for labels, value in values:
            made.add_metric([self._name, *labels], value)
        return made


def _client() -> Any:
    try:
        from prometheus_client import metrics_core
    except ImportError:
        why = "the collector needs prometheus_client: pip install 'kvoffload[metrics]'"
        raise ConfigError("prometheus_client", None, why) from None
    return metrics_core
