"""When a node that does not answer is left alone, and when it is tried again. Knows no network."""

from __future__ import annotations

import random
from collections.abc import Callable

_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_JITTER = 0.5


class Circuit:
    """Closed while a node answers; open for a while after three failures in a row; then half open: one
    attempt decides, and it is no request's.

    Pauses double from one second to thirty, each up to half longer or shorter, so that a hundred machines do
    not come back at the same instant.

    Args:
        clock: monotonic seconds.
        chance: in [0, 1).

    Thread: one.
    """

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float] = random.random) -> None:
        self._clock, self._chance = clock, chance
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._next_try: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the node is left alone, but for an attempt."""
        return self._next_try is not None

    @property
    def may_try(self) -> bool:
        """Whether it is open, and time for an attempt."""
        return self._next_try is not None and self._clock() >= self._next_try

    def succeeded(self) -> None:
        """The node has answered."""
        self._num_failures, self._pause_s, self._next_try = 0, _FIRST_PAUSE_S, None

    def failed(self) -> None:
        """The node has not answered, or not as it should. While it is open and no attempt is due nothing
        changes: what fails then was begun before."""
        self._num_failures += 1
        if self._num_failures < _FAILURES or (self.is_open and not self.may_try):
            return
        self._next_try = self._clock() + self._pause_s * (1.0 + _JITTER * (2.0 * self._chance() - 1.0))
        self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
