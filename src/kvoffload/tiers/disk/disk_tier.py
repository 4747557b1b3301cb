"""The disk tier on the scheduler's thread: decisions and jobs.

Owns the jobs, and the manager that decides which blocks the slab keeps. Never waits for the disk: other
threads move and commit blocks, and `finished` collects the results.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.errors import ConfigError, MisuseError, UnavailableError, check_integer
from kvoffload.settings.paths import expanded
from kvoffload.structures.keys import Keys
from kvoffload.text import size
from kvoffload.tiers.contract import NO_JOB, Checksums, JobResult, Mask, TierStats, checked_rows
from kvoffload.tiers.disk.chunk import Chunk, Stamps
from kvoffload.tiers.disk.committer import Committer
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.pipeline import Pipeline
from kvoffload.tiers.disk.placement import Placement
from kvoffload.tiers.disk.recovery import Contents, Progress
from kvoffload.tiers.disk.slab import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MISMATCH,
    REFUSED,
    SOUND,
    UNREADABLE,
    Outcomes,
    Positions,
)
from kvoffload.tiers.disk.slab_directory import Geometry, open_directory
from kvoffload.tiers.disk.slab_format import MAX_NUMBER, REUSE, SlabSlots
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.memory import available_bytes
from kvoffload.tiers.offer import ManagedTier, Purse
from kvoffload.tiers.producer_text import check_producer_text
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.waiting import Backoff
from kvoffload.tiers.write_budget import WriteBudget
from kvoffload.transfer import Blocks, Rows

READ_CHUNK_BYTES = 512 * 1024
"""Smallest chunk into which a read is split for the threads. A smaller chunk is not worthwhile: passing it to
a thread takes as long as reading and verifying 128 KiB."""

REFUSED_READS_S = 60.0
"""Seconds for which a block is kept although the system refuses to read it (ENOMEM, ESTALE). If the system
still refuses afterwards, the tier forgets the block.
"""
_MAX_REFUSED = 1 << 16

_NO_GENERATIONS = np.empty(0, np.uint64)
_LATEST_NS = MAX_NUMBER - (1 << 60)
"""A tier that is opened continues its generations at the present time in nanoseconds since 1970, or at the
next generation if this is greater. This constant limits the time, so that 2^60 generations are left even if
the clock is centuries ahead."""
_MOST_THREADS = 1024
_MEMORY_PER_BLOCK = 210


@dataclass(eq=False)
class _Request:
    """The tier's record of a request.

    Attributes:
        context: the request in the tier's manager.
        written: generations of the blocks that the request wrote.
    """

    context: RequestContext
    written: list[npt.NDArray[np.uint64]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A read or write in flight.

    Attributes:
        plan: the blocks, pinned or in flight until the job ends.
        ok: result mask, one row for each block that the caller has given to the job.
        at: for each block of the plan, its row in `ok`.
        generations, checksums: the expected values of a read. A write sets the checksums as chunks end.
        outcomes: outcome of each block.
        began: start time in seconds of the monotonic clock.
        remaining: number of chunks that have not been delivered.
    """

    number: int
    plan: LoadPlan | StorePlan
    ok: Mask
    at: Positions
    generations: npt.NDArray[np.uint64]
    checksums: Checksums
    outcomes: Outcomes
    began: float
    remaining: int = 0


