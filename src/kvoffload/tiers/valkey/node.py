"""One node of a cluster, as the scheduler's thread sees it: a server that has some of the divisions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.core.admission import Admission
from kvoffload.tiers.shared.batches import (
    ELSEWHERE,
    Batch,
    Greeting,
    WasResetError,
    epoch_found,
    rights_asked,
    rights_refused,
)
from kvoffload.tiers.shared.connection import Connect
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.identity import producer_of
from kvoffload.tiers.shared.tier import RemoteOptions, RemoteTier
from kvoffload.tiers.valkey.divisions import DividedEpoch, epoch_names
from kvoffload.tiers.valkey.resp import Connection, ProtocolError, ServerError, command


@dataclass(eq=False, kw_only=True)
class DividedGreeting(Greeting):
    """As `Greeting`, for the epochs of several divisions.

    Attributes:
        names: where they are.
        num_replicas: those that must have a reset before it counts, so that none of them takes the place of
            the node and brings back what was before.
        numbers: the epochs, once they are known; None for a division that is on its way to another node.
    """

    names: list[bytes]
    num_replicas: int = 0
    numbers: tuple[int | None, ...] = ()

    @property
    def found(self) -> list[int]:
        return [number for number in self.numbers if number is not None]

    def run(self, connection: Connection) -> None:
        options = () if self.is_reset else (b"NX",)
        asked = [command(b"SET", name, b"%016x" % secrets.randbits(64), *options) + command(b"GET", name)
                 for name in self.names]  # fmt: skip
        told = self.telling(self.names[0])
        connection.send([b"".join([*asked, *told]), rights_asked(self.names[0])], self.deadline)
        found = [self._found(connection) for _ in self.names]
        self.hear_told(connection)
        for refused in rights_refused(connection, self.deadline):
            raise refused
        elsewhere = [one for one in found if isinstance(one, ServerError)]
        if len(elsewhere) == len(found):
            raise elsewhere[0]
        if self.is_reset and self.num_replicas:
            self._wait_for_replicas(connection)
        self.numbers = tuple(None if isinstance(one, ServerError) else one for one in found)

    def _found(self, connection: Connection) -> int | ServerError:
        replies = [connection.reply(self.deadline) for _ in ("SET", "GET")]
        for reply in replies:
            if isinstance(reply, ServerError):
                if reply.code not in ELSEWHERE:
                    raise reply
                return reply
        return epoch_found(replies[1])

    def _wait_for_replicas(self, connection: Connection) -> None:
        patience_ms = max(1, int(1e3 * (self.deadline - time.monotonic()) / 2))
        connection.send([command(b"WAIT", b"%d" % self.num_replicas, b"%d" % patience_ms)], self.deadline)
        have = connection.reply(self.deadline)
        if isinstance(have, ServerError):
            raise have
        if not isinstance(have, int):
            raise ProtocolError("WAIT is not answered with a number")
        if have < self.num_replicas:
            raise TimeoutError(f"{have} of {self.num_replicas} replicas have the reset")


class Node(RemoteTier):
    """As `RemoteTier`, for the divisions that this node has now; if they change it is another one.

    What it says of blocks that have moved is a miss, and no failure of the node.

    Attributes:
        divisions: in their order.
        has_begun: whether it has threads, and sends requests; before, all of its blocks are misses.
        num_replicas: of the node, as far as is known.
        num_troubles: batches that failed, or were about blocks that are elsewhere: reasons to ask for a map.
    """

    def __init__(
        self,
        name: str,
        place: str,
        connect: Connect,
        options: RemoteOptions,
        *,
        block_bytes: int,
        fingerprint: str,
        divisions: tuple[int, ...],
        admission: Admission | None,
        clock: Callable[[], float],
        history: EpochHistory,
    ) -> None:
        self.divisions = divisions
        self.num_replicas = self.num_troubles = 0
        self.has_begun = self._is_partial = False
        self._epoch_names = epoch_names(options.namespace, producer_of(fingerprint), divisions)
        super().__init__(
            name,
            place,
            connect,
            options,
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            admission=admission,
            clock=clock,
            history=history,
        )
        self._epoch_name = self._epoch_names[0]

    def begin(self) -> None:
        """Start all threads and greet the node. Raises `RuntimeError` if a thread cannot be started; it may
        be called again."""
        for line in self._all_lines():
            line.start()
        self.has_begun = True
        self._greet()

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way, and all results have been taken."""
        return not self._under_way and not self._results

    @property
    def is_well(self) -> bool:
        """Whether it can hold all its blocks, as far as is known."""
        return self._epoch is not None and not self._is_partial and not self._circuit.is_open

    @property
    def was_reset(self) -> bool:
        """Whether the last `clear` has been confirmed."""
        return not self._reset_wanted

    def has_ended(self) -> bool:
        """Take in what has come: whether no job is under way."""
        self._take_in_all()
        return not self._waited_for()

    def tend(self) -> None:
        """Take in what has come while it could not be used, and greet the node where that may help."""
        self._is_open()

    def _is_open(self, kind: str | None = None) -> bool:
        if self._is_partial:
            self._tend()
        return super()._is_open(kind)

    def _tend(self) -> None:
        if self._is_partial and not self._circuit.is_open and self._clock() >= self._greet_at:
            self._greet()
        super()._tend()

    def _greet(self) -> None:
        if self.has_begun:
            super()._greet()

    def _new_greeting(self, deadline: float) -> Greeting:
        return DividedGreeting(
            name=self._epoch_names[0],
            names=self._epoch_names,
            is_reset=self._reset_wanted,
            num_replicas=self.num_replicas,
            about=self._about,
            deadline=deadline,
        )

    def _own_epoch_names(self) -> list[bytes]:
        return self._epoch_names

    def _shut(self) -> None:
        super()._shut()
        self._is_partial = False

    def _accept(self, greeting: Greeting) -> None:
        assert isinstance(greeting, DividedGreeting)
        is_partial = None in greeting.numbers
        if is_partial and self._reset_wanted:
            return  # not everything has been forgotten
        if not self._may_enter(greeting):
            return
        self._history.enter(self._epoch_names, greeting.numbers, time.monotonic())
        epoch = DividedEpoch(self.options.namespace, self._producer, self.divisions, greeting.numbers)
        if not (self._is_partial and epoch == self._epoch):
            self._hints.clear()
            self._vouching.lost_all()
        self._reset_wanted, self._is_partial, self._epoch = False, is_partial, epoch

    def _note_health(self, batch: Batch) -> None:
        said = batch.error or getattr(batch, "refused", None)
        is_elsewhere = isinstance(said, ServerError) and said.code in ELSEWHERE
        if is_elsewhere or not (batch.error is None or isinstance(batch.error, WasResetError)):
            self.num_troubles += 1
        if is_elsewhere and batch.error is not None:
            self.last_error = batch.error
        else:
            super()._note_health(batch)
