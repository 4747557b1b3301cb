"""Circuit breakers: when a server that does not answer is left alone, and when it is tried again. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable

_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_JITTER = 0.5
LONGEST_SERVER_PAUSE_S = 3.0
"""With its jitter at most 4.5 s: a server that is back is found within 5 s. A greeting costs 200 bytes."""

PROBE, READ, WRITE = "probe", "read", "write"


class Circuit:
    """Closed while calls succeed; open for a while after three failures in a row; then half open: one
    attempt decides, and it is no request's.

    Pauses double from one second, each up to half longer or shorter, so that a hundred machines do not come
    back at the same instant.

    Args:
        clock: monotonic seconds.
        chance: in [0, 1).
        longest_pause_s: the bound of a pause, before it is made longer or shorter.

    Thread: one.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        self._clock, self._chance, self._longest_pause_s = clock, chance, longest_pause_s
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._next_try: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing is sent, but for an attempt."""
        return self._next_try is not None

    @property
    def may_try(self) -> bool:
        """Whether it is open, and time for an attempt."""
        return self._next_try is not None and self._clock() >= self._next_try

    def succeeded(self) -> None:
        """A call has succeeded: close."""
        self._num_failures, self._pause_s, self._next_try = 0, _FIRST_PAUSE_S, None

    def answered(self) -> None:
        """An attempt was answered and proves little: close, but the next failure opens again, for longer."""
        if self.is_open:
            self._num_failures, self._next_try = _FAILURES - 1, None

    def failed(self) -> None:
        """A call has failed. While it is open and no attempt is due nothing changes: the call was begun
        before."""
        self._num_failures += 1
        if self._num_failures >= _FAILURES and (not self.is_open or self.may_try):
            self.open()

    def open(self) -> None:
        """Open for the next pause."""
        self._num_failures = max(self._num_failures, _FAILURES)
        self._next_try = self._clock() + self._pause_s * (1.0 + _JITTER * (2.0 * self._chance() - 1.0))
        self._pause_s = min(2.0 * self._pause_s, self._longest_pause_s)


class Breakers:
    """The circuits of a server: one for all that is sent to it, and one for each type of operation.

    Three failures in a row of any type open the server's; a greeting closes it. A server that answers
    greetings and probes but hangs on values would close it again and again, so failures of a type in a row
    count as well, and only an operation of the same type closes the circuit of that type.

    Attributes:
        server: pauses are 3 s at most. operations: by type; pauses are 60 s at most.
        num_outages, outage_s: how often the server's circuit, or that of reads, has opened, and for how many
            seconds one of them has been open.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.server = Circuit(clock, longest_pause_s=LONGEST_SERVER_PAUSE_S)
        self.operations = {kind: Circuit(clock) for kind in (PROBE, READ, WRITE)}
        self.num_outages = 0
        self._outage_s = 0.0
        self._since: float | None = None

    @property
    def is_any_open(self) -> bool:
        """Whether an attempt may be due."""
        return self.server.is_open or any(circuit.is_open for circuit in self.operations.values())

    @property
    def is_out(self) -> bool:
        """Whether nothing can be read."""
        return self.server.is_open or self.operations[READ].is_open

    @property
    def outage_s(self) -> float:
        return self._outage_s + (0.0 if self._since is None else self._clock() - self._since)

    def open_kinds(self) -> list[str]:
        """The types of operations that are not sent now."""
        return [kind for kind, circuit in self.operations.items() if self.server.is_open or circuit.is_open]

    def note_outage(self, waited_s: float) -> None:
        """Count an outage that has begun, after a wait of `waited_s`, or one that has ended."""
        if self.is_out and self._since is None:
            self.num_outages += 1
            self._outage_s += waited_s
            self._since = self._clock()
        elif not self.is_out and self._since is not None:
            self._outage_s += self._clock() - self._since
            self._since = None