class DiskTier(ManagedTier):
    """Blocks in a directory: bounded in bytes, verified when read, durable across crashes.

    In addition to the contract of `SecondaryTier`, this tier guarantees:

    - A write is reported as finished only when its blocks survive a power loss.
    - After a crash at any instant, the tier opens with every block whose write was reported as finished,
      except evicted and removed blocks. The order of the blocks in the tier's policy is restored.
    - A block is served only if its key, producer, length, generation and checksum are as they were written.
      Any other block is forgotten and counted.

    The guarantees hold on every file system that keeps synced data; see docs/formats.md. For several disks
    use a `StripedTier` of disk tiers.

    Args:
        path: the directory, created if absent. One process may have the directory open at a time.
        capacity_bytes: limit of all files in the directory, in bytes; the space is reserved at opening.
        block_bytes: bytes of a block. Blocks of whole pages in an aligned pool are moved without a copy.
        key_bytes: length of every key.
        fingerprint: identifies the producer: model, dtype, layout, parallel shape. Each producer has its own
            slab and never gets blocks of another producer. Other producers' slabs stay until their space is
            needed.
        policy, admission: eviction policy and admission rule, as for `OffloadingManager`.
        num_threads: number of threads that move blocks. With two or more threads, one thread only reads.
        queue_bytes: limit of the write queue in bytes. Writes that exceed the limit are dropped.
        write_budget: limit of the bytes written in a day, against wear of the disk.
        progress: called at opening, with the bytes of metadata read so far and the total.
        files: system calls and clocks, for tests.

    Memory: 210 bytes a block; 4 MiB a thread unless blocks are whole pages.

    Raises:
        ConfigError: an option is invalid.
        UnavailableError: the directory is full, unreadable, or open in another process.
        MisuseError: the tier is closed, or was opened before this process was forked.
    """

    name = "disk"
    close_timeout_s = 10.0
    """Longest wait of `close`."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        block_bytes: int,
        *,
        key_bytes: int = 32,
        fingerprint: str,
        policy: str | type[EvictionPolicy] = "lru",
        admission: str | Admission | None = "all",
        num_threads: int = 16,
        queue_bytes: int = 256 * 1024 * 1024,
        write_budget: WriteBudget | None = None,
        progress: Progress | None = None,
        files: Files | None = None,
    ) -> None:
        check_producer_text("fingerprint", fingerprint)
        num_threads = check_integer("num_threads", num_threads, _MOST_THREADS)
        queue_bytes = check_integer("queue_bytes", queue_bytes, sys.maxsize)

        def manager_of(layout: Layout) -> OffloadingManager:
            return OffloadingManager(
                layout.num_blocks, key_bytes=key_bytes, policy=policy, admission=admission
            )

        layout = Layout.within(capacity_bytes, block_bytes, key_bytes)
        _check_memory(capacity_bytes, layout)
        # Before anything is open, because the options may be invalid.
        super().__init__(manager_of(layout))
        self._directory, self._log = _directory_of(path), RateLimitedLog("kvoffload.disk")
        self._files = files or Files()
        self.block_bytes, self.stored_bytes = block_bytes, layout.slot_bytes
        self._write_backoff, self._may_write_at_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        self._refused = dict[int, float]()
        self._queue_blocks, self._num_queued = max(1, queue_bytes // layout.slot_bytes), 0
        self._next_job, self._results = 0, list[JobResult]()
        self._closed, self._ending = False, threading.Lock()
        geometry = Geometry(layout, capacity_bytes, fingerprint)
        self._lock, self._slab, self._journal, contents = open_directory(
            self._directory, geometry, self._files, self._log, progress
        )
        with ExitStack() as undo:
            # A user's policy may raise during the restoration.
            undo.callback(self._lock.release)
            undo.callback(self._slab.close)
            if self._slab.layout.num_blocks != layout.num_blocks:
                # After changes of the capacity the journal may be longer than in a new slab, so fewer blocks
                # fit.
                self._manager = manager_of(self._slab.layout)
            unrestored = self._restore(contents)
            if write_budget is not None:
                self._purse = Purse(write_budget, self._manager, self.stored_bytes, contents.written)
            self._start_threads(num_threads)
            if len(unrestored):
                self._placement.set_gate(unrestored, self._committer.remove(unrestored))
            undo.pop_all()

    def _restore(self, contents: Contents) -> SlabSlots:
        """Register the slab's blocks in the manager; return slots whose blocks the manager cannot hold."""
        # At least the time, because a crashed process may have written blocks that the journal lacks.
        now_ns = min(int(self._files.time_s() * 1e9), _LATEST_NS)
        next_generation = max(contents.last_generation + 1, self._slab.void_before, now_ns)
        self._placement = Placement(self._slab.layout, next_generation)
        unrestored = self._placement.restore(contents, self._manager)
        self._next_stamp = int(contents.stamp.max(initial=0)) + 1
        self.identity, self.written_before = self._slab.identity.slab_id, contents.written
        self._counts.restored = self._manager.stats().ready
        self._usable_end = self._last_reserved = self._slab.layout.num_slots
        if not self._slab.may_grow:
            self._confine()
        return unrestored

    def _start_threads(self, num_threads: int) -> None:
        self._num_threads, self._delivered = num_threads, deque[Chunk]()
        self._committer = Committer(self._slab, self._journal, self._log)
        try:
            self._pipeline = Pipeline(
                self._slab, self._committer, num_threads, self._delivered.append, self._log
            )
        except RuntimeError as error:
            why = f"the threads cannot be started ({error})"
            raise UnavailableError("num_threads", num_threads, why) from None

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return _Request(self._manager.begin_request(request_id))

    def finish_request(self, request: object, path: Keys) -> None:
        self._check_process()
        record = self._request_of(request)
        self._manager.finish_request(record.context, path)
        # From tail to head, as the policy expects: the head of the prefix becomes the most recent.
        slots = self._manager.slots_of(path)[::-1]
        slots = slots[slots >= 0]
        if len(slots):
            own = np.concatenate([_NO_GENERATIONS, *record.written])
            records = self._placement.places(slots).astype(np.uint32)
            records[~np.isin(self._placement.generation[slots], own)] |= REUSE
            self._committer.access(records, self._stamps(len(slots)))

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        if request is not None:
            # Protects the request's blocks from eviction by the request's own writes.
            self._request_of(request).context.extend(keys)
        present: Mask = self._manager.ready_slots_of(keys) >= 0
        return present

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked = self._checked(keys, pool, rows)
        at = np.flatnonzero(self._manager.ready_slots_of(keys) >= 0)
        ok = np.zeros(len(keys), np.bool_)
        if len(at):
            reader = self._owned(keys)
            return self._submit(self._manager.prepare_load(keys.take(at), reader), ok, at, pool, checked[at])
        job = self._new_job()
        self._results.append(JobResult(job, ok, 0.0))
        return job

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """Queue a write, see `SecondaryTier.submit_write`.

        If the blocks exceed the room in the queue or the write budget, the tier accepts the leading blocks
        that fit.
        """
        checked = self._checked(keys, pool, rows)
        record = self._request_of(request) if request is not None else None
        self._follow_file_growth(len(keys))
        accepted = np.zeros(len(keys), np.bool_)
        room = max(0, self._queue_blocks - self._num_queued) if self.accepts_writes else 0
        plan, at = self._prepare_offer(keys, None if record is None else record.context, room)
        if plan is None:
            return NO_JOB, accepted
        if len(plan.evicted):
            # New blocks get the places that were emptied first, because their removals are probably durable.
            evicted = plan.slots[-len(plan.evicted) :]
            self._forget(evicted)
            self._placement.rotate(evicted)
        self._placement.renew(plan.slots)
        if record is not None:
            record.written.append(self._placement.generation[plan.slots])
        accepted[at], count = True, len(at)
        self._num_queued += count
        return self._submit(plan, np.zeros(count, np.bool_), np.arange(count), pool, checked[at]), accepted

    @property
    def queue_room(self) -> int:
        """Room in the write queue, in blocks; ``sys.maxsize`` while the tier drops all writes."""
        return max(0, self._queue_blocks - self._num_queued) if self.accepts_writes else sys.maxsize

    def finished(self) -> list[JobResult]:
        self._check_process()
        while self._delivered:
            chunk = self._delivered.popleft()
            job: Job = chunk.owner
            job.outcomes[chunk.index], job.checksums[chunk.index] = chunk.outcomes, chunk.checksums
            job.remaining -= 1
            if job.remaining == 0:
                self._end(job)
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        self._check_process()
        slots = self._manager.ready_slots_of(keys)
        ready = slots >= 0
        if ready.any():
            self._manager.discard(keys.take(ready))
            self._forget(slots[ready])
        return int(np.count_nonzero(ready))

    def clear(self) -> None:
        """Forget all blocks, including blocks in flight. Durable once a later `drain` has succeeded."""
        self._check_process()
        self._committer.void(self._placement.next_generation)
        occupied = np.flatnonzero(self._placement.generation > 0).astype(np.int32)
        self._manager.reset()
        if len(occupied):
            self._forget(occupied)

    def drain(self, timeout_s: float) -> bool:
        """Wait for all jobs, see `SecondaryTier.drain`. Also make deletions, accesses and `clear` durable.

        After a failure of the journal nothing but `clear` can become durable.
        """
        self._check_process()
        return self._pipeline.drain(timeout_s)

    @property
    def accepts_writes(self) -> bool:
        """False during the back-off after a failed write, and forever after a failure of the journal."""
        return not self._committer.broken and self._files.monotonic_s() >= self._may_write_at_s

    def stats(self) -> TierStats:
        stats, purse = super().stats(), self._purse
        stats.capacity -= self._placement.num_withheld
        stats.journal_damage = self._journal.damaged
        stats.write_budget_bytes = None if purse is None else purse.budget.left_bytes_each
        return stats

    def close(self) -> None:
        """Close the tier, see `SecondaryTier.close`. Waits at most `close_timeout_s`.

        If the disk hangs, the file stays open and the directory stays locked, until the disk responds or the
        process ends.
        """
        hung, self._closed = self._closed, True
        if not self._lock.held:
            return
        if self._pipeline.close(self.close_timeout_s):
            self._release()
        elif not hung:
            self._log.warn(
                "hang", "disk tier: %s does not answer, and stays open until it does", self._directory
            )
            threading.Thread(target=self._close_later, daemon=True, name="kvoffload-disk-close").start()

    # ---- inside

    def _close_later(self) -> None:
        self._pipeline.close(None)
        self._release()

    def _release(self) -> None:
        with self._ending:
            self._slab.close()
            self._lock.release()

    def _checked(self, keys: Keys, pool: Blocks, rows: Rows) -> Positions:
        if self._closed or not self._lock.held:
            raise MisuseError("this disk tier is closed, or it was opened before this process was forked")
        return checked_rows(keys, pool, rows, self.block_bytes)

    def _check_process(self) -> None:
        """Raise `MisuseError` in a forked process, which lacks the tier's threads."""
        if self._lock.is_inherited:
            raise MisuseError("this disk tier belongs to the parent process: open a tier after the fork")

    def _request_of(self, request: object) -> _Request:
        if isinstance(request, _Request):
            context = request.context
            if context.owner is self._manager and not context.finished:
                return request
        raise MisuseError(f"this tier has no such request, or it has finished: {request!r}")

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job - 1

    def _submit(
        self, plan: LoadPlan | StorePlan, ok: Mask, at: Positions, pool: Blocks, rows: Positions
    ) -> int:
        placement, slots = self._placement, plan.slots
        outcomes = np.full(len(slots), UNREADABLE, np.uint8)
        job = Job(
            self._new_job(), plan, ok, at, placement.generation[slots], placement.checksum[slots], outcomes,
            self._files.monotonic_s(),
        )  # fmt: skip
        chunks = self._chunks(job, pool, rows)
        job.remaining = len(chunks)
        self._pipeline.submit(chunks)
        return job.number

    def _chunks(self, job: Job, pool: Blocks, rows: Positions) -> list[Chunk]:
        """Split a job into chunks, in ascending order of slots in the slab.

        A read is split evenly among the threads, into chunks of at least `READ_CHUNK_BYTES`.
        """
        plan, writes = job.plan, isinstance(job.plan, StorePlan)
        places = self._placement.places(plan.slots)
        order = np.argsort(places, kind="stable")
        size, gate, stamps = self._slab.chunk_blocks, 0, np.zeros(len(places), np.uint64)
        if writes:
            gate = self._placement.gate(plan.slots)
            # The tail of a prefix gets the first stamp, so that the head is the most recent.
            stamps = self._stamps(len(places))[::-1]
        else:
            least = -(-READ_CHUNK_BYTES // self._slab.layout.slot_bytes)
            size = min(size, max(least, -(-len(places) // self._num_threads)))
        return [
            Chunk(
                job, index, writes, plan.keys.take(index), places[index], job.generations[index],
                pool, rows[index], job.checksums[index], stamps[index], gate,
            )
            for index in np.split(order, range(size, len(order), size))
        ]  # fmt: skip

    def _stamps(self, count: int) -> Stamps:
        stamps = np.arange(self._next_stamp, self._next_stamp + count, dtype=np.uint64)
        self._next_stamp += count
        return stamps

    def _forget(self, slots: SlotArray) -> None:
        """Mark slots as empty. The next writes to their places wait until the removals are durable."""
        emptied = self._placement.empty(slots)
        self._placement.set_gate(emptied, self._committer.remove(emptied))

    def _end(self, job: Job) -> None:
        sound: Mask = job.outcomes == SOUND
        if isinstance(job.plan, StorePlan):
            self._end_write(job, job.plan, sound)
        else:
            self._end_read(job, job.plan, sound)
        job.ok[job.at] = sound
        self._results.append(JobResult(job.number, job.ok, self._files.monotonic_s() - job.began))

    def _end_write(self, job: Job, plan: StorePlan, sound: Mask) -> None:
        num_sound = int(np.count_nonzero(sound))
        self._num_queued -= len(sound)
        self._placement.checksum[plan.slots] = job.checksums
        self._counts.written += num_sound
        if num_sound == len(sound):
            self._manager.complete_store(plan)
            self._write_backoff.reset()
            return
        self._counts.failed += len(sound) - num_sound
        self._placement.generation[plan.slots[~sound]] = 0
        has_grown = (self._placement.places(plan.slots[~sound]) < self._slab.num_reserved).any()
        for block_plan, success in zip(plan.split(), sound.tolist(), strict=True):
            self._manager.complete_store(block_plan, success)
        if has_grown:
            self._may_write_at_s = self._files.monotonic_s() + self._write_backoff.next_s()
        else:
            self._confine()

    def _confine(self) -> None:
        """Reduce the capacity to the slots that the file has now, because the file cannot grow at present."""
        self._usable_end = self._last_reserved = self._slab.num_reserved
        self._placement.confine(self._usable_end, self._manager)

    def _follow_file_growth(self, num_blocks: int) -> None:
        """Raise the capacity that `_confine` has reduced.

        - If the file cannot grow now, the slots in the file are usable.
        - If the file may grow again, `num_blocks` more slots are usable. A write to them makes the file grow.
        - If the file has grown, all slots of the layout are usable.
        """
        end, reserved = self._slab.layout.num_slots, self._slab.num_reserved
        if self._usable_end == end:
            return
        if not self._slab.may_grow:
            end = reserved
        elif reserved == self._last_reserved:
            end = min(end, reserved + num_blocks)
        if end > self._usable_end:
            self._usable_end = end
            self._placement.confine(end, self._manager)

    def _end_read(self, job: Job, plan: LoadPlan, sound: Mask) -> None:
        self._counts.read += int(np.count_nonzero(sound))
        if self._refused:
            for generation in job.generations[sound].tolist():
                self._refused.pop(generation, None)
        bad = np.flatnonzero(~sound)
        # A block that was deleted or replaced during the read is not damaged.
        bad = bad[self._placement.generation[plan.slots[bad]] == job.generations[bad]]
        wrong = bad[job.outcomes[bad] == MISMATCH]
        self._counts.mismatches += len(wrong)
        self._counts.failed += len(bad) - len(wrong)
        bad = bad[[not self._may_retry(job, row) for row in bad.tolist()]] if len(bad) else bad
        self._manager.complete_load(plan, bad)
        if len(bad) == 0:
            return
        for row in wrong[:1].tolist():
            self._log.warn(
                "mismatch", "disk tier: forgot %d blocks with wrong checksums; first: key %s, slot %d of %s",
                len(wrong), plan.keys[row].hex(),
                self._placement.places(plan.slots)[row], self._directory,
            )  # fmt: skip
        self._forget(plan.slots[bad])

    def _may_retry(self, job: Job, row: int) -> bool:
        """Return True to keep a block whose reads the system has refused for less than `REFUSED_READS_S`."""
        generation = int(job.generations[row])
        if job.outcomes[row] != REFUSED:
            self._refused.pop(generation, None)
            return False
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        now = self._files.monotonic_s()
        if now < self._refused.setdefault(generation, now) + REFUSED_READS_S:
            return True
        del self._refused[generation]
        return False


def _check_memory(capacity_bytes: int, layout: Layout) -> None:
    """Raise `UnavailableError` if the metadata of the blocks needs more memory than this process can get."""
    num_blocks, available = layout.num_blocks, available_bytes()
    if (needed := num_blocks * _MEMORY_PER_BLOCK) > available:
        why = f"its {num_blocks:,} blocks need {size(needed)} of memory, and {size(available)} are available"
        raise UnavailableError("capacity_bytes", capacity_bytes, why)


def _directory_of(path: object) -> Path:
    if not isinstance(path, (str, Path)) or not str(path) or "\0" in str(path):
        raise ConfigError("path", path, "allowed: a directory")
    return Path(expanded("path", str(path)))
