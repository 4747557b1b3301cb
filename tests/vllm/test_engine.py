"""A real engine that offloads through kvoffload: equal tokens, loaded blocks, and a negative control."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.vllm_needs import COUNTS_EVERY_STEP, RESETS, needs
from support.vllm_traffic import (
    ANSWER_TOKENS,
    TOKENS_THAT_PREEMPT,
    Expected,
    Recorder,
    answer_across_a_reset,
    check_nothing_is_left,
    conversations,
    damage,
    drive,
)

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

THREE = 3
"""Number of prompts: the engine has room for two, so each evicts the others."""


def logprobs(engine: Any, prompt: list[int]) -> list[dict[int, float]]:
    """Return the five most probable tokens at each position, with their log-probabilities."""
    output = engine.generate([prompt], logprobs=5)[0]
    return [{token: item.logprob for token, item in step.items()} for step in output.logprobs]


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any], llama: Path, on_llama: Expected) -> Any:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options = {"ram": "8MiB", "policy": "arc", "self_describing_kv_events": True}
    return start_engine(llama, options, kv_events_config=events)


def loaded(engine: Any) -> int:
    return engine.manager.core.stats().loaded


def test_loaded_prefixes_give_the_same_tokens(engine: Any, on_llama: Expected) -> None:
    recorder = Recorder(engine)
    for _ in range(3):
        on_llama.check(engine, THREE)
    engine.drain()
    recorder.remove()
    assert engine.manager.core.stats().stored == 27, "nine whole blocks of each prompt, once"
    assert loaded(engine) >= 27
    assert (recorder.compared, recorder.different) == (loaded(engine), 0), "loaded bytes equal stored bytes"
    check_nothing_is_left(engine)


@needs(*RESETS)
def test_a_reset_under_a_request_that_loads_in_the_same_step(engine: Any, on_llama: Expected) -> None:
    on_llama.check(engine, 1)
    engine.drain()
    before = loaded(engine)
    for _ in range(2):
        answer = answer_across_a_reset(engine, on_llama.prompts[0], ANSWER_TOKENS)
        assert answer == on_llama.answers[0]
    assert loaded(engine) >= before + 18, "nine blocks after each reset"
    check_nothing_is_left(engine)


def test_log_probs_equal_the_ones_of_hits_in_the_gpu_cache(engine: Any, on_llama: Expected) -> None:
    """They are equal to the last bit: both compute the same twelve tokens after the same 288."""
    for prompt in on_llama.prompts[:THREE]:
        engine.tokens([prompt])
        before = loaded(engine)
        own = logprobs(engine, prompt)
        assert loaded(engine) == before
        engine.forget_device()
        assert logprobs(engine, prompt) == own
        assert loaded(engine) == before + 9


def test_events_match_the_contents_of_ram(
    engine: Any, on_llama: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Applying the published events to a set gives the blocks of our manager, with their tokens."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    published: list[Any] = []
    publisher = engine.core.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", lambda batch: published.extend(batch.events))
    assert engine.core.reset_prefix_cache(reset_connector=True)
    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
    engine.drain()
    stored = [event for event in published if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert [token for event in stored for token in event.token_ids] == on_llama.prompts[0][:288]
    assert [event.block_size for event in stored] == [32] * 9
    outcome = drive(engine, on_llama.chats, on_llama.chat_answers, seed=10, requests=40)
    assert not outcome.wrong
    held: set[Any] = set()
    for event in published:
        if isinstance(event, BlockStored | BlockRemoved) and event.medium == "CPU":
            (held.update if isinstance(event, BlockStored) else held.difference_update)(event.block_hashes)
    core = engine.manager.core
    resident = [
        core.index.key_at(slot) for slot, state in enumerate(core.slots.ref_cnt.tolist()) if state >= 0
    ]
    assert core.stats().evicted > 0
    assert held == {maybe_convert_block_hash(key[:-4]) for key in resident}


@needs(*COUNTS_EVERY_STEP)
def test_metrics_under_vllms_own(engine: Any, on_llama: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a running request, ``/metrics`` of a server has the metrics of this process."""
    monkeypatch.setattr(engine.manager.metrics, "interval_s", 1e9)
    from prometheus_client import REGISTRY

    def value(metric: str, /, **labels: str) -> float:
        label = {"model_name": engine.llm.llm_engine.model_config.served_model_name, "engine": "0"}
        sample = REGISTRY.get_sample_value(f"vllm:{metric}", label | labels)
        return 0.0 if sample is None else sample

    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
    engine.forget_device()
    before = {name: value(name) for name in ("kvoffload_hit_blocks_total", "kv_offload_load_bytes_total")}
    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
    engine.drain()
    stats, hits = engine.manager.core.stats(), value("kvoffload_hit_blocks_total")
    assert hits > before["kvoffload_hit_blocks_total"]
    block_bytes = engine.manager.pool.part_bytes
    assert value("kv_offload_load_bytes_total") - before["kv_offload_load_bytes_total"] == block_bytes * (
        hits - before["kvoffload_hit_blocks_total"]
    )
    assert value("kvoffload_capacity_blocks") == stats.capacity
    assert value("kvoffload_ready_blocks") == stats.ready
    assert value("kvoffload_evicted_blocks_total") == stats.evicted
    assert value("kvoffload_stored_blocks_total") == stats.stored
    assert value("kvoffload_policy_state", policy="arc", name="target_t1_blocks") >= 0


