"""Random scripts for a manager, and the log of its decisions: twins are compared with them.

A script is data, so that several managers can play it. Its steps name requests, keys and jobs by numbers that
are valid for every manager, whatever it decides; two managers that decide alike give equal logs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
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

known_of_requests = st.builds(
    Hints,
    finish_reason=st.sampled_from(["", "stop", "tool_calls"]) | st.text(max_size=3),
    session_over=st.booleans(),
    priority=st.integers(),
    time_to_live_s=st.none() | st.floats(),
    tenant=st.sampled_from(["", "me"]) | st.text(max_size=3),
)
"""Anything that an engine may say of a request, nonsense too."""

Step: TypeAlias = tuple[str, int, list[int]]
"""Name of a step; number of a request or job; numbers of keys."""

ACTIONS = (
    ["store", "stored"] * 4
    + ["load", "loaded", "finish"] * 2
    + ["touch", "failed", "damaged", "discard", "wait", "served"]
)


def scripts(num_keys: int = 12, num_requests: int = 3, max_steps: int = 60) -> st.SearchStrategy[list[Step]]:
    """Scripts over prefixes of a few chains, by interleaved requests."""
    chain = st.tuples(st.integers(0, num_keys - 1), st.integers(1, 5)).map(lambda r: [*range(r[0], sum(r))])
    step = st.tuples(st.sampled_from(ACTIONS), st.integers(0, num_requests - 1), chain)
    return long_lists(step, max_steps)


def random_script(seed: int, num_steps: int, settle: bool = False) -> list[Step]:
    """A long script, always the same for a seed. With `settle`, every job and request ends."""
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
    """Lists with equally likely lengths up to `max_size`; `st.lists` makes about five elements."""
    return st.integers(0, max_size).flatmap(lambda n: st.lists(elements, min_size=n, max_size=n))


def play(
    manager: OffloadingManager,
    script: Sequence[Step],
    after_step: Callable[[OffloadingManager], Any] = lambda manager: None,
    hints: Sequence[Hints] = (NO_HINTS,),
) -> list[Any]:
    """Play a script; returns every decision in order, with the result of `after_step`.

    Requests begin and end with these `hints`, in turn.
    """
    said = cycle(hints)
    contexts: dict[int, RequestContext] = {}
    stores: list[StorePlan] = []
    loads: list[LoadPlan] = []
    log: list[Any] = []
    for action, number, key_numbers in script:
        keys = [key_of(n, manager.key_bytes) for n in key_numbers]
        if number not in contexts:
            contexts[number] = manager.begin_request(f"request {number}", hints=next(said))
        ctx = contexts[number]
        decision: Any = None
        if action == "store":
            plan = manager.prepare_store(keys, ctx)
            if plan is not None:
                stores.append(plan)
                decision = (list(plan.keys), plan.slots.tolist(), list(plan.evicted), plan.num_refused)
        elif action in ("stored", "failed") and stores:
            manager.complete_store(stores.pop(number % len(stores)), action == "stored")
        elif action == "load":
            found = manager.lookup(keys, ctx)
            loads.append(manager.prepare_load(keys[: found.num_ready], ctx))
            decision = found
        elif action in ("loaded", "damaged") and loads:
            load = loads.pop(number % len(loads))
            manager.complete_load(load, [0] if action == "damaged" and len(load.keys) else [])
        elif action == "touch":
            manager.touch(keys, ctx)
        elif action == "discard":
            decision = manager.discard(keys[:1])
        elif action == "wait":
            manager.lookup(keys, ctx)
            manager.expect(ctx)
        elif action == "served":
            manager.withdraw(ctx)
        elif action == "finish":
            manager.finish_request(contexts.pop(number), hints=next(said))
        log.append((action, decision, after_step(manager)))
    return log


def key_of(number: int, key_bytes: int) -> bytes:
    """The key that has `number` in a script."""
    return bytes([number]) * key_bytes


@cache
def colliding_keys(num_keys: int, capacity_blocks: int, key_bytes: int) -> list[bytes]:
    """`num_keys` keys whose home buckets are the last ones of a manager's index, so that they wrap around."""
    rng = np.random.default_rng(0)
    keys = Keys.pack(list({rng.bytes(key_bytes): None for _ in range(num_keys * 20)}), key_bytes)
    homes = []
    for row in range(len(keys)):
        index = Index(capacity_blocks, key_bytes)
        index.put(keys[row], 0)
        homes.append(np.flatnonzero(index.table)[0])
    return [keys[int(row)] for row in np.argsort(homes, kind="stable")[-num_keys:]]
