"""What operators see of our manager inside vLLM: metrics, sources of hits, options, lines in the log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload import base

from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm import connector, spec
from kvoffload.integrations.vllm.connector import KVOffloadConnector
from kvoffload.integrations.vllm.scheduler_side.metrics import COUNTERS, REASONS
from kvoffload.integrations.vllm.shared.logs import join_vllm
from kvoffload.testing.scripted_tier import ScriptedTier
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.vllm_needs import FILTERS, NAMED_TIERS, SOURCES, needs
from support.vllm_world import World, key


def shown(manager: Any) -> dict[tuple[str, ...], float]:
    """What the last step has told vLLM, by name and labels."""
    taken = manager.get_stats()
    values: dict[str, Any] = vars(taken)["data"]["data"] if taken is not None else {}
    return {
        (name.removeprefix("vllm:"), *labels): v for name, by in values.items() for labels, v in by.items()
    }


def test_counters_are_there_before_anything_has_happened(tmp_path: Path) -> None:
    one = World(tmp_path, 6)
    first = shown(one.manager)
    zeros = {("kvoffload_" + name,): 0 for name in COUNTERS}
    zeros |= {("kvoffload_refused_blocks", reason): 0 for reason in REASONS}
    assert zeros.items() <= first.items()
    assert first["kv_offload_stores_skipped",] == 0
    ctx = one.request("r", [key(1), key(2)])
    assert one.lookup(ctx, [key(1)]) == 0
    one.manager.prepare_store([key(1), key(2), key(3)], ctx)
    one.manager.metrics.interval_s = 0.0
    then = shown(one.manager)
    assert then["kvoffload_lookup_blocks",] == 1
    assert then["kvoffload_writing_blocks",] == 3
    assert then["kv_offload_cpu_cache_usage_perc",] == then["kv_offload_cpu_cache_write_usage_perc",] == 0.5
    assert ("kvoffload_evicted_blocks",) not in then, "nothing has changed"
    one.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_waiting_request_counts_once(tmp_path: Path, at_once: bool) -> None:
    """vLLM repeats the lookup in every step in which the request cannot be scheduled."""
    one, path = World(tmp_path, 40), [key(number) for number in range(30)]
    one.serve("stores", path)
    one.manager.metrics.num_lookups = 0
    ctx = one.request("r", path)
    asks = (lambda: one.manager.lookup_prefix(path, ctx)) if at_once else (lambda: one.lookup(ctx, path))
    for _ in range(5):
        assert asks() == ((30, False) if at_once else 30)
        one.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert one.manager.metrics.num_lookups == 30
    one.manager.on_schedule_end(base.ScheduleEndContext(["r"], []))
    one.manager.on_schedule_end(base.ScheduleEndContext([], ["r"]))
    asks()
    assert one.manager.metrics.num_lookups == 60, "preempted: the blocks are looked up and loaded once more"
    one.manager.on_request_finished(ctx)
    one.close()


@pytest.mark.parametrize("key_bytes", [20, 36])
def test_keys_of_any_length_where_vllm_notes_no_positions(tmp_path: Path, key_bytes: int) -> None:
    """vLLM before 0.31; its hash may be xxhash."""
    one = World(tmp_path, 6)
    keys = [number.to_bytes(key_bytes, "big") for number in range(4)]
    for name in ("a", "b"):
        ctx = base.ReqContext(name)
        one.manager.on_new_request(ctx)
        hits = one.lookup(ctx, keys)
        assert hits == (0 if name == "a" else 4)
        if not hits:
            output = one.manager.prepare_store(keys, ctx)
            assert output.keys_to_store == keys
            one.manager.complete_store(set(keys), ctx)
        one.manager.on_request_finished(ctx)
    assert not one.manager.broken
    one.pool.close()


def with_a_tier(tmp_path: Path) -> World:
    """A world whose tier has the blocks of the keys 1 and 2, and its RAM as well."""
    one = World(tmp_path, 16)
    tier = ScriptedTier(one.pool.slot_stride, immediate=True)
    one.manager._open_tiers = lambda block_bytes, key_bytes: [tier]
    one.manager._build(36)
    one.serve("stores", [key(1), key(2)])
    one.manager.on_schedule_end(base.ScheduleEndContext([], []))
    assert len(tier.blocks) == 2
    return one


def come_up(one: World, ctx: Any) -> int | None:
    """Ask for the keys 1 and 2 until what is in the tier has come up."""
    assert one.lookup(ctx, [key(1), key(2)]) is None
    for _ in range(4):
        one.manager.on_schedule_end(base.ScheduleEndContext([], []))
        found = one.lookup(ctx, [key(1), key(2)])
    return found


@needs(*SOURCES)
def test_where_a_hit_came_from(tmp_path: Path) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    one = with_a_tier(tmp_path)
    in_ram = one.request("in ram", [key(1), key(2)])
    assert one.lookup(in_ram, [key(1), key(2)]) == 2
    assert CacheHitSource(one.manager.get_load_source(key(1), in_ram)) is CacheHitSource.HOST
    one.manager.on_request_finished(in_ram)
    OffloadingManager.reset(one.manager.core)
    from_tier = one.request("from tier", [key(1), key(2)])
    assert come_up(one, from_tier) == 2
    assert CacheHitSource(one.manager.get_load_source(key(1), from_tier)) is CacheHitSource.DISK


@needs(*FILTERS)
def test_requests_that_leave_out_storage(tmp_path: Path) -> None:
    one = with_a_tier(tmp_path)
    OffloadingManager.reset(one.manager.core)
    refuses = one.request("refuses", [key(1), key(2)])
    refuses.load_tier_filter = base.TierFilter(matchers=(base.TierMatcher(medium=base.Medium.CPU),))
    assert one.lookup(refuses, [key(1), key(2)]) == 0
    assert come_up(one, one.request("takes all", [key(1), key(2)])) == 2


def test_a_load_that_failed_is_no_failure_of_what_comes_into_its_slot_next(tmp_path: Path) -> None:
    """A tier fills the slot: no worker stores there, and says that the slot is sound again."""
    one, keys = World(tmp_path, 2), [key(1)]
    tier = ScriptedTier(one.pool.slot_stride, immediate=True)
    one.manager._open_tiers = lambda block_bytes, key_bytes: [tier]
    one.manager._build(36)
    one.serve("stores", keys)
    one.manager.on_schedule_end(base.ScheduleEndContext([], []))
    for number in range(6):
        ctx = one.request(f"r{number}", keys)
        while one.lookup(ctx, keys) is None:
            one.manager.on_schedule_end(base.ScheduleEndContext([], []))
        spec = one.manager.prepare_load(keys, ctx)
        if number % 2 == 0:
            one.pool.fail(0, spec.block_ids)
        one.manager.complete_load({*keys}, ctx)
        one.manager.on_request_finished(ctx)
        assert one.manager.metrics.counts["failed_load_blocks"] == number // 2 + 1
    assert not one.manager.broken
    one.close()


def test_problems_with_options_are_lines_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Also before any process is started, where vLLM asks about CUDA graphs."""
    with caplog.at_level("ERROR", "vllm.kvoffload"), pytest.raises(ConfigError):
        KVOffloadConnector.requires_piecewise_for_cudagraph(
            {"ram": "1GiB", "polcy": "lru", "verify": "often"}
        )
    assert all(line.startswith("kvoffload: not started: ") for line in caplog.messages)
    assert "polcy" in caplog.text
    assert "often" in caplog.text
    mine = {"ram": "1GiB", "sync_load_budget_bytes": 1 << 20, "enable_telemetry": True}
    assert not KVOffloadConnector.requires_piecewise_for_cudagraph(mine)


def test_what_the_library_logs_is_vllms(caplog: pytest.LogCaptureFixture) -> None:
    join_vllm()
    join_vllm()
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


def test_the_connector_needs_a_version_whose_scheduler_side_is_as_ours(
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


def test_a_reset_says_which_tiers_it_does_not_reach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = World(tmp_path, 6)
    one.manager._missing_tiers = ["/nvme1/kv"]
    with caplog.at_level("ERROR", "vllm.kvoffload"):
        one.manager.reset_cache()
    assert "this reset does not reach /nvme1/kv" in caplog.text
    one.close()
