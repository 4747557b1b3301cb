"""Processes die inside a call at a random instruction: the others continue, and no byte is wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload.testing.audit import audit
from support.node_process import KEYS, KILLS, Child, Process, contents
from support.node_ptrace import Traced, owner_of

pytestmark = pytest.mark.usefixtures("fast_burials")


SURVIVORS_SHARE, VICTIMS_SHARE = 24, 16
"""Blocks, of `CAPACITY`."""


class Deaths:
    """A surviving process, and other processes that die while it works.

    Args:
        has_shares: the survivor and each victim have a share of the pool.

    Attributes:
        inside: deaths while the process held the lock.
    """

    def __init__(self, root: Path, policy: str, rng: random.Random, has_shares: bool) -> None:
        self._root, self._policy, self._random, self._has_shares = root, policy, rng, has_shares
        share = SURVIVORS_SHARE if has_shares else 0
        self.survivor = Process(root, "survivor", rng.randrange(1 << 30), policy=policy, share_blocks=share)
        self.inside = self.count = 0

    def one(self) -> None:
        """Let a process die at a random instruction, while the survivor loads and stores blocks."""
        manager, rng, seed = self.survivor.manager, self._random, self._random.randrange(1 << 30)
        name = f"victim-{self.count}"
        self.count += 1
        share = VICTIMS_SHARE if self._has_shares else 0
        victim = Traced(lambda ready: _work(self._root, name, seed, self._policy, share, ready))
        held, store = self._begin_transfers()
        try:
            self._run_to_a_random_instruction(victim)
            self.inside += owner_of(manager._mutex._address) == victim.pid
        finally:
            victim.kill()
        rows = self.survivor.slots
        if held is not None:
            assert np.array_equal(rows[held.slots], contents(held.keys)), f"pinned bytes changed, seed {seed}"
            manager.complete_load(held)
        if store is not None:
            rows[store.slots] = contents(store.keys)
            manager.complete_store(store)
        for _ in range(rng.randrange(1, 30)):
            self.survivor.step()
        self.check()

    def check(self) -> None:
        """Bury the dead, and audit the state while the other processes wait."""
        manager = self.survivor.manager
        until = time.monotonic() + 30
        while self.survivor.directory.dead():
            assert time.monotonic() < until, "the dead are not buried"
            for _ in range(20):
                manager.contains([])
        with manager._locked(10.0):
            audit(manager)

    def _begin_transfers(self) -> tuple:
        """Start a load and a store, which other processes must leave alone."""
        manager, rng = self.survivor.manager, self._random
        start = rng.randrange(len(KEYS) - 8)
        keys = KEYS[start : start + 8]
        ctx = manager.begin_request("r", keys)
        with manager._locked(10.0):  # so that no other process evicts them in between
            ready = manager.lookup(keys, ctx).num_ready
            held = manager.prepare_load(keys[:ready], ctx) if ready else None
        store = manager.prepare_store(keys, ctx)
        if store is not None:
            self.survivor.slots[store.slots] = 0
        manager.finish_request(ctx)
        return held, store

    def _run_to_a_random_instruction(self, victim: Traced) -> None:
        """Run the victim to a random instruction, in three of four cases inside the lock."""
        address, rng = self.survivor.manager._mutex._address, self._random
        wanted = rng.random() < 0.75
        for _ in range(200):
            time.sleep(rng.random() * 0.002)
            victim.interrupt()
            if not wanted or owner_of(address) == victim.pid:
                break
            victim.resume()
        for _ in range(rng.choice([0, 3, 40, 400])):
            victim.step()


def _work(
    root: Path, name: str, seed: int, policy: str, share_blocks: int, ready: Callable[[], None]
) -> None:
    process = Process(root, name, seed, policy=policy, share_blocks=share_blocks)
    ready()
    while True:
        process.step()


def run(
    root: Path, num_deaths: int, policy: str, *, num_children: int = 0, has_shares: bool = False
) -> Deaths:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    deaths = Deaths(root, policy, rng, has_shares)
    children = [Child(root, f"p{n}", rng.randrange(1 << 30), 3600, policy) for n in range(num_children)]
    try:
        for _ in range(num_deaths):
            deaths.one()
        inside = deaths.survivor.manager._numbers.num_died_inside
    finally:
        for child in children:
            child.kill()
    deaths.check()
    assert deaths.survivor.manager.stats().writing == 0
    print(f"{policy}: {num_deaths} deaths, {deaths.inside} of them inside the lock; found: {inside}")
    assert inside == deaths.inside > num_deaths // 4
    return deaths


def test_deaths_at_random_instructions(root: Path) -> None:
    deaths = run(root, 12, "arc")
    assert deaths.survivor.loaded


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_deaths_of_engines_with_shares(root: Path, policy: str) -> None:
    """The share of a dead engine returns to the pool, and the next victim gets it."""
    deaths = run(root, 60, policy, num_children=1, has_shares=True)
    tenants = deaths.survivor.manager.stats().tenants
    assert tenants["own"].min == SURVIVORS_SHARE
    assert tenants["others"].min == 0, "all victims are dead, and the child has no share"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["arc", "lru", "hazard"])
def test_many_deaths_at_random_instructions(root: Path, policy: str) -> None:
    deaths = run(root, KILLS, policy, num_children=2)
    assert deaths.survivor.loaded
