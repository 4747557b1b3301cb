"""CPU time of a prefix lookup in vLLM's scheduler: ``python bench/vllm_lookup.py``.

Compares vLLM's loop over keys, with its manager and with ours, with the single call of `KVOffloadConnector`.
All prefixes are hits. Each round is a new request with new keys, whose positions are recorded as by vLLM. The
sides take turns in one process. Times are CPU time of the thread.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
from kvoffload.integrations.vllm.scheduler_side.scheduler import KVOffloadScheduler
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.integrations.vllm.shared.pool import SharedPool

LENGTHS, CAPACITY, ROUNDS = (16, 128, 1024, 4096), 8192, 21


def context(name: str, keys: list[bytes]) -> Any:
    """Return a request's context as made by vLLM's connector."""
    made = ReqContext(name)
    for position, key in enumerate(keys):
        made.set_offload_key_position(key, position)
    return made


def keys_of(count: int) -> list[bytes]:
    """Return keys as new ``bytes`` objects, because a request does not share objects with the manager."""
    return [bytes(make_offload_key(number.to_bytes(32, "big"), 0)) for number in range(count)]


def side(kind: type[Any], manager: Any) -> Callable[[str, list[bytes]], float]:
    """Return a function that looks up a prefix with this scheduler class, and returns CPU seconds."""
    scheduler: Any = object.__new__(kind)
    scheduler.manager = manager
    scheduler._events_tracker = SimpleNamespace(
        self_describing_enabled=False, record_lookup=lambda *given: None
    )

    def look_up(name: str, keys: list[bytes]) -> float:
        ctx = context(name, keys)
        manager.on_new_request(ctx)
        start = time.thread_time()
        num_hits = scheduler._maximal_prefix_lookup(keys, ctx, None, None, 0)
        seconds = time.thread_time() - start
        assert num_hits == len(keys)
        manager.on_request_finished(ctx)
        return seconds

    return look_up


def fill(manager: Any) -> Any:
    """Store the longest prefix; returns the manager."""
    ctx, keys = context("fill", keys_of(max(LENGTHS))), keys_of(max(LENGTHS))
    manager.on_new_request(ctx)
    output = manager.prepare_store(keys, ctx)
    manager.complete_store(output.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    return manager


def main() -> None:
    """Measure and print the table of docs/performance.md."""
    with tempfile.TemporaryDirectory() as directory:
        pool = SharedPool.attach(
            f"bench-{os.getpid()}",
            member=0,
            num_members=1,
            num_parts=1,
            part_bytes=4096,
            capacity_bytes=4096 * CAPACITY,
            directory=Path(directory),
        )
        options = parse_options({"ram": 4096 * CAPACITY})
        native, own_manager = fill(CPUOffloadingManager(CAPACITY)), fill(KVOffloadManager(options, pool))
        sides = {
            "vLLM's manager, key by key": side(OffloadingConnectorScheduler, native),
            "ours, key by key": side(OffloadingConnectorScheduler, own_manager),
            "ours, at once": side(KVOffloadScheduler, own_manager),
        }
        print("| blocks of prefix | " + " | ".join(f"{name}, µs" for name in sides) + " |")
        print("|---|" + "---|" * len(sides))
        for length in LENGTHS:
            samples: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(ROUNDS):
                for name, look_up in sides.items():
                    samples[name].append(look_up(f"{length}-{number}", keys_of(length)))
            cells = [f"{1e6 * statistics.median(seconds):,.0f}" for seconds in samples.values()]
            print(f"| {length:,} | {' | '.join(cells)} |")
        own_manager.shutdown()


if __name__ == "__main__":
    main()
