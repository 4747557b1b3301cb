"""What tiers share: their contract, and the checksum that binds a block's bytes to its key.

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
"""Shape ``(n,)``, bool: one answer for each block of a batch."""

Checksums: TypeAlias = npt.NDArray[np.uint64]
"""Shape ``(n,)``, uint64. 0 (`NO_CHECKSUM`) means none; a checksum is never 0."""

NO_CHECKSUM = 0


class Memory(Protocol):
    """The memory behind RAM's slots, as `MemoryTier` has it: where tiers read to and write from."""

    @property
    def pool(self) -> Blocks: ...
    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None: ...
    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask: ...


class SecondaryTier(ABC):
    """A store for blocks behind RAM: finds blocks by key, works in the background, and may forget them.

    Every member is abstract, so a tier or a wrapper that misses one cannot be constructed.
    `SharedTier` adds the members of a store that several machines share, `GroupedTier` those of a store that
    keeps consecutive blocks together. `StripedTier` makes one tier of several.

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
        """Open the tier's record of a request: a block counts as used once, however often it is asked for."""

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

        ``removed`` is False for blocks that this process has written, confirmed by the server, and True for
        those of them that it has found gone or cannot vouch for any longer. Blocks of other writers, and
        changes before the first call, are not reported.
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

        Called before the tier is asked for blocks of the path or offered them, and again when the path has
        grown. `path` is a view that the tier must not keep. Cost: O(new blocks).
        """

    @abstractmethod
    def cut(self, keys: Keys, room: int) -> int:
        """Return the number of leading `keys` to offer where `room` blocks fit, at most `room`.

        The cut is at the end of a group. Cost: as `contains`.
        """


NO_JOB = -1


class JobResult(NamedTuple):
    """How a job ended.

    Attributes:
        job: its number.
        ok: shape ``(n,)``; which blocks were read and are sound, or are written durably, or are there.
        seconds: from its submission to its end, including waiting in queues.
        stale: shape ``(n,)``; of a read from a shared tier, the blocks that were believed to be there and had
            left. They have neither failed nor been damaged. None for none.
    """

    job: int
    ok: Mask
    seconds: float
    stale: Mask | None = None


@dataclass
class TierStats:
    """Counters of one secondary tier since it was opened. In blocks, unless a name says otherwise."""

    capacity: int = 0
    ready: int = 0
    written: int = 0
    read: int = 0
    evicted: int = 0
    refused: int = 0
    """Refused by the tier's admission rule or policy."""
    dropped: int = 0
    """Not taken because the tier was too busy or its write budget was used up."""
    failed: int = 0
    """The medium failed to write or read them."""
    mismatches: int = 0
    """Read, but not what was stored under their key: served as misses and forgotten."""
    restored: int = 0
    """Found when the tier was opened."""
    journal_damage: int = 0
    """Parts of the tier's own records, not blocks, that could not be read. Their contents are lost."""
    bytes_written: int = 0
    bytes_read: int = 0
    free: int = 0
    """Room without a block in it."""
    in_flight: int = 0
    """Being written or read."""
    write_budget_bytes: int | None = None
    """Bytes that may still be written in these 24 hours; None without a limit."""
    probes: int = 0
    """Of a shared tier, blocks that it was asked for."""
    probe_hits: int = 0
    """Of those, how many were there."""
    stale: int = 0
    """Blocks that were believed to be in a shared tier, and had left it."""
    timeouts: int = 0
    """Blocks of jobs whose time was up before they had ended."""
    skipped: int = 0
    """Blocks that were not written because another machine had written them."""
    circuit_open: int = 0
    """Nodes of a shared tier that are left alone now, because they did not answer."""
    outages: int = 0
    """How often nodes of a shared tier were left alone, because they did not answer."""
    outage_s: float = 0.0
    """Seconds for which a node was left alone, and was waited for before; summed over nodes."""
    puts: int = 0
    """Requests to a bucket that store."""
    gets: int = 0
    """Requests to a bucket that read or ask."""
    errors: int = 0
    """Calls of the tier that raised an exception."""
    cost: float = 0.0
    """What these requests, and the bytes received, come to at the prices that were given."""


def checked_rows(keys: Keys, pool: Blocks, rows: Rows, block_bytes: int) -> npt.NDArray[np.int64]:
    """The rows of a job, checked against its pool and keys. Raises `ValueError` and, as `check_rows`,
    `IndexError`."""
    if pool.shape[1] != block_bytes:
        raise ValueError(f"the pool has blocks of {pool.shape[1]} bytes, this tier of {block_bytes}")
    checked = check_rows("rows", rows, len(pool))
    if len(checked) != len(keys):
        raise ValueError(f"{len(keys)} keys but {len(checked)} rows")
    return checked


def block_checksums(addresses: npt.NDArray[np.int64], block_bytes: int, digests: Checksums) -> Checksums:
    """xxh3_64 of the block at each of these addresses, seeded with its key's digest; never `NO_CHECKSUM`.

    The caller keeps the memory alive. Cost: memory speed (10-20 GB/s), without the GIL. Thread: any.
    """
    sums = checksums(addresses, block_bytes, digests)
    sums[sums == NO_CHECKSUM] = 1
    return sums
