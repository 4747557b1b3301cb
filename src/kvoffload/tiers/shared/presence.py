"""What this process has learnt of the blocks in a shared tier, for a while. Knows no network.

A hint may be wrong at any time: others write, and the engine evicts. A wrong one costs a miss, or a question.
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
NUM_HINTS = 1 << 20


class Hints:
    """Which blocks are present until when, and which are absent until when.

    A table in which each key has one place, by its digest: a hint that comes to a place that another one has
    replaces it. So it is bounded, and what it has forgotten is asked for again.

    Args:
        num_hints: places, a power of two.
        present_s, absent_s: how long a hint of each kind is believed.
        clock: monotonic seconds, above 0.

    Memory: 16 bytes a hint. Cost: 20 to 80 ns a key in batches. Thread: one.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        num_hints: int = NUM_HINTS,
        present_s: float = PRESENT_S,
        absent_s: float = ABSENT_S,
    ) -> None:
        self._clock, self._present_s, self._absent_s = clock, present_s, absent_s
        # Digest xor how often all was forgotten: two that differ in that alone never have the same place.
        self._keys = _pages(num_hints).view(np.uint64)
        self._times_cleared = np.uint64(0)
        # When the hint ends; negative for a block that is absent; 0 for none.
        self._until = _pages(num_hints).view(np.float64)
        self._mask = np.uint64(num_hints - 1)

    def present(self, digests: U64Array) -> Mask:
        """Which blocks are believed to be there."""
        at = self._places(digests)
        found: Mask = self._is_in(at, digests) & (self._until[at] > self._clock())
        return found

    def known(self, digests: U64Array) -> Mask:
        """Which blocks are believed to be there, or not to be."""
        at = self._places(digests)
        found: Mask = self._is_in(at, digests) & (np.abs(self._until[at]) > self._clock())
        return found

    def learn(self, digests: U64Array, present: Mask) -> None:
        """These blocks are there, or not, as far as is known now."""
        at, now = self._places(digests), self._clock()
        self._keys[at] = digests ^ self._times_cleared
        self._until[at] = np.where(present, now + self._present_s, -(now + self._absent_s))

    def forget(self, digests: U64Array) -> None:
        """Nothing is known of these blocks."""
        at = self._places(digests)
        self._until[at[self._is_in(at, digests)]] = 0.0

    def clear(self) -> None:
        """Nothing is known of any block. Cost: O(1), and no page is given back or zeroed: either may take
        20 ms."""
        self._times_cleared += np.uint64(1)

    def _places(self, digests: U64Array) -> I64Array:
        # numpy gives up the interpreter's lock to index with unsigned numbers, and gets it back when others
        # are done with it: the scheduler's thread waited for milliseconds.
        found: I64Array = (digests & self._mask).view(np.int64)
        return found

    def _is_in(self, at: I64Array, digests: U64Array) -> Mask:
        found: Mask = self._keys[at] == digests ^ self._times_cleared
        return found


def _pages(count: int) -> npt.NDArray[np.uint8]:
    """Zeros, eight bytes each, in small pages: the first use of a huge one zeroes two megabytes, and 64
    blocks are in as many of them as there are."""
    memory = mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
