"""Exhaustive search: the most prefix hits of RAM and a tier with a limit of writes, knowing the future."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from support.naive.optimum import Offers
from support.optimum_traces import Requests

State = tuple[frozenset[int], frozenset[int]]
"""Blocks in RAM and in the tier."""


def most_hits(requests: Requests, offers: Offers, capacity: int, tier_blocks: int, max_writes: int) -> int:
    """Try every choice of blocks for RAM and for the tier after every request.

    RAM chooses among its blocks, the offered blocks and the blocks of the tier that the request has loaded.
    The tier may take any block that RAM has or is offered; it may also drop blocks, and write them again.
    """
    best: dict[tuple[State, int], int] = {((frozenset(), frozenset()), 0): 0}
    for request, (served, offered) in zip(requests, offers, strict=True):
        after: dict[tuple[State, int], int] = {}
        for ((ram, tier), written), hits in best.items():
            run = 0
            needed = request[served:]
            while run < len(needed) and needed[run] in ram | tier:
                run += 1
            loaded = frozenset(needed[:run])
            for kept in _subsets(ram | set(offered) | loaded, capacity):
                for new_tier, writes in _tiers(tier, ram | set(offered), tier_blocks, max_writes - written):
                    key = ((kept, new_tier), written + writes)
                    after[key] = max(after.get(key, -1), hits + served + run)
        best = after
    return max(best.values())


def _tiers(
    tier: frozenset[int], writable: Iterable[int], tier_blocks: int, writes_left: int
) -> Iterator[tuple[frozenset[int], int]]:
    for new in _subsets(frozenset(writable) - tier, writes_left):
        for kept in _subsets(tier, tier_blocks - len(new)):
            yield kept | new, len(new)


def _subsets(blocks: Iterable[int], most: int) -> Iterator[frozenset[int]]:
    ordered = sorted(blocks)
    for count in range(min(most, len(ordered)) + 1):
        yield from map(frozenset, combinations(ordered, count))
