"""Exchanges with a server, as data: a request, its deadline and its results.

The scheduler's thread creates an exchange. A connection thread performs the exchange and writes the results
into it. The scheduler's thread reads the results afterwards. If an exchange is aborted, the results that it
has received so far remain valid.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.shared.groups import ObjectPart
from kvoffload.tiers.shared.identity import Epoch
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import address_of

PROBE, READ, WRITE = "probe", "read", "write"
"""Types of operations. Each type has its own connections and its own circuit breaker."""


@dataclass(eq=False, kw_only=True)
class Exchange:
    """A request to a server, and the server's replies.

    Attributes:
        submitted, ended: when the exchange was created and when it ended (`time.monotonic`).
        deadline: when the exchange must have ended (`time.monotonic`), even if it is still in the queue then.
        error: reason why the exchange failed or was aborted; None if it succeeded.
        closes_connection: True to close the connection after this exchange.
    """

    deadline: float
    submitted: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    error: Exception | None = None
    closes_connection: bool = False
    _unclaimed: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Claim the exchange; returns True in the first call, False in later calls.

        A connection thread claims an exchange to perform it, and a tier claims an exchange to drop it. Only
        the first of the two may go on. Thread: any, because `pop` of a list is atomic.
        """
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True


@dataclass(eq=False, kw_only=True)
class Handshake(Exchange):
    """An exchange that reads the present epochs and creates missing epochs, or replaces all epochs (a reset).

    Attributes:
        epoch_keys: the keys that hold the epochs.
        is_reset: True to replace the epochs, so that no earlier block is found.
        about: text about the producer, stored beside the epoch for ``inspect``; empty for none.
        num_replicas: number of replicas that must confirm a reset. A replica that missed the reset could
            later take over and serve earlier blocks.
        numbers: the result. For each of `epoch_keys`, the epoch number, or None if another node has the key.
    """

    epoch_keys: Sequence[bytes]
    about: bytes = b""
    is_reset: bool = False
    num_replicas: int = 0
    numbers: tuple[int | None, ...] = ()

    @property
    def known_numbers(self) -> list[int]:
        """The epochs in `numbers` that are not None."""
        return [number for number in self.numbers if number is not None]


class Persistence(Enum):
    """State of a server's persistence. It is ON if the server saves its contents to a disk."""

    OFF = "no"
    ON = "yes"
    UNKNOWN = "not known"


@dataclass(eq=False, kw_only=True)
class PersistenceQuestion(Exchange):
    """Asks a server about its persistence.

    If the user may not read the server's settings, `persistence` stays `UNKNOWN`, and the exchange succeeds.

    Attributes:
        reasons: the settings that turn persistence on, such as ``save "3600 1"``.
    """

    persistence: Persistence = Persistence.UNKNOWN
    reasons: list[str] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class BlockExchange(Exchange):
    """An exchange about blocks. A block's result counts only if the server has confirmed the block's epoch.

    Attributes:
        job: number that identifies the job. The exchange does the job's work.
        num_rows: number of blocks of the job. The exchange covers the first ``len(keys)`` of these blocks.
        objects: for a bucket, the objects that hold these blocks; otherwise empty.
        current: mask of the blocks whose epoch the server has confirmed.
        ok: mask of the blocks that the server has (probe), or that were verified (read) or stored (write).
        refused: last error reply that concerned a single block, or None.
    """

    kind: ClassVar[str]

    job: int
    num_rows: int
    keys: Keys
    epoch: Epoch
    block_bytes: int
    objects: Sequence[ObjectPart] = ()
    ok: Mask = field(init=False)
    current: Mask = field(init=False)
    refused: ServerError | None = None

    def __post_init__(self) -> None:
        self.ok, self.current = np.zeros((2, len(self.keys)), np.bool_)


@dataclass(eq=False, kw_only=True)
class Probe(BlockExchange):
    """Asks the server which blocks it has."""

    kind = PROBE


@dataclass(eq=False, kw_only=True)
class Transfer(BlockExchange):
    """An exchange that moves blocks from or to rows of a pool."""

    pool: Blocks
    rows: npt.NDArray[np.int64]

    @property
    def has_moved_blocks(self) -> bool:
        """True if at least one block was transferred."""
        return bool(self.ok.any())

    def addresses(self, which: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the memory addresses of the blocks ``keys[which]``."""
        addresses: npt.NDArray[np.int64] = address_of(self.pool) + self.rows[which] * self.pool.strides[0]
        return addresses

    def row(self, number: int) -> memoryview:
        """Return the pool's memory of the block ``keys[number]``."""
        return memoryview(self.pool[self.rows[number]])


@dataclass(eq=False, kw_only=True)
class Read(Transfer):
    """Receives blocks into their rows of the pool and verifies the blocks.

    Attributes:
        absent: mask of the blocks that the server does not have.
        damaged: mask of the blocks with a wrong header or checksum. The read deletes these blocks on the
            server, or in a bucket the objects that contain them.
        deleted: for a bucket, mask of all blocks in the deleted objects, damaged or not.
    """

    kind = READ

    absent: Mask = field(init=False)
    damaged: Mask = field(init=False)
    deleted: Mask = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.absent, self.damaged, self.deleted = np.zeros((3, len(self.keys)), np.bool_)


@dataclass(eq=False, kw_only=True)
class Write(Transfer):
    """Stores the blocks that the server does not have.

    Attributes:
        ttl_s: lifetime of the blocks on the server in seconds; 0 if the server decides.
        was_there: mask of the blocks that the server already had.
    """

    kind = WRITE

    ttl_s: int = 0
    was_there: Mask = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.was_there = np.zeros(len(self.keys), np.bool_)

    @property
    def has_moved_blocks(self) -> bool:
        return bool((self.ok & ~self.was_there).any())
