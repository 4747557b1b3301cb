"""A disk behind the RAM of a real engine: blocks of one engine are hits or misses of the next engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from kvoffload.tiers.disk.inspection import opened
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.disk.slab_directory import slabs_in
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from support.vllm_needs import COUNTS_EVERY_STEP, lacks
from support.vllm_traffic import PATIENCE_S, Expected

pytestmark = pytest.mark.filterwarnings("ignore")

SIX = 6
"""Prompts of nine whole blocks each; RAM has room for 48 blocks, and the engine for two prompts."""


@pytest.fixture(scope="module")
def lives(start_engine: Callable[..., Any], llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that starts an engine on the same directory each time, with long deadlines."""
    path = tmp_path_factory.mktemp("slab")

    def start(**options: Any) -> Any:
        tier = {"type": "disk", "path": str(path), "capacity": "32MiB", **options}
        lives.engine = start_engine(llama, {"ram": "6MiB", "tiers": [tier], "tier_deadline_s": PATIENCE_S})
        return lives.engine

    lives: Any = start
    lives.path = path
    return lives


@pytest.fixture(scope="module")
def first_life(on_llama: Expected, lives: Any) -> Expected:
    """The first engine computes all prompts and writes their blocks to the disk."""
    engine = lives()
    for prompt, answer in zip(on_llama.prompts[:SIX], on_llama.answers, strict=False):
        assert engine.tokens([prompt])[0] == answer
        # At most a quarter of RAM, a prompt and a third, may wait to be written; further blocks are dropped.
        engine.drain()
        assert engine.manager.core.settle(PATIENCE_S)
    assert engine.manager.core.hit_blocks == [0, 0]
    # Blocks evicted from RAM are also loaded from the disk by the same engine.
    engine.forget_device()
    on_llama.check(engine, 1)
    from_ram, from_disk = engine.manager.core.hit_blocks
    assert from_ram + from_disk == 9
    assert from_disk > 0
    engine.drain()
    assert engine.manager.core.settle(PATIENCE_S)
    engine.close()
    return on_llama


def tier_metric(engine: Any, name: str) -> Any:
    """Return a metric of the disk as ``/metrics`` of a server shows it."""
    model = engine.llm.llm_engine.model_config.served_model_name
    label = {"model_name": model, "engine": "0", "tier": "disk"}
    return REGISTRY.get_sample_value(f"vllm:kvoffload_tier_{name}", label)


def test_the_second_engine_answers_from_the_disk_of_the_first(lives: Any, first_life: Expected) -> None:
    """All prompts together promote 54 blocks into 48 slots, and no request waits forever."""
    engine = lives()
    assert engine.manager.core.tier_stats()[0].restored == 54
    assert engine.tokens(first_life.prompts[:SIX]) == first_life.answers[:SIX]
    core = engine.manager.core
    assert core.hit_blocks[1] >= 9
    assert core.tier_stats()[0].mismatches == 0
    first_life.check(engine, 1)
    if not lacks(*COUNTS_EVERY_STEP):
        assert (tier_metric(engine, "hits_total") or 0) >= 9
        assert tier_metric(engine, "ready") == 54
        assert tier_metric(engine, "free") == tier_metric(engine, "capacity") - 54
    engine.drain()
    assert core.settle(PATIENCE_S)
    stats = core.stats()
    assert (stats.writing, stats.condemned, stats.ready) == (0, 0, stats.evictable)


def test_a_damaged_slab_changes_nothing_but_the_hit_rate(lives: Any, first_life: Expected) -> None:
    """The damage hits every third block, and sixty random places, including the journal."""
    lives.engine.close()
    with opened(lives.path) as (slab, recovered):
        offsets = [slab.layout.slot_offset(slot) + 1000 for slot in recovered.contents.slots().tolist()[::3]]
    (path,) = slabs_in(lives.path)
    offsets += np.random.default_rng(11).integers(0, path.stat().st_size, 60).tolist()
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(b"\x5a" * 4096)
    engine = lives()
    tier = engine.manager.core.tier_stats()[0]
    first_life.check(engine, SIX)
    damaged = 54 - tier.restored + engine.manager.core.tier_stats()[0].mismatches + tier.journal_damage
    assert damaged > 0
    assert (tier_metric(engine, "mismatches_total") or 0) > 0 or lacks(*COUNTS_EVERY_STEP)
    assert engine.manager.core.hit_blocks[1] < 54


def test_blocks_of_other_weights_are_not_served(lives: Any, first_life: Expected) -> None:
    engine = lives(salt="retrained")
    first_life.check(engine, SIX)
    assert engine.manager.core.hit_blocks == [0, 0]
    assert len(slabs_in(lives.path)) == 2, "the old slab is kept, but not served"


def test_an_engine_whose_disk_cannot_be_opened_serves_from_ram(
    lives: Any, first_life: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    lives.engine.close()
    lock = DirectoryLock(lives.path, RateLimitedLog("test"))
    with caplog.at_level(logging.ERROR, "vllm.kvoffload"):
        engine = lives()
    assert f"WITHOUT a tier behind RAM until its next start: path: '{lives.path}'" in caplog.text
    first_life.check(engine, 2)
    engine.forget_device()
    first_life.check(engine, 2)
    assert engine.manager.core.stats().ready >= 18
    assert tier_metric(engine, "hits_total") is None
    engine.close()
    lock.release()
