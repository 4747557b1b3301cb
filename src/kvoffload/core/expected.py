"""The blocks that requests in the engine's queue will ask for: others leave before them.

Owns how often each key is expected. An engine's queue is the near future, which a policy can only estimate;
who waits there is served soon, whatever the policy thinks of its blocks. Decides nothing: a store spares
these blocks if there is room without them (`state.evictable`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.core.request import HASH, Path, RequestContext
from kvoffload.structures.index import ABSENT, find
from kvoffload.structures.jit import I32Array, inline, kernel
from kvoffload.structures.keylists import KeyLists, forget, remember
from kvoffload.structures.lists import LIST
from kvoffload.structures.structs import Struct

MOST_KEYS = 1 << 16
"""A queue of 64 requests of 1,024 blocks."""


def most_expected(capacity_blocks: int) -> int:
    """How many keys can be expected: seven eighths of the cache at most, so that the others have room."""
    return min(capacity_blocks * 7 // 8, MOST_KEYS)


class Expected(Struct):
    """Keys, and by how many waiting requests each of them is expected.

    Whether the block of a key is here does not matter: it may come.

    Args:
        num_keys: at most so many; of requests that do not fit the head is expected.

    Attributes:
        keys: one list; counts: of each position.

    Memory: 32 bytes a key, and the key.
    """

    keys: KeyLists
    counts: I32Array

    def __init__(self, num_keys: int, key_bytes: int) -> None:
        super().__init__(keys=KeyLists(num_keys, key_bytes, 1), counts=np.zeros(num_keys, np.int32))


@inline
def num_expected(expected: Expected) -> int:
    """How many different keys are expected."""
    return np.int64(expected.keys.lists.links[expected.keys.lists.num_positions, LIST])


@kernel
def _expect(expected: Expected, path: Path) -> int:
    """A request waits: its blocks are expected, from its head on. Returns how many of them are, in all.

    Cost: an index probe for each block, once for each request.
    """
    keys, recent = expected.keys, expected.keys.lists.num_positions
    while path.num_expected < path.length:
        row = path.num_expected
        h = path.records[row, HASH]
        position = find(keys.index, path.index.keys, row, h)
        if position == ABSENT:
            if keys.lists.links[recent + 1, LIST] == 0:
                break
            position = remember(keys, recent, path.index.keys, row, h)
            expected.counts[position] = 0
        expected.counts[position] += 1
        path.num_expected += 1
    return path.num_expected


@kernel
def _expect_no_more(expected: Expected, path: Path) -> None:
    while path.num_expected > 0:
        path.num_expected -= 1
        row = path.num_expected
        position = find(expected.keys.index, path.index.keys, row, path.records[row, HASH])
        expected.counts[position] -= 1
        if expected.counts[position] == 0:
            forget(expected.keys, position)


class Queue:
    """The requests that wait, in the order in which they came: the first get what room there is.

    Memory: none until the first request waits: most managers never hear of a queue.

    Args:
        make: an `Expected` for the cache's kernels, called when the first request waits.
        tell: called with a request after blocks of it may have come to be expected.
    """

    def __init__(self, make: Callable[[], Expected], tell: Callable[[RequestContext], None]) -> None:
        self._make, self._tell = make, tell
        self._expected: Expected | None = None
        self._waiting: dict[RequestContext, None] = {}
        self._is_full = False

    def join(self, ctx: RequestContext) -> None:
        """This request waits. Once more: as much of its path as has come since is expected, too."""
        self._expected = self._expected or self._make()
        self._waiting[ctx] = None
        self._is_full = self._is_full or not self._expect_all(ctx)

    def leave(self, ctx: RequestContext) -> None:
        """It waits no more, if it did."""
        if ctx in self._waiting:
            del self._waiting[ctx]
            assert self._expected is not None
            _expect_no_more(self._expected.memory, ctx.memory)
            self._is_full = self._is_full and not all(map(self._expect_all, self._waiting))

    def _expect_all(self, ctx: RequestContext) -> bool:
        assert self._expected is not None
        has_room = bool(_expect(self._expected.memory, ctx.memory) == ctx.length)
        self._tell(ctx)
        return has_room
