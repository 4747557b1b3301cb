"""The disk tier: jobs over the volumes of one or several directories.

Owns jobs, the share that each directory gets of the blocks, the bounds of the queue and of what may be
written in a day. Which blocks a directory keeps, and how they survive, is the affair of its volume.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import NO_JOB, JobResult, Mask, TierStats, key_digests
from kvoffload.tiers.disk.endurance import EnduranceBudget
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.notices import Notices
from kvoffload.tiers.disk.opening import Geometry
from kvoffload.tiers.disk.pipeline import Chunk
from kvoffload.tiers.disk.recovery import Progress
from kvoffload.tiers.disk.volume import Part, Volume
from kvoffload.transfer import Blocks, Rows, check_rows

CLOSE_TIMEOUT_S = 10.0


@dataclass(eq=False)
class _Request:
    """What the tier knows of a request: its contexts, by volume, and the generations that it wrote."""

    contexts: list[RequestContext]
    written: list[list[npt.NDArray[np.uint64]]] = field(default_factory=list)
    finished: bool = False


@dataclass(eq=False)
class _Job:
    number: int
    ok: Mask
    began: float
    writes: bool
    remaining: int = 0


class DiskTier:
    """Blocks on local disks, bounded in bytes, verified when they are read, and there after a crash.

    A `SecondaryTier`: see there for the contract of each method. Beyond it: a write is reported when its
    blocks would survive a power loss; the tier opens after a crash at any instant with every block that was
    reported and not evicted since, in the order of its policy; what it reads is served if key, producer,
    length, generation and checksum are those of the write, and otherwise forgotten and counted. What is in
    docs/formats.md holds for every file system that keeps what it has synced.

    Each directory is a slab of its own with a manager of its own. A key belongs to one of them, by its
    digest, and mostly still does when a directory is added. One that fails costs its own blocks.

    Args:
        paths: one directory, or several.
        capacity_bytes: of all directories together, in equal shares. Slab, journal and lock file take no
            byte more, and the room is reserved when the slab is made.
        block_bytes: bytes of a block. Multiples of 4096 that lie so in their pool are moved without a copy.
        key_bytes: length of every key.
        fingerprint: says whose blocks these are: model, dtype, layout, parallel shape. Blocks of another
            one are never served: their slab is set aside.
        policy, admission: who leaves, and who may enter; as for `OffloadingManager`. An `Admission` object
            serves one directory.
        max_write_bytes_per_day: what may be written to all directories in any 24 hours.
        num_threads: that move blocks, for each directory. From two on, one of them only reads.
        queue_bytes: writes that may be waiting; what comes on top is dropped.
        progress: told how far the metadata have been read, when there is much to open.
        files: the way to the system; for tests.
        clock: seconds since 1970; for the budget.

    Memory: 210 bytes a block; 4 MiB a thread where blocks are no whole pages.
    Raises: `ConfigError` for what cannot be used; `MisuseError` after `close`.
    """

    name = "disk"
    medium = "STORAGE"

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        capacity_bytes: int,
        block_bytes: int,
        *,
        key_bytes: int = 32,
        fingerprint: str,
        policy: str | type[EvictionPolicy] = "lru",
        admission: str | Admission | None = "all",
        max_write_bytes_per_day: int | None = None,
        num_threads: int = 16,
        queue_bytes: int = 256 * 1024 * 1024,
        progress: Progress | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        directories = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
        _check(directories, fingerprint, admission, max_write_bytes_per_day, num_threads, queue_bytes)
        layout = Layout.within(capacity_bytes // len(directories), block_bytes, key_bytes)
        geometry = Geometry(layout, capacity_bytes // len(directories), fingerprint)
        self.block_bytes, self.key_bytes = block_bytes, key_bytes
        self._ended: deque[Chunk] = deque()
        self._volumes: list[Volume] = []
        try:
            for directory in directories:
                self._volumes.append(
                    Volume(
                        directory, geometry, policy=policy, admission=admission, num_threads=num_threads,
                        deliver=self._ended.append, files=files or Files(),
                        notices=Notices("kvoffload.disk"), progress=progress,
                    )
                )  # fmt: skip
        except BaseException:
            for volume in self._volumes:
                volume.close(CLOSE_TIMEOUT_S)
            raise
        self._slot_bytes = layout.slot_bytes
        self._queue_blocks = max(1, queue_bytes // layout.slot_bytes)
        self._num_queued = 0
        self._budget = EnduranceBudget(max_write_bytes_per_day, clock)
        for volume in self._volumes:
            self._budget.restore(volume.written_before, layout.slot_bytes)
        self._salts = np.array([volume.slab_id for volume in self._volumes], np.uint64)
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._next_job = 0
        self._num_dropped = 0
        self._closed = False

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        """As `SecondaryTier.begin_request`."""
        contexts = [volume.manager.begin_request(request_id) for volume in self._volumes]
        return _Request(contexts, [[] for _ in self._volumes])

    def finish_request(self, request: object, path: Keys) -> None:
        """As `SecondaryTier.finish_request`."""
        known = self._request(request)
        for number, rows in self._routed(path):
            own = known.written[number]
            written = np.concatenate(own) if own else np.empty(0, np.uint64)
            self._volumes[number].finish_request(known.contexts[number], _select(path, rows), written)
        known.finished = True

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        """As `SecondaryTier.contains`."""
        found = np.zeros(len(keys), np.bool_)
        known = self._request(request) if request is not None else None
        for number, rows in self._routed(keys):
            asked = _select(keys, rows)
            if known is not None:
                # What a request asks for is not evicted for what it writes.
                known.contexts[number].see(asked)
            found[rows] = self._volumes[number].ready_slots(asked)[1]
        return found

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """As `SecondaryTier.submit_read`."""
        checked = self._checked(keys, pool, rows)
        job = self._begin(len(keys), writes=False)
        for number, at in self._routed(keys):
            part = self._volumes[number].submit_read(job.number, at, _select(keys, at), pool, checked[at])
            job.remaining += part is not None
        if job.remaining == 0:
            self._finish(job)
        return job.number

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """As `SecondaryTier.submit_write`. Of what does not fit into the queue the head is taken."""
        checked = self._checked(keys, pool, rows)
        known = self._request(request) if request is not None else None
        room, budget_bytes = self._queue_blocks - self._num_queued, self._budget.left()
        if budget_bytes is not None:
            room = min(room, budget_bytes // self._slot_bytes)
        taken = np.zeros(len(keys), np.bool_)
        parts: list[Part] = []
        for number, at in self._routed(keys):
            volume = self._volumes[number]
            wanted = volume.missing(_select(keys, at))
            allowed = max(0, room) if volume.accepts_writes else 0
            if len(wanted) > allowed:
                self._num_dropped += len(wanted) - allowed
                at = at[: wanted[allowed]]
            if len(wanted) == 0 or allowed == 0:
                continue
            ctx = known.contexts[number] if known is not None else None
            part = volume.submit_write(self._next_job, at, _select(keys, at), pool, checked[at], ctx)
            if part is not None:
                parts.append(part)
                taken[part.at] = True
                room -= len(part.at)
                if known is not None:
                    known.written[number].append(part.generations)
        count = int(np.count_nonzero(taken))
        if count == 0:
            return NO_JOB, taken
        self._budget.spend(count * self._slot_bytes)
        self._num_queued += count
        # The result has one row for each block that was taken.
        place = np.cumsum(taken) - 1
        for part in parts:
            part.at = place[part.at]
        job = self._begin(count, writes=True)
        job.remaining = len(parts)
        return job.number, taken

    def finished(self) -> list[JobResult]:
        """As `SecondaryTier.finished`."""
        while self._ended:
            chunk = self._ended.popleft()
            part: Part = chunk.owner
            part.outcomes[chunk.index], part.checksums[chunk.index] = chunk.outcomes, chunk.checksums
            part.remaining -= 1
            if part.remaining == 0:
                job = self._jobs[part.job]
                job.ok[part.at] = part.volume.end(part)
                job.remaining -= 1
                if job.remaining == 0:
                    self._finish(job)
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        """As `SecondaryTier.delete`."""
        return sum(self._volumes[number].delete(_select(keys, rows)) for number, rows in self._routed(keys))

    def clear(self) -> None:
        """As `SecondaryTier.clear`; durable after a `drain`."""
        for volume in self._volumes:
            volume.clear()

    def drain(self, timeout_s: float) -> bool:
        """As `SecondaryTier.drain`. Deletions, accesses and `clear` are durable as well; when the journal has
        failed only `clear` is."""
        deadline = time.monotonic() + timeout_s
        # Every volume is asked, also when one hangs.
        drained = [volume.drain(max(0.0, deadline - time.monotonic())) for volume in self._volumes]
        return all(drained)

    def stats(self) -> TierStats:
        """As `SecondaryTier.stats`."""
        stats = TierStats(dropped=self._num_dropped, write_budget_bytes=self._budget.left())
        for volume in self._volumes:
            counts = volume.manager.stats()
            stats.capacity += counts.capacity
            stats.ready += counts.ready
            stats.free += counts.free
            stats.in_flight += counts.writing + counts.ready - counts.evictable
            stats.evicted += counts.evicted
            stats.refused += counts.refused
            stats.dropped += counts.dropped
            stats.written += volume.written
            stats.read += volume.read
            stats.failed += volume.failed
            stats.mismatches += volume.mismatches
            stats.restored += volume.restored
            stats.journal_damage += volume.damaged
        stats.bytes_written = stats.written * self.block_bytes
        stats.bytes_read = stats.read * self.block_bytes
        return stats

    def close(self) -> None:
        """As `SecondaryTier.close`. Returns after some seconds also when a disk hangs."""
        if not self._closed:
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            self.drain(CLOSE_TIMEOUT_S)
            for volume in self._volumes:
                volume.close(max(0.1, deadline - time.monotonic()))
            self._closed = True

    # ---- inside

    def _routed(self, keys: Keys) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """The rows of each volume that has any. By highest random weight, so that most keys stay where they
        are when directories are added (Thaler and Ravishankar, IEEE/ACM Transactions on Networking 1998)."""
        if len(self._volumes) == 1:
            return [(0, np.arange(len(keys)))] if len(keys) else []
        weights = key_digests(keys)[:, None] ^ self._salts
        weights *= np.uint64(0x9E3779B97F4A7C15)
        weights ^= weights >> np.uint64(32)
        weights *= np.uint64(0xD6E8FEB86659FD93)
        homes = np.argmax(weights, axis=1)
        return [(number, np.flatnonzero(homes == number)) for number in np.unique(homes).tolist()]

    def _checked(self, keys: Keys, pool: Blocks, rows: Rows) -> npt.NDArray[np.int64]:
        if self._closed:
            raise MisuseError("this disk tier is closed")
        if pool.shape[1] != self.block_bytes:
            raise ValueError(f"a pool with blocks of {pool.shape[1]} bytes; this tier has {self.block_bytes}")
        checked = check_rows("rows", rows, len(pool))
        if len(checked) != len(keys):
            raise ValueError(f"{len(keys)} keys but {len(checked)} rows")
        return checked

    def _request(self, request: object) -> _Request:
        if not isinstance(request, _Request) or request.finished:
            raise MisuseError(f"no request of this tier, or one that has finished: {request!r}")
        return request

    def _begin(self, count: int, *, writes: bool) -> _Job:
        job = _Job(self._next_job, np.zeros(count, np.bool_), time.monotonic(), writes)
        self._next_job += 1
        self._jobs[job.number] = job
        return job

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.number]
        if job.writes:
            self._num_queued -= len(job.ok)
        self._results.append(JobResult(job.number, job.ok, time.monotonic() - job.began))


def _select(keys: Keys, rows: npt.NDArray[np.int64]) -> Keys:
    return keys if len(rows) == len(keys) else Keys(np.ascontiguousarray(keys.words[rows]), keys.key_bytes)


def _check(
    directories: list[Path],
    fingerprint: str,
    admission: str | Admission | None,
    max_write_bytes_per_day: int | None,
    num_threads: int,
    queue_bytes: int,
) -> None:
    if not directories:
        raise ConfigError("paths", [], "one directory, or several")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError("paths", [str(directory) for directory in directories], "each directory once")
    if not isinstance(fingerprint, str) or not fingerprint:
        raise ConfigError("fingerprint", fingerprint, "a text that says whose blocks these are")
    if isinstance(admission, Admission) and len(directories) > 1:
        raise ConfigError(
            "admission", admission, "with several directories: its name, since each has its own"
        )
    for field_, value in (("num_threads", num_threads), ("queue_bytes", queue_bytes)):
        if value < 1:
            raise ConfigError(field_, value, "it is at least 1")
    if max_write_bytes_per_day is not None and max_write_bytes_per_day < 0:
        raise ConfigError(
            "max_write_bytes_per_day", max_write_bytes_per_day, "it is not negative; None for no limit"
        )
