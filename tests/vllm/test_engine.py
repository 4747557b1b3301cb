"""A real engine that offloads through us: tokens stay the same, blocks come back, and the test can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from traffic import (
    Recorder,
    certain_answers,
    check_nothing_is_left,
    conversations,
    damage,
    drive,
    random_prompts,
)

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = random_prompts(seed=1, count=3, length=300)
"""The engine has room for two of them: each evicts the others."""
CHATS = conversations(seed=2, documents=8, turns=4)


class Expected:
    """What the engine answers without offloading: each prompt alone and computed, and after its own hit."""

    def __init__(self, engine: Any) -> None:
        self.chats, self.answers = certain_answers(engine, CHATS, 8)
        self.prompts = [engine.tokens([prompt])[0] for prompt in PROMPTS]
        self.logprobs = []
        for prompt in PROMPTS:
            engine.tokens([prompt])
            self.logprobs.append(logprobs(engine, prompt))


def logprobs(engine: Any, prompt: list[int]) -> list[dict[int, float]]:
    """Of each token: the five most probable ones, and how probable they were."""
    output = engine.generate([prompt], logprobs=5)[0]
    return [{token: one.logprob for token, one in step.items()} for step in output.logprobs]


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., Any], llama: Path) -> Expected:
    return Expected(start_engine(llama, None))


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any], llama: Path, expected: Expected) -> Any:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options = {"ram": "4MiB", "policy": "arc", "self_describing_kv_events": True}
    return start_engine(llama, options, kv_events_config=events)


def loaded(engine: Any) -> int:
    return engine.manager.core.stats().loaded


def test_loaded_prefixes_give_the_same_tokens(engine: Any, expected: Expected) -> None:
    recorder = Recorder(engine)
    for turn in range(3):
        assert [engine.tokens([prompt])[0] for prompt in PROMPTS] == expected.prompts, f"turn {turn}"
    engine.drain()
    recorder.remove()
    assert engine.manager.core.stats().stored == 27, "nine whole blocks of each prompt, once"
    assert loaded(engine) >= 27
    assert (recorder.compared, recorder.different) == (loaded(engine), 0), "bytes as they were stored"
    check_nothing_is_left(engine)


def test_log_probs_are_those_of_the_engines_own_hits(engine: Any, expected: Expected) -> None:
    for prompt, own in zip(PROMPTS, expected.logprobs, strict=True):
        engine.tokens([prompt])
        engine.forget_device()
        before = loaded(engine)
        assert logprobs(engine, prompt) == own
        assert loaded(engine) == before + 9


def test_events_tell_what_ram_holds(engine: Any, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM publishes, applied to a set, is what our manager holds, with the tokens of each block."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    published: list[Any] = []
    publisher = engine.core.scheduler.kv_event_publisher
    monkeypatch.setattr(publisher, "publish", lambda batch: published.extend(batch.events))
    assert engine.core.reset_prefix_cache(reset_connector=True)
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
    engine.drain()
    stored = [event for event in published if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert [token for event in stored for token in event.token_ids] == PROMPTS[0][:288]
    assert [event.block_size for event in stored] == [32] * 9
    outcome = drive(engine, expected.chats, expected.answers, seed=10, requests=40)
    assert not outcome.wrong
    held: set[Any] = set()
    for event in published:
        if isinstance(event, BlockStored | BlockRemoved) and event.medium == "CPU":
            (held.update if isinstance(event, BlockStored) else held.difference_update)(event.block_hashes)
    core = engine.manager.core
    resident = [core.index.key_at(slot) for slot, state in enumerate(core.ref_cnt.tolist()) if state >= 0]
    assert core.stats().evicted > 0
    assert held == {maybe_convert_block_hash(key[:-4]) for key in resident}


def test_metrics_under_vllms_own(engine: Any, expected: Expected) -> None:
    """What ``/metrics`` of a server would show of this process."""
    from prometheus_client import REGISTRY

    def value(metric: str, /, **labels: str) -> float:
        label = {"model_name": engine.llm.llm_engine.model_config.served_model_name, "engine": "0"}
        found = REGISTRY.get_sample_value(f"vllm:{metric}", label | labels)
        return 0.0 if found is None else found

    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
    engine.forget_device()
    before = {name: value(name) for name in ("kvoffload_hit_blocks_total", "kv_offload_load_bytes_total")}
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
    stats, hits = engine.manager.core.stats(), value("kvoffload_hit_blocks_total")
    assert hits > before["kvoffload_hit_blocks_total"]
    block_bytes = engine.manager._pool.part_bytes
    assert value("kv_offload_load_bytes_total") - before["kv_offload_load_bytes_total"] == block_bytes * (
        hits - before["kvoffload_hit_blocks_total"]
    )
    assert value("kvoffload_capacity_blocks") == stats.capacity
    assert value("kvoffload_ready_blocks") == stats.ready
    assert value("kvoffload_evicted_blocks_total") == stats.evicted
    assert value("kvoffload_stored_blocks_total") == stats.stored
    assert value("kvoffload_policy_state", policy="arc", name="target_t1_blocks") >= 0


@pytest.mark.parametrize("how", ["zeros", "noise", "other slots"])
def test_wrong_bytes_change_the_tokens(engine: Any, expected: Expected, how: str) -> None:
    """The negative control: without verification the engine computes with whatever is loaded."""
    kept = engine.manager._pool._slots.copy()
    engine.forget_device()
    damage(engine, how)
    tokens = engine.tokens([PROMPTS[0]])[0]
    engine.drain()
    engine.manager._pool._slots[:] = kept
    engine.forget_device()
    assert tokens != expected.prompts[0]
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_failing_worker_stops_nothing(
    engine: Any, expected: Expected, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.core.reset_prefix_cache(reset_connector=True)
    if direction == "load":
        assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
        engine.forget_device()

    def fail(*_: Any) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(engine.worker._copies, "_copy", fail)
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0]
    engine.drain()
    monkeypatch.undo()
    assert engine.worker.num_failed >= 1
    check_nothing_is_left(engine)
    engine.forget_device()
    assert engine.tokens([PROMPTS[0]])[0] == expected.prompts[0], "and it goes on"


@pytest.mark.parametrize("seed", [1, 2])
def test_stress(engine: Any, expected: Expected, seed: int) -> None:
    """Preemption, aborts, eviction in engine and pool, resets; the seed is in the name."""
    before = engine.manager.core.stats()
    outcome = drive(
        engine, expected.chats, expected.answers, seed, 100, aborts=0.1 * (seed - 1), resets=0.01 * (seed - 1)
    )
    after = engine.manager.core.stats()
    assert not outcome.wrong, outcome
    assert outcome.finished + outcome.aborted == 100
    assert outcome.preempted
    assert after.loaded > before.loaded
    assert after.evicted > before.evicted
    check_nothing_is_left(engine)
