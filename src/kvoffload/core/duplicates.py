"""Blocks of a victim tier that the device holds as well: they give up their slots first.

Owns their order. Does not know policies: a duplicate is in no policy's order until the device drops it.
"""

from __future__ import annotations

import numpy as np

from kvoffload.core.request import Path, RequestContext
from kvoffload.core.state import Cache, evictable
from kvoffload.structures.jit import I32Array, I32Matrix, ReadI32Array, kernel
from kvoffload.structures.lists import LIST, NEXT, UNLISTED, Lists, move_to_head, push_head, unlink


class Duplicates:
    """The slots of duplicates, in the order in which they became duplicates. Memory: 12 bytes a slot.

    The latest is given up first: the device keeps it longest, so it is offered again last.
    """

    __slots__ = ("_order",)

    def __init__(self, capacity_blocks: int) -> None:
        self._order = Lists(capacity_blocks, 1)

    def __len__(self) -> int:
        return self._order.size(0)

    def slots(self) -> list[int]:
        """Every duplicate, in the order in which they are given up. Cost: O(duplicates), for audits."""
        return self._order.members(0)

    def add(self, slots: I32Array, ref_cnt: I32Array) -> I32Array:
        """The device holds these blocks too. Returns the new duplicates; skips blocks in flight."""
        added = np.empty(len(slots), np.int32)
        return added[: _add(self._order.links, slots, ref_cnt, added)]

    def drop(self, slots: I32Array) -> tuple[I32Array, I32Array]:
        """These are no longer duplicates. Returns rows of `slots`: those that were, and the others."""
        rows = np.empty(len(slots), np.int32)
        found = _drop(self._order.links, slots, rows)
        return rows[:found], rows[found:][::-1]

    def holds_any(self, slots: I32Array) -> bool:
        """Whether one of `slots` holds a duplicate."""
        return bool((self._order.links[slots, LIST] != UNLISTED).any())

    def choose(self, wanted: int, cache: Cache, ctx: RequestContext) -> I32Array:
        """Up to `wanted` duplicates that may leave, in order; call `drop` for those that do."""
        chosen = np.empty(min(wanted, len(self)), np.int32)
        return chosen[: _choose(self._order.memory, cache.memory, ctx.memory, chosen)]

    def clear(self) -> None:
        """Forget all of them. Cost: O(capacity)."""
        self._order.clear()


@kernel
def _add(links: I32Matrix, slots: ReadI32Array, ref_cnt: I32Array, added: I32Array) -> int:
    sentinel = links.shape[0] - 1
    found = 0
    for i in range(slots.shape[0] - 1, -1, -1):
        slot = slots[i]
        if ref_cnt[slot] < 0:
            continue
        if links[slot, LIST] == UNLISTED:
            push_head(links, sentinel, slot)
            added[found] = slot
            found += 1
        else:
            move_to_head(links, sentinel, slot)
    return found


@kernel
def _drop(links: I32Matrix, slots: ReadI32Array, rows: I32Array) -> int:
    found, others = 0, slots.shape[0]
    for i in range(slots.shape[0]):
        if links[slots[i], LIST] == UNLISTED:
            others -= 1
            rows[others] = i
        else:
            unlink(links, slots[i])
            rows[found] = i
            found += 1
    return found


@kernel
def _choose(duplicates: Lists, cache: Cache, path: Path, chosen: I32Array) -> int:
    links, sentinel = duplicates.links, duplicates.num_positions
    found, slot = 0, links[sentinel, NEXT]
    while found < chosen.shape[0] and slot != sentinel:
        if evictable(cache, path, slot):
            chosen[found] = slot
            found += 1
        slot = links[slot, NEXT]
    return found
