"""Twins of the index and the lists."""

from __future__ import annotations

from kvoffload.structures.index import ABSENT


class NaiveIndex:
    """Twin of `structures.index.Index` and its kernels: a dict."""

    def __init__(self) -> None:
        self.positions: dict[bytes, int] = {}

    def find(self, key: bytes) -> int:
        """Return the position of `key`, or ABSENT."""
        return self.positions.get(key, ABSENT)

    def insert(self, key: bytes, position: int) -> None:
        """Put the absent `key` at the unused `position`."""
        assert key not in self.positions
        assert position not in self.positions.values()
        self.positions[key] = position

    def remove(self, position: int) -> None:
        """Remove the key at `position`."""
        key = next(key for key, place in self.positions.items() if place == position)
        del self.positions[key]


class NaiveLists:
    """Twin of `structures.lists.Lists` and its helpers: Python lists, most recent first."""

    def __init__(self, num_lists: int) -> None:
        self.lists: list[list[int]] = [[] for _ in range(num_lists)]

    def push_head(self, number: int, position: int) -> None:
        """Make `position`, which is in no list, the head of list `number`."""
        assert not any(position in members for members in self.lists)
        self.lists[number].insert(0, position)

    def unlink(self, position: int) -> None:
        """Remove `position` from its list."""
        next(members for members in self.lists if position in members).remove(position)

    def move_to_head(self, number: int, position: int) -> None:
        """Make `position`, wherever it is, the head of list `number`."""
        self.unlink(position)
        self.push_head(number, position)
