"""Flat streams of blocks, for comparisons with simulators that have no requests. Standard library only.

python tests/support/flat_streams.py NAME [PATH]     # prints a stream, one number a line
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
import sys
from pathlib import Path


def zipf() -> list[int]:
    """Draw 30,000 of 6,000 blocks independently, block `i` in proportion to ``1 / (i + 1)``."""
    rng = random.Random(7)
    cumulative = [*itertools.accumulate(1 / rank for rank in range(1, 6_001))]
    return [bisect.bisect_left(cumulative, rng.random() * cumulative[-1]) for _ in range(30_000)]


def skewed() -> list[int]:
    """Draw 30,000 of 5,000 blocks independently, block `i` in proportion to ``(i + 1) ** -0.9``."""
    rng = random.Random(20260101)
    cumulative = [*itertools.accumulate(1 / rank**0.9 for rank in range(1, 5_001))]
    return [bisect.bisect_left(cumulative, rng.random() * cumulative[-1]) for _ in range(30_000)]


def bursts() -> list[int]:
    """Generate 30,000 references: 50 % to recent blocks, 30 % to any known block, 20 % to new blocks.

    A block is reused soon or almost never: the pattern that policies with a queue for new blocks assume.
    """
    rng = random.Random(3)
    stream: list[int] = []
    known = 0
    while len(stream) < 30_000:
        kind, where = rng.random(), rng.random()
        if kind < 0.5 and stream:
            stream.append(stream[-1 - int(where * where * min(len(stream), 60))])
        elif kind < 0.8 and known:
            stream.append(int(known * where))
        else:
            stream.append(known)
            known += 1
    return stream


def conversation(path: Path) -> list[int]:
    """Return the first 40,000 references of the recorded conversation trace, each request in prefix order."""
    stream: list[int] = []
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            stream += request["hash_ids"][: request["input_length"] // 512]
    return stream[:40_000]


def after_a_prologue(stream: list[int], capacity: int) -> list[int]:
    """Prepend references that fill a cache and use its younger half again.

    After this prologue, segmented caches that insert new blocks at the bottom and segmented caches that first
    fill all segments hold the same blocks in the same order. The added blocks are negative.
    """
    filling = [*range(-capacity, 0)]
    return [*filling, *filling[capacity - capacity // 2 :], *stream]


if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    print(*(globals()[name](*map(Path, paths))), sep="\n")
