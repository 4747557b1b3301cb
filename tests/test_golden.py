"""Golden numbers of policies on the block I/O traces of the ARC paper (FAST'03).

Those traces are flat: no prefixes, every block of a line is one reference, in sequence. The numbers are
those of an independent simulator; a plain transcription of the paper's figure 4, without a manager, agrees
with ours to the last hit when each block is a request of its own (OLTP: 0.389451).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from kvoffload.core.manager import OffloadingManager
from kvoffload.types import LookupResult

LONGEST_RUN = 64


def references(path: Path) -> Iterator[int]:
    """Blocks of a classic trace (lines of ``start_block num_blocks ignored request``), one by one."""
    with path.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "ascii"):
            start, num_blocks, *_ = map(int, line.split())
            yield from range(start, start + num_blocks)


def hit_ratio(blocks: Iterator[int], capacity_blocks: int, policy: str) -> float:
    """Hits of a flat trace: each reference a request of its own.

    Runs of hits, or of misses, of different blocks go to the manager together, for speed. A batch is
    put in order from its end, hence the reversals. Blocks of a batch do not evict each other: of OLTP's
    914,145 references ARC loses two hits by that.
    """
    manager = OffloadingManager(capacity_blocks, key_bytes=8, policy=policy)
    hits = total = 0
    run: dict[bytes, None] = {}
    run_hits = False

    def end_run() -> int:
        if run_hits:
            manager.touch([*run][::-1])
            return len(run)
        ctx = manager.begin_request("", [*run][::-1])
        plan = manager.prepare_store([*run], ctx)
        assert plan is not None
        manager.complete_store(plan)
        manager.finish_request(ctx)
        return 0

    for total, block in enumerate(blocks, 1):  # noqa: B007
        key = block.to_bytes(8, "little")
        if key in run or (manager.lookup_key(key) is LookupResult.HIT) != run_hits or len(run) == LONGEST_RUN:
            hits += end_run()
            run = {}
            # What has just been stored may have taken this block's place.
            run_hits = manager.lookup_key(key) is LookupResult.HIT
        run[key] = None
    return (hits + end_run()) / total


@pytest.mark.trace
@pytest.mark.parametrize(
    ("name", "capacity_blocks", "policy", "golden"),
    [
        ("P3", 38_127, "lru", 0.0433),  # 5 % of 762,543 blocks
        ("P3", 38_127, "arc", 0.1756),
        ("OLTP", 1_000, "arc", 0.3894),
    ],
)
def test_golden_numbers_on_the_papers_traces(
    recorded_trace_path: Callable[[str], Path], name: str, capacity_blocks: int, policy: str, golden: float
) -> None:
    found = hit_ratio(references(recorded_trace_path(name)), capacity_blocks, policy)
    assert round(found, 4) == golden
