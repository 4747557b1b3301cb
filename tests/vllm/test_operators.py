"""Our manager inside vLLM as operators see it: metrics, sources of hits, options, log lines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload import base

from kvoffload.core.miss_reasons import LIVE_REASONS
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.logs import join
from kvoffload.integrations.vllm import connector, spec
from kvoffload.integrations.vllm.connector import KVOffloadConnector
from kvoffload.integrations.vllm.scheduler_side import audits
from kvoffload.integrations.vllm.scheduler_side.metrics import definitions
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.tiers import EngineTiers
from kvoffload.metrics.families import AUDIT_RESULTS, COUNTERS, REASONS
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.scripted_tier import ScriptedTier
from support.vllm_needs import FILTERS, NAMED_TIERS, SOURCES, needs
from support.vllm_world import World, key

ROOT = Path(__file__).resolve().parents[2]


def shown(manager: Any) -> dict[tuple[str, ...], float]:
    """Return the metrics of the last step, by name and labels."""
    taken = manager.get_stats()
    values: dict[str, Any] = vars(taken)["data"]["data"] if taken is not None else {}
    return {
        (name.removeprefix("vllm:"), *labels): v for name, by in values.items() for labels, v in by.items()
    }


def test_counters_exist_before_the_first_event(tmp_path: Path) -> None:
    rig = World(tmp_path, 6)
    first = shown(rig.manager)
    zeros = {("kvoffload_" + name,): 0 for name in COUNTERS}
    zeros |= {("kvoffload_refused_blocks", reason): 0 for reason in REASONS}
    zeros |= {("kvoffload_miss_blocks", reason): 0 for reason in LIVE_REASONS}
    assert zeros.items() <= first.items()
    assert first["kv_offload_stores_skipped",] == 0
    ctx = rig.request("r", [key(1), key(2)])
    assert rig.lookup(ctx, [key(1)]) == 0
    rig.manager.prepare_store([key(1), key(2), key(3)], ctx)
    rig.manager.metrics.interval_s = 0.0
    then = shown(rig.manager)
    assert then["kvoffload_lookup_blocks",] == 2, "the block behind the first missing block counts as well"
    assert then["kvoffload_miss_blocks", "never_seen"] == 2
    assert then["kvoffload_writing_blocks",] == 3
    assert then["kv_offload_cpu_cache_usage_perc",] == then["kv_offload_cpu_cache_write_usage_perc",] == 0.5
    assert ("kvoffload_evicted_blocks",) not in then, "an unchanged counter is not reported"
    rig.close()


def test_each_result_of_an_audit_has_a_meaning() -> None:
    assert set(audits.RESULTS.values()) == set(AUDIT_RESULTS)


def test_queries_name_metrics_that_exist() -> None:
    """The queries of docs/vllm.md use our metrics and vLLM's metrics of transfers."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    queries = re.findall(r"```promql\n(.*?)\n```", page, re.S)
    assert len(queries) == 4
    counters = {f"{name}_total" for name, made in definitions().items() if "Counter" in type(made).__name__}
    gauges = {name for name, made in definitions().items() if "Gauge" in type(made).__name__}
    # vLLM's own metrics, which test_server.py finds in /metrics.
    counters |= {f"vllm:kv_offload_load_{quantity}_total" for quantity in ("bytes", "time")}
    for query in queries:
        names = re.findall(r"vllm:\w+", query)
        assert names
        assert set(names) <= counters | gauges
        for name in names:
            assert (name in counters) == (f"({name}[" in query), f"rates are of counters: {query}"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_waiting_request_counts_once(tmp_path: Path, at_once: bool) -> None:
    """vLLM repeats the lookup in every step in which the request cannot be scheduled."""
    rig, path = World(tmp_path, 40), [key(number) for number in range(30)]
    rig.manager.metrics.interval_s = 0.0
    rig.serve("stores", path)
    shown(rig.manager)
    ctx = rig.request("r", path)
    asks = (lambda: rig.manager.lookup_prefix(path, ctx)) if at_once else (lambda: rig.lookup(ctx, path))
    for preempted in ([], ["r"]):
        rig.manager.on_schedule_end(base.ScheduleEndContext([], preempted))
        for _ in range(5):
            asks()
            rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        assert ("kvoffload_lookup_blocks",) not in shown(rig.manager), "the request still waits"
        while asks() not in (30, (30, False)):
            rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        rig.manager.prepare_load(path, ctx)
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        rig.manager.complete_load({*path}, ctx)
        then = shown(rig.manager)
        assert then["kvoffload_lookup_blocks",] == then["kvoffload_hit_blocks",] == 30
        assert not any(name == "kvoffload_miss_blocks" for name, *_ in then)
    rig.manager.on_request_finished(ctx)
    rig.close()


