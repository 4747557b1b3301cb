"""The contract of a tier, and the checksum that binds the bytes of a block to its key.

Knows neither the media of the tiers nor the devices of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.core.tenants import Quota, TenantStats
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.checksum import checksums
from kvoffload.transfer import Blocks, Rows, check_rows

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Shape ``(n,)``, bool: a flag for each block of a batch."""

Checksums: TypeAlias = npt.NDArray[np.uint64]
"""Shape ``(n,)``, uint64.

The value 0 (`NO_CHECKSUM`) means that a block has no checksum; a checksum is never 0.
"""

NO_CHECKSUM = 0

OwnerOf: TypeAlias = Callable[[Keys], str]
"""Function that returns the tenant of a batch of blocks. All blocks of a batch must belong to one tenant."""


class Memory(Protocol):
    """Interface of the memory of RAM's slots: tiers copy blocks to and from this memory. See `MemoryTier`."""

    @property
    def pool(self) -> Blocks: ...
    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None: ...
    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask: ...


class SecondaryTier(ABC):
    """A medium behind RAM, such as a disk, that stores blocks by key. The tier may lose blocks at any time.

    `SharedTier` is the contract of a tier that several machines share. `GroupedTier` is the contract of a
    tier that keeps consecutive blocks together. `StripedTier` combines several tiers.

    Reads and writes are jobs. `submit_read` and `submit_write` return at once, the tier's own threads do the
    work, and `finished` returns the results. From submission to end, only the job may use its rows of the
    pool, which is the caller's memory. If `submit_read` or `submit_write` raises, no job has begun.

    A failure of the medium raises no exception. Instead, each block that was not read or written, or that has
    a wrong checksum, is False in the job's result. The tier forgets these blocks, except after a transient
    read error such as ENOMEM.

    Thread: all methods on the scheduler's thread; only `drain` and `close` wait for the medium. A job does
    not see the effects of jobs that were in flight at its submission.

    Attributes:
        name: name in reports and metrics: ``disk``.
        identity: 64 bits that identify this tier across restarts. `StripedTier` assigns keys by identity.
        block_bytes: bytes of a block.
        stored_bytes: bytes of a block on the medium, with padding.
    """

    name: str
    identity: int
    block_bytes: int
    stored_bytes: int

    @abstractmethod
    def begin_request(self, request_id: str) -> object:
        """Open the tier's record of a request, and return the record, for later calls.

        Repeated lookups of a block in a request count as one use.
        """

    @abstractmethod
    def finish_request(self, request: object, path: Keys) -> None:
        """Close the record of a request.

        `path` has all blocks that the request used, whether computed or loaded from any source.
        """

    @abstractmethod
    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        """Return a mask of the blocks that can be read now. Does no I/O. Cost: one index probe per key."""

    def missed(self, keys: Keys) -> None:  # noqa: B027  (for rules that learn the value of blocks)
        """Record, for admission rules, that a lookup did not find these blocks in RAM.

        This tier may have the blocks or not. Callers report the misses of a request before the uses of the
        request, and may report a block several times.
        """

    def set_tenants(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        """Replace the quotas of tenants, like `OffloadingManager.set_tenants`.

        Blocks of earlier runs belong to no tenant and are evicted first. A block that a tenant loads belongs
        to this tenant from then on.

        Args:
            owner_of: returns the tenant of a batch. Called within `submit_write` and `submit_read`.

        Raises: `ConfigError` for an invalid quota, or for any quota if the tier does not support quotas.
        """
        if quotas:
            raise ConfigError("tenants", ", ".join(quotas), f"the tier {self.name} takes no quotas")

    def tenants(self) -> dict[str, TenantStats]:
        """Return the counts of each tenant; empty if no quotas are set."""
        return {}

    def read_room(self, keys: Keys) -> int:
        """Return the number of leading `keys` that a read may contain now.

        A read of further blocks would fail at once; read them when jobs in flight have ended. Does no I/O.
        """
        return len(keys)

    @abstractmethod
    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """Start a job that reads block `i` into ``pool[rows[i]]``; returns the job's number.

        Absent and damaged blocks are False in the result; the contents of their rows are undefined.
        """

    @abstractmethod
    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """Start a job that writes block `i` from ``pool[rows[i]]``.

        Returns the job's number, and a mask of the accepted blocks.

        The tier accepts no block that it already has, or that its admission rule or policy refuses. While its
        queue is full, it accepts no block at all. The job's result has one row for each accepted block. If no
        block is accepted, no job begins, and the number is `NO_JOB`.

        If `request` is None, the offer does not count as a use of the blocks.
        """

    @property
    @abstractmethod
    def queue_room(self) -> int:
        """Number of blocks that the write queue still accepts; ``sys.maxsize`` if the queue has no limit.

        An empty queue accepts at least one block.
        """

    @abstractmethod
    def finished(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""

    @abstractmethod
    def delete(self, keys: Keys) -> int:
        """Forget blocks; returns the number of blocks that were present."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block. The tier must not serve these blocks after a restart either.

        A shared tier forgets the blocks of all machines; each machine notices the reset at its next exchange
        with the server. Until the server confirms the reset, this process finds no blocks.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and its blocks are durable; return False on time-out."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """End the jobs in flight, make blocks durable if the tier is persistent, and release the medium.
        Idempotent."""


class SharedTier(SecondaryTier):
    """A tier that several machines share: other machines write to its server, and the server evicts blocks.

    `contains` reads a presence cache of this process. If the cache lists a block that the server has lost,
    the read is a miss (`JobResult.stale`). `unknown` returns the blocks without an entry in the cache, and
    `submit_probe` asks the server whether it has them. Every job ends in bounded time, even if the network
    fails. After a job has ended, nothing writes to the job's rows.

    Attributes:
        probe_timeout_s: longest duration of a probe, and longest time that a request waits for probes.
    """

    probe_timeout_s: float

    @abstractmethod
    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        """Return a mask of the blocks that a probe should ask for: they have no entry in the presence cache.

        The mask is False for blocks that the tier cannot ask for, for example while the server is down.
        Does no I/O. Cost: one lookup in the presence cache per key.
        """

    @abstractmethod
    def submit_probe(self, keys: Keys) -> int:
        """Start a job that probes the server for blocks; returns its number, or `NO_JOB` if no probe is sent.

        The job's result is True for the blocks that the server has. For some seconds after the job, `unknown`
        is False for the probed blocks, even if the job failed.
        """

    @abstractmethod
    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        """Return the blocks that were stored or removed since the last call, in order, as (keys, removed).

        - ``removed`` False: this process has written the blocks, and the server has confirmed the writes.
        - ``removed`` True: a probe or read found these blocks missing, or the tier no longer tracks them, for
          example after a reset.

        Blocks that other processes wrote are not reported, and neither are changes before the first call.
        """


class GroupedTier(SecondaryTier):
    """A tier that stores consecutive blocks of a path as one group. Callers report paths with `extend_path`.

    Attributes:
        group_blocks: blocks in a group, counted from the beginning of a path; 1 for no groups. Only whole
            groups are written.
    """

    group_blocks: int

    @abstractmethod
    def extend_path(self, request: object, path: Keys) -> None:
        """Record the known part of a request's path, from the first block.

        Call it before lookups and writes of the path's blocks, and again after the path has grown. The tier
        must copy the keys that it stores, because `path` is a view. Cost: O(new blocks).
        """

    @abstractmethod
    def cut(self, keys: Keys, room: int) -> int:
        """Return the number of leading `keys` to offer, at most `room`. If possible, cuts between two groups.

        Cost: like `contains`.
        """


NO_JOB = -1


class JobResult(NamedTuple):
    """The result of a job.

    Attributes:
        job: number of the job.
        ok: shape ``(n,)``; True for sound blocks of a read, durable blocks of a write, and present blocks of
            a probe.
        seconds: from submission to end, including time in queues.
        stale: shape ``(n,)``; True for blocks that a shared tier's presence cache listed, although the server
            had lost them. They count neither as failed nor as damaged. None if no block is stale.
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
    """Blocks that the tier's admission rule or policy refused."""
    dropped: int = 0
    """Blocks not accepted, because the tier was busy or its write budget was spent."""
    failed: int = 0
    """Blocks not written or not read, because the medium failed."""
    mismatches: int = 0
    """Blocks read with a wrong checksum. They count as misses and are forgotten."""
    restored: int = 0
    """Blocks found when the tier was opened."""
    journal_damage: int = 0
    """Number of unreadable parts of the tier's own records (its journal). Their contents are lost."""
    bytes_written: int = 0
    bytes_read: int = 0
    free: int = 0
    """Number of empty slots."""
    in_flight: int = 0
    """Blocks that are being written or read."""
    write_budget_bytes: int | None = None
    """Bytes that may still be written in the current 24 hours; None if there is no limit."""
    probes: int = 0
    """Blocks for which probes were sent to a shared tier."""
    probe_hits: int = 0
    """Probed blocks that were present."""
    stale: int = 0
    """Blocks that a shared tier's presence cache listed, although the server had lost them."""
    timeouts: int = 0
    """Blocks of jobs that exceeded their deadline."""
    skipped: int = 0
    """Blocks not written, because another machine had written them."""
    circuit_open: int = 0
    """Number of nodes of a shared tier with an open circuit breaker."""
    outages: int = 0
    """Number of outages, summed over nodes. An outage begins when a node's circuit breaker stops reads."""
    outage_s: float = 0.0
    """Duration of all outages in seconds, summed over nodes. Includes the duration of the failed exchange
    that started each outage.
    """
    puts: int = 0
    """Write requests to a bucket."""
    gets: int = 0
    """Number of read requests and probe requests to a bucket."""
    errors: int = 0
    """Number of calls of the tier's methods that raised an exception."""
    cost: float = 0.0
    """Cost of a bucket's requests and received bytes, at the configured prices."""


def check_tiers(tiers: Sequence[SecondaryTier]) -> None:
    """Raise `ConfigError` if `tiers` is not a list of tiers."""
    if not isinstance(tiers, Sequence) or not all(isinstance(tier, SecondaryTier) for tier in tiers):
        raise ConfigError("tiers", tiers, "allowed: a list of tiers, each a SecondaryTier")


def checked_rows(keys: Keys, pool: Blocks, rows: Rows, block_bytes: int) -> npt.NDArray[np.int64]:
    """Check the rows of a job against its pool and keys; returns a copy, because the job outlives the call.

    Raises: `ValueError` or `IndexError` if a check fails.
    """
    if pool.ndim != 2 or pool.dtype.itemsize != 1:
        raise ValueError(
            f"the pool is {pool.dtype} of shape {pool.shape}; allowed: bytes (slots, block_bytes)"
        )
    if pool.shape[1] != block_bytes:
        raise ValueError(f"the pool has blocks of {pool.shape[1]} bytes, this tier of {block_bytes}")
    checked: npt.NDArray[np.int64] = check_rows("rows", rows, len(pool)).copy()
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
