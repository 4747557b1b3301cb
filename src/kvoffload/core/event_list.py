"""The events that a manager records until `take_events`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvoffload.core.plans import OffloadingEvent
from kvoffload.structures.keys import Keys


class EventSink(ABC):
    """A record of a manager's events. Thread: the manager's."""

    @abstractmethod
    def add(self, keys: Keys, *, removed: bool) -> None:
        """Record that blocks became readable (`removed` is False) or left the cache (`removed` is True)."""

    @abstractmethod
    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call, in order."""


class EventList(EventSink):
    """The events of one manager.

    Args:
        block_size, medium: as for `OffloadingEvent`.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self._block_size, self._medium = block_size, medium
        self._events: list[OffloadingEvent] = []

    def add(self, keys: Keys, *, removed: bool) -> None:
        self._events.append(OffloadingEvent(keys, self._block_size, self._medium, removed))

    def take(self) -> list[OffloadingEvent]:
        events, self._events = self._events, []
        return events
