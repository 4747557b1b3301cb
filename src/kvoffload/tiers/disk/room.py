"""The room of a directory, in bytes: one slab grows in it, and those of other producers make way.

Knows the files of other slabs only by their sizes. Does not open them.
"""

from __future__ import annotations

from pathlib import Path

from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES
from kvoffload.tiers.rate_limited_log import RateLimitedLog


class Room:
    """How far one slab may grow while other slabs lie beside it.

    All files together take at most the capacity. A slab that needs the room of others gets it: the one that
    nobody has opened for the longest is deleted first, as a whole.

    Args:
        capacity_bytes: of the directory.
        others: the files of other slabs. Nobody has them open.

    Thread: one at a time.
    """

    def __init__(self, capacity_bytes: int, others: list[Path], log: RateLimitedLog) -> None:
        self._capacity_bytes, self._log = capacity_bytes, log
        self._others = [(path, path.lstat().st_size) for path in others]

    @property
    def own_bytes(self) -> int:
        """The most bytes that the slab may take beside those that are still here."""
        return self._capacity_bytes - LOCK_FILE_BYTES - sum(size for _, size in self._others)

    @property
    def others(self) -> list[Path]:
        """The other slabs, in the order in which they go."""
        return [path for path, _ in self._others]

    def make(self) -> bool:
        """Delete the first of the others; False if there is none. Raises `OSError`."""
        if not self._others:
            return False
        path, size = self._others[0]
        path.unlink(missing_ok=True)
        self._others.pop(0)
        self._log.warn(
            f"room {path}", "disk tier: deleted %s, blocks of another producer, for its %d MiB",
            path, size >> 20,
        )  # fmt: skip
        return True


def by_last_use(paths: list[Path]) -> list[Path]:
    """The same files, the one that was opened or written least recently first."""
    return sorted(paths, key=lambda path: (path.lstat().st_mtime, path.name))
