"""KV blocks of a device, managed as in vLLM's block pool.

A request holds its blocks until it ends. Free blocks with contents can still be found. They are evicted in
the order in which they became free. The blocks of one request become free from the tail to the head. Knows no
bytes and no time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class Lease:
    """Blocks that one request holds.

    Attributes:
        known: codes of the computed blocks, in prefix order.
        copies: codes of the second copies in `known`. A computed block is a second copy if another block
            already had the same contents.
        num_blank: number of held blocks that `DevicePool.find` does not find: blocks not computed yet, blocks
            of the answer, and second copies.
        num_reserved: number of blocks reserved for later.
    """

    __slots__ = ("copies", "known", "num_blank", "num_reserved")

    def __init__(self, num_reserved: int) -> None:
        self.known: list[int] = []
        self.copies: set[int] = set()
        self.num_blank, self.num_reserved = 0, num_reserved


class DevicePool:
    """Pool of `num_blocks` blocks. A block is blank, or free with known contents, or held.

    Differs from vLLM's pool: blocks for the whole request are reserved when it starts, so no request is
    preempted.

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
        """Return the number of leading blocks of `codes` that can be found."""
        holders = self._holders
        return next((length for length, code in enumerate(codes) if code not in holders), len(codes))

    def lease(self, codes: Sequence[int], num_more: int) -> Lease | None:
        """Hold these known blocks and reserve `num_more` further blocks. Returns None if there is no room."""
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
        """Convert `num_blocks` reserved blocks to blank blocks.

        Returns the codes of the evicted blocks, coldest first.
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
        """Assign the contents `codes` to blank blocks of a lease, so that the blocks can be found.

        If another block already has the same contents, the new block is a second copy. The second copy cannot
        be found while the first copy exists.
        """
        for code in codes:
            lease.known.append(code)
            if code in self._holders:
                lease.copies.add(code)
            else:
                lease.num_blank -= 1
                self._holders[code] = 1

    def release(self, lease: Lease) -> None:
        """Free the blocks of an ended request.

        If no other request holds a block's contents, the block will be evicted last. A second copy
        becomes blank, unless the first copy was evicted meanwhile: then `find` finds the second copy.
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
        """Number of blocks without a holder."""
        return self._num_blank + len(self._free)

    def _hold(self, code: int, lease: Lease) -> None:
        if self._holders[code] == 0:
            del self._free[code]
            self.version += 1
        self._holders[code] += 1
        lease.known.append(code)
