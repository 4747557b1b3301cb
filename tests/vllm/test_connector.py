"""`KVOffloadConnector` in a real engine: prefixes at once, and storing what the GPU is about to drop."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: `make test-vllm` builds an environment")
# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

from kvoffload.testing.audit import audit  # noqa: E402

VICTIM = {"ram": "16MiB", "store": "on-device-eviction"}
SMALL_STEPS = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 48}


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 1024) for _ in range(length)] for _ in range(count)]


PROMPTS = random_prompts(seed=3, count=8, length=300)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., Any], llama: Path) -> list[list[int]]:
    """What the engine answers without offloading, each prompt computed."""
    engine = start_engine(llama, None, **SMALL_STEPS)
    return [engine.tokens([prompt])[0] for prompt in PROMPTS]


def test_prefixes_at_once(start_engine: Callable[..., Any], llama: Path, expected: list[list[int]]) -> None:
    engine = start_engine(llama, {"ram": "16MiB"}, connector=True, **SMALL_STEPS)
    asked: list[int] = []
    lookup = engine.manager.lookup_prefix
    engine.manager.lookup_prefix = lambda keys, ctx: asked.append(len(keys)) or lookup(keys, ctx)
    engine.manager.lookup = None  # key by key: never
    for turn in range(2):
        assert [engine.tokens([prompt])[0] for prompt in PROMPTS] == expected, f"turn {turn}"
    engine.drain()
    assert max(asked) == 9
    assert engine.manager.core.stats().loaded >= 9
    audit(engine.manager.core)


@pytest.fixture(scope="module")
def victim(start_engine: Callable[..., Any], llama: Path, expected: list[list[int]]) -> Any:
    return start_engine(llama, VICTIM, connector=True, **SMALL_STEPS)


def test_what_the_gpu_drops_comes_back(victim: Any, expected: list[list[int]]) -> None:
    """47 blocks in the engine, 80 in the prompts: the engine drops what RAM then gives back."""
    for turn in range(3):
        assert [victim.tokens([prompt])[0] for prompt in PROMPTS] == expected, f"turn {turn}"
    victim.drain()
    stats = victim.manager.core.stats()
    assert stats.loaded > 40
    assert victim.connector.connector_scheduler.num_unseen == 0
    audit(victim.manager.core)


def test_nothing_is_stored_that_the_gpu_keeps(victim: Any) -> None:
    victim.forget_device()
    victim.llm.reset_prefix_cache(reset_connector=True)
    before = victim.manager.core.stats()
    prompt = random_prompts(seed=5, count=1, length=300)[0]
    for _ in range(3):
        victim.tokens([prompt])
    victim.drain()
    after = victim.manager.core.stats()
    assert (after.stored - before.stored, after.loaded - before.loaded) == (0, 0)


def test_what_came_back_is_kept_without_a_copy(victim: Any, expected: list[list[int]]) -> None:
    victim.llm.reset_prefix_cache(reset_connector=True)
    for _ in range(6):
        for prompt, tokens in zip(PROMPTS[:5], expected, strict=False):
            assert victim.tokens([prompt])[0] == tokens
    victim.drain()
    stats = victim.manager.core.stats()
    assert stats.kept > 0
    audit(victim.manager.core)


def test_many_at_once_preempted_and_aborted(victim: Any, expected: list[list[int]]) -> None:
    """More than the engine has blocks for: requests wait, are preempted and finish together."""
    victim.llm.reset_prefix_cache(reset_connector=True)
    for turn in range(4):
        order = random.Random(turn).sample(range(len(PROMPTS)), len(PROMPTS))
        outputs = victim.tokens([PROMPTS[row] for row in order])
        assert outputs == [expected[row] for row in order], f"turn {turn}"
        if turn == 1:
            victim.drain()
            victim.llm.reset_prefix_cache(reset_connector=True)
    victim.drain()
    audit(victim.manager.core)
    scheduler = victim.connector.connector_scheduler
    assert not scheduler._jobs
    assert not scheduler._block_id_to_pending_jobs
    assert list(scheduler._req_status) == [""]


def test_few_free_blocks_fall_back_to_storing_at_once(
    start_engine: Callable[..., Any], llama: Path, expected: list[list[int]]
) -> None:
    """A step may take 64 blocks, and the engine has 23: half of them is the window, and it is mostly in use."""
    engine = start_engine(
        llama, VICTIM, connector=True, num_gpu_blocks_override=24, max_num_batched_tokens=2048
    )
    for turn in range(3):
        outputs = engine.tokens(PROMPTS)
        # Batches of other sizes than alone: the last digits differ, and now and then a token.
        equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
        assert equal >= len(PROMPTS) - 1, f"turn {turn}: {equal}"
    engine.drain()
    assert engine.connector.connector_scheduler.window == 12
    stats = engine.manager.core.stats()
    assert stats.loaded > 0
    audit(engine.manager.core)


@pytest.mark.parametrize(
    ("offload", "settings", "message"),
    [
        ({"blocks_per_chunk": 3}, {}, "blocks_per_chunk 1"),
        ({}, {"enable_prefix_caching": False}, "prefix caching"),
    ],
)
def test_what_cannot_be(
    start_engine: Callable[..., Any], llama: Path, offload: Any, settings: Any, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        start_engine(llama, VICTIM | offload, connector=True, **settings)
