"""A real engine that offloads through us: the tokens stay the same, the blocks come back, and the test can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: `make test-vllm` builds an environment")
# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 1024) for _ in range(length)] for _ in range(count)]


PROMPTS = random_prompts(seed=1, count=3, length=300)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., Any], llama: Path) -> list[list[int]]:
    """What the engine answers without offloading, each prompt computed."""
    engine = start_engine(llama, None)
    return [engine.tokens([prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any], llama: Path, expected: list[list[int]]) -> Any:
    return start_engine(llama, {"ram": "8MiB"})


def test_loaded_prefixes_give_the_same_tokens(engine: Any, expected: list[list[int]]) -> None:
    """The engine has room for two of the three prompts: each evicts the others, and comes back from RAM."""
    for turn in range(3):
        assert [engine.tokens([prompt])[0] for prompt in PROMPTS] == expected, f"turn {turn}"
    engine.drain()
    stats = engine.manager.core.stats()
    assert stats.stored == 27, "nine whole blocks of each prompt, once"
    assert stats.loaded >= 27
