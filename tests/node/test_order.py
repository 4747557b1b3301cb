"""Four processes that make calls in turn decide like one manager, with every compiled policy."""

from __future__ import annotations

import logging
import multiprocessing
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES, CompiledPolicy, EvictionPolicy
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.testing.audit import audit
from kvoffload.testing.scripts import ACTIONS, Player, Step
from support.small_hazard import HazardOfFewKeys, SmallHazard

NUM_PROCESSES, CAPACITY = 4, 8
NUM_EXPECTED = CAPACITY * 7 // 8 // NUM_PROCESSES
HINTS = (NO_HINTS, Hints(tenant="me"), Hints(finish_reason="stop"), Hints(finish_reason="tool_calls"))


def compiled_policies() -> Iterator[Any]:
    for name in POLICIES.names():
        policy = POLICIES.find(name)
        if isinstance(policy, type) and issubclass(policy, CompiledPolicy) and name != "hazard":
            yield name
    yield from (HazardOfFewKeys, SmallHazard)


def script(rng: random.Random, num_steps: int) -> Iterator[tuple[int, Step]]:
    """Draw the process of each step, and the step.

    The expected keys must fit into a process's share of 7/8 of the cache: beyond it, a process favours its
    own requests, and one manager the longest waiting request. So only request 3 waits, for few keys.
    """
    for _ in range(num_steps):
        action, number, first = rng.choice(ACTIONS), rng.randrange(3), rng.randrange(12)
        keys = [*range(first, first + rng.randrange(1, 6))]
        if action in ("wait", "served"):
            number, keys = 3, [key for key in keys if key < NUM_EXPECTED]
        elif action == "finish":
            number = rng.randrange(4)
        yield rng.randrange(NUM_PROCESSES), (action, number, keys)


def _serve(pipe: Any, root: Path, name: str, policy: str | type[EvictionPolicy]) -> None:
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    try:
        directory = PoolDirectory.join({"test": 1}, name, keep_s=60.0, root=root, has_keeper=False)
        manager = NodeManager(CAPACITY, directory=directory, policy=policy)
        player = Player(manager, HINTS)
        pipe.send("ready")
        while (step := pipe.recv()) is not None:
            pipe.send(player.play(step))
        audit(manager)
        pipe.send(manager.stats())
        pipe.recv()
    except BaseException:
        pipe.send(traceback.format_exc())


def play(root: Path, policy: Any, num_steps: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    alone = OffloadingManager(CAPACITY, policy=policy)
    players = [Player(alone, HINTS) for _ in range(NUM_PROCESSES)]
    context = multiprocessing.get_context("fork")
    pipes = []
    for number in range(NUM_PROCESSES):
        parent_end, child_end = context.Pipe()
        context.Process(target=_serve, args=(child_end, root, f"p{number}", policy), daemon=True).start()
        pipes.append(parent_end)
        ready = parent_end.recv()
        assert ready == "ready", ready
    for number, (process, step) in enumerate(script(random.Random(seed), num_steps)):
        pipes[process].send(step)
        child_end = pipes[process].recv()
        assert child_end == players[process].play(step), f"step {number}: {step} of process {process}"
    for pipe in pipes:
        pipe.send(None)
        stats = pipe.recv()
        assert stats == alone.stats(), stats
    for pipe in pipes:
        pipe.send(None)


@pytest.mark.parametrize("policy", [*compiled_policies()], ids=str)
def test_processes_decide_as_one_manager(root: Path, policy: Any) -> None:
    play(root, policy, 400)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*compiled_policies(), "hazard"], ids=str)
def test_processes_decide_as_one_manager_for_long(root: Path, policy: Any) -> None:
    play(root, policy, 10_000)
