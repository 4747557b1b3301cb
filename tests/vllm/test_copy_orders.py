"""Answers of engines whose copies run early or late, and which zero new blocks before or after fences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.vllm_needs import CONNECTOR, needs  # the first import: it skips if vLLM is not installed

# isort: split
from kvoffload.tiering.tiered_manager import TieredManager
from support.vllm_copy_orders import EARLY, LATE, V1, V2, put_in_order, zeroing_of_new_blocks
from support.vllm_traffic import PATIENCE_S, Expected, check_nothing_is_left, drive

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]

VICTIM = {"ram": "32MiB", "store": "on-device-eviction"}
SMALL_STEPS = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 48}
REQUESTS, SEED = 60, 20261124


def store_late(engine: Any) -> Any:
    """Offer only the blocks that the next step may take, so that vLLM reuses blocks during their copies."""
    window = engine.core.scheduler.connector.connector_scheduler.window
    window.size = window.largest = window.smallest
    return engine


@pytest.fixture(scope="module")
def victim(start_engine: Callable[..., Any], llama: Path, on_llama: Expected) -> Any:
    """An engine with a victim tier that zeroes new blocks."""
    with zeroing_of_new_blocks():
        return store_late(start_engine(llama, VICTIM, connector=True, **SMALL_STEPS))


def wrong_answers(engine: Any, expected: Expected, seed: int) -> int:
    """Drive the engine from empty caches; returns the number of wrong answers."""
    engine.drain()
    engine.llm.reset_prefix_cache(reset_connector=True)
    outcome = drive(engine, expected.chats, expected.chat_answers, seed, REQUESTS)
    assert outcome.finished == REQUESTS
    return len(outcome.wrong)


@pytest.mark.parametrize("order", [EARLY, LATE, SEED])
@pytest.mark.parametrize("runner", [V1, V2])
def test_no_answer_is_wrong(victim: Any, on_llama: Expected, runner: str, order: str | int) -> None:
    copied = put_in_order(victim, runner, order)
    before = victim.manager.core.stats()
    dropped = victim.worker.num_overwritten
    assert wrong_answers(victim, on_llama, seed=0) == 0
    after = victim.manager.core.stats()
    assert copied.num_copies > 0
    assert victim.num_zeroed > 0
    assert after.loaded > before.loaded, "blocks are loaded nevertheless"
    if runner == V1:
        assert victim.worker.num_overwritten == dropped, "with V1 no store is dropped"
    check_nothing_is_left(victim)


@pytest.mark.parametrize("order", [EARLY, LATE])
def test_the_emulation_shows_wrong_answers_without_the_guard(
    victim: Any, on_llama: Expected, order: str
) -> None:
    """Negative control: V2's order with a worker that assumes V1's. The guard corrects the same requests."""
    put_in_order(victim, V2, order, guarded=False)
    wrong: dict[int, int] = {}
    while not any(wrong.values()):
        assert len(wrong) < 20, "no wrong answer in 1,200 requests"
        wrong[len(wrong)] = wrong_answers(victim, on_llama, len(wrong))
    put_in_order(victim, V2, order)
    for seed, count in wrong.items():
        if count:
            assert wrong_answers(victim, on_llama, seed) == 0


@pytest.mark.parametrize("order", [EARLY, LATE])
def test_no_disk_keeps_overwritten_blocks(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, tmp_path: Path, order: str
) -> None:
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "32MiB"}
    options = VICTIM | {"ram": "6MiB", "tiers": [disk], "tier_deadline_s": PATIENCE_S}
    with zeroing_of_new_blocks():
        engine = store_late(start_engine(llama, options, connector=True, **SMALL_STEPS))
    put_in_order(engine, V2, order)
    assert wrong_answers(engine, on_llama, seed=0) == 0
    assert isinstance(engine.manager.core, TieredManager)
    assert engine.manager.core.settle(PATIENCE_S)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("connector", [True, False], ids=["connector", "specification"])
def test_blocks_stored_when_they_are_computed(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, connector: bool
) -> None:
    """The engine has room for two requests: the next step takes the blocks of a finished request."""
    with zeroing_of_new_blocks():
        engine = start_engine(llama, {"ram": "32MiB", "prompt_only": False}, connector=connector)
    for order in (EARLY, LATE):
        put_in_order(engine, V2, order)
        assert wrong_answers(engine, on_llama, seed=1) == 0
    check_nothing_is_left(engine)
