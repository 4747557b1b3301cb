"""The disk space of a directory. One slab grows, and slabs of other producers shrink for it.

Knows other slabs only by path and size. Opens no file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES


class Room:
    """Space for one slab in a directory that holds other slabs too.

    All files together take at most the capacity. The least recently opened slab shrinks first: it loses its
    coldest blocks, and is deleted when few remain.

    Args:
        capacity_bytes: capacity of the directory.
        others: files of other slabs, in the order in which they shrink.
        shrink: shortens a file by at least this many bytes, or deletes it; returns its new size. May raise
            `OSError`.

    Thread: one at a time.
    """

    def __init__(self, capacity_bytes: int, others: list[Path], shrink: Callable[[Path, int], int]) -> None:
        self._capacity_bytes, self._shrink = capacity_bytes, shrink
        self._other_sizes = [(path, path.lstat().st_size) for path in others]

    @property
    def own_bytes(self) -> int:
        """Bytes that the slab may take while the other slabs keep their sizes."""
        return self._capacity_bytes - LOCK_FILE_BYTES - sum(size for _, size in self._other_sizes)

    def make(self, num_bytes: int) -> bool:
        """Shrink the first other slab by at least `num_bytes`, or delete it; False if there is no other slab.

        Raises `OSError`.
        """
        if not self._other_sizes:
            return False
        path, _ = self._other_sizes[0]
        size = self._shrink(path, num_bytes)
        self._other_sizes[:1] = [(path, size)] if size else []
        return True

    def clear(self) -> None:
        """Delete all other slabs, durably. Raises `OSError`; then call it again."""
        for path, _ in self._other_sizes:
            path.unlink(missing_ok=True)
        if self._other_sizes:
            Files().sync_directory(self._other_sizes[0][0].parent)
        self._other_sizes.clear()
