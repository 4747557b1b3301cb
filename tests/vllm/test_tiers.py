"""A disk behind the RAM of a real engine: what one life has stored answers the next one, or is a miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from prometheus_client import REGISTRY
from traffic import random_prompts

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = random_prompts(seed=5, count=6, length=300)
"""Nine whole blocks each; RAM has room for 48 blocks, and the engine for two prompts."""


@pytest.fixture(scope="module")
def lives(start_engine: Callable[..., Any], llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that starts an engine on the same directory each time."""
    path = tmp_path_factory.mktemp("slab")

    def start(**options: Any) -> Any:
        tier = {"type": "disk", "path": str(path), "capacity": "16MiB", **options}
        lives.engine = start_engine(llama, {"ram": "3MiB", "tiers": [tier], "tier_deadline_s": 20.0})
        return lives.engine

    lives: Any = start
    lives.path = path
    return lives


@pytest.fixture(scope="module")
def answers(lives: Any) -> list[list[int]]:
    """What the first life answers: computed, all of it."""
    engine = lives()
    tokens = [engine.tokens([prompt])[0] for prompt in PROMPTS]
    assert engine.manager.core.hit_blocks == [0, 0]
    # What has left RAM comes back from the disk within one life, too.
    engine.forget_device()
    assert engine.tokens([PROMPTS[0]])[0] == tokens[0]
    from_ram, from_disk = engine.manager.core.hit_blocks
    assert from_ram + from_disk == 9
    assert from_disk > 0
    engine.drain()
    assert engine.manager.core.settle(10.0)
    engine.close()
    return tokens


def test_the_second_life_answers_from_the_firsts_disk(lives: Any, answers: list[list[int]]) -> None:
    """All at once: prefixes of 54 blocks want to come up into 48 slots, and nobody waits for ever."""
    engine = lives()
    assert engine.manager.core.tier_stats()[0].restored == 54
    assert engine.tokens(PROMPTS) == answers
    core = engine.manager.core
    assert core.hit_blocks[1] >= 9
    assert core.tier_stats()[0].mismatches == 0
    label = {
        "model_name": engine.llm.llm_engine.model_config.served_model_name,
        "engine": "0",
        "tier": "disk",
    }
    engine.tokens([PROMPTS[0]])
    assert (REGISTRY.get_sample_value("vllm:kvoffload_tier_hits_total", label) or 0) >= 9
    assert REGISTRY.get_sample_value("vllm:kvoffload_tier_ready", label) == 54
    free, capacity = (
        REGISTRY.get_sample_value(f"vllm:kvoffload_tier_{name}", label) for name in ("free", "capacity")
    )
    assert free == capacity - 54
    engine.drain()
    assert core.settle(10.0)
    stats = core.stats()
    assert (stats.writing, stats.condemned, stats.ready) == (0, 0, stats.evictable)


def test_a_damaged_slab_changes_nothing_but_the_hit_rate(lives: Any, answers: list[list[int]]) -> None:
    lives.engine.close()
    (slab,) = lives.path.glob("*.slab")
    with slab.open("r+b") as file:
        for offset in np.random.default_rng(11).integers(0, slab.stat().st_size, 60).tolist():
            file.seek(offset)
            file.write(b"\x5a" * 4096)
    engine = lives()
    tier = engine.manager.core.tier_stats()[0]
    assert [engine.tokens([prompt])[0] for prompt in PROMPTS] == answers
    damaged = 54 - tier.restored + engine.manager.core.tier_stats()[0].mismatches + tier.journal_damage
    assert damaged > 0
    assert engine.manager.core.hit_blocks[1] < 54


def test_blocks_of_other_weights_are_not_served(lives: Any, answers: list[list[int]]) -> None:
    engine = lives(salt="retrained")
    assert [engine.tokens([prompt])[0] for prompt in PROMPTS] == answers
    assert engine.manager.core.hit_blocks == [0, 0]
    assert list(lives.path.glob("*set-aside*")), "what was there is kept, and not served"
