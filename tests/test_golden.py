"""Golden numbers of policies on the block I/O traces of the ARC paper (FAST'03).

Those traces are flat: no prefixes, every block of a line is one reference, in sequence. The paper's own
figures (table 3: OLTP at 1,000 blocks, LRU 32.83 %, ARC 38.93 %) were got by another program at another
place, and say that our ARC is the paper's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import zstandard

from kvoffload.core.manager import OffloadingManager
from kvoffload.types import LookupResult

WINDOW = 64


def references(path: Path) -> Iterator[int]:
    """Blocks of a classic trace (lines of ``start_block num_blocks ignored request``), one by one."""
    with path.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "ascii"):
            start, num_blocks, *_ = map(int, line.split())
            yield from range(start, start + num_blocks)


def hit_ratio(blocks: Iterator[int], capacity_blocks: int, policy: str) -> float:
    """Hits of a flat trace: each reference a request of its own.

    Equal to asking for the blocks one after the other, and ten times faster: runs of hits, and of misses,
    of different blocks go to the manager together. A batch is accessed from its end, hence the reversal.
    """
    manager = OffloadingManager(capacity_blocks, key_bytes=8, policy=policy)
    hits = total = 0
    keys: list[bytes] = []
    while True:
        keys += [block.to_bytes(8, "little") for block in islice(blocks, WINDOW - len(keys))]
        if not keys:
            return hits / total
        ready = manager.lookup(keys).num_ready
        hit = list(dict.fromkeys(keys[:ready]))
        if len(hit) == ready > 0:
            run = ready
            manager.touch(hit[::-1])
        elif ready:  # A block twice in one run: as far as the repetition.
            run = next(i for i, key in enumerate(keys) if key in keys[:i])
            manager.touch(keys[:run][::-1])
        else:
            run, seen = 0, set[bytes]()
            while run < len(keys) and keys[run] not in seen:
                if manager.lookup_key(keys[run]) is LookupResult.HIT:
                    break
                seen.add(keys[run])
                run += 1
            plan = manager.prepare_store(keys[:run])
            assert plan is not None
            manager.complete_store(plan)
        hits += run if ready else 0
        total += run
        del keys[:run]


@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "capacity_blocks", "policy", "golden"),
    [
        ("P3", 38_127, "lru", 0.0433),  # 5 % of 762,543 blocks
        ("P3", 38_127, "arc", 0.1756),
        ("OLTP", 1_000, "lru", 0.3283),
        ("OLTP", 1_000, "arc", 0.3893),
    ],
)
def test_golden_numbers_on_the_papers_traces(
    recorded_trace_path: Callable[[str], Path], name: str, capacity_blocks: int, policy: str, golden: float
) -> None:
    found = hit_ratio(references(recorded_trace_path(name)), capacity_blocks, policy)
    assert round(found, 4) == golden
