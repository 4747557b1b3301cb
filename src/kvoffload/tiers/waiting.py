"""Waiting: for a condition with a time limit, and exponential back-off between attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.001) -> bool:
    """Poll a condition every `poll_s` seconds until it is True; returns False on time-out."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True


class Backoff:
    """Pauses between attempts, which double from `first_s` up to `longest_s`.

    Args:
        jitter: largest random change of a pause, as a share of the pause. With jitter, several machines do
            not retry at the same time.
        chance: returns a random number in [0, 1).
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        jitter: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s, self._longest_s, self._jitter, self._chance = first_s, longest_s, jitter, chance
        self._pause_s = first_s

    def next_s(self) -> float:
        """Return the next pause in seconds, and double the pause of the next call."""
        pause_s, self._pause_s = self._pause_s, min(2.0 * self._pause_s, self._longest_s)
        return pause_s * (1.0 + self._jitter * (2.0 * self._chance() - 1.0)) if self._jitter else pause_s

    def reset(self) -> None:
        """Begin again with the first pause. Call this after a successful attempt."""
        self._pause_s = self._first_s
