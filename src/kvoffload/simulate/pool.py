"""The device's KV blocks over time, as vLLM's block pool has them.

A request holds its blocks until it ends. Blocks of requests that have ended stay, can be found, and leave in
the order in which they became free, of one request the tail first. Knows no bytes and no time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class Lease:
    """The blocks that one request holds.

    Attributes:
        known: codes of those that have contents, in prefix order.
        copies: those of them of which another block is the one that is found.
        num_blank: those that nobody can find: not yet computed, generated, or a second copy.
        num_reserved: that it does not have yet, and will need.
    """

    __slots__ = ("copies", "known", "num_blank", "num_reserved")

    def __init__(self, num_reserved: int) -> None:
        self.known: list[int] = []
        self.copies: set[int] = set()
        self.num_blank, self.num_reserved = 0, num_reserved


class DevicePool:
    """`num_blocks` blocks, each blank, free and known, or held.

    Unlike vLLM's it keeps room for all that running requests will need, so none is ever preempted.

    Attributes:
        version: rises whenever the order of free blocks changes.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blank, self._num_reserved = num_blocks, 0
        # How many requests hold each known block; those held by none are also in `_free`, coldest first.
        self._holders: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self.version = 0

    def find(self, codes: Sequence[int]) -> int:
        """Length of the leading run of known blocks."""
        holders, found = self._holders, 0
        for code in codes:
            if code not in holders:
                break
            found += 1
        return found

    def lease(self, codes: Sequence[int], num_more: int) -> Lease | None:
        """Hold these known blocks, and reserve room for more; None if there is no room."""
        free = self._free
        num_free = sum(code in free for code in codes)
        if self._num_blank + len(free) - num_free - self._num_reserved < num_more:
            return None
        lease = Lease(num_more)
        self._num_reserved += num_more
        for code in codes:
            self._hold(code, lease)
        return lease

    def take(self, lease: Lease, num_blocks: int) -> list[int]:
        """Make room for so many of the blocks that it has reserved; which blocks leave, the coldest first."""
        assert num_blocks <= lease.num_reserved
        lease.num_reserved -= num_blocks
        self._num_reserved -= num_blocks
        lease.num_blank += num_blocks
        num_dropped = max(0, num_blocks - self._num_blank)
        self._num_blank -= num_blocks - num_dropped
        dropped = [self._free.popitem(last=False)[0] for _ in range(num_dropped)]
        for code in dropped:
            del self._holders[code]
        self.version += num_blocks > 0
        return dropped

    def know(self, lease: Lease, codes: Iterable[int]) -> None:
        """Blocks that it has taken have these contents, and can be found from now on.

        Of one that is known already this is a second copy, which nobody finds while the first is there.
        """
        for code in codes:
            lease.known.append(code)
            if code in self._holders:
                lease.copies.add(code)
            else:
                lease.num_blank -= 1
                self._holders[code] = 1

    def release(self, lease: Lease) -> None:
        """The request has ended. Of two copies one stays, used now."""
        holders, free = self._holders, self._free
        for code in reversed(lease.known):
            if code not in lease.copies:
                holders[code] -= 1
            elif code not in holders:
                holders[code] = 0
                lease.num_blank -= 1
            if holders[code] == 0:
                free[code] = None
                free.move_to_end(code)
        self._num_blank += lease.num_blank
        self._num_reserved -= lease.num_reserved
        self.version += 1

    def next_to_leave(self, num_blocks: int) -> list[int]:
        """The known ones among the blocks that are taken next, the coldest first."""
        return list(islice(self._free, max(0, num_blocks - self._num_blank)))

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return self._num_blank + len(self._free)

    def _hold(self, code: int, lease: Lease) -> None:
        if self._holders[code] == 0:
            del self._free[code]
            self.version += 1
        self._holders[code] += 1
        lease.known.append(code)