@pytest.mark.parametrize("key_bytes", [20, 36])
def test_keys_of_any_length_where_vllm_notes_no_positions(tmp_path: Path, key_bytes: int) -> None:
    """Applies to vLLM before 0.31, whose hash may be xxhash."""
    rig = World(tmp_path, 6)
    keys = [number.to_bytes(key_bytes, "big") for number in range(4)]
    for name in ("a", "b"):
        ctx = base.ReqContext(name)
        rig.manager.on_new_request(ctx)
        hits = rig.lookup(ctx, keys)
        assert hits == (0 if name == "a" else 4)
        if not hits:
            output = rig.manager.prepare_store(keys, ctx)
            assert output.keys_to_store == keys
            rig.manager.complete_store(set(keys), ctx)
        rig.manager.on_request_finished(ctx)
    assert not rig.manager.broken
    rig.pool.close()


def with_a_tier(tmp_path: Path) -> World:
    """Return a world whose tier and RAM have the blocks of keys 1 and 2."""
    rig = World(tmp_path, 16)
    tier = ScriptedTier(rig.pool.slot_stride, immediate=True)
    rig.put_behind(tier)
    rig.serve("stores", [key(1), key(2)])
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert len(tier.blocks) == 2
    return rig


def come_up(rig: World, ctx: Any) -> int | None:
    """Look up the keys 1 and 2 until their blocks in the tier are promoted."""
    assert rig.lookup(ctx, [key(1), key(2)]) is None
    for _ in range(4):
        rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        hits = rig.lookup(ctx, [key(1), key(2)])
    return hits


@needs(*SOURCES)
def test_hits_are_counted_by_source(tmp_path: Path) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    rig = with_a_tier(tmp_path)
    in_ram = rig.request("in ram", [key(1), key(2)])
    assert rig.lookup(in_ram, [key(1), key(2)]) == 2
    assert CacheHitSource(rig.manager.get_load_source(key(1), in_ram)) is CacheHitSource.HOST
    rig.manager.on_request_finished(in_ram)
    rig.manager.core.ram_manager.reset()
    from_tier = rig.request("from tier", [key(1), key(2)])
    assert come_up(rig, from_tier) == 2
    assert CacheHitSource(rig.manager.get_load_source(key(1), from_tier)) is CacheHitSource.DISK


@needs(*FILTERS)
def test_requests_that_exclude_storage(tmp_path: Path) -> None:
    rig = with_a_tier(tmp_path)
    rig.manager.core.ram_manager.reset()
    refuses = rig.request("refuses", [key(1), key(2)])
    refuses.load_tier_filter = base.TierFilter(matchers=(base.TierMatcher(medium=base.Medium.CPU),))
    assert rig.lookup(refuses, [key(1), key(2)]) == 0
    assert come_up(rig, rig.request("takes all", [key(1), key(2)])) == 2


