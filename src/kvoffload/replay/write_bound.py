"""Upper bound of prefix hits with a limited number of writes to the tier behind RAM.

The computation knows the whole trace, but no managers or policies. `replay.optimum` computes the bound for an
unlimited number of writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.replay.device_cache import run_device
from kvoffload.replay.optimum import next_uses, optimum
from kvoffload.traces.trace import Trace

_STEPS = 40
_GOLDEN = (5**0.5 - 1) / 2


def bound_within_writes(
    trace: Trace,
    capacity_blocks: int,
    tier_blocks: int,
    max_writes: int,
    device_blocks: int = 0,
    store: str = "on-compute",
) -> int:
    """Bound the prefix hits of RAM and a tier behind RAM, with at most `max_writes` writes to the tier.

    No policy with any admission rule exceeds the bound, but possibly none can reach it. The result is the
    lowest of three bounds:

    - The optimum of one cache of ``capacity_blocks + tier_blocks``, with any number of writes.
    - The optimum of RAM alone, plus all uses of those `max_writes` blocks that are used most. A block's first
      use, and uses that the device serves, are not counted.
    - A Lagrangian relaxation of the limits on slots and writes. There are two ways to make a use a hit: RAM
      holds the block from its last offer to the use, or the block is written to the tier, which then serves
      all its uses. Assume that to hold a block in RAM costs `p` hits per request, and a write costs `q` hits.
      For each block, the better way is chosen: RAM for each interval that costs less than a hit, or a write.
      By weak duality, the sum of all net gains, plus the price of all slots and of all allowed writes, is an
      upper bound of the hits for any `p` and `q`. The best `q` follows from `p`, and a search finds the best
      `p`.

    The second and third bound assume that the tier keeps every written block forever, from its first offer
    on.

    Args:
        capacity_blocks: slots of RAM.
        tier_blocks: slots of the tier behind RAM.
        max_writes: number of blocks that may be written to the tier during the whole trace.
        device_blocks, store: as for `optimum`.

    Cost: O(1) per reference and search step; in total 0.3 s per million references. Raises: `ConfigError` for
    a negative number of writes, and the errors of `optimum`.
    """
    if max_writes < 0:
        raise ConfigError("max_writes", max_writes, "allowed: 0 or more")
    both = optimum(trace, capacity_blocks + tier_blocks, device_blocks, store).prefix_hit_blocks
    ram = optimum(trace, capacity_blocks, device_blocks, store)
    uses = _uses(trace, device_blocks, store)
    by_uses = ram.prefix_hit_blocks + int(_largest(uses.per_block(np.ones(len(uses.blocks))), max_writes))
    relaxed = ram.device_hit_blocks + _relaxed(uses, capacity_blocks, max_writes, trace.requests)
    return min(both, by_uses, int(relaxed + 1e-6))


def oracle_within_writes(trace: Trace, hits_per_request: npt.NDArray[np.int32], max_writes: int) -> int:
    """Compute the prefix hits of existing caches after a tier is added whose writes an oracle chooses.

    The caches in front are assumed to have the same hits as without the tier. The oracle writes the
    `max_writes` blocks with the most missed uses, and the tier keeps these blocks forever. The result is no
    upper bound for a replay, because in a replay promoted blocks also enter the cache in front of the tier,
    which may then have more hits.

    Args:
        hits_per_request: for each request, its prefix hits without the tier (`Replay.hits_per_request`).

    Cost: O(1) per reference. Raises: `ConfigError` for a negative number of writes.
    """
    if max_writes < 0:
        raise ConfigError("max_writes", max_writes, "allowed: 0 or more")
    is_missed = trace.depths >= hits_per_request[trace.request_of]
    is_missed[np.unique(trace.refs, return_index=True)[1]] = False
    missed = np.bincount(trace.refs[is_missed], minlength=trace.unique_blocks).astype(np.float64)
    return int(hits_per_request.sum()) + int(_largest(missed, max_writes))


@dataclass(frozen=True)
class _Uses:
    """The uses that RAM or a tier may serve: all uses except first uses and uses that the device serves.

    Attributes:
        blocks: for each use, the code of the block.
        gaps: for each use, how long RAM must hold the block before the use, as a number of requests.
        unique_blocks: number of unique blocks in the trace.
    """

    blocks: npt.NDArray[np.int32]
    gaps: npt.NDArray[np.float64]
    unique_blocks: int

    def per_block(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return, for each block, the sum of `weights` over the block's uses."""
        sums: npt.NDArray[np.float64] = np.bincount(self.blocks, weights, self.unique_blocks)  # type: ignore[assignment]
        return sums


def _uses(trace: Trace, device_blocks: int, store: str) -> _Uses:
    request_of = trace.request_of
    offered, at = np.arange(trace.block_refs), request_of
    next_use = next_uses(trace.refs)
    by_device = np.zeros(trace.block_refs, np.bool_)
    if device_blocks:
        device = run_device(trace, device_blocks)
        by_device = device.is_served(trace)
        if store == ON_DEVICE_EVICTION:
            offered = device.dropped
            at = np.repeat(np.arange(trace.requests), np.diff(device.offsets))
    uses = next_use[offered]
    is_use = uses >= 0
    is_use[is_use] = ~by_device[uses[is_use]]
    uses = uses[is_use]
    gaps = (request_of[uses] - at[is_use]).astype(np.float64)
    return _Uses(trace.refs[uses], gaps, trace.unique_blocks)


def _relaxed(uses: _Uses, slots: int, max_writes: int, requests: int) -> float:
    """Compute the lowest bound that the relaxation gives, by golden-section search over the price of a slot.

    The search finds the minimum, because the bound is a convex function of this price.
    """
    if len(uses.blocks) == 0:
        return 0.0
    total = uses.per_block(np.ones(len(uses.blocks)))

    def bound(price: float) -> float:
        in_ram = uses.per_block(np.maximum(0.0, 1.0 - price * uses.gaps))
        # The best price of a write is the gain of the last block that is written.
        return slots * price * (requests - 1) + float(in_ram.sum()) + _largest(total - in_ram, max_writes)

    # No interval is worth a price of 1.
    low, high = 0.0, 1.0
    least = min(bound(low), bound(high))
    for _ in range(_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = bound(left), bound(right)
        least = min(least, at_left, at_right)
        low, high = (low, right) if at_left < at_right else (left, high)
    return least


def _largest(gains: npt.NDArray[np.float64], count: int) -> float:
    """Return the sum of the `count` largest gains."""
    if count >= len(gains):
        return float(gains.sum())
    return float(np.partition(gains, len(gains) - count)[len(gains) - count :].sum()) if count else 0.0
