"""Real engines with verified pools, chunks of several blocks, or several KV groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support.vllm_traffic import Expected, check_nothing_is_left, damage, drive

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TWO = 2
"""Prompts of 18 whole blocks: the pools of these tests have room for them and one or two requests more."""


def stress(engine: Any, expected: Expected, seed: int, resets: float = 0.005) -> None:
    before = engine.manager.core.stats()
    outcome = drive(engine, expected.chats, expected.chat_answers, seed, 60, aborts=0.1, resets=resets)
    after = engine.manager.core.stats()
    assert not outcome.wrong, (seed, outcome)
    assert after.loaded > before.loaded
    assert after.evicted + after.discarded > before.evicted + before.discarded
    check_nothing_is_left(engine)


def test_a_damaged_block_is_computed_again(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected
) -> None:
    """With ``verify: always`` damage in the pool changes only a counter."""
    engine = start_engine(llama, {"ram": "4MiB", "verify": "always", "policy": "s3fifo"})
    on_llama.check(engine, TWO)
    engine.forget_device()
    on_llama.check(engine, TWO)
    assert engine.manager.core.stats().loaded == 18, "sound blocks are loaded"
    for how in ("zeros", "noise", "other slots"):
        engine.forget_device()
        damage(engine, how)
        before = engine.manager.core.stats()
        on_llama.check(engine, TWO)
        engine.drain()
        after = engine.manager.core.stats()
        assert after.loaded == before.loaded, "no damaged block is loaded"
        assert after.discarded > before.discarded
        assert after.stored == before.stored + (after.discarded - before.discarded), "each is stored again"
    # A request cancels the checks that it does not need, but finds at least one damaged block.
    for _ in range(18):
        engine.forget_device()
        before = engine.manager.core.stats()
        on_llama.check(engine, TWO)
        if engine.manager.core.stats().loaded == before.loaded + 18:
            break
    else:
        pytest.fail("damaged blocks are still in RAM")
    # One bad block in the middle: the sound head is loaded, the rest is computed.
    ready = engine.manager.core.lookup(engine_keys(engine, on_llama.prompts[0])).num_ready
    assert ready == 9
    plan = engine.manager.core.prepare_load(engine_keys(engine, on_llama.prompts[0]))
    engine.manager.pool.slots[plan.slots[4], 0] ^= 1
    engine.manager.core.unpin(plan)
    before = engine.manager.core.stats()
    on_llama.check(engine, 1)
    engine.drain()
    assert engine.manager.core.stats().loaded == before.loaded + 4
    stress(engine, on_llama, seed=6)


def engine_keys(engine: Any, prompt: list[int]) -> list[bytes]:
    """Return vLLM's keys of a prompt, overheard from a lookup."""
    noted: list[bytes] = []
    core, begin, touch = engine.manager.core, engine.manager.core.begin_request, engine.manager.core.touch

    def listen(request_id: str, keys: list[bytes], **known: Any) -> Any:
        noted[:] = keys
        return begin(request_id, keys, **known)

    def listen_before_0_31(keys: list[bytes], ctx: Any) -> None:
        noted[:] = keys
        touch(keys, ctx)

    core.begin_request, core.touch = listen, listen_before_0_31
    engine.tokens([prompt], 1)
    engine.drain()
    del core.begin_request, core.touch
    engine.forget_device()
    return noted[: len(prompt) // 32]


def test_chunks_of_three_blocks(start_engine: Callable[..., Any], llama: Path, on_llama: Expected) -> None:
    engine = start_engine(
        llama, {"ram": "4MiB", "blocks_per_chunk": 3, "policy": "lirs", "prompt_only": False}
    )
    for _ in range(2):
        on_llama.check(engine, TWO)
        engine.forget_device()
    stats = engine.manager.core.stats()
    assert (stats.stored, stats.loaded) == (6, 6), "three chunks of each prompt"
    stress(engine, on_llama, seed=7)


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_two_kv_groups(
    start_engine: Callable[..., Any],
    hybrid: Path,
    on_hybrid: Expected,
    blocks_per_chunk: int,
) -> None:
    engine = start_engine(
        hybrid,
        {"ram": "4MiB", "blocks_per_chunk": blocks_per_chunk, "verify": "always", "policy": "wtinylfu"},
        num_gpu_blocks_override=44,
    )
    assert len(engine.connector.connector_scheduler.config.kv_group_configs) == 2
    for _ in range(2):
        on_hybrid.check(engine, TWO)
        engine.forget_device()
    assert engine.manager.core.stats().loaded > 0
    if blocks_per_chunk == 1:
        damage(engine, "noise")
        on_hybrid.check(engine, TWO)
        assert engine.manager.core.stats().discarded > 0
    # With chunks that have lost blocks to the sliding window, and resets under running requests, vLLM's
    # scheduler sometimes offers blocks that now belong to other requests. Several rounds make that likely.
    for seed in (8, 9, 10, 12):
        stress(engine, on_hybrid, seed, resets=0.02)


def test_only_our_connector_offers_blocks_evicted_by_the_gpu(
    start_engine: Callable[..., Any], llama: Path
) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    with pytest.raises(Exception, match="only with kv_connector: KVOffloadConnector"):
        start_engine(llama, {"ram": "4MiB", "store": "on-device-eviction"})
    ensure_kv_transfer_shutdown()
