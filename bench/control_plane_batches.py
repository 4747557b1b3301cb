"""Time of a request by its length, from one block on: our manager against vLLM's, hot and cold.

`control_plane` runs it. Schedulers make calls of one to sixteen blocks, where fixed costs dominate. The
*life* of a request: begin, look up, load the hits, store the misses, finish. The first 60 % of its blocks,
rounded down, begin an earlier request; a request of one block therefore stores it. *Store* lasts from the
offer of the blocks until they are readable.

Before each *cold* life, 8 MiB of other memory are touched, as by the rest of an engine's step, which evicts
the manager's code from the processor's caches. *Hot* lives follow each other directly. Each life is timed
separately; the median excludes interruptions by the operating system.

Keys are ``list[bytes]``, as in an engine. *Packed*: the same lives with packed keys; packing is timed. Each
manager receives its own keys; making them is not timed.
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
        store: prepare and complete. life: the whole request. packed: life with packed keys; None for vLLM.
    """

    store: float
    life: float
    packed: float | None


def requests(length: int, count: int, seed: str) -> Iterator[list[bytes]]:
    """Generate requests of one length; the first 60 % of their blocks begin an earlier request."""
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
    """Measure times by temperature, manager's name and length. The managers must be full."""
    times_us: dict[str, dict[str, dict[int, Lives]]] = {}
    for temperature, before in (("hot", _nothing), ("cold", _Other())):
        times_us[temperature] = {manager.name: {} for manager in managers}
        for length in lengths:
            taken = _measure(managers, length, f"{SEED} {temperature}", before)
            for name, lives in taken.items():
                times_us[temperature][name][length] = lives
    return times_us


def _measure(managers: list[Any], length: int, seed: str, before: Callable[[], None]) -> dict[str, Lives]:
    count = min(MOST, max(FEWEST, MEASURED_BLOCKS // length))
    taken: dict[str, list[list[int]]] = {manager.name: [[], [], []] for manager in managers}
    for turn, keys in enumerate(requests(length, count, seed)):
        for manager in managers if turn % 2 == 0 else managers[::-1]:
            stores, lives, packed = taken[manager.name]
            own_keys = [bytes(bytearray(key)) for key in keys]
            before()
            store, life = manager.timed_life(own_keys)
            stores.append(store)
            lives.append(life)
            if manager.name == "kvoffload":
                # Other keys: the blocks of this request are cached now.
                other_keys = [bytes(key[:27]) + b"p" + key[28:] for key in own_keys]
                before()
                packed.append(manager.timed_life(other_keys, packed=True)[1])
    return {
        name: Lives(*(statistics.median(times_ns) / 1e3 if times_ns else None for times_ns in by_figure))  # type: ignore[arg-type]
        for name, by_figure in taken.items()
    }


class _Other:
    """Touches 8 MiB of memory, each cache line once."""

    def __init__(self) -> None:
        self._memory = np.zeros(TOUCHED_BYTES, np.uint8)

    def __call__(self) -> None:
        self._memory[::64] += 1


def _nothing() -> None:
    """Touch no memory."""


def kvoffload_life(manager: Any, keys: list[bytes], packed: bool) -> tuple[int, int]:
    """Time a request with our manager; returns ns of the store and of the whole life."""
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
    """Count the leading hits with one lookup per key, as vLLM's connector does."""
    for position, key in enumerate(keys):
        if lookup(key, ctx) is not hit:
            return position
    return len(keys)


def vllm_life(manager: Any, ctx: Any, hit: Any, keys: list[bytes]) -> tuple[int, int]:
    """Time a request with vLLM's manager; `ctx` already contains the position of each key."""
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
