"""What this machine has told others of its blocks in a shared tier. Knows no network."""

from __future__ import annotations

from itertools import islice

from kvoffload.structures.keys import Keys

MOST_KEYS = 1 << 20


class Vouching:
    """The blocks that this machine has written to a shared tier, until it finds out that they are gone.

    Of what others have written there it says nothing, and what has left without its notice stays.

    Args:
        most_keys: of more, it vouches no longer for those that it has for the longest time.

    Memory: 200 bytes a block, and none before the first `take`: until then nobody wants to know. Cost: a
    dictionary's, for each block. Thread: one.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys, self._is_wanted = most_keys, False
        self._keys: dict[bytes, None] = {}
        self._changes: list[tuple[list[bytes], bool]] = []

    def stored(self, keys: Keys) -> None:
        """These were written, and the engine has confirmed it."""
        if not self._is_wanted:
            return
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        self._add(new, False)
        self._lost([*islice(self._keys, max(0, len(self._keys) - self._most_keys))])

    def lost(self, keys: Keys) -> None:
        """These were not there."""
        if self._keys:
            self._lost([key for key in keys if key in self._keys])

    def lost_all(self) -> None:
        """Nothing counts that was there."""
        self._lost([*self._keys])

    def take(self) -> list[tuple[list[bytes], bool]]:
        """What has changed since the last call, in order: which blocks, and whether they are gone."""
        self._is_wanted = True
        changes, self._changes = self._changes, []
        return changes

    def _lost(self, keys: list[bytes]) -> None:
        for key in keys:
            del self._keys[key]
        self._add(keys, True)

    def _add(self, keys: list[bytes], removed: bool) -> None:
        if keys:
            self._changes.append((keys, removed))
