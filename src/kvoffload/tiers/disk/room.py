"""The division of a directory's disk space: one slab grows, and the slabs of other producers shrink for it.

Knows the path and size of the other slabs, not their contents. Opens no file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES


class Room:
    """Space for one slab in a directory with other slabs.

    All files together take at most the capacity. The other slab that was least recently opened or written
    shrinks first. It loses its coldest blocks, and is deleted when few blocks remain.

    Args:
        capacity_bytes: capacity of the directory.
        other_slabs: files of other slabs, in the order in which they shrink.
        shrink: function that takes a slab's path and a number of bytes. It shortens the file by at least
            this number, or deletes the file, and returns the new size, 0 if deleted. May raise `OSError`.

    Thread: one at a time.
    """

    def __init__(
        self, capacity_bytes: int, other_slabs: list[Path], shrink: Callable[[Path, int], int]
    ) -> None:
        self._capacity_bytes, self._shrink = capacity_bytes, shrink
        self._other_sizes = [(path, path.lstat().st_size) for path in other_slabs]

    @property
    def own_bytes(self) -> int:
        """Size in bytes to which the slab may grow while the other slabs keep their sizes."""
        return self._capacity_bytes - LOCK_FILE_BYTES - sum(size for _, size in self._other_sizes)

    def make(self, num_bytes: int) -> bool:
        """Shrink the first of the other slabs by at least `num_bytes`, or delete it.

        Returns False if there is no other slab. Raises: `OSError` from the function `shrink`.
        """
        if not self._other_sizes:
            return False
        path, _ = self._other_sizes[0]
        size = self._shrink(path, num_bytes)
        self._other_sizes[:1] = [(path, size)] if size else []
        return True

    def clear(self) -> None:
        """Delete all other slabs, durably. Raises `OSError`; `clear` may then be called again."""
        for path, _ in self._other_sizes:
            path.unlink(missing_ok=True)
        if self._other_sizes:
            Files().sync_directory(self._other_sizes[0][0].parent)
        self._other_sizes.clear()
