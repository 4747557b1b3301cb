"""The back-off after failed writes: each write evicts a block, and a failing disk must not lose all."""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


class WritePause:
    """A pause that doubles with each failure. Thread: one. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._next_s, self._until = clock, FIRST_PAUSE_S, 0.0

    @property
    def is_over(self) -> bool:
        """True if the tier may write."""
        return self._clock() >= self._until

    def failed(self) -> None:
        """Start a pause after a failed write."""
        self._until = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """Reset the length of the next pause after a successful write."""
        self._next_s = FIRST_PAUSE_S