def test_a_failed_load_is_no_failure_of_the_next_block_in_its_slot(tmp_path: Path) -> None:
    """A tier fills the slot, so no worker removes the mark of the failed load."""
    rig, keys = World(tmp_path, 2), [key(1)]
    tier = ScriptedTier(rig.pool.slot_stride, immediate=True)
    rig.put_behind(tier)
    rig.serve("stores", keys)
    rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
    for number in range(6):
        ctx = rig.request(f"r{number}", keys)
        while rig.lookup(ctx, keys) is None:
            rig.manager.on_schedule_end(base.ScheduleEndContext([], []))
        spec = rig.manager.prepare_load(keys, ctx)
        if number % 2 == 0:
            rig.pool.fail(0, spec.block_ids)
        rig.manager.complete_load({*keys}, ctx)
        rig.manager.on_request_finished(ctx)
        assert rig.manager.metrics.counts["failed_load_blocks"] == number // 2 + 1
    assert not rig.manager.broken
    rig.close()


def test_each_problem_with_options_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """They are also logged before any process starts, when vLLM asks about CUDA graphs."""
    with caplog.at_level("ERROR", "vllm.kvoffload"), pytest.raises(ConfigError):
        KVOffloadConnector.requires_piecewise_for_cudagraph(
            {"ram": "1GiB", "polcy": "lru", "verify": "often"}
        )
    assert all(line.startswith("kvoffload: not started: ") for line in caplog.messages)
    assert "polcy" in caplog.text
    assert "often" in caplog.text
    options = {"ram": "1GiB", "sync_load_budget_bytes": 1 << 20, "enable_telemetry": True}
    assert not KVOffloadConnector.requires_piecewise_for_cudagraph(options)


def test_log_lines_of_the_library_appear_in_vllms_log(caplog: pytest.LogCaptureFixture) -> None:
    join(logger)
    join(logger)
    with caplog.at_level("WARNING", "vllm.kvoffload"):
        RateLimitedLog("kvoffload.disk").warn("test", "disk tier: cannot write blocks: %s", "No space left")
    lines = [record for record in caplog.records if record.name == "vllm.kvoffload"]
    assert [line.getMessage() for line in lines] == [
        "kvoffload: disk tier: cannot write blocks: No space left"
    ]


def test_a_gpu_needs_a_version_that_can_pin_our_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(spec, "vllm_version", "0.31.0")
    with pytest.raises(ConfigError, match=r"kvoffload with a GPU needs vLLM 0.32 to 0.33"):
        spec.KVOffloadSpec()


def test_the_connector_needs_a_version_with_a_compatible_scheduler_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "vllm_version", "0.31.0")
    with pytest.raises(ConfigError, match=r"KVOffloadConnector needs vLLM 0.32 to 0.33"):
        KVOffloadConnector(None, None, None)


@needs(*NAMED_TIERS)
def test_a_disk_behind_vllms_ram_needs_a_version_that_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.integrations.vllm import secondary

    monkeypatch.setattr(secondary, "vllm_version", "0.31.0")
    with pytest.raises(ConfigError, match=r"KVOffloadDisk needs vLLM 0.32 to 0.33"):
        secondary.KVOffloadDisk(None, memoryview(b""), "KVOffloadDisk")


def test_a_reset_logs_the_tiers_that_it_does_not_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = World(tmp_path, 6)
    rig.manager._tiers = EngineTiers((), None, None)
    rig.manager._tiers._leave_out(UnavailableError("tiers", "/nvme1/kv", "no such device"))
    with caplog.at_level("ERROR", "vllm.kvoffload"):
        rig.manager.reset_cache()
    assert "this reset does not reach /nvme1/kv" in caplog.text
    rig.close()


def test_a_reset_logs_the_tiers_that_have_not_confirmed_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was logged, although old blocks could be served after a restart."""
    rig = World(tmp_path, 6, tier_deadline_s=0.1)
    sound, failed = (ScriptedTier(4096, name=name) for name in ("sound", "failed"))
    rig.put_behind(sound, failed)

    def fail(method: str) -> None:
        if method == "clear":
            raise OSError("no such device")

    failed.on_call = fail
    with caplog.at_level("ERROR", "vllm.kvoffload"):
        rig.manager.reset_cache()
    assert "the tier failed has not confirmed this reset in 0.1 s" in caplog.text
    assert "the tier sound" not in caplog.text
    assert not rig.manager.broken
    rig.close()
