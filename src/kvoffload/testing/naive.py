"""Naive twins: the obvious O(n) version of everything that is clever elsewhere.

Each twin says in plain Python, on lists and dicts, what its fast counterpart is meant to do. Property
tests drive both with the same calls and compare every decision; a reader who wants to know *what* a
kernel does reads the twin first. The policies serve a whole manager: ``OffloadingManager(policy=NaiveARC)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvoffload.admission import Admission
from kvoffload.core.index import ABSENT, Index
from kvoffload.core.keys import Keys
from kvoffload.core.protection import Protected
from kvoffload.errors import PolicyError
from kvoffload.policies import BlockwisePolicy


class NaiveLRU(BlockwisePolicy):
    """Twin of `policies.lru.LRU`: a list of slots, the coldest first."""

    name = "naive-lru"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.order: list[int] = []

    def hit(self, slot: int) -> None:
        self.order.remove(slot)
        self.order.append(slot)

    refresh = hit

    def insert(self, slot: int, key: bytes) -> None:
        self.order.append(slot)

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = _first_unprotected(self.order, protected)
        if slot is None:
            raise PolicyError(f"no block may leave for {key.hex()}")
        self.order.remove(slot)
        return slot

    def forget(self, slot: int) -> None:
        self.order.remove(slot)

    def reset(self) -> None:
        self.order.clear()

    def coldest_first(self) -> list[int]:
        """Slots in the order in which they would leave."""
        return list(self.order)


class NaiveARC(BlockwisePolicy):
    """Twin of `policies.arc.ARC`: figure 4 of the paper, line by line; its docstring has the conventions.

    Attributes:
        t1, t2: slot to key of the resident blocks, the coldest first.
        b1, b2: remembered keys, the coldest first.
        p: target size of T1.
    """

    name = "naive-arc"

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.reset()

    def reset(self) -> None:
        self.t1: dict[int, bytes] = {}
        self.t2: dict[int, bytes] = {}
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0
        self._case_done = False
        self._enters_t2 = False

    def hit(self, slot: int) -> None:
        """Case I: the block becomes the most recent of T2."""
        home = self.t1 if slot in self.t1 else self.t2
        self.t2[slot] = home.pop(slot)

    def refresh(self, slot: int) -> None:
        """The block becomes the most recent of the list that it is in."""
        home = self.t1 if slot in self.t1 else self.t2
        home[slot] = home.pop(slot)

    def insert(self, slot: int, key: bytes) -> None:
        if not self._case_done:  # The slot was free: all of the case but REPLACE.
            self._learn(key)
        self._case_done = False
        (self.t2 if self._enters_t2 else self.t1)[slot] = key

    def victim(self, key: bytes, protected: Protected) -> int:
        in_b2 = key in self.b2
        keeps_ghost = self._learn(key)
        self._case_done = True
        size = len(self.t1)
        from_t1 = size >= 1 and (size > self.p or (in_b2 and size == self.p))
        homes = [(self.t1, self.b1), (self.t2, self.b2)]
        for home, ghosts in homes if from_t1 or not keeps_ghost else reversed(homes):
            slot = _first_unprotected(home, protected)
            if slot is not None:
                gone = home.pop(slot)
                if keeps_ghost:
                    if len(self.b1) + len(self.b2) == self.capacity_blocks:
                        del (self.b2 or self.b1)[0]
                    ghosts.append(gone)
                return slot
        raise PolicyError(f"no block may leave for {key.hex()}")

    def _learn(self, key: bytes) -> bool:
        """Cases II, III and IV up to REPLACE; whether a block that leaves for `key` becomes a ghost."""
        c = self.capacity_blocks
        self._enters_t2 = key in self.b1 or key in self.b2
        if key in self.b1:  # Case II
            self.p = min(self.p + max(1.0, len(self.b2) / len(self.b1)), float(c))
            self.b1.remove(key)
        elif key in self.b2:  # Case III
            self.p = max(self.p - max(1.0, len(self.b1) / len(self.b2)), 0.0)
            self.b2.remove(key)
        elif len(self.t1) + len(self.b1) == c:  # Case IV, A
            if len(self.t1) == c:
                return False
            del self.b1[0]
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:  # Case IV, B
            del self.b2[0]
        return True

    def forget(self, slot: int) -> None:
        (self.t1 if slot in self.t1 else self.t2).pop(slot)

    def stats(self) -> dict[str, float]:
        return {
            "t1_blocks": len(self.t1),
            "t2_blocks": len(self.t2),
            "b1_keys": len(self.b1),
            "b2_keys": len(self.b2),
            "target_t1_blocks": self.p,
        }

    def lists(self) -> tuple[list[int], list[int], list[bytes], list[bytes]]:
        """Slots of T1 and T2, keys of B1 and B2, each most recent first."""
        return [*self.t1][::-1], [*self.t2][::-1], self.b1[::-1], self.b2[::-1]


class NaiveReuse(Admission):
    """Twin of `admission.ReuseAdmission`: the last keys that requests referred to, with their counts."""

    name = "naive-reuse"

    def __init__(self, store_threshold: int, max_tracker_size: int) -> None:
        self.store_threshold, self.max_tracker_size = store_threshold, max_tracker_size
        self.counts: dict[bytes, int] = {}
        """Most recent first."""

    def count(self, keys: Keys) -> None:
        # The request's keys come first, its head foremost; what does not fit is forgotten from the end.
        order = dict.fromkeys([*islice(keys, self.max_tracker_size), *self.counts])
        known = set(islice(keys, self.max_tracker_size))
        counted = {key: self.counts.get(key, 0) + (key in known) for key in order}
        self.counts = dict(islice(counted.items(), self.max_tracker_size))

    def refresh(self, keys: Keys) -> None:
        order = dict.fromkeys([*(key for key in keys if key in self.counts), *self.counts])
        self.counts = {key: self.counts[key] for key in order}

    def admit(self, keys: Keys) -> int:
        for row, key in enumerate(keys):
            if self.counts.get(key, 0) < self.store_threshold:
                return row
        return len(keys)

    def reset(self) -> None:
        self.counts.clear()

    def tracked(self) -> dict[bytes, int]:
        """Every tracked key with its count, most recent first."""
        return dict(self.counts)


class NaiveIndex:
    """Twin of `core.index.Index` and its kernels: a dict."""

    def __init__(self) -> None:
        self.positions: dict[bytes, int] = {}

    def find(self, key: bytes) -> int:
        """Position of `key`, or ABSENT."""
        return self.positions.get(key, ABSENT)

    def insert(self, key: bytes, position: int) -> None:
        """Put the absent `key` at the unused `position`."""
        assert key not in self.positions
        assert position not in self.positions.values()
        self.positions[key] = position

    def remove(self, position: int) -> None:
        """Take out the key at `position`."""
        key = next(key for key, found in self.positions.items() if found == position)
        del self.positions[key]


class NaiveLists:
    """Twin of `core.lists.Lists` and its helpers: Python lists, most recent first."""

    def __init__(self, num_lists: int) -> None:
        self.lists: list[list[int]] = [[] for _ in range(num_lists)]

    def push_head(self, number: int, position: int) -> None:
        """Make `position`, which is in no list, the head of list `number`."""
        assert not any(position in members for members in self.lists)
        self.lists[number].insert(0, position)

    def unlink(self, position: int) -> None:
        """Take `position` out of its list."""
        next(members for members in self.lists if position in members).remove(position)

    def move_to_head(self, number: int, position: int) -> None:
        """Make `position`, wherever it is, the head of list `number`."""
        self.unlink(position)
        self.push_head(number, position)


def _first_unprotected(slots: Iterable[int], protected: Protected) -> int | None:
    return next((slot for slot in slots if slot not in protected), None)
