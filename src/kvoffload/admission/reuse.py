"""Reuse-gated admission: a block is admitted from its Nth request on."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from kvoffload.core.admission import Admission
from kvoffload.errors import check_integer
from kvoffload.structures.index import ABSENT, MAX_POSITIONS, find, hash_row
from kvoffload.structures.jit import BoolArray, I32Array, ReadU64Matrix, kernel
from kvoffload.structures.keylists import KeyLists, forget_coldest, remember
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import LIST, move_to_head

DEFAULT_TRACKER_SIZE = 64_000
MOST_COUNTED = 2**31 - 1
"""Largest allowed threshold, because counts have 32 bits."""


class ReuseAdmission(Admission):
    """Admits a block from its Nth request on.

    N is `store_threshold`. The request that stores the block counts, too.

    The rule keeps counts for the `max_tracker_size` most recently referenced keys. Of one request's keys, the
    rule forgets the last key first. So a parent is never forgotten before its child, and the parent of an
    admitted block is always admitted.

    Cost: one index probe and a few writes per key. Memory: 32 bytes plus the key for each tracked key.
    """

    store_threshold: Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNTED)] = 2
    max_tracker_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS // 2)] = DEFAULT_TRACKER_SIZE

    name = "reuse"
    good_for = "few writes: a tier with expensive writes and ample room; the first reuse is lost"

    def __init__(
        self, key_bytes: int, store_threshold: int, max_tracker_size: int = DEFAULT_TRACKER_SIZE
    ) -> None:
        size = check_integer("max_tracker_size", max_tracker_size, MAX_POSITIONS // 2)
        self.key_bytes, self.max_tracker_size = key_bytes, size
        self.store_threshold = check_integer(
            "store_threshold", store_threshold, MOST_COUNTED, 2, "because 1 admits every block"
        )
        self._tracker = KeyLists(size, key_bytes, 1)
        self._counts = np.full(size, 0, np.int32)

    @classmethod
    def for_cache(cls, key_bytes: int, capacity_blocks: int) -> ReuseAdmission | None:
        """Create the rule. Return None if the threshold is 1, because every block reaches it."""
        if cls.store_threshold == 1:
            return None
        return cls(key_bytes, cls.store_threshold, cls.max_tracker_size)

    def count(self, keys: Keys) -> None:
        count_keys(self._tracker.memory, self._counts, keys.words)

    def refresh(self, keys: Keys) -> None:
        refresh_keys(self._tracker.memory, keys.words)

    def admit(self, keys: Keys) -> BoolArray:
        allowed = np.empty(len(keys), np.bool_)
        _admit(self._tracker.memory, self._counts, keys.words, self.store_threshold, allowed)
        return allowed

    def reset(self) -> None:
        self._tracker.clear()

    def tracked(self) -> dict[bytes, int]:
        """Return every tracked key with its count, most recent first.

        Cost: O(keys), for tests and reports.
        """
        positions = self._tracker.lists.members(0)
        return {self._tracker.index.key_at(p): int(self._counts[p]) for p in positions}


@kernel
def count_keys(tracker: KeyLists, counts: I32Array, batch: ReadU64Matrix) -> None:
    index, links = tracker.index, tracker.lists.links
    tracked, spare = links.shape[0] - 2, links.shape[0] - 1
    # If a request is longer than the tracker, only its head is remembered.
    length = min(batch.shape[0], index.keys.shape[0])
    # Tracked keys move to the front first, so that new keys never displace them.
    for row in range(length - 1, -1, -1):
        position = find(index, batch, row, hash_row(batch, row))
        if position != ABSENT:
            move_to_head(links, tracked, position)
            counts[position] += 1
    for row in range(length - 1, -1, -1):
        h = hash_row(batch, row)
        position = find(index, batch, row, h)
        if position != ABSENT:
            move_to_head(links, tracked, position)
            continue
        if links[spare, LIST] == 0:
            forget_coldest(tracker, tracked)
        counts[remember(tracker, tracked, batch, row, h)] = 1


@kernel
def refresh_keys(tracker: KeyLists, batch: ReadU64Matrix) -> None:
    links = tracker.lists.links
    for row in range(batch.shape[0] - 1, -1, -1):
        position = find(tracker.index, batch, row, hash_row(batch, row))
        if position != ABSENT:
            move_to_head(links, links.shape[0] - 2, position)


@kernel
def _admit(
    tracker: KeyLists, counts: I32Array, batch: ReadU64Matrix, threshold: int, allowed: BoolArray
) -> None:
    for row in range(batch.shape[0]):
        position = find(tracker.index, batch, row, hash_row(batch, row))
        allowed[row] = position != ABSENT and counts[position] >= threshold
