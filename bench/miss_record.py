"""CPU time of explained misses: ``python bench/miss_record.py [--rounds N] [--capacity N]``.

Two managers with a full cache serve the same requests in turns in one process, one of them with
`explain_misses`. Measures the library's manager and, if vLLM is installed, the plug-in's manager with vLLM's
calls. The requests are the workload of `control_plane.py`, and requests of only new blocks. These are the
worst case: every block is explained, and every stored block evicts another. Times are CPU time of the thread.
A ratio is the median of the rounds; the lowest and highest are in brackets.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from control_plane import GROUP, KEY_BYTES, copy_of, fill_blocks, why_no_vllm, workload
from kvoffload.core import manager as core

Request = list[bytes]
ROUND_BLOCKS = 50_000
STEP_BLOCKS = 128
"""Blocks computed in a step of vLLM: 2,048 tokens, its default, in blocks of 16."""


class Library:
    """The life of a request with the library's manager."""

    name = "library"

    def __init__(self, capacity: int, explains: bool, folder: Path) -> None:
        self.manager = core.OffloadingManager(capacity, key_bytes=KEY_BYTES, explain_misses=explains)
        self.explains = explains

    def life(self, name: str, keys: Request) -> int:
        """Serve a request; return its CPU time in ns."""
        manager = self.manager
        start = time.thread_time_ns()
        ctx = manager.begin_request(name, keys)
        num_ready = manager.lookup(keys, ctx).num_ready
        if self.explains:
            manager.count_misses(ctx, num_ready)
        if num_ready:
            manager.complete_load(manager.prepare_load(keys[:num_ready], ctx))
        plan = manager.prepare_store(keys, ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)
        return time.thread_time_ns() - start


class _Plain(core.OffloadingManager):
    """The library's manager without explanations, as a replacement in the plug-in's manager."""

    def __init__(self, capacity_blocks: int, *, explain_misses: bool, **manager: Any) -> None:
        super().__init__(capacity_blocks, **manager)

    def count_misses(self, ctx: Any, start: int, keys: Any = None) -> int:
        return 0


class PlugIn:
    """The life of a request with the plug-in's manager, with the calls of `KVOffloadConnector`."""

    name = "plug-in"

    def __init__(self, capacity: int, explains: bool, folder: Path) -> None:
        from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
        from kvoffload.integrations.vllm.shared.options import parse_options
        from kvoffload.integrations.vllm.shared.pool import SharedPool

        pool = SharedPool.attach(
            f"bench-{os.getpid()}-{explains}",
            member=0,
            num_members=1,
            num_parts=1,
            part_bytes=64,
            capacity_bytes=64 * capacity,
            directory=folder,
        )
        with patch.object(core, "OffloadingManager", core.OffloadingManager if explains else _Plain):
            self.manager = KVOffloadManager(parse_options({"ram": "1GiB"}), pool)
            self.manager._build(KEY_BYTES)

    def life(self, name: str, keys: Request) -> int:
        """Record the keys as vLLM does, then serve the request; return the manager's CPU time in ns."""
        from vllm.v1.kv_offload.base import ReqContext

        ctx, manager = ReqContext(name), self.manager
        for position, key in enumerate(keys):
            ctx.set_offload_key_position(key, position + 1)
        started = SimpleNamespace(new_req_ids=[name], preempted_req_ids=())
        no_request = SimpleNamespace(new_req_ids=(), preempted_req_ids=())
        start = time.thread_time_ns()
        manager.on_new_request(ctx)
        manager.expect(ctx)
        num_ready, _ = manager.lookup_prefix(keys, ctx)
        manager.withdraw(name)
        if num_ready:
            manager.prepare_load(keys[:num_ready], ctx)
        manager.on_schedule_end(started)
        if num_ready:
            manager.complete_load({*keys[:num_ready]}, ctx)
        for first in range(num_ready, len(keys), STEP_BLOCKS):
            stored = manager.prepare_store(keys[first : first + STEP_BLOCKS], ctx)
            assert stored is not None
            manager.on_schedule_end(no_request)
            manager.complete_store({*stored.keys_to_store}, ctx)
        manager.on_request_finished(ctx)
        return time.thread_time_ns() - start


def all_new(length: int) -> Callable[[int], list[Request]]:
    """Return a source of requests with only new blocks."""

    def requests(seed: int) -> list[Request]:
        rng = random.Random(seed)
        return [
            [rng.randbytes(KEY_BYTES - len(GROUP)) + GROUP for _ in range(length)]
            for _ in range(ROUND_BLOCKS // length)
        ]

    return requests


def measure(kind: Any, capacity: int, rounds: int, folder: Path) -> None:
    """Measure and print a line for each kind of request."""
    sides = [kind(capacity, explains, folder) for explains in (False, True)]
    for number, request in enumerate(workload(capacity, 0, fill_blocks(capacity))):
        for side in sides:
            side.life(f"fill-{number}", copy_of(request))
    sources: dict[str, Callable[[int], list[Request]]] = {
        "mixed": lambda seed: list(workload(capacity, seed, ROUND_BLOCKS)),
        "16 new": all_new(16),
        "512 new": all_new(512),
    }
    for name, source in sources.items():
        ratios, per_block = [], []
        for number in range(rounds):
            spent, requests = [0, 0], source(number + 1)
            for turn, request in enumerate(requests):
                for side in (0, 1) if turn % 2 else (1, 0):
                    spent[side] += sides[side].life(f"{number}-{turn}", copy_of(request))
            ratios.append(spent[1] / spent[0])
            per_block.append(spent[0] / sum(map(len, requests)))
        print(
            f"{kind.name:8} {capacity:>9,} blocks  {name:8} {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})  of {min(per_block):.0f} ns a block",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--capacity", type=int, action="append")
    arguments = parser.parse_args()
    gc.disable()
    for capacity in arguments.capacity or (30_000, 300_000):
        for kind in (Library,) if why_no_vllm() else (Library, PlugIn):
            with tempfile.TemporaryDirectory() as folder:
                measure(kind, capacity, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
