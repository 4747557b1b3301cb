"""The collector for engines other than vLLM: values, threads, and refused input."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import Keys, LookupResult, MemoryTier, OffloadingManager, TieredManager
from kvoffload.core.tenants import Quota
from kvoffload.errors import ConfigError
from kvoffload.metrics import Collector
from kvoffload.metrics.collector import ENGINE_COUNTERS
from kvoffload.metrics.families import COUNTERS, FAMILIES, TENANT_COUNTERS
from support.node_members import Members
from support.scripted_tier import ScriptedTier
from support.tiering_rig import Rig
from support.timeouts import HANGS_S
from support.token_engine import BLOCK_TOKENS, TokenEngine, layout_of

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="no prometheus_client: pip install 'kvoffload[metrics]'"
)
BLOCK_BYTES = 64


def serve(manager: Any, name: str, numbers: range) -> None:
    """Load ready blocks, and store the others."""
    keys = Keys.pack([bytes([number]) * 16 for number in numbers], key_bytes=16)
    ctx = manager.begin_request(name, keys)
    num_ready = manager.lookup(keys, ctx).num_ready
    if num_ready:
        manager.complete_load(manager.prepare_load(keys[:num_ready], ctx))
    plan = manager.prepare_store(keys, ctx)
    if plan is not None:
        manager.complete_store(plan)
    manager.finish_request(ctx)


def values_of(collector: Collector) -> dict[tuple[str, ...], float]:
    """Return the values of a scrape by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def tiered() -> tuple[TieredManager, ScriptedTier]:
    tier = ScriptedTier(BLOCK_BYTES, immediate=True)
    ram = MemoryTier(8, BLOCK_BYTES)
    return TieredManager(8, key_bytes=16, policy="arc", ram=ram, tiers=[tier]), tier


def test_values_equal_the_managers_statistics() -> None:
    manager = OffloadingManager(4, key_bytes=16, policy="arc")
    collector = Collector(manager, name="chat")
    serve(manager, "a", range(4))
    serve(manager, "b", range(4))
    serve(manager, "c", range(10, 12))
    collector.count("lookup_blocks", 10)
    collector.update()
    values = values_of(collector)
    assert values["kvoffload_lookup_blocks_total", "chat"] == 10
    assert values["kvoffload_hit_blocks_total", "chat"] == 4
    assert values["kvoffload_stored_blocks_total", "chat"] == 6
    assert values["kvoffload_evicted_blocks_total", "chat"] == 2
    assert values["kvoffload_capacity_blocks", "chat"] == values["kvoffload_ready_blocks", "chat"] == 4
    assert values["kvoffload_refused_blocks_total", "chat", "no_room"] == 0
    assert values["kvoffload_policy_state", "chat", "arc", "target_t1_blocks"] >= 0
    assert not any("tier" in name for name, *_ in values)


def test_hits_are_counted_by_place() -> None:
    rig = Rig(capacity=4)
    collector = Collector(rig.manager)
    rig.store("c")
    rig.load("c")
    rig.below("ab")
    ctx = rig.begin("ab")
    rig.ask("ab", ctx)
    rig.end_all()
    assert rig.ask("ab", ctx) == (2, LookupResult.HIT)
    rig.load("ab", ctx)
    rig.manager.finish_request(ctx)
    collector.update()
    values = values_of(collector)
    assert values["kvoffload_hit_blocks_total", "kvoffload"] == 3
    assert values["kvoffload_tier_hits_total", "kvoffload", "t0"] == 2
    assert values["kvoffload_not_promoted_blocks_total", "kvoffload", "lost"] == 0
    assert ("kvoffload_tier_write_budget_bytes", "kvoffload", "t0") not in values, "no limit"
    rig.manager.close()


def test_every_metric_exists_after_the_first_update() -> None:
    manager, _ = tiered()
    collector = Collector(manager)
    assert not values_of(collector), "a scrape before the first step has no values, not zeros"
    collector.update()
    names = {name for name, *_ in values_of(collector)}
    expected = {family.series_name("kvoffload_") for family in FAMILIES if not family.is_of_vllm}
    of_tenants = {f"kvoffload_{name}_total" for name in TENANT_COUNTERS}
    of_tenants |= {"kvoffload_tenant_held_blocks", "kvoffload_tenant_tier_held_blocks"}
    assert expected - names == {"kvoffload_tier_write_budget_bytes", *of_tenants}
    manager.set_tenants({"a": Quota(1)})
    collector.update()
    held = {labels[-1]: value for labels, value in values_of(collector).items() if "held" in labels[0]}
    assert held == {"a": 0, "other": 0}
    manager.close()


def test_counters_belong_to_the_manager_or_the_engine() -> None:
    manager, _ = tiered()
    collector = Collector(manager)
    for metric in ENGINE_COUNTERS:
        collector.count(metric)
    assert set(ENGINE_COUNTERS) < set(COUNTERS)
    with pytest.raises(ConfigError, match=r"metric: 'stored_blocks' is invalid; allowed: lookup_blocks, "):
        collector.count("stored_blocks")
    manager.close()


@pytest.mark.parametrize("number", [-5, float("nan"), 2.5, "3", np.int64(-1)])
def test_invalid_counts_are_refused(number: Any) -> None:
    collector = Collector(OffloadingManager(4, key_bytes=16))
    with pytest.raises(ConfigError, match=r"number: .*allowed: an integer of at least 0"):
        collector.count("lookup_blocks", number)
    collector.count("lookup_blocks", 2)
    collector.count("lookup_blocks", np.int64(3))
    collector.count("lookup_blocks", 0)
    collector.update()
    assert values_of(collector)["kvoffload_lookup_blocks_total", "kvoffload"] == 5


