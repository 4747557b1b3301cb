"""Real processes on one pool are killed and stopped at random: no byte is wrong, and the others continue."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvoffload.testing.audit import audit
from support.node_process import KILLS, Child, Process


def check(root: Path) -> Process:
    """Attach to the pool, wait until the dead are buried, and audit the state."""
    process = Process(root, "auditor", 0)
    until = time.monotonic() + 30
    while process.directory.dead():
        assert time.monotonic() < until, "the dead are not buried"
        for _ in range(20):
            process.manager.contains([])
        time.sleep(0.05)
    audit(process.manager)
    assert process.manager.stats().writing == 0
    assert process.manager.stats().condemned == 0
    return process


@pytest.mark.slow
def test_processes_share_blocks(root: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    children = [Child(root, f"p{n}", seed + n, 2.0) for n in range(3)]
    counts = [child.result() for child in children]
    assert all(count.steps > 100 and count.loaded > 0 for count in counts), counts
    check(root)


def kill_at_random(root: Path, num_kills: int) -> Process:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    children = {n: Child(root, f"p{n}", rng.randrange(1 << 30), 3600) for n in range(3)}
    try:
        for kill in range(num_kills):
            time.sleep(rng.random() * 0.08)
            number = rng.randrange(3)
            children[number].kill()
            children[number] = Child(root, f"p{number}-{kill}", rng.randrange(1 << 30), 3600)
    finally:
        for child in children.values():
            child.kill()
    return check(root)


def test_kills_at_random_times(root: Path) -> None:
    process = kill_at_random(root, 6)
    assert process.manager._numbers.num_buried >= 6


@pytest.mark.slow
def test_many_kills(root: Path) -> None:
    process = kill_at_random(root, KILLS)
    print("died inside a call:", process.manager._numbers.num_died_inside)
    if KILLS >= 200:  # about one death in ten is inside a call
        assert process.manager._numbers.num_died_inside > 0, "no process died inside a call"
