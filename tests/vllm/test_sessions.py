"""Requests with streaming input: vLLM schedules them as new again when their next input begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import (
    Expected,
    check_nothing_is_left,
    random_prompts,
    streamed,
)
from support.vllm_world import World, base, key

Sessions = pytest.importorskip("kvoffload.integrations.vllm.scheduler_side.sessions").Sessions

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

FIRST_INPUT = 100
"""Tokens of the first input: three blocks and a part of the fourth."""


def after_preemption(*, resumed_are_new: bool) -> list[str]:
    sessions = Sessions(resumed_are_new=resumed_are_new)
    assert sessions.continued(["a", "b"], []) == []
    assert sessions.continued([], ["a"]) == []
    continued: list[str] = sessions.continued(["a"], [])
    return continued


def test_a_preempted_request_of_runner_v2_is_not_a_session() -> None:
    assert after_preemption(resumed_are_new=True) == []
    assert after_preemption(resumed_are_new=False) == ["a"]


def test_a_request_preempted_and_resumed_in_one_step_is_not_a_session() -> None:
    sessions = Sessions(resumed_are_new=True)
    assert sessions.continued(["a"], []) == []
    assert sessions.continued(["a"], ["a"]) == []
    assert sessions.continued(["a"], []) == ["a"]


def test_the_id_of_a_finished_request_may_be_used_again() -> None:
    sessions = Sessions(resumed_are_new=False)
    assert sessions.continued(["a", "b"], []) == []
    sessions.forget("a")
    assert sessions.continued(["a", "b"], []) == ["b"]


def test_without_our_connector_a_session_stores_nothing_after_its_first_input(tmp_path: Path) -> None:
    world = World(tmp_path, 8, sessions=Sessions(resumed_are_new=False))
    ctx, other = world.request("a", [key(1), key(2)]), world.request("b", [key(9)])
    step = base.ScheduleEndContext
    world.manager.on_schedule_end(step(["a"], []))
    assert world.store(ctx, [key(1)]).keys_to_store == [key(1)]
    world.manager.complete_store({key(1)}, ctx)
    world.manager.on_schedule_end(step(["a", "b"], []))
    assert world.store(ctx, [key(2)]).keys_to_store == []
    assert world.store(other, [key(9)]).keys_to_store == [key(9)]
    world.manager.complete_store({key(9)}, other)
    for finished in (ctx, other):
        world.manager.on_request_finished(finished)
    again = world.request("a", [key(3)])
    world.manager.on_schedule_end(step(["a"], []))
    assert world.store(again, [key(3)]).keys_to_store == [key(3)]
    world.manager.complete_store({key(3)}, again)
    world.manager.on_request_finished(again)
    world.check()
    world.close()


@needs(*CONNECTOR)
@pytest.mark.parametrize("connector", [True, False])
def test_blocks_of_all_inputs_are_right(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, connector: bool
) -> None:
    """A prompt of nine whole blocks arrives in two inputs; later requests load its blocks."""
    engine = start_engine(llama, {"ram": "8MiB"}, connector=connector)
    for prompt, answer in zip(on_llama.prompts[:2], on_llama.answers, strict=False):
        # With one token for each answer, vLLM keeps no token of an answer.
        assert streamed(engine, [prompt[:FIRST_INPUT], prompt[FIRST_INPUT:]], tokens=1) == [
            *prompt,
            answer[0],
        ]
        engine.forget_device()
        assert engine.tokens([prompt])[0] == answer
        engine.forget_device()
        assert engine.tokens([prompt])[0] == answer
        engine.forget_device()
    # The second request loads what the session has stored, and stores the other blocks for the third.
    assert engine.manager.core.stats().loaded == 2 * ((9 if connector else 3) + 9)
    check_nothing_is_left(engine)
    unseen = random_prompts(seed=31, count=1, length=70)[0]
    assert len(streamed(engine, [unseen, unseen, unseen], tokens=3)) == 3 * 70 + 2 * 2 + 3
    engine.drain()
    check_nothing_is_left(engine)