def test_a_scrape_in_another_thread_is_consistent() -> None:
    """`stored == ready + evicted + discarded` holds after every step, and in every scrape."""
    manager = OffloadingManager(8, key_bytes=16)
    collector = Collector(manager)
    wrong, num_scrapes, done = list[dict[str, float]](), 0, threading.Event()

    def scrape() -> None:
        nonlocal num_scrapes
        while not done.is_set() or not num_scrapes:
            values = {name: value for (name, *_), value in values_of(collector).items()}
            if values:
                num_scrapes += 1
                stored = values["kvoffload_stored_blocks_total"]
                removed = (
                    values["kvoffload_evicted_blocks_total"] + values["kvoffload_discarded_blocks_total"]
                )
                if stored != values["kvoffload_ready_blocks"] + removed:
                    wrong.append(values)

    thread = threading.Thread(target=scrape)
    thread.start()
    random = np.random.default_rng(1)
    for step in range(300):
        start = int(random.integers(0, 200))
        serve(manager, str(step), range(start, start + 3))
        collector.update()
    done.set()
    thread.join()
    assert num_scrapes
    assert not wrong


def test_a_cache_counts_its_own_events(tmp_path: Path) -> None:
    """Lookups are the sum of hits and misses; a damaged block of RAM is a verification failure."""
    layout = layout_of()
    engine, tokens = TokenEngine(layout), [*range(8 * BLOCK_TOKENS + 1)]
    place = {"block_ids": [*range(9)]}
    tiers = [f"disk:{tmp_path}:16MiB"]
    for life in ("first", "second"):
        with kvoffload.open(
            model="m", layout=layout, ram=40 * layout.block_bytes, tiers=tiers, deadline_s=HANGS_S
        ) as cache:
            collector = Collector(cache, name="chat")
            assert values_of(collector)["kvoffload_capacity_blocks", "chat"] == 40
            for number in range(2):
                with cache.request([*tokens, number]) as request:
                    request.load_into(engine.kv, **place)
                    engine.compute(tokens, place)
                    request.store_from(engine.kv, **place)
                assert cache.flush(HANGS_S)
                cache._jobs.ram.pool[:] ^= 1
        values = values_of(collector)
        hits, lookups = (values[f"kvoffload_{name}_blocks_total", "chat"] for name in ("hit", "lookup"))
        misses = sum(value for (name, *_), value in values.items() if "miss_blocks" in name)
        assert (lookups, hits + misses) == (16, 16)
        if life == "first":
            assert values["kvoffload_miss_blocks_total", "chat", "never_seen"] == 8
            assert values["kvoffload_stored_blocks_total", "chat"] >= 8
        else:
            assert values["kvoffload_tier_hits_total", "chat", "disk"] >= 8
        assert values["kvoffload_verification_failures_total", "chat"] == 8


def test_a_failed_copy_of_a_cache_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens, place = TokenEngine(layout_of()), [*range(9)], {"block_ids": [0, 1]}
    with kvoffload.open(model="m", layout=engine.layout, ram="1MiB") as cache:
        collector = Collector(cache)
        with cache.request(tokens) as request:
            engine.compute(tokens[:8], place)
            request.store_from(engine.kv, **place)
            with monkeypatch.context() as patch:
                patch.setattr("kvoffload.transfer.parts.HostParts.load", _fails)
                with pytest.raises(OSError, match="out of order"):
                    request.load_into(engine.kv, **place)
    assert values_of(collector)["kvoffload_failed_load_blocks_total", "kvoffload"] == 2


def test_a_collector_that_raises_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = layout_of()
    cache = kvoffload.open(model="m", layout=layout, ram="1MiB")
    collector = Collector(cache)
    monkeypatch.setattr(collector, "update", _fails)
    cache.close()
    assert "the metrics are no longer updated" in caplog.text


def _fails(*_: Any) -> Any:
    raise OSError("out of order")


def test_counters_of_a_shared_pool_are_per_engine_and_gauges_per_pool() -> None:
    """A sum over the engines of a pool must not count a block several times."""
    members = Members(2, 5, key_bytes=16, policy="lru", shares=(1, 0))
    serve(members.managers[0], "r", range(3))
    serve(members.managers[1], "r", range(2))
    shown = []
    for manager in members.managers:
        collector = Collector(manager, name="m")
        collector.update()
        values = values_of(collector)
        names = ("stored_blocks_total", "hit_blocks_total", "ready_blocks", "capacity_blocks")
        shown.append([values[f"kvoffload_{name}", "m"] for name in names])
    assert shown == [[3, 0, 3, 5], [0, 2, 3, 5]]
    members.close()


def test_two_managers_in_one_registry_are_refused() -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(OffloadingManager(4, key_bytes=16), name="a"))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Collector(OffloadingManager(4, key_bytes=16), name="b"))


def test_without_the_client_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvoffload\[metrics\]'"):
        Collector(OffloadingManager(4, key_bytes=16))


def test_prometheus_accepts_the_text(tmp_path: Path) -> None:
    manager, _ = tiered()
    registry = prometheus_client.CollectorRegistry()
    collector = Collector(manager, name='a "name"')
    registry.register(collector)
    collector.update()
    text = prometheus_client.generate_latest(registry).decode()
    assert "# TYPE kvoffload_stored_blocks_total counter" in text
    assert 'kvoffload_stored_blocks_total{manager="a \\"name\\""} 0.0' in text
    assert "_created" not in text
    manager.close()