@pytest.mark.parametrize("how", ["zeros", "noise", "other slots"])
def test_wrong_bytes_change_the_tokens(engine: Any, on_llama: Expected, how: str) -> None:
    """Negative control: without verification the engine computes with the damaged bytes."""
    assert engine.core.reset_prefix_cache(reset_connector=True)
    # Blocks of these prompts that earlier tests stored in other slots would have the right bytes.
    engine.manager.pool.slots[:] = 0
    on_llama.check(engine, THREE)
    engine.forget_device()
    kept = engine.manager.pool.slots.copy()
    damage(engine, how)
    before = loaded(engine)
    answers = [engine.tokens([prompt])[0] for prompt in on_llama.prompts[:THREE]]
    engine.drain()
    assert loaded(engine) == before + 27
    engine.manager.pool.slots[:] = kept
    engine.forget_device()
    for answer, expected in zip(answers, on_llama.answers, strict=False):
        wrong = sum(map(operator.ne, answer, expected))
        assert wrong > ANSWER_TOKENS / 2, "far more tokens than rounding can change"
    on_llama.check(engine, THREE)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_failing_worker_stops_nothing(
    engine: Any, on_llama: Expected, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.core.reset_prefix_cache(reset_connector=True)
    if direction == "load":
        assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
        engine.forget_device()

    def fail(*_: Any) -> None:
        raise RuntimeError("a failing copy")

    monkeypatch.setattr(engine.worker.copies, "_copy", fail)
    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0]
    engine.drain()
    monkeypatch.undo()
    assert engine.worker.num_failed >= 1
    check_nothing_is_left(engine)
    engine.forget_device()
    assert engine.tokens([on_llama.prompts[0]])[0] == on_llama.answers[0], "the engine continues"


@pytest.mark.parametrize("seed", [1, 2])
def test_stress(engine: Any, on_llama: Expected, seed: int) -> None:
    """Preemption, aborts, eviction in engine and pool, resets; the seed is in the name."""
    before = engine.manager.core.stats()
    outcome = drive(
        engine,
        on_llama.chats,
        on_llama.chat_answers,
        seed,
        100,
        tokens=TOKENS_THAT_PREEMPT,
        aborts=0.1 * (seed - 1),
        resets=0.01 * (seed - 1),
    )
    after = engine.manager.core.stats()
    assert not outcome.wrong, outcome
    assert outcome.finished + outcome.aborted == 100
    assert outcome.preempted
    assert after.loaded > before.loaded
    if seed == 1:
        assert after.evicted > before.evicted
    else:  # with resets in quick succession RAM is never full
        assert after.discarded > before.discarded
    check_nothing_is_left(engine)


def test_bf16_keeps_its_bytes(start_engine: Callable[..., Any], llama: Path) -> None:
    """In bf16, which users run, answers depend on the processor; the test compares loaded bytes instead."""
    chats = conversations(2, documents=8, turns=4)
    engine = start_engine(llama, {"ram": "4MiB", "policy": "arc"}, dtype="bfloat16")
    recorder = Recorder(engine)
    outcome = drive(engine, chats, [[] for _ in chats], seed=3, requests=60, aborts=0.1, resets=0.005)
    recorder.remove()
    assert outcome.finished + outcome.aborted == 60
    assert engine.manager.core.stats().evicted > 0
    assert recorder.compared > 50
    assert recorder.different == 0
    check_nothing_is_left(engine)
