"""KV blocks of a device, managed as in vLLM's block pool.

A request holds its blocks until it ends. Then they become free, the last block first, but requests can still
find their contents. Free blocks are evicted in the order in which they became free. This module knows no
bytes and no time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class Lease:
    """Blocks that one request holds.

    Attributes:
        known: codes of the blocks whose contents were found, loaded or computed, in prefix order.
        copies: codes of those blocks in `known` that are second copies: when the block was computed, another
            block already had the same contents.
        num_blank: number of held blocks that `DevicePool.find` does not find. These are blocks that are not
            computed yet, blocks of the answer, and second copies.
        num_reserved: number of blocks that are reserved for the request but not used yet.
    """

    __slots__ = ("copies", "known", "num_blank", "num_reserved")

    def __init__(self, num_reserved: int) -> None:
        self.known: list[int] = []
        self.copies: set[int] = set()
        self.num_blank, self.num_reserved = 0, num_reserved


class DevicePool:
    """Pool of `num_blocks` blocks. A block is held by requests, free with known contents, or blank.

    Unlike in vLLM's pool, all blocks that a request will need are reserved when it starts, so that no request
    is preempted.

    Attributes:
        version: increases whenever the order of free blocks changes.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blank, self._num_reserved = num_blocks, 0
        # Code of each known block -> number of leases that hold the block. Blocks that no lease holds are
        # also in `_free`, coldest first.
        self._holders: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self.version = 0

    def find(self, codes: Sequence[int]) -> int:
        """Return how many leading blocks of `codes` have their contents on the device."""
        holders = self._holders
        return next((length for length, code in enumerate(codes) if code not in holders), len(codes))

    def lease(self, codes: Sequence[int], num_more: int) -> Lease | None:
        """Hold the known blocks `codes` and reserve `num_more` further blocks; None if there is no room."""
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
        """Turn `num_blocks` reserved blocks of a lease into blank blocks that the lease holds.

        If the pool has too few blank blocks, free blocks are evicted. Returns their codes, coldest first.
        """
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
        """Record that blank blocks of a lease now have the contents `codes`, so that `find` can find them.

        If another block already has the same contents, the new block is a second copy, which cannot be found
        as long as the first copy exists.
        """
        for code in codes:
            lease.known.append(code)
            if code in self._holders:
                lease.copies.add(code)
            else:
                lease.num_blank -= 1
                self._holders[code] = 1

    def release(self, lease: Lease) -> None:
        """Free the blocks of an ended request, the last block first.

        Blocks that no other request holds become free, and will be evicted after all blocks that are already
        free. A second copy becomes blank. But if the first copy was evicted meanwhile, the second copy takes
        its place, so that `find` finds it.
        """
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
        """Return the codes of the blocks that ``take(lease, num_blocks)`` would evict, coldest first."""
        return list(islice(self._free, max(0, num_blocks - self._num_blank)))

    @property
    def num_available(self) -> int:
        """Number of blocks that no request holds: free blocks and blank blocks."""
        return self._num_blank + len(self._free)

    def _hold(self, code: int, lease: Lease) -> None:
        if self._holders[code] == 0:
            del self._free[code]
            self.version += 1
        self._holders[code] += 1
        lease.known.append(code)
