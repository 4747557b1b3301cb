"""The room of a directory, in bytes: one slab grows in it, and those of other producers make way.

Knows the files of other slabs only by their sizes. Does not open them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES


class Room:
    """How far one slab may grow while other slabs lie beside it.

    All files together take at most the capacity. A slab that needs the room of others gets it: the one that
    nobody has opened for the longest gives up its coldest blocks, as many as needed and some more, until it
    is hardly worth keeping and goes.

    Args:
        capacity_bytes: of the directory.
        others: the files of other slabs, in the order in which they make way.
        give_up: makes a file smaller by so many bytes or more, or deletes it; returns its size then. It may
            raise `OSError`.

    Thread: one at a time.
    """

    def __init__(self, capacity_bytes: int, others: list[Path], give_up: Callable[[Path, int], int]) -> None:
        self._capacity_bytes, self._give_up = capacity_bytes, give_up
        self._others = [(path, path.lstat().st_size) for path in others]

    @property
    def own_bytes(self) -> int:
        """The most bytes that the slab may take beside the others as they are."""
        return self._capacity_bytes - LOCK_FILE_BYTES - sum(size for _, size in self._others)

    def make(self, num_bytes: int) -> bool:
        """Have the first of the others give up so many bytes or more, or go; False if there are no others.

        Raises `OSError`.
        """
        if not self._others:
            return False
        path, _ = self._others[0]
        left = self._give_up(path, num_bytes)
        self._others[:1] = [(path, left)] if left else []
        return True

    def clear(self) -> None:
        """Delete all others, durably. Raises `OSError`; then what is left is deleted by the next call."""
        for path, _ in self._others:
            path.unlink(missing_ok=True)
        if self._others:
            Files().sync_directory(self._others[0][0].parent)
        self._others.clear()
