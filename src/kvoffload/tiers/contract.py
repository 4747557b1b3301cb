"""The contract of a tier, and the checksum that binds the bytes of a block to its key.

Does not know media or devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.checksum import checksums
from kvoffload.transfer import Blocks, Rows, check_rows

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Shape ``(n,)``, bool: a flag for each block of a batch."""

Checksums: TypeAlias = npt.NDArray[np.uint64]
"""Shape ``(n,)``, uint64. 0 (`NO_CHECKSUM`) means none; a checksum is never 0."""

NO_CHECKSUM = 0


class Memory(Protocol):
    """The memory of RAM's slots, which tiers read into and write from; see `MemoryTier`."""

    @property
    def pool(self) -> Blocks: ...
    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None: ...
    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask: ...


class SecondaryTier(ABC):
    """A store for blocks behind RAM: finds blocks by key, works in the background, and may forget them.

    Every method is abstract, so a tier or wrapper that misses a method cannot be constructed. `SharedTier` is
    the contract of a store that several machines share, `GroupedTier` of a store that keeps consecutive
    blocks together. `StripedTier` combines several tiers.

    Reads and writes are jobs. `submit_read` and `submit_write` return at once, the tier's own threads do the
    work, and `finished` returns the results. A job owns its rows of the pool from submission to end. A
    failure of the medium is no exception: a block that cannot be written or read, or whose bytes are not the
    bytes stored under its key, is False in the result of the job, and `contains` is False for it afterwards.
    If `submit_read` or `submit_write` raises all the same, no job has begun.

    Thread: all methods on the scheduler's thread; only `drain` and `close` wait for the medium. A job does
    not see the effect of another job that had not ended when it was submitted.

    Attributes:
        name: name in reports and metrics: ``disk``.
        identity: 64 bits that identify this tier in every life; `StripedTier` distributes keys by it.
        block_bytes: bytes of a block.
        stored_bytes: bytes that a block takes on the medium, padding included.
    """

    name: str
    identity: int
    block_bytes: int
    stored_bytes: int

    @abstractmethod
    def begin_request(self, request_id: str) -> object:
        """Open the tier's record of a request; repeated lookups of a block count as one use."""

    @abstractmethod
    def finish_request(self, request: object, path: Keys) -> None:
        """Close the record: the request used these blocks, from RAM or from any tier."""

    @abstractmethod
    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        """Return the blocks that can be read now, as a mask. No I/O; cost: one index probe a key."""

    @abstractmethod
    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """Begin to read blocks into ``pool[rows[i]]``; returns the number of the job.

        Absent and damaged blocks are False in the result; the contents of their rows are undefined.
        """

    @abstractmethod
    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """Begin to write blocks from ``pool[rows[i]]``; returns the job's number and the accepted blocks.

        The tier leaves out blocks that it has, blocks that its admission rule or policy refuses, and all
        blocks while its queue is full: it drops rather than delays. If it accepts none, there is no job, and
        the number is `NO_JOB`. The result has one row for each accepted block.
        """

    @property
    @abstractmethod
    def queue_room(self) -> int:
        """Blocks that the write queue can still take; a tier without a bound returns ``sys.maxsize``.

        While it is 0, a job is in flight.
        """

    @abstractmethod
    def finished(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""

    @abstractmethod
    def delete(self, keys: Keys) -> int:
        """Forget blocks that are not trusted or not wanted; returns the number that were present."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block for good: a later life of the tier must not serve it either.

        A shared tier forgets for all machines, as soon as they learn of the reset. Until its server confirms
        the reset, the tier has no blocks for this process.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and its blocks would survive a crash; False on time-out."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """End the jobs in flight, make blocks durable if the tier does so, release the medium. Idempotent."""


class SharedTier(SecondaryTier):
    """A tier that several machines share. Others write to it and its server evicts, so it cannot know its
    contents.

    `contains` answers from a presence cache. A block that the cache lists and the server has lost is a miss
    (`JobResult.stale`). `unknown` returns the blocks that the cache does not cover, and `submit_probe` asks
    the server for them. Whatever the network does, every job ends in bounded time, and nothing writes to its
    rows afterwards.

    Attributes:
        probe_timeout_s: longest duration of a probe, and longest time that a request waits for probes.
    """

    probe_timeout_s: float

    @abstractmethod
    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        """Return the blocks whose presence only a probe can tell. No I/O; cost: one index probe a key."""

    @abstractmethod
    def submit_probe(self, keys: Keys) -> int:
        """Begin to ask the server for blocks; returns the number of the job, or `NO_JOB` if it cannot ask.

        The result lists the present blocks. After the job, answered or not, the blocks are not `unknown` for
        a while.
        """

    @abstractmethod
    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        """Return the changes since the last call, in order, as (keys, removed).

        ``removed`` is False for blocks that this process wrote and the server confirmed. It is True for such
        blocks when they are found gone, or when their presence is no longer certain. Blocks of other writers,
        and changes before the first call, are not reported.
        """


class GroupedTier(SecondaryTier):
    """A tier that keeps consecutive blocks of a path together, and therefore must know paths.

    Attributes:
        group_blocks: blocks in a group, counted from the beginning of a path; a group is written as a whole
            or not at all. 1 for no groups.
    """

    group_blocks: int

    @abstractmethod
    def follow(self, request: object, path: Keys) -> None:
        """Learn the path of a request from its beginning, as far as it is known.

        Called before any lookup or write of blocks of the path, and again when the path has grown. `path` is
        a view that the tier must not keep. Cost: O(new blocks).
        """

    @abstractmethod
    def cut(self, keys: Keys, room: int) -> int:
        """Return the number of leading `keys` to offer where `room` blocks fit, at most `room`.

        The cut is at the end of a group. Cost: as `contains`.
        """


NO_JOB = -1


class JobResult(NamedTuple):
    """The result of a job.

    Attributes:
        job: number of the job.
        ok: shape ``(n,)``; blocks that were read and are sound, were written durably, or are present.
        seconds: from submission to end, including time in queues.
        stale: shape ``(n,)``; blocks that the presence cache of a shared tier listed and the server has lost.
            They count neither as failed nor as damaged. None for none.
    """

    job: int
    ok: Mask
    seconds: float
    stale: Mask | None = None


@dataclass
class TierStats:
    """Counters of a tier since it was opened, in blocks unless noted."""

    capacity: int = 0
    ready: int = 0
    written: int = 0
    read: int = 0
    evicted: int = 0
    refused: int = 0
    """Refused by the tier's admission rule or policy."""
    dropped: int = 0
    """Not accepted because the tier was busy or its write budget spent."""
    failed: int = 0
    """Not written or read because the medium failed."""
    mismatches: int = 0
    """Read with other bytes than were stored under the key; served as misses and forgotten."""
    restored: int = 0
    """Found when the tier was opened."""
    journal_damage: int = 0
    """Unreadable parts of the tier's own records, whose contents are lost."""
    bytes_written: int = 0
    bytes_read: int = 0
    free: int = 0
    """Empty slots."""
    in_flight: int = 0
    """Being written or read."""
    write_budget_bytes: int | None = None
    """Bytes that may still be written in the current 24 hours; None without a limit."""
    probes: int = 0
    """Blocks that probes asked a shared tier for."""
    probe_hits: int = 0
    """Probed blocks that were present."""
    stale: int = 0
    """Blocks that the presence cache of a shared tier listed and the server had lost."""
    timeouts: int = 0
    """Blocks of jobs that exceeded their deadline."""
    skipped: int = 0
    """Not written because another machine had written them."""
    circuit_open: int = 0
    """Nodes of a shared tier with an open circuit breaker."""
    outages: int = 0
    """Times that the circuit breaker of a node has opened."""
    outage_s: float = 0.0
    """Seconds with an open circuit breaker, and of the waits before; summed over nodes."""
    puts: int = 0
    """Storing requests to a bucket."""
    gets: int = 0
    """Reading and listing requests to a bucket."""
    errors: int = 0
    """Calls of the tier that raised an exception."""
    cost: float = 0.0
    """Price of these requests and of the received bytes, at the configured prices."""


def checked_rows(keys: Keys, pool: Blocks, rows: Rows, block_bytes: int) -> npt.NDArray[np.int64]:
    """Check the rows of a job against its pool and keys. Raises `ValueError` or `IndexError`."""
    if pool.shape[1] != block_bytes:
        raise ValueError(f"the pool has blocks of {pool.shape[1]} bytes, this tier of {block_bytes}")
    checked = check_rows("rows", rows, len(pool))
    if len(checked) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(checked)} rows")
    return checked


def block_checksums(addresses: npt.NDArray[np.int64], block_bytes: int, digests: Checksums) -> Checksums:
    """Compute the xxh3_64 of the block at each address, seeded with its key's digest; never `NO_CHECKSUM`.

    The caller keeps the memory alive. Cost: memory speed (10-20 GB/s), without the GIL. Thread: any.
    """
    sums = checksums(addresses, block_bytes, digests)
    sums[sums == NO_CHECKSUM] = 1
    return sums
