"""Hit ratios at several capacities, with LRU and with the optimum, which knows the future.

The difference is the most that any policy can gain over LRU."""

from __future__ import annotations

from typing import Any

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.optimum import infinite, optimum
from kvoffload.replay.replay import Replay
from kvoffload.traces.trace import Trace

_CAPACITIES_PERCENT = (1, 2, 5, 10, 20)


def beside_optimum(trace: Trace) -> list[dict[str, Any]]:
    """Replay LRU and the optimum at several capacities; the last row has unlimited capacity."""
    rows = []
    for percent in (*_CAPACITIES_PERCENT, None):
        capacity = None if percent is None else trace.unique_blocks * percent // 100
        result = infinite(trace) if capacity is None else optimum(trace, capacity)
        lru = result if not capacity else Replay(trace, ReplayConfig(capacity)).run()
        rows.append(
            {
                "lru_prefix_hit_ratio": lru.prefix_hit_blocks / max(trace.block_refs, 1),
                "capacity_percent": percent,
                "capacity_blocks": capacity,
                "prefix_hit_blocks": result.prefix_hit_blocks,
                "prefix_hit_ratio": result.prefix_hit_blocks / max(trace.block_refs, 1),
                "blocks_written": result.blocks_written,
            }
        )
    return rows
