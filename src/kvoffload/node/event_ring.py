"""The events of a pool, in a ring buffer that all engines share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.core.event_list import EventSink
from kvoffload.core.plans import OffloadingEvent
from kvoffload.node.state import StateFile
from kvoffload.structures.keys import Keys

_UNKNOWN = -1


class EventRing(EventSink):
    """Reads and writes the events of a pool for one engine. The caller must hold the pool's lock.

    Args:
        file: the pool's state, with the ring buffer and the number of events.
        contents: function that returns the keys of all ready blocks. Called if this engine missed events.
        key_bytes, block_size, medium: see `OffloadingManager`.
    """

    def __init__(
        self, file: StateFile, contents: Callable[[], Keys], key_bytes: int, block_size: int, medium: str
    ) -> None:
        self._words, self._numbers, self._contents = file.events, file.numbers, contents
        self._key_bytes, self._block_size, self._medium = key_bytes, block_size, medium
        self._next = _UNKNOWN

    def ignore_earlier(self) -> None:
        """Skip all earlier events. Call this when the engine joins an empty pool."""
        self._next = self._numbers.num_events

    def add(self, keys: Keys, *, removed: bool) -> None:
        words, start, count = self._words, self._numbers.num_events, len(keys)
        kept = keys.words[-len(words) :]
        rows = (start + count - len(kept) + np.arange(len(kept))) % len(words)
        words[rows, 0], words[rows, 1:] = removed, kept
        self._numbers.num_events = start + count

    def skip(self) -> None:
        """Mark all events as missed, so that every engine receives a reset event."""
        self._numbers.num_events += len(self._words) + 1

    def take(self) -> list[OffloadingEvent]:
        """Return the events of all engines since the last call, in order.

        If this engine has missed events, because it fell behind or has just joined a pool that holds blocks,
        return a reset event, then an event with the present contents.
        """
        words, stop = self._words, self._numbers.num_events
        start, self._next = self._next, stop
        if start == _UNKNOWN or stop - start > len(words):
            nothing = Keys.pack([], self._key_bytes)
            return [
                OffloadingEvent(nothing, self._block_size, self._medium, removed=True, is_reset=True),
                self._event(self._contents(), removed=False),
            ]
        rows = words[np.arange(start, stop) % len(words)]
        changes = np.flatnonzero(np.diff(rows[:, 0].astype(np.int64))) + 1
        return [
            self._event(Keys(np.ascontiguousarray(equal[:, 1:]), self._key_bytes), removed=bool(equal[0, 0]))
            for equal in np.split(rows, changes)
            if len(equal)
        ]

    def _event(self, keys: Keys, *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys, self._block_size, self._medium, removed)
