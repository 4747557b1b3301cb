"""Expected keys: keys of blocks that requests in the engine's queue will look up.

Counts the waiting requests that expect each key. Expected blocks are evicted last, because the queue shows
which blocks will be used soon, while a policy can only estimate it. A store evicts no expected block as long
as it finds enough other slots (`state.evictable`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffload.core.request import HASH, Path, RequestContext
from kvoffload.structures.index import ABSENT, find
from kvoffload.structures.jit import I32Array, inline, kernel
from kvoffload.structures.keylists import KeyLists, forget, remember
from kvoffload.structures.lists import LIST
from kvoffload.structures.structs import Struct

_NO_LIMIT = 1 << 62
MOST_KEYS = 1 << 16
"""Largest number of expected keys. It suffices for a queue of 64 requests of 1,024 blocks each."""


def most_expected(capacity_blocks: int) -> int:
    """Return the maximum number of expected keys: 7/8 of the slots, but at most `MOST_KEYS`.

    The other slots remain for blocks that no waiting request expects.
    """
    return min(capacity_blocks * 7 // 8, MOST_KEYS)


class Expected(Struct):
    """Expected keys with the number of waiting requests that expect each key.

    The blocks of these keys need not be resident.

    Args:
        num_keys: maximum number of keys. If the keys of a request do not fit, only the head of its path is
            expected.

    Attributes:
        keys: the expected keys, in one list.
        counts: number of waiting requests that expect the key at each position of `keys`.

    Memory: for each key 32 bytes and the key's length.
    """

    keys: KeyLists
    counts: I32Array

    def __init__(self, num_keys: int, key_bytes: int) -> None:
        super().__init__(keys=KeyLists(num_keys, key_bytes, 1), counts=np.zeros(num_keys, np.int32))


@inline
def num_expected(expected: Expected) -> int:
    """Return the number of different expected keys."""
    return np.int64(expected.keys.lists.links[expected.keys.lists.num_positions, LIST])


@kernel
def _expect(expected: Expected, path: Path, most: int) -> int:
    """Add the leading keys of a waiting request to `expected`, up to `most` keys or until `expected` is full.

    Returns the number of the request's expected keys, including keys of earlier calls.

    Cost: all calls for a request together probe the index once for each block.
    """
    keys, recent = expected.keys, expected.keys.lists.num_positions
    while path.num_expected < min(path.length, most):
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
def _withdraw(expected: Expected, path: Path) -> None:
    while path.num_expected > 0:
        path.num_expected -= 1
        row = path.num_expected
        position = find(expected.keys.index, path.index.keys, row, path.records[row, HASH])
        expected.counts[position] -= 1
        if expected.counts[position] == 0:
            forget(expected.keys, position)


class Queue:
    """The waiting requests in order of arrival. If `Expected` has too little room, the keys of earlier
    requests come first.

    Memory: none until the first request waits, because most managers have no queue.

    Args:
        make: creates the `Expected` of the cache, when the first request waits.
        on_expected: called with a waiting request after each attempt to add more of its keys to `Expected`.
        share: function that returns how many keys this queue may expect in all. Without it, the room in
            `Expected` is the only limit.
    """

    def __init__(
        self,
        make: Callable[[], Expected],
        on_expected: Callable[[RequestContext], None],
        share: Callable[[], int] | None = None,
    ) -> None:
        self._make, self._on_expected, self._share = make, on_expected, share
        self._expected: Expected | None = None
        self._waiting: dict[RequestContext, None] = {}
        self._is_full = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_make": None, "_on_expected": None}

    def attach(self, make: Callable[[], Expected], on_expected: Callable[[RequestContext], None]) -> None:
        """Set the callbacks after unpickling, because a pickle does not contain them.

        The arguments are the same as for the constructor.
        """
        self._make, self._on_expected = make, on_expected

    def join(self, ctx: RequestContext) -> None:
        """Add a waiting request and its keys. Call again when the request's path has grown."""
        self._expected = self._expected or self._make()
        self._waiting[ctx] = None
        self._is_full = self._is_full or not self._expect_all(ctx)

    def leave(self, ctx: RequestContext) -> None:
        """Remove a request, if it is waiting. Other waiting requests may then expect more keys."""
        if ctx in self._waiting:
            del self._waiting[ctx]
            assert self._expected is not None
            _withdraw(self._expected.memory, ctx.memory)
            self._is_full = self._is_full and not all(map(self._expect_all, self._waiting))

    def has(self, ctx: RequestContext) -> bool:
        """Return True if the request is waiting."""
        return ctx in self._waiting

    def renew(self) -> None:
        """Add the keys of all waiting requests again, after `Expected` was cleared."""
        for ctx in self._waiting:
            Path.over(ctx.memory).num_expected = 0
        self._is_full = not all(map(self._expect_all, self._waiting))

    def _expect_all(self, ctx: RequestContext) -> bool:
        assert self._expected is not None
        most = _NO_LIMIT
        if self._share is not None:
            paths = [Path.over(other.memory) for other in self._waiting if other is not ctx]
            most = self._share() - sum(path.num_expected for path in paths)
        has_room = bool(_expect(self._expected.memory, ctx.memory, most) == ctx.length)
        self._on_expected(ctx)
        return has_room
