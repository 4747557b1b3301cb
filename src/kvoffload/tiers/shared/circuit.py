"""Circuit breakers: stop requests to a failing server, and decide when to retry. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.shared.exchanges import PROBE, READ, WRITE, BlockExchange, Exchange
from kvoffload.tiers.shared.remote_errors import QueuedTooLongError
from kvoffload.tiers.waiting import Backoff

_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _JITTER = 1.0, 60.0, 0.5
LONGEST_SERVER_PAUSE_S = 3.0
"""Longest pause of a server's breaker in seconds, before jitter. With jitter the pause is at most 4.5 s, so
that a recovered server is used within 5 s."""


class CircuitBreaker:
    """A circuit breaker. Three consecutive failures open it for a pause, in which no calls are sent.

    After the pause the breaker is half open, and one call, the attempt, is sent. Success closes the breaker;
    failure opens it again. No request waits for an attempt. The first pause is one second, and each further
    pause is twice as long. Jitter keeps machines from retrying at the same instant.

    Args:
        clock: monotonic seconds.
        chance: returns a random number in [0, 1).
        longest_pause_s: limit of a pause, before jitter.

    Attributes:
        next_attempt: end of the pause, on `clock`; None while closed.

    Thread: one.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_PAUSE_S, longest_pause_s, _JITTER, chance)
        self._num_failures = 0
        self.next_attempt: float | None = None

    @property
    def is_open(self) -> bool:
        """True while the breaker is open or half open. Then only an attempt, after the pause, may be sent."""
        return self.next_attempt is not None

    @property
    def may_attempt(self) -> bool:
        """True if the breaker is half open: the pause is over."""
        return self.next_attempt is not None and self._clock() >= self.next_attempt

    def succeeded(self) -> None:
        """Close after a successful call."""
        self._num_failures, self.next_attempt = 0, None
        self._backoff.reset()

    def answered(self) -> None:
        """Close an open breaker after an inconclusive reply. The next failure opens it for a longer pause."""
        if self.is_open:
            self._num_failures, self.next_attempt = _FAILURES - 1, None

    def failed(self) -> None:
        """Count a failed call. The third consecutive failure opens the breaker.

        If the breaker is half open, a failure opens it again. Failures during a pause do not lengthen the
        pause, because the failed calls were sent before it.
        """
        self._num_failures += 1
        if self._num_failures >= _FAILURES and (not self.is_open or self.may_attempt):
            self.open()

    def open(self) -> None:
        """Open the breaker until the end of the next pause."""
        self._num_failures = max(self._num_failures, _FAILURES)
        self.next_attempt = self._clock() + self._backoff.next_s()


class Breakers:
    """Circuit breakers of a server: one for the server, and one for each type of operation.

    - Three consecutive failures of operations of any type open the server's breaker. A handshake closes it.
    - Three consecutive failures of one type open the type's breaker. Only an operation of the type closes it.

    The server's breaker alone would not suffice: a server may answer handshakes but hang when it must send
    values. Each handshake would close the breaker, and requests would hang again.

    Attributes:
        server: breaker of the server; its pauses are at most 3 s, before jitter.
        operations: breakers by type; their pauses are at most 60 s, before jitter.
        attempts: for each type, the job of the attempt in flight.
        retry_keys: for each type, the block to use in the next attempt.
        num_outages: number of outages. An outage begins when the breaker of the server or of reads opens.
    """

    def __init__(self, clock: Callable[[], float], chance: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self.server = CircuitBreaker(clock, chance, LONGEST_SERVER_PAUSE_S)
        self.operations = {kind: CircuitBreaker(clock, chance) for kind in (PROBE, READ, WRITE)}
        self.attempts: dict[str, int] = {}
        self.retry_keys: dict[str, Keys] = {}
        self._succeeded_at = dict.fromkeys((PROBE, READ, WRITE), 0.0)
        self.num_outages = 0
        self._outage_s = 0.0
        self._out_since: float | None = None

    @property
    def is_any_open(self) -> bool:
        """True if a breaker is open or half open."""
        return self.server.is_open or any(breaker.is_open for breaker in self.operations.values())

    @property
    def is_out(self) -> bool:
        """True while no block can be read, because the breaker of the server or of reads is open."""
        return self.server.is_open or self.operations[READ].is_open

    @property
    def outage_s(self) -> float:
        """Duration of all outages in seconds. Includes the failed exchange that started each outage."""
        return self._outage_s + (0.0 if self._out_since is None else self._clock() - self._out_since)

    def open_kinds(self) -> set[str]:
        """Return the types of operations that are not sent now."""
        return {kind for kind, breaker in self.operations.items() if self.server.is_open or breaker.is_open}

    def may_attempt(self, kind: str) -> bool:
        """Return True if an attempt of this type may be sent.

        Conditions: the type's breaker is half open, no attempt of the type is in flight, and the server's
        breaker is closed.
        """
        is_reachable = not self.server.is_open and kind not in self.attempts
        return is_reachable and self.operations[kind].may_attempt

    def is_attempt(self, exchange: BlockExchange) -> bool:
        """Return True if the exchange is the attempt in flight for its type of operation."""
        return self.attempts.get(exchange.kind) == exchange.job

    def note_success(self, exchange: BlockExchange) -> None:
        """Record that an exchange has succeeded. Only a successful attempt closes an open breaker."""
        self._succeeded_at[exchange.kind] = exchange.ended
        breaker = self.operations[exchange.kind]
        if breaker.is_open and not self.is_attempt(exchange):
            return
        if exchange.kind == READ and not exchange.ok.any():
            breaker.answered()  # inconclusive: a server may report absent blocks but hang on values
        else:
            breaker.succeeded()

    def note_failure(self, exchange: Exchange, error: Exception) -> bool:
        """Count a failure in the breakers; returns True if it counted.

        A failure does not count if the exchange timed out in the queue while another exchange of the type
        succeeded: the server is slow, but works.
        """
        if isinstance(exchange, BlockExchange):
            has_answered = exchange.submitted < self._succeeded_at[exchange.kind]
            if has_answered and isinstance(error, QueuedTooLongError):
                return False
            self.retry_keys[exchange.kind] = exchange.keys.take(np.zeros(1, np.intp))
            self.operations[exchange.kind].failed()
        self.server.failed()
        return True

    def note_outage(self, waited_s: float) -> None:
        """Record that an outage has started or ended, if either has happened since the last call.

        If an outage has started, adds `waited_s`, the duration of the last exchange, to `outage_s`.
        """
        if self.is_out and self._out_since is None:
            self.num_outages += 1
            self._outage_s += waited_s
            self._out_since = self._clock()
        elif not self.is_out and self._out_since is not None:
            self._outage_s += self._clock() - self._out_since
            self._out_since = None
