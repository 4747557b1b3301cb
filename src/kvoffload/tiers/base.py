"""What tiers share: their contract, and the checksum that binds a block's bytes to its key.

Knows neither media nor devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import ReadU64Matrix, U64Array, inline, kernel
from kvoffload.structures.keys import Keys
from kvoffload.tiers.checksum import checksums
from kvoffload.transfer import Blocks, Rows, check_rows

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Shape ``(n,)``: one answer for each block of a batch."""

Checksums: TypeAlias = npt.NDArray[np.uint64]
"""Shape ``(n,)``. 0 (`NO_CHECKSUM`) stands for none; a checksum is never 0."""

NO_CHECKSUM = 0

HOUR_S = 3600

ODD = np.uint64(0x9E3779B97F4A7C15)
"""splitmix64's step: odd, so that its multiples are all different, and without a pattern in its bits."""


class Memory(Protocol):
    """The memory behind RAM's slots, as `MemoryTier` has it: where tiers read to and write from."""

    @property
    def pool(self) -> Blocks: ...
    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None: ...
    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask: ...


class SecondaryTier(Protocol):
    """A place behind RAM: it finds its blocks by key, takes its time, and may forget.

    `StripedTier` makes one of several, and `BudgetedTier` bounds what is written to one.

    Reads and writes are jobs. `submit_read` and `submit_write` return at once, threads of the tier's own
    do the work, and `finished` tells how each ended. From the submission to the end of its job the rows of
    a pool that it names belong to the job. No failure of the medium is an exception: a block that cannot be
    written or read, or that is not what was stored under its key, is False in the result of its job, and
    `contains` it no longer.

    Thread: every method by one thread, the scheduler's; none of them waits for the medium, except `drain`
    and `close`. What one job does is not visible to another that was submitted before it ended.

    Attributes:
        name: what users call it, for reports and metrics: ``disk``.
        identity: which one this is, in 64 bits and the same in every life; keys are shared out by it.
        block_bytes: bytes of a block.
        stored_bytes: what writing a block costs the medium, padding included.
        written_before: how many blocks earlier lives have written, by hour since 1970; empty where the tier
            does not remember.
    """

    name: str
    identity: int
    block_bytes: int
    stored_bytes: int
    written_before: Mapping[int, int]

    def begin_request(self, request_id: str) -> object:
        """Open the tier's record of an inference request: what it uses counts once, however often it asks."""
        ...

    def finish_request(self, request: object, path: Keys) -> None:
        """The request used these blocks, wherever they were served from; it will not be named any more."""
        ...

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        """Which blocks could be read now: written, not forgotten. No I/O; cost: an index probe a key."""
        ...

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """Begin to read blocks into ``pool[rows[i]]``; the number of the job.

        Blocks that are not here, or not sound, are False in the result; their rows hold anything.
        """
        ...

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """Begin to write blocks that the tier wants, from ``pool[rows[i]]``; the job, and which it takes.

        It leaves out what it has, what its admission rule or policy refuses, and, when its queue is full,
        everything: it drops rather than delays. When it takes nothing there is no job, and its number is
        `NO_JOB`. The result has one row for each block that it took.
        """
        ...

    def finished(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        ...

    def delete(self, keys: Keys) -> int:
        """Forget blocks that cannot be trusted, or are not wanted; how many were here."""
        ...

    def clear(self) -> None:
        """Forget every block for good, also for those who open the tier later: they mean nothing any more."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and its blocks would survive a crash; False if that takes longer."""
        ...

    def stats(self) -> TierStats:
        """A copy of the counters."""
        ...

    def close(self) -> None:
        """End what is under way, keep what is to be kept, let go of the medium. Idempotent."""
        ...


NO_JOB = -1


class JobResult(NamedTuple):
    """How a job ended.

    Attributes:
        job: its number.
        ok: shape ``(n,)``; which blocks were read and are sound, or written for good.
        seconds: from its submission to its end, waiting in queues included.
    """

    job: int
    ok: Mask
    seconds: float


@dataclass
class TierStats:
    """Counters of one secondary tier since it was opened. Blocks, unless their names say otherwise."""

    capacity: int = 0
    ready: int = 0
    written: int = 0
    read: int = 0
    evicted: int = 0
    refused: int = 0
    """Not wanted by the tier's admission rule or policy."""
    dropped: int = 0
    """Wanted, but the tier was too busy, or its write budget was used up."""
    failed: int = 0
    """The medium would not take them, or not give them back."""
    mismatches: int = 0
    """Read, and not what was stored under their key: served as misses and forgotten."""
    restored: int = 0
    """Found when the tier was opened."""
    journal_damage: int = 0
    """Parts of the tier's own records that could not be read: not blocks. What they said is forgotten."""
    bytes_written: int = 0
    bytes_read: int = 0
    free: int = 0
    """Room that nothing is in."""
    in_flight: int = 0
    """Being written or read now."""
    write_budget_bytes: int | None = None
    """What may still be written in these 24 hours; None without a limit."""


def checked_rows(keys: Keys, pool: Blocks, rows: Rows, block_bytes: int) -> npt.NDArray[np.int64]:
    """The rows of a job, checked against its pool and keys. Raises `ValueError` and, as `check_rows`,
    `IndexError`."""
    if pool.shape[1] != block_bytes:
        raise ValueError(f"a pool with blocks of {pool.shape[1]} bytes; this tier has {block_bytes}")
    checked = check_rows("rows", rows, len(pool))
    if len(checked) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(checked)} rows")
    return checked


def key_digests(keys: Keys) -> Checksums:
    """A 64-bit digest of each key: the seed that makes a checksum one of *this* key.

    Two keys of up to 8 bytes never share a digest, longer ones with probability 2^-64. It is part of
    what tiers may persist and does not change; the hash of the index is another one, and may.

    Cost: 2 ns a word. Thread: any.
    """
    digests = np.empty(len(keys), np.uint64)
    _digest(keys.words, keys.key_bytes, digests)
    return digests


def block_checksums(addresses: npt.NDArray[np.int64], block_bytes: int, digests: Checksums) -> Checksums:
    """xxh3_64 of the block at each of these addresses, seeded with its key's digest; never `NO_CHECKSUM`.

    Who calls holds the memory. Cost: memory speed (10-20 GB/s), without the GIL. Thread: any.
    """
    sums = checksums(addresses, block_bytes, digests)
    sums[sums == NO_CHECKSUM] = 1
    return sums


@inline
def mix(word: Any) -> Any:
    """splitmix64's finisher (Steele, Lea and Flood, OOPSLA'14): a bijection that spreads every bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@kernel
def _digest(words: ReadU64Matrix, key_bytes: int, digests: U64Array) -> int:
    for row in range(words.shape[0]):
        digest = np.uint64(key_bytes)
        # Not `words.shape[1]`: how far a batch pads its keys is no property of the key.
        for word in range((key_bytes + 7) // 8):
            digest = mix((digest ^ words[row, word]) + ODD)
        digests[row] = digest
    return len(words)
