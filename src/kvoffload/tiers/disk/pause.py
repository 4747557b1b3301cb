"""How long a tier does not write after a write has failed.

Each write evicts a block: a medium that fails to write must not lose the blocks that it holds.
"""

from __future__ import annotations

import time

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0


class WritePause:
    """A pause that doubles while writes keep failing. Thread: one."""

    def __init__(self) -> None:
        self._next_s, self._until = FIRST_PAUSE_S, 0.0

    @property
    def is_over(self) -> bool:
        """Whether a write may be tried."""
        return time.monotonic() >= self._until

    def failed(self) -> None:
        """A write has failed: a pause begins."""
        self._until = time.monotonic() + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """A write has succeeded: the next pause is short again."""
        self._next_s = FIRST_PAUSE_S
