"""Log of the blocks that this process has written to a shared tier. Knows no network."""

from __future__ import annotations

from itertools import islice

from kvoffload.structures.keys import Keys

MOST_KEYS = 1 << 20


class WriteLog:
    """Log of the blocks that this process has written. Lets the tier report which blocks were added and lost.

    If the server evicts a block, the block stays in the log until a probe or read finds it missing. The log
    has no blocks of other processes. Logging starts with the first call of `take`.

    Args:
        most_keys: largest number of logged blocks. Beyond it, the oldest blocks are reported as gone.

    Memory: 200 bytes a logged block. Cost: one dictionary access a block. Thread: one.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys, self._is_wanted = most_keys, False
        self._keys: dict[bytes, None] = {}
        self._changes: list[tuple[list[bytes], bool]] = []

    def stored(self, keys: Keys) -> None:
        """Log blocks whose write the server has confirmed."""
        if not self._is_wanted:
            return
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        self._add(new, False)
        self._remove([*islice(self._keys, max(0, len(self._keys) - self._most_keys))])

    def lost(self, keys: Keys) -> None:
        """Report as gone those blocks of `keys` that are logged."""
        if self._keys:
            self._remove([key for key in keys if key in self._keys])

    def lost_all(self) -> None:
        """Report every logged block as gone."""
        self._remove([*self._keys])

    def take(self) -> list[tuple[list[bytes], bool]]:
        """Return the changes of the log since the last call, in order.

        Each change is a pair (keys, removed). `removed` is True if the blocks are gone, and False if they
        were written.
        """
        self._is_wanted = True
        changes, self._changes = self._changes, []
        return changes

    def _remove(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._keys[key]
        self._add(keys, True)

    def _add(self, keys: list[bytes], removed: bool) -> None:
        if keys:
            self._changes.append((keys, removed))
