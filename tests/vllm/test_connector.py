"""`KVOffloadConnector` in a real engine: lookups of whole prefixes, and the victim tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.integrations.vllm.scheduler_side.scheduler import KVOffloadScheduler
from kvoffload.testing.audit import audit
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import (
    ANSWER_TOKENS,
    TOKENS_THAT_PREEMPT,
    Expected,
    answer_across_a_reset,
    check_nothing_is_left,
    drive,
    random_prompts,
)

SamplingParams = pytest.importorskip("vllm").SamplingParams

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]

VICTIM = {"ram": "32MiB", "store": "on-device-eviction"}
SMALL_STEPS = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 48}
NINE = 9
"""Prompts: 81 whole blocks, more than the engine has."""


def test_prefixes_at_once(start_engine: Callable[..., Any], llama: Path, on_llama: Expected) -> None:
    engine = start_engine(llama, {"ram": "32MiB"}, connector=True, **SMALL_STEPS)
    prefix_lengths: list[int] = []
    lookup = engine.manager.lookup_prefix
    engine.manager.lookup_prefix = lambda keys, ctx: prefix_lengths.append(len(keys)) or lookup(keys, ctx)
    engine.manager.lookup = None  # fails if vLLM looks up single keys
    side = engine.connector.connector_scheduler
    sources: list[tuple[Any, Any]] = []
    get_sources = side.get_external_cache_hit_sources
    of_vllm = super(KVOffloadScheduler, side).get_external_cache_hit_sources
    side.get_external_cache_hit_sources = lambda *given: (
        sources.append((get_sources(*given), of_vllm(*given))) or get_sources(*given)
    )
    for _ in range(2):
        on_llama.check(engine, NINE)
    engine.drain()
    assert max(prefix_lengths) == 9
    assert sources
    assert all(our_item == vllm_item for our_item, vllm_item in sources)
    assert engine.manager.core.stats().loaded >= 9
    audit(engine.manager.core)
    before = engine.manager.core.stats().loaded
    assert answer_across_a_reset(engine, on_llama.prompts[0], ANSWER_TOKENS) == on_llama.answers[0]
    assert engine.manager.core.stats().loaded >= before + 9
    check_nothing_is_left(engine)


@pytest.fixture(scope="module")
def victim(start_engine: Callable[..., Any], llama: Path, on_llama: Expected) -> Any:
    return start_engine(llama, VICTIM, connector=True, **SMALL_STEPS)


def test_blocks_evicted_by_the_gpu_are_loaded(victim: Any, on_llama: Expected) -> None:
    """The engine has 47 blocks, the prompts 81: the engine loads its evicted blocks from RAM."""
    for _ in range(3):
        on_llama.check(victim, NINE)
    victim.drain()
    stats = victim.manager.core.stats()
    assert stats.loaded > 40
    assert victim.manager.metrics.counts["lost_blocks"] <= 20, "when a prefix comes back for the first time"
    assert victim.connector.connector_scheduler.window.size > 4
    audit(victim.manager.core)


def test_blocks_kept_by_the_gpu_are_not_stored(victim: Any) -> None:
    victim.forget_device()
    victim.llm.reset_prefix_cache(reset_connector=True)
    before = victim.manager.core.stats()
    prompt = random_prompts(seed=5, count=1, length=300)[0]
    for _ in range(3):
        victim.tokens([prompt])
    victim.drain()
    after = victim.manager.core.stats()
    assert (after.stored - before.stored, after.loaded - before.loaded) == (0, 0)


def test_loaded_blocks_are_kept_without_a_copy(victim: Any, on_llama: Expected) -> None:
    victim.llm.reset_prefix_cache(reset_connector=True)
    for _ in range(6):
        for prompt, tokens in zip(on_llama.prompts[:5], on_llama.answers, strict=False):
            assert victim.tokens([prompt])[0] == tokens
    victim.drain()
    stats = victim.manager.core.stats()
    assert stats.kept > 0
    audit(victim.manager.core)


@pytest.mark.parametrize("seed", [1, 2])
def test_stress(victim: Any, on_llama: Expected, seed: int) -> None:
    """Preemption, aborts, eviction in engine and pool, resets; the seed is in the name."""
    victim.llm.reset_prefix_cache(reset_connector=True)
    before = victim.manager.core.stats()
    outcome = drive(
        victim, on_llama.chats, on_llama.chat_answers, seed, 60, aborts=0.1, resets=0.01 * (seed - 1)
    )
    after = victim.manager.core.stats()
    assert not outcome.wrong, outcome
    assert outcome.finished + outcome.aborted == 60
    assert after.loaded > before.loaded
    check_nothing_is_left(victim)
    scheduler = victim.connector.connector_scheduler
    assert not scheduler._jobs
    assert not scheduler._block_id_to_pending_jobs
    assert list(scheduler._req_status) == [""]


def test_few_free_blocks_fall_back_to_storing_at_once(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected
) -> None:
    """A step may take 64 blocks, but the engine has 23: the window is half of these, mostly in use."""
    engine = start_engine(
        llama, VICTIM, connector=True, num_gpu_blocks_override=24, max_num_batched_tokens=2048
    )
    for _ in range(3):
        assert engine.tokens(on_llama.prompts[:NINE]) == on_llama.answers[:NINE]
    engine.drain()
    assert engine.connector.connector_scheduler.window.size == 12
    stats = engine.manager.core.stats()
    assert stats.loaded > 0
    audit(engine.manager.core)


def test_two_kv_groups(start_engine: Callable[..., Any], hybrid: Path, on_hybrid: Expected) -> None:
    """Some layers attend to the whole prefix, others to the last 80 tokens: two groups of blocks."""
    settings = SMALL_STEPS | {"disable_hybrid_kv_cache_manager": False}
    engine = start_engine(hybrid, VICTIM, connector=True, **settings)
    assert len(engine.connector.connector_scheduler.config.kv_group_configs) == 2
    for _ in range(3):
        on_hybrid.check(engine, NINE)
    engine.drain()
    assert engine.manager.core.stats().loaded > 20
    check_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("offload", "settings", "message"),
    [
        ({"blocks_per_chunk": 3}, {}, "one engine block"),
        ({}, {"enable_prefix_caching": False}, "prefix caching"),
    ],
)
def test_impossible_settings_are_refused(
    start_engine: Callable[..., Any], llama: Path, offload: Any, settings: Any, message: str
) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    with pytest.raises(Exception, match=message):
        start_engine(llama, VICTIM | offload, **{"connector": True, **settings})
    ensure_kv_transfer_shutdown()


def test_hints_of_the_engine_reach_the_policy(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected
) -> None:
    engine = start_engine(llama, {"ram": "32MiB", "policy": "hazard"}, connector=True, **SMALL_STEPS)
    hints_seen: list[tuple[Hints, Hints]] = []
    core = engine.manager.core
    finish = core.finish_request

    def finish_and_write_down(ctx: Any, *, hints: Hints = NO_HINTS) -> None:
        began_with = ctx.hints
        finish(ctx, hints=hints)
        hints_seen.append((began_with, ctx.hints))

    core.finish_request = finish_and_write_down
    first = on_llama.answers[0][0]
    parameters: list[Any] = [
        {},
        {"stop_token_ids": [first], "max_tokens": 4},
        {"extra_args": {"kv_transfer_params": {"kvoffload": {"session_over": True, "tenant": "a"}}}},
        {"extra_args": {"kv_transfer_params": {"kvoffload": {"tenants": "a"}}}},
    ]
    for extra in parameters:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 2, "ignore_eos": False} | extra)
        engine.llm.generate([{"prompt_token_ids": on_llama.prompts[0]}], sampling, use_tqdm=False)
    salted = {"prompt_token_ids": on_llama.prompts[0], "cache_salt": "their secret"}
    engine.llm.generate([salted], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    engine.drain()
    assert hints_seen == [
        (NO_HINTS, Hints("length")),
        (NO_HINTS, Hints(f"stop {first}")),
        (
            Hints(session_over=True, tenant="a"),
            Hints("length", session_over=True, tenant="a"),
        ),
        (NO_HINTS, Hints("length")),
        (Hints(tenant="their secret"), Hints("length", tenant="their secret")),
    ]
    assert not engine.manager._arrivals
    audit(core)


def test_blocks_of_waiting_requests_are_expected(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected
) -> None:
    """One request runs at a time, and the others wait."""
    engine = start_engine(llama, {"ram": "32MiB"}, connector=True, max_num_seqs=1, **SMALL_STEPS)
    core, expected_blocks = engine.manager.core, list[int]()
    withdraw = core.withdraw
    core.withdraw = lambda ctx: expected_blocks.append(core.counters().expected) or withdraw(ctx)
    assert engine.tokens(on_llama.prompts[:NINE]) == on_llama.answers[:NINE]
    engine.drain()
    assert expected_blocks == [*range(81, 0, -9)], "81 blocks in all, nine fewer after each request"
    assert core.counters().expected == 0
    audit(core)


def test_a_preempted_request_waits_again(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected
) -> None:
    engine = start_engine(llama, {"ram": "32MiB"}, connector=True)
    core, waited = engine.manager.core, list[Any]()
    expect = core.expect
    core.expect = lambda ctx: waited.append(ctx) or expect(ctx)
    outcome = drive(
        engine, on_llama.chats, on_llama.chat_answers, seed=3, requests=60, tokens=TOKENS_THAT_PREEMPT
    )
    assert not outcome.wrong, outcome
    assert outcome.preempted > 0
    assert len(waited) == 60 + outcome.preempted
    assert len({id(ctx) for ctx in waited}) == 60
    assert core.counters().expected == 0
    audit(core)


@pytest.mark.parametrize("store", ["on-compute", "on-device-eviction"])
def test_works_inside_a_multi_connector(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, tmp_path: Path, store: str
) -> None:
    """A child's configuration that names no specification once crashed the engine at its first report."""
    our_config = {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "kvoffload.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram": "4MiB", "store": store},
    }
    other_config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [our_config, other_config]},
    }
    engine = start_engine(llama, None, kv_transfer_config=transfer)
    for _ in range(3):
        on_llama.check(engine, 4)
    stats = engine.manager.core.stats()
    assert stats.loaded > 0
    assert stats.stored > 0
    assert not engine.manager.broken
    audit(engine.manager.core)
