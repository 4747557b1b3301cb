"""Cache of recent replies of a shared tier: which blocks were present, and which were absent.

Knows no network.

An entry may become wrong at any time, because other machines write blocks and the server evicts blocks. A
wrong entry costs only a miss or a probe.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import I64Array, U64Array
from kvoffload.tiers.contract import Mask

PRESENT_S, ABSENT_S = 60.0, 5.0
"""Lifetimes of entries for present and for absent blocks, in seconds."""
NUM_ENTRIES = 1 << 20


class PresenceCache:
    """Cached replies in a direct-mapped table: the digest of a block's key selects the block's only entry.

    If two blocks select the same entry, the later block replaces the earlier block. When the earlier block is
    needed again, the server is probed for it.

    Args:
        clock: returns monotonic seconds, above 0.
        num_entries: a power of two.

    Memory: 16 bytes an entry. Cost: 20 to 80 ns a key in batches. Thread: one.
    """

    def __init__(self, clock: Callable[[], float], num_entries: int = NUM_ENTRIES) -> None:
        self._clock = clock
        # Digest xor the number of `clear` calls, so that entries from before `clear` do not match. The number
        # changes only low bits of a digest. No other digest of the same entry differs only in low bits.
        self._keys = _small_pages(num_entries).view(np.uint64)
        self._times_cleared = np.uint64(0)
        # End of the entry's lifetime; negative for an absent block; 0 for an empty entry.
        self._until = _small_pages(num_entries).view(np.float64)
        self._mask = np.uint64(num_entries - 1)

    def present(self, digests: U64Array) -> Mask:
        """Return a mask of the blocks that the server had at its last reply; False for expired entries."""
        at = self._entries(digests)
        mask: Mask = self._matches(at, digests) & (self._until[at] > self._clock())
        return mask

    def known(self, digests: U64Array) -> Mask:
        """Return a mask of the blocks with an entry, present or absent, that has not expired."""
        at = self._entries(digests)
        mask: Mask = self._matches(at, digests) & (np.abs(self._until[at]) > self._clock())
        return mask

    def learn(self, digests: U64Array, present: Mask) -> None:
        """Record which of these blocks the server has: `present` is True for present, False for absent."""
        at, now = self._entries(digests), self._clock()
        self._keys[at] = digests ^ self._times_cleared
        self._until[at] = np.where(present, now + PRESENT_S, -(now + ABSENT_S))

    def forget(self, digests: U64Array) -> None:
        """Drop the entries of these blocks."""
        at = self._entries(digests)
        self._until[at[self._matches(at, digests)]] = 0.0

    def clear(self) -> None:
        """Drop all entries. Cost: O(1)."""
        self._times_cleared += np.uint64(1)

    def _entries(self, digests: U64Array) -> I64Array:
        # Signed: numpy releases the GIL to index with unsigned numbers, and the scheduler's thread would wait
        # milliseconds for the GIL.
        entries: I64Array = (digests & self._mask).view(np.int64)
        return entries

    def _matches(self, at: I64Array, digests: U64Array) -> Mask:
        mask: Mask = self._keys[at] == digests ^ self._times_cleared
        return mask


def _small_pages(count: int) -> npt.NDArray[np.uint8]:
    """Allocate ``8 * count`` bytes of zeros without huge pages.

    With huge pages a lookup would be slow: 64 blocks may touch 64 pages, and the first use of a huge page
    zeroes 2 MiB.
    """
    memory = mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
