"""State of a server, as far as this process knows it: epoch and health. Creates handshakes with the server.

Owns the epoch and the circuit breakers. Knows neither blocks nor threads.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvoffload.tiers.producer_text import pack
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.shared.circuit import Breakers
from kvoffload.tiers.shared.connection import CONNECT_S
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import (
    PROBE,
    WRITE,
    BlockExchange,
    Exchange,
    Handshake,
    Persistence,
    PersistenceQuestion,
    Transfer,
)
from kvoffload.tiers.shared.identity import Epoch
from kvoffload.tiers.shared.printable import printable
from kvoffload.tiers.shared.remote_errors import CacheResetError, NotSentError, ServerError
from kvoffload.tiers.shared.server import RemoteOptions, Server

HANDSHAKE_S = 2 * CONNECT_S
_RETRY_S = 1.0


class Forget(Protocol):
    """Type of the callback that a peer calls when known blocks may be gone."""

    def __call__(self, *, same_epoch: bool) -> None:
        """Clear the tier's presence cache, the cache of the server's replies.

        If `same_epoch` is False, also report all blocks that the tier has written (its write log) as gone.
        """


class Peer:
    """A server, with the epoch that is in use on it and its circuit breakers.

    The peer never enters an epoch again that has ended. If the server nevertheless returns an ended epoch,
    the server has restored a snapshot. The peer then resets the cache once more and logs an error.

    Args:
        name: name of the tier, for the log.
        send: sends an exchange over a connection for a type of operation.
        forget: called when known blocks may be gone.
        clock: returns monotonic seconds, for pauses.
        history: for a node of a cluster, the history that all nodes share; None for any other server. If a
            node replies that another node has a block, this does not count as a failure.
        chance: returns a random number in [0, 1), for jitter.

    Attributes:
        epoch: the epoch in use; None while the epoch is unknown or a reset is not confirmed.
        is_partial: True if some epochs of a cluster node are unknown because they are on another node.
        has_begun: True once handshakes may be sent.
        reset_wanted: True until the server confirms a reset.
        num_replicas: number of replicas that must confirm a reset.
        num_troubles: number of exchanges that failed, or found a block on another node. When it grows, the
            cluster tier reads the cluster's map again.
        last_error: last failure, for messages.
        handshake: the handshake in flight, or None.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        options: RemoteOptions,
        *,
        send: Callable[[str, Exchange], None],
        forget: Forget,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        history: EpochHistory | None = None,
    ) -> None:
        self.name, self.place, self.keyspace = name, server.place, server.keyspace
        self._send, self._forget, self._clock = send, forget, clock
        self._about = pack(options.fingerprint)  # stored beside the epoch
        self.history = history or EpochHistory()
        self._gives_up_at_once, self._is_node = options.gives_up_at_once, history is not None
        self.breakers = Breakers(clock, chance)
        self.epoch: Epoch | None = None
        self.handshake: Handshake | None = None
        self.persistence_question: PersistenceQuestion | None = None
        self._may_ask_persistence = server.dialect.reports_persistence
        self._next_handshake = 0.0
        # Epoch numbers from handshakes that were sent before a reset by this process.
        self._overtaken: list[int] = []
        self.is_partial = self.has_begun = self.is_closed = self.reset_wanted = False
        self.num_replicas = self.num_troubles = 0
        self.last_error: Exception = TimeoutError("it has not answered")
        self._log = RateLimitedLog("kvoffload.remote")

    @property
    def is_well(self) -> bool:
        """True if the server is usable and all its epochs are known."""
        return self.epoch is not None and not self.is_partial and not self.breakers.server.is_open

    @property
    def needs_maintenance(self) -> bool:
        """True if `maintain` should be called: an epoch is unknown, or a circuit breaker is open."""
        return self.epoch is None or self.is_partial or self.breakers.is_any_open

    def is_open(self, kind: str | None = None) -> bool:
        """Return True if operations of type `kind` may be sent.

        If `kind` is None, return True if the server is usable at all.
        """
        if self.epoch is None or self.breakers.server.is_open:
            return False
        return kind is None or not self.breakers.operations[kind].is_open

    def may_attempt(self, kind: str) -> bool:
        """Return True if an attempt of type `kind` may be sent, because the type's breaker is half open."""
        return self.epoch is not None and self.breakers.may_attempt(kind)

    # ---- handshakes

    def start(self) -> None:
        """Send the first handshake, and allow further handshakes."""
        self.has_begun = True
        self._shake_hands()

    def maintain(self) -> None:
        """Send a handshake if an epoch is unknown or the server's breaker is half open.

        Sends nothing in the first second after the last handshake has ended.
        """
        if self._clock() < self._next_handshake:
            return
        server = self.breakers.server
        if server.may_attempt or (not server.is_open and (self.epoch is None or self.is_partial)):
            self._shake_hands()

    def reset(self) -> None:
        """Forget all blocks: in this process at once, on all machines when the server confirms the reset."""
        self.history.end(self.keyspace.epoch_keys, time.monotonic())
        self.close_epoch()
        self.reset_wanted = True
        self.handshake, self._next_handshake = None, 0.0
        self._shake_hands()

    def close_epoch(self) -> None:
        """Leave the epoch: forget known blocks, and ignore exchanges in flight."""
        self.epoch, self.is_partial = None, False
        self._forget(same_epoch=False)

    def new_handshake(self, deadline: float) -> Handshake:
        """Create a handshake for the present state. Does not send the handshake."""
        return Handshake(
            epoch_keys=self.keyspace.epoch_keys,
            is_reset=self.reset_wanted,
            num_replicas=self.num_replicas,
            about=self._about,
            deadline=deadline,
        )

    def _shake_hands(self) -> None:
        if self.has_begun and self.handshake is None and not self.is_closed:
            self.handshake = self.new_handshake(time.monotonic() + HANDSHAKE_S)
            self._send(PROBE, self.handshake)

    def take_handshake(self, handshake: Handshake) -> None:
        """Process a handshake that has ended: enter its epoch, unless a reset was requested meanwhile."""
        if handshake is not self.handshake:
            # Sent before a reset by this process. The server may have performed it after the reset, and
            # returned the new epoch.
            self._overtaken += () if handshake.is_reset else handshake.known_numbers
        else:
            self.handshake, self._next_handshake = None, self._clock() + _RETRY_S
            if handshake.error is None:
                self._accept(handshake)
                self._ask_persistence()
        if self.epoch is not None:
            for number in self._overtaken:
                if not self.history.is_present(number):
                    self.history.end_number(number, time.monotonic())
            self._overtaken.clear()

    def take_reset(self) -> None:
        """Leave the epoch and send a handshake. Called when an exchange has found another epoch, or none."""
        self.close_epoch()
        # An epoch is entered only when a second exchange confirms it. Otherwise a garbled reply would end the
        # present epoch and reset the cache for all machines.
        self._shake_hands()

    def _accept(self, handshake: Handshake) -> None:
        """Enter the epoch of a handshake, unless the epoch has ended."""
        is_partial = None in handshake.numbers
        if (is_partial and self.reset_wanted) or not self._may_enter(handshake):
            return
        self.history.record(self.keyspace.epoch_keys, handshake.numbers, time.monotonic())
        epoch = self.keyspace.epoch(handshake.numbers)
        if not (self.is_partial and epoch == self.epoch):
            self._forget(same_epoch=epoch == self.epoch)
        self.reset_wanted, self.is_partial, self.epoch = False, is_partial, epoch

    def _may_enter(self, handshake: Handshake) -> bool:
        """Return False if a handshake found an ended epoch, else True.

        If this epoch had ended before the handshake was sent, the server has restored it, so this requests a
        reset. If the epoch ended later, the reply is only outdated; if no epoch is in use, sends a handshake.
        """
        numbers, since = handshake.known_numbers, handshake.submitted
        if any(self.history.has_ended(number, since) for number in numbers):
            text = (
                "tier %s: %s has blocks from before a reset again: it has restored a snapshot, or a replica "
                "without the reset has taken over; the cache is reset once more"
            )
            self._log.error("returned", text, self.name, self.place)
            self.close_epoch()
            self.reset_wanted = True
            if not handshake.is_reset:
                # At once, before other machines enter the epoch. After a failed reset, a second later.
                self._shake_hands()
            return False
        if any(self.history.is_outdated(number, since) for number in numbers):
            if self.epoch is None:
                self._shake_hands()
            return False
        return True

    # ---- persistence

    def _ask_persistence(self) -> None:
        if self._may_ask_persistence:
            self._may_ask_persistence = False
            self.persistence_question = PersistenceQuestion(deadline=time.monotonic() + HANDSHAKE_S)
            self._send(WRITE, self.persistence_question)  # no request waits for writes

    def take_persistence(self, question: PersistenceQuestion) -> None:
        """Log a warning if the reply says that the server saves its contents to a disk. Warns only once."""
        self.persistence_question = None
        if question.persistence is Persistence.ON and not self.history.has_warned:
            self.history.has_warned = True
            text = (
                "tier %s: %s saves to a disk (%s): after a crash it has blocks from before a reset again, "
                'and an engine that did not see the reset serves them; set save to "" and appendonly to no'
            )
            reasons = ", ".join(question.reasons)
            logging.getLogger("kvoffload.remote").warning(text, self.name, self.place, reasons)

    # ---- health

    def note(self, exchange: Exchange) -> set[str]:
        """Record an exchange's outcome; returns the types of operations whose breakers it has opened."""
        if self._is_node and self._is_elsewhere(exchange):
            return set()
        error = exchange.error
        if isinstance(error, NotSentError):
            return set()
        before = self.breakers.open_kinds()
        if error is None or isinstance(error, CacheResetError) or self._is_slow(exchange):
            if not (self.breakers.server.is_open and exchange is not self.handshake):
                self.breakers.server.succeeded()
            if isinstance(exchange, BlockExchange):
                self.breakers.note_success(exchange)
        else:
            self.last_error = error
            if not self.is_closed:
                self._note_failure(exchange, error)
        self.breakers.note_outage(max(0.0, exchange.ended - exchange.submitted))
        return self.breakers.open_kinds() - before

    def _is_slow(self, exchange: Exchange) -> bool:
        """Return True if an exchange exceeded its deadline, but has transferred some of its blocks.

        This is no failure of the server. Later reads use the server's measured speed to leave out blocks that
        would arrive too late.
        """
        if self._gives_up_at_once or not isinstance(exchange, Transfer) or not exchange.has_moved_blocks:
            return False
        if not isinstance(exchange.error, TimeoutError):
            return False
        num_blocks, total = int(np.count_nonzero(exchange.ok)), len(exchange.keys)
        text = "tier %s: %s is slow: %d of %d blocks of a %s were transferred by the deadline"
        self._log.warn("slow", text, self.name, self.place, num_blocks, total, exchange.kind)
        return True

    def _is_elsewhere(self, exchange: Exchange) -> bool:
        """Return True if an exchange failed because its keys are on another node of the cluster.

        Also increments `num_troubles` if the exchange failed for any reason, or if a reply says that a key is
        on another node.
        """
        reply = exchange.error or getattr(exchange, "refused", None)
        is_elsewhere = isinstance(reply, ServerError) and reply.is_elsewhere
        if is_elsewhere or not (exchange.error is None or isinstance(exchange.error, CacheResetError)):
            self.num_troubles += 1
        if not is_elsewhere or exchange.error is None:
            return False
        self.last_error = exchange.error
        return True

    def _note_failure(self, exchange: Exchange, error: Exception) -> None:
        was_open = self.breakers.server.is_open
        if not self.breakers.note_failure(exchange, error):
            return
        is_silent = isinstance(exchange, BlockExchange) and isinstance(error, TimeoutError)
        if self._gives_up_at_once and is_silent:
            if not was_open:
                self.breakers.server.open()
                text = "tier %s: %s is silent (%.0f s): not used until it answers"
                seconds = exchange.ended - exchange.submitted
                self._log.warn("silent", text, self.name, self.place, seconds)
        elif not (self._gives_up_at_once and was_open):  # one line is enough
            text = "tier %s: an exchange with %s failed: %s: %s"
            self._log.warn("health", text, self.name, self.place, type(error).__name__, printable(error))
