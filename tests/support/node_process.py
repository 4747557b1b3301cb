"""Processes that make random requests to a shared pool, and check every byte that they load.

A block repeats the bytes of its key.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import random
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffload.core.plans import LookupResult
from kvoffload.errors import GoneError
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory, open_own
from kvoffload.structures.jit import compile_all
from kvoffload.structures.keys import Keys

KILLS = int(os.environ.get("KVOFFLOAD_KILLS", "60"))
"""Kills, deaths or double starts of each long test; `make test-all` and `make soak`: 200."""
CAPACITY, SLOT_BYTES, NUM_KEYS = 64, 256, 160
FACTS = {"test": "processes"}
KEYS = Keys.pack([number.to_bytes(4, "little") * 8 for number in range(1, NUM_KEYS + 1)], 32)


class Process:
    """A member with its slots; `step` makes one random request."""

    def __init__(
        self, root: Path, name: str, seed: int, *, policy: str = "arc", share_blocks: int = 0
    ) -> None:
        self.directory = PoolDirectory.join(FACTS, name, keep_s=60.0, root=root, has_keeper=False)
        self.manager = NodeManager(
            CAPACITY, directory=self.directory, policy=policy, share_blocks=share_blocks
        )
        fd = open_own(self.directory.path / "slots", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, CAPACITY * SLOT_BYTES)
        self.slots = np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(CAPACITY, SLOT_BYTES)
        self.random = random.Random(seed)
        self.loaded = self.stored = self.vanished = 0

    def step(self) -> None:
        start = self.random.randrange(NUM_KEYS - 12)
        keys = KEYS[start : start + self.random.randrange(1, 12)]
        ctx = self.manager.begin_request("r", keys)
        if self.random.random() < 0.1:
            self.manager.expect(ctx)
        ready, stopped_by = self.manager.lookup(keys, ctx)
        if ready:
            try:
                load = self.manager.prepare_load(keys[:ready], ctx)
            except GoneError:
                self.vanished += 1
            else:
                rows = self.slots[load.slots]
                if not np.array_equal(rows, contents(keys[:ready])):
                    raise AssertionError("wrong bytes")
                self.manager.complete_load(load)
                self.loaded += ready
        if stopped_by is not LookupResult.HIT_PENDING:
            plan = self.manager.prepare_store(keys, ctx)
            if plan is not None:
                self.slots[plan.slots] = 0
                self.slots[plan.slots] = contents(plan.keys)
                self.manager.complete_store(plan, success=self.random.random() > 0.05)
                self.stored += len(plan)
        self.manager.finish_request(ctx)
        if self.random.random() < 0.002:
            self.manager.reset(drop_in_flight=self.random.random() < 0.5)

    def close(self) -> None:
        self.manager.close()
        self.directory.close()


def contents(keys: Keys) -> np.ndarray:
    """Return the bytes of these blocks, ``(len(keys), SLOT_BYTES)``."""
    words = np.tile(keys.words, (1, SLOT_BYTES // 32))
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(keys), SLOT_BYTES)


class Child:
    """A forked process that makes random steps until its time has elapsed or it is killed."""

    def __init__(self, root: Path, name: str, seed: int, seconds: float, policy: str = "arc") -> None:
        compile_all()  # a forked process inherits loaded kernels; loading them takes a second
        context = multiprocessing.get_context("fork")
        self._pipe, child_end = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run, args=(child_end, root, name, seed, seconds, policy), daemon=True
        )
        self.process.start()
        child_end.close()
        ready = self._receive()
        assert ready == "ready", f"{name} has not started: {ready}"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Kill the process, which must be alive."""
        if not self.process.is_alive():
            raise AssertionError(f"the process has ended: {self._receive()}")
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def result(self) -> Counts:
        """Wait for the end; return the counts."""
        counts = self._receive()
        self.process.join()
        assert isinstance(counts, Counts), f"the process has ended: {counts}"
        return counts

    def _receive(self) -> object:
        try:
            return self._pipe.recv() if self._pipe.poll(60) else "nothing for 60 s"
        except EOFError:
            return "nothing more"


class Counts(NamedTuple):
    """Blocks and calls of a process. `vanished`: loads refused because a block had vanished."""

    steps: int
    loaded: int
    stored: int
    vanished: int
    timeouts: int


def _run(pipe: Any, root: Path, name: str, seed: int, seconds: float, policy: str) -> None:
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    try:
        process = Process(root, name, seed, policy=policy)
        pipe.send("ready")
        until, steps = time.monotonic() + seconds, 0
        # On a busy machine the process runs longer, until it has made a hundred steps and a load.
        while (now := time.monotonic()) < until or (
            now < until + 30 and not (steps > 100 and process.loaded)
        ):
            process.step()
            steps += 1
        counts = Counts(steps, process.loaded, process.stored, process.vanished, process.manager.num_timeouts)
        process.close()
        pipe.send(counts)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
