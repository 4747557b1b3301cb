"""The life of a request by its length: ours against vLLM's, hot and cold, from one block on.

Part of `control_plane`, which runs it. Schedulers make calls of one to sixteen blocks, so fixed costs decide
here. Each *life* is: begin, look up, load what is there, store the rest, finish; 60 % of a request's blocks,
rounded down, are the beginning of an earlier one: a request of one block stores it. *Store* is the part from
offering the blocks to their being readable.

*Cold* means that 8 MiB of other memory were touched before each life, as the rest of an engine's step does:
the code of neither manager is in a cache of the processor then. Every life is timed by itself; the figure is
the median, so a call that the operating system interrupts does not count. *Hot* lives follow one another
directly.

Keys are given as ``list[bytes]``, as an engine has them; *packed* are the same lives with keys that are
packed first (that is timed too). Making keys is not timed, and each manager gets its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvoffload.structures.keys import Keys

LENGTHS = (1, 4, 8, 16, 64, 256, 1024)
MEASURED_BLOCKS = 12_000
FEWEST, MOST = 60, 400
TOUCHED_BYTES = 8 << 20
SEED = 4


class Lives(NamedTuple):
    """Median times in us, of requests of one length.

    Attributes:
        store: prepare and complete. life: everything. packed: a life with packed keys; None for vLLM.
    """

    store: float
    life: float
    packed: float | None


def requests(length: int, count: int, seed: str) -> Iterator[list[bytes]]:
    """Requests of one length; six in ten of their blocks begin an earlier request."""
    chance, previous, shared = random.Random(f"{seed} {length}"), list[list[bytes]](), int(0.6 * length)
    for _ in range(count):
        new = [chance.randbytes(28) + bytes(4) for _ in range(length)]
        if previous:
            new[:shared] = chance.choice(previous)[:shared]
        previous = [*previous[-7:], new]
        yield new


def measure_lengths(
    managers: list[Any], lengths: tuple[int, ...] = LENGTHS
) -> dict[str, dict[str, dict[int, Lives]]]:
    """Times by temperature, name of the manager and length. The managers must be full."""
    found: dict[str, dict[str, dict[int, Lives]]] = {}
    for temperature, before in (("hot", _nothing), ("cold", _Other())):
        found[temperature] = {manager.name: {} for manager in managers}
        for length in lengths:
            taken = _measure(managers, length, f"{SEED} {temperature}", before)
            for name, lives in taken.items():
                found[temperature][name][length] = lives
    return found


def _measure(managers: list[Any], length: int, seed: str, before: Callable[[], None]) -> dict[str, Lives]:
    count = min(MOST, max(FEWEST, MEASURED_BLOCKS // length))
    taken: dict[str, list[list[int]]] = {manager.name: [[], [], []] for manager in managers}
    for turn, keys in enumerate(requests(length, count, seed)):
        for manager in managers if turn % 2 == 0 else managers[::-1]:
            stores, lives, packed = taken[manager.name]
            mine = [bytes(bytearray(key)) for key in keys]
            before()
            store, life = manager.timed_life(mine)
            stores.append(store)
            lives.append(life)
            if manager.name == "kvoffload":
                # Another request of the same length: all of its blocks may be here now.
                others = [bytes(key[:27]) + b"p" + key[28:] for key in mine]
                before()
                packed.append(manager.timed_life(others, packed=True)[1])
    return {
        name: Lives(*(statistics.median(part) / 1e3 if part else None for part in parts))  # type: ignore[arg-type]
        for name, parts in taken.items()
    }


class _Other:
    """Touches memory that is nobody's, a cache line after the other."""

    def __init__(self) -> None:
        self._memory = np.zeros(TOUCHED_BYTES, np.uint8)

    def __call__(self) -> None:
        self._memory[::64] += 1


def _nothing() -> None:
    """The life before has just ended."""


def life_of_ours(manager: Any, keys: list[bytes], packed: bool) -> tuple[int, int]:
    """ns of a store, and of the life that it is part of, with our manager."""
    clock = time.perf_counter_ns
    started = clock()
    batch = Keys.pack(keys, 32) if packed else keys
    ctx = manager.begin_request("request")
    num_ready = manager.lookup(batch, ctx).num_ready
    if num_ready:
        manager.complete_load(manager.prepare_load(batch[:num_ready], ctx))
    offered = clock()
    plan = manager.prepare_store(batch, ctx)
    manager.complete_store(plan)
    stored = clock()
    manager.finish_request(ctx)
    return stored - offered, clock() - started


def leading_hits(lookup: Callable[..., Any], hit: Any, keys: list[bytes], ctx: Any) -> int:
    """How many leading blocks vLLM's manager has, asked as its connector asks."""
    for position, key in enumerate(keys):
        if lookup(key, ctx) is not hit:
            return position
    return len(keys)


def life_of_theirs(manager: Any, ctx: Any, hit: Any, keys: list[bytes]) -> tuple[int, int]:
    """The same with vLLM's; its connector has made `ctx` and noted the position of each key."""
    clock = time.perf_counter_ns
    started = clock()
    manager.on_new_request(ctx)
    num_ready = leading_hits(manager.lookup, hit, keys, ctx)
    if num_ready:
        head = keys[:num_ready]
        manager.prepare_load(head, ctx)
        manager.complete_load(head, ctx)
    offered = clock()
    plan = manager.prepare_store(keys, ctx)
    manager.complete_store(plan.keys_to_store, ctx)
    stored = clock()
    manager.on_request_finished(ctx)
    return stored - offered, clock() - started
