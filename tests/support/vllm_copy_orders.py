"""A device whose copies run as early or as late as its events allow, in front of a real engine on the CPU.

Owns the order of copies and of the zeroing of new blocks. Model, scheduler, connector and our
classes are real. Does not check answers: `vllm_traffic.drive` does.

A copy of a CUDA stream may run at any time between its submission and the first call that waits for it. The
model's own work has always run when it was submitted, because the CPU build computes at once; so a late copy
sees what later steps have written, as on a GPU whose copies lag behind.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import __version__ as vllm_version

from kvoffload.integrations.vllm.shared.versions import fences_come_late
from kvoffload.integrations.vllm.worker_side import copies

EARLY, LATE = "early", "late"
LATEST_POLLS = 6
"""Number of polls after which a late copy runs; a step polls once."""

V1, V2 = "V1", "V2"
"""Model runners: V1 waits for the fence of a step before it zeroes the step's new blocks, V2 afterwards."""


class OrderedCopies:
    """Copies of tensors in host memory, each run by this thread at the time that `order` sets.

    Args:
        host: our copies on the CPU, whose tensors and layout are used.
        order: `EARLY` runs a copy when it is submitted; `LATE` when `wait` is called for it, or after
            `LATEST_POLLS` polls; a number is the seed of random points in between.

    Attributes:
        num_copies: copies that have run; forced: copies that ran because of `wait`.
    """

    def __init__(self, host: Any, order: str | int) -> None:
        self._host, self._order = host, order
        self._rng = random.Random(order) if isinstance(order, int) else None
        self._queues = {copies._store: deque[list[Any]](), copies._load: deque[list[Any]]()}
        self._done: list[copies.Copied] = []
        self.num_copies = self.forced = 0

    def store(self, job: int, engine: Any, slots: Any) -> None:
        self._submit(copies._store, job, engine, slots)

    def load(self, job: int, engine: Any, slots: Any) -> None:
        self._submit(copies._load, job, engine, slots)

    def finished(self) -> list[copies.Copied]:
        for direction, queue in self._queues.items():
            for entry in queue:
                entry[-1] += 1
            while queue and (queue[0][-1] >= LATEST_POLLS or self._now()):
                self._run(direction)
        done, self._done = self._done, []
        return done

    def wait(self, jobs: set[int]) -> None:
        """Run these jobs and all earlier jobs of the same direction, and no others."""
        for direction, queue in self._queues.items():
            while any(entry[0] in jobs for entry in queue):
                self.forced += 1
                self._run(direction)

    def close(self) -> None:
        self.wait({entry[0] for queue in self._queues.values() for entry in queue})
        self._host.close()

    def _submit(self, direction: Callable[..., None], job: int, engine: Any, slots: Any) -> None:
        self._queues[direction].append([job, engine, slots, 0])
        while self._queues[direction] and self._now():
            self._run(direction)

    def _now(self) -> bool:
        return self._order == EARLY or (self._rng is not None and self._rng.random() < 0.4)

    def _run(self, direction: Callable[..., None]) -> None:
        job, engine, slots, _ = self._queues[direction].popleft()
        self.num_copies += 1
        try:
            self._done.append(copies.Copied(job, *self._host._copy(engine, slots, direction)))
        except Exception as error:
            self._done.append(copies.Copied(job, 0, 0.0, error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


@contextmanager
def zeroing_of_new_blocks() -> Iterator[None]:
    """Let engines that start in this context zero new blocks, as vLLM does for recurrent state."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda config: True))
        yield


def put_in_order(engine: Any, runner: str, order: str | int, *, guarded: bool = True) -> OrderedCopies:
    """Make this engine zero blocks at the time of `runner`, and copy in this order.

    Args:
        engine: started within `zeroing_of_new_blocks`.
        guarded: our worker knows the runner; otherwise it assumes V1.
    """
    engine.drain()
    worker, host = engine.worker, engine.worker.copies
    if isinstance(host, OrderedCopies):
        assert not any(host._queues.values())
        host = host._host
    worker.copies = ordered = OrderedCopies(host, order)
    assert engine.core.scheduler.needs_kv_cache_zeroing
    configs = (
        SimpleNamespace(use_v2_model_runner=runner == V2 and guarded),
        SimpleNamespace(needs_kv_cache_zeroing=True),
    )
    worker.fences_come_late = fences_come_late(*configs, vllm_version)
    _zero_where(engine, runner, host)
    return ordered


def _zero_where(engine: Any, runner: str, host: Any) -> None:
    model_runner = engine.core.model_executor.driver_worker.worker.model_runner
    vars(model_runner).pop("execute_model", None)
    execute = model_runner.execute_model

    def zero(block_ids: list[int]) -> None:
        engine.num_zeroed = getattr(engine, "num_zeroed", 0) + len(block_ids)
        for tensor in host.tensors:
            tensor[np.asarray(block_ids)] = 0

    def execute_model(scheduler_output: Any, *arguments: Any, **keywords: Any) -> Any:
        if scheduler_output.new_block_ids_to_zero:
            zero(scheduler_output.new_block_ids_to_zero)
            scheduler_output.new_block_ids_to_zero = None
        return execute(scheduler_output, *arguments, **keywords)

    model_runner._zero_block_ids = zero
    if runner == V2:
        model_runner.execute_model = execute_model


def orders(seed: int, count: int) -> list[str | int]:
    """Both extremes, and `count` random orders of this seed."""
    rng = random.Random(seed)
    return [EARLY, LATE, *(rng.randrange(10**9) for _ in range(count))]


def soak(start: Callable[[], Any], expected: Any, seed: int, count: int, *, runner: str = V2) -> list[str]:
    """Drive one engine through `count` random orders and both extremes; returns a line for each wrong answer.

    Args:
        start: starts an engine; it is called within `zeroing_of_new_blocks`.
        expected: prompts, and their certain answers.
    """
    from support.vllm_traffic import drive

    with zeroing_of_new_blocks():
        engine = start()
    wrong, began = [], time.monotonic()
    for number, order in enumerate(orders(seed, count)):
        copied = put_in_order(engine, runner, order)
        outcome = drive(engine, *expected, seed + number, 60, aborts=0.05)
        wrong += [f"order {order}, drive {seed + number}: prompt {row}" for row, _ in outcome.wrong]
        print(f"{runner}, order {order}: {outcome}, {copied.num_copies} copies, {copied.forced} waited for, "
              f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    engine.close()
    return wrong
