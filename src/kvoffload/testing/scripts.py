"""Random scripts of calls to a manager, and logs of its decisions. Tests use them to compare policies.

A script is a list of steps that can be played on any manager: steps refer to requests, keys and jobs by
number. Managers with equal decisions give equal logs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any, TypeAlias, TypeVar

import numpy as np
from hypothesis import strategies as st

from kvoffload.core.hints import NO_HINTS, Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys

T = TypeVar("T")

any_hints = st.builds(
    Hints,
    finish_reason=st.sampled_from(["", "stop", "tool_calls"]) | st.text(max_size=3),
    session_over=st.booleans(),
    priority=st.integers(),
    time_to_live_s=st.none() | st.floats(),
    tenant=st.sampled_from(["", "me"]) | st.text(max_size=3),
)
"""Arbitrary hints, including invalid values."""

Step: TypeAlias = tuple[str, int, list[int]]
"""A step of a script: an action, the number of a request or job, and the numbers of keys."""

ACTIONS = (
    ["store", "stored"] * 4
    + ["load", "loaded", "finish"] * 2
    + ["touch", "failed", "damaged", "discard", "wait", "served"]
)


def scripts(num_keys: int = 12, num_requests: int = 3, max_steps: int = 60) -> st.SearchStrategy[list[Step]]:
    """Draw scripts in which requests interleave. Each step names up to 5 consecutive keys."""
    chain = st.tuples(st.integers(0, num_keys - 1), st.integers(1, 5)).map(lambda r: [*range(r[0], sum(r))])
    step = st.tuples(st.sampled_from(ACTIONS), st.integers(0, num_requests - 1), chain)
    return long_lists(step, max_steps)


def random_script(seed: int, num_steps: int, settle: bool = False) -> list[Step]:
    """Generate a long script from a seed.

    If `settle` is True, the last steps end every open job and request.
    """
    rng = random.Random(seed)
    script: list[Step] = []
    for _ in range(num_steps):
        first = rng.randrange(12)
        script.append((rng.choice(ACTIONS), rng.randrange(3), [*range(first, first + rng.randrange(1, 6))]))
    if settle:
        script += [("stored", 0, []), ("loaded", 0, [])] * num_steps
        script += [("finish", number, []) for number in range(3)]
    return script


def long_lists(elements: st.SearchStrategy[T], max_size: int) -> st.SearchStrategy[list[T]]:
    """Draw lists with uniformly distributed lengths up to `max_size`. (`st.lists` prefers short lists.)"""
    return st.integers(0, max_size).flatmap(lambda n: st.lists(elements, min_size=n, max_size=n))


def play(
    manager: OffloadingManager,
    script: Sequence[Step],
    after_step: Callable[[OffloadingManager], Any] = lambda manager: None,
    hints: Sequence[Hints] = (NO_HINTS,),
) -> list[Any]:
    """Play a script. Returns for each step: its name, the decision, and the result of `after_step`.

    When a request begins and when it ends, it gets the next element of `hints`; after the last element comes
    the first again.
    """
    player = Player(manager, hints)
    return [(step[0], player.play(step), after_step(manager)) for step in script]


class Player:
    """Plays the steps of a script on one manager, and keeps track of open requests, stores and loads."""

    def __init__(self, manager: OffloadingManager, hints: Sequence[Hints]) -> None:
        self.manager, self._hints = manager, cycle(hints)
        self.contexts: dict[int, RequestContext] = {}
        self.stores: list[StorePlan] = []
        self.loads: list[LoadPlan] = []

    def play(self, step: Step) -> Any:
        """Play one step; return the manager's decision, or None."""
        action, number, key_numbers = step
        if number not in self.contexts:
            self.contexts[number] = self.manager.begin_request(f"request {number}", hints=next(self._hints))
        keys = [key_of(n, self.manager.key_bytes) for n in key_numbers]
        return _STEPS[action](self, number, keys)

    def store(self, number: int, keys: list[bytes]) -> Any:
        plan = self.manager.prepare_store(keys, self.contexts[number])
        if plan is None:
            return None
        self.stores.append(plan)
        return list(plan.keys), plan.slots.tolist(), list(plan.evicted), plan.num_refused

    def complete_store(self, number: int, keys: list[bytes], success: bool = True) -> None:
        """End a store, if any is open."""
        if self.stores:
            self.manager.complete_store(self.stores.pop(number % len(self.stores)), success)

    def load(self, number: int, keys: list[bytes]) -> Any:
        """Look up blocks and start to load the ready blocks."""
        ctx = self.contexts[number]
        result = self.manager.lookup(keys, ctx)
        self.loads.append(self.manager.prepare_load(keys[: result.num_ready], ctx))
        return result

    def complete_load(self, number: int, keys: list[bytes], damaged: bool = False) -> None:
        """End a load, if any is open."""
        if self.loads:
            plan = self.loads.pop(number % len(self.loads))
            self.manager.complete_load(plan, [0] if damaged and len(plan.keys) else [])

    def touch(self, number: int, keys: list[bytes]) -> None:
        self.manager.touch(keys, self.contexts[number])

    def discard(self, number: int, keys: list[bytes]) -> int:
        """Discard the first of these blocks."""
        return self.manager.discard(keys[:1])

    def wait(self, number: int, keys: list[bytes]) -> None:
        """Look up blocks of a request, and register the request as waiting in the engine's queue."""
        self.manager.lookup(keys, self.contexts[number])
        self.manager.expect(self.contexts[number])

    def serve(self, number: int, keys: list[bytes]) -> None:
        """Report that a request has left the engine's queue."""
        self.manager.withdraw(self.contexts[number])

    def finish(self, number: int, keys: list[bytes]) -> None:
        self.manager.finish_request(self.contexts.pop(number), hints=next(self._hints))


_STEPS: dict[str, Callable[[Player, int, list[bytes]], Any]] = {
    "store": Player.store,
    "stored": Player.complete_store,
    "failed": partial(Player.complete_store, success=False),
    "load": Player.load,
    "loaded": Player.complete_load,
    "damaged": partial(Player.complete_load, damaged=True),
    "touch": Player.touch,
    "discard": Player.discard,
    "wait": Player.wait,
    "served": Player.serve,
    "finish": Player.finish,
}


def key_of(number: int, key_bytes: int) -> bytes:
    """Return the key that a script refers to by `number`."""
    return bytes([number]) * key_bytes


@cache
def colliding_keys(num_keys: int, capacity_blocks: int, key_bytes: int) -> list[bytes]:
    """Return keys whose home buckets are at the end of a manager's index, so that probing wraps around."""
    rng = np.random.default_rng(0)
    keys = Keys.pack(list({rng.bytes(key_bytes): None for _ in range(num_keys * 20)}), key_bytes)
    homes = []
    for row in range(len(keys)):
        index = Index(capacity_blocks, key_bytes)
        index.put(keys[row], 0)
        homes.append(np.flatnonzero(index.table)[0])
    return [keys[int(row)] for row in np.argsort(homes, kind="stable")[-num_keys:]]
