"""What tiers share: their contract, and the checksum that binds a block's bytes to its key.

Does not know media or devices.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

HOUR_S = 3600


class Memory(Protocol):
    """The memory behind RAM's slots, as `MemoryTier` has it: where tiers read to and write from."""

    @property
    def pool(self) -> Blocks: ...
    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None: ...
    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask: ...


class SecondaryTier(Protocol):
    """A place for blocks behind RAM: it finds them by key, works in the background, and may forget them.

    `StripedTier` makes one tier of several, and `BudgetedTier` bounds the bytes written to one.

    Reads and writes are jobs. `submit_read` and `submit_write` return at once, the tier's own threads do the
    work, and `finished` returns how each job ended. From its submission to its end a job owns the rows of the
    pool that it names. No failure of the medium is an exception: a block that cannot be written or read, or
    that is not what was stored under its key, is False in the result of its job, and `contains` is False for
    it from then on. If `submit_read` or `submit_write` raises all the same, nothing has begun.

    A tier that several machines share (`shared`) does not know what it holds: others write, and its engine
    evicts. There `contains` says what this process believes, a block that is believed to be there and is not
    is a miss (`JobResult.stale`), `unknown` names the blocks of which it believes nothing, and `submit_probe`
    asks for them. Whatever happens to the network, every job ends in bounded time, and from its end on
    nothing writes to its rows. Other tiers need not implement these.

    Thread: all methods on one thread, the scheduler's; only `drain` and `close` wait for the medium. The
    effect of a job is not visible to jobs that were submitted before it ended.

    Attributes:
        name: name in reports and metrics: ``disk``.
        identity: 64 bits that identify this tier, the same in every life; keys are distributed by it.
        block_bytes: bytes of a block.
        stored_bytes: bytes that writing a block costs the medium, including padding.
        written_before: blocks written in earlier lives, by hour since 1970; empty if the tier does not
            remember.
        shared: whether machines share it.
        measured_read: of a shared tier, seconds of a round trip and bytes a second when it was opened; None
            if that was not measured.
        probe_timeout_s: the time after which a probe has ended, and the longest that a request waits for one.
        group_blocks: so many consecutive blocks of a path, counted from its beginning, are written together
            or not at all. Above 1 the tier has to be told of paths: `follow`.
    """

    name: str
    identity: int
    block_bytes: int
    stored_bytes: int
    written_before: Mapping[int, int]
    shared: bool = False
    probe_timeout_s: float = 0.0
    group_blocks: int = 1
    measured_read: tuple[float, float] | None = None

    def begin_request(self, request_id: str) -> object:
        """Open the tier's record of a request: a block counts as used once, however often it is asked for."""
        ...

    def follow(self, request: object, path: Keys) -> None:
        """The request's path from its beginning, as far as it is known: before the tier is asked for its
        blocks or offered them, again when more is known. A view: it is not kept. Cost: O(what is new)."""
        return

    def cut(self, keys: Keys, room: int) -> int:
        """How many of these to offer first where there is room for so many: fewer, so that no group is cut in
        two. Cost: as `contains`."""
        return min(room, len(keys))

    def finish_request(self, request: object, path: Keys) -> None:
        """The request used these blocks, wherever they were served from. This is its last call."""
        ...

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        """Which blocks can be read now: written and not forgotten. No I/O; cost: one index probe a key."""
        ...

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        """Which blocks may be here or not, and a probe would tell. No I/O; cost: one index probe a key."""
        return np.zeros(len(keys), np.bool_)

    def submit_probe(self, keys: Keys) -> int:
        """Begin to ask whether blocks are here; returns the number of the job, or `NO_JOB` if it cannot ask.

        Its result says which are. After it, and also if nobody answered, they are not `unknown` for a while.
        """
        return NO_JOB

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """Begin to read blocks into ``pool[rows[i]]``; returns the number of the job.

        Blocks that are absent or damaged are False in the result; the contents of their rows are undefined.
        """
        ...

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """Begin to write blocks from ``pool[rows[i]]``; returns the job's number, and which blocks it takes.

        The tier leaves out blocks that it has, that its admission rule or policy refuses, and, when its queue
        is full, all blocks: it drops rather than delays. If it takes none there is no job, and the number is
        `NO_JOB`. The result has one row for each block taken.
        """
        ...

    @property
    def queue_room(self) -> int:
        """How many more blocks it can queue for writing now: of more it drops the rest. While there is none
        a job is under way."""
        return sys.maxsize

    def finished(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        ...

    def delete(self, keys: Keys) -> int:
        """Forget blocks that are not trusted or not wanted; returns how many were here."""
        ...

    def clear(self) -> None:
        """Forget every block permanently: also a later life of the tier must not serve it.

        A shared tier forgets for all who share it, as far as they come to know of it; until its engine has
        confirmed that, it holds nothing for this process.
        """
        ...

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        """Of a shared tier, since the last call, in order: blocks that this process has written there, which
        is confirmed, and (True) those of them that it has found gone, or cannot vouch for any longer.

        Nothing is said of what others have written, nor before the first call.
        """
        return []

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and its blocks would survive a crash; False on time-out."""
        ...

    def stats(self) -> TierStats:
        """A copy of the counters."""
        ...

    def close(self) -> None:
        """End the jobs under way, make blocks durable if the tier does so, release the medium. Idempotent."""
        ...


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
