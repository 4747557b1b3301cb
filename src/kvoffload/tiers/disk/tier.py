"""The disk tier: one directory, as the scheduler's thread sees it.

Owns a manager that decides which blocks are in the directory and which leave, and the jobs that move them.
Decides and never waits: threads move blocks and commit, and `finished` collects what they hand back.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.errors import ConfigError, MisuseError, UnavailableError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import (
    NO_JOB,
    Checksums,
    JobResult,
    Mask,
    SecondaryTier,
    TierStats,
    checked_rows,
)
from kvoffload.tiers.disk.chunk import Chunk, Stamps
from kvoffload.tiers.disk.committer import Committer
from kvoffload.tiers.disk.directory import Geometry, open_directory
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.format import REUSE
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.pause import WritePause
from kvoffload.tiers.disk.pipeline import Pipeline
from kvoffload.tiers.disk.placement import Placement
from kvoffload.tiers.disk.recovery import Progress
from kvoffload.tiers.disk.slab import MISMATCH, REFUSED, SOUND, UNREADABLE, Outcomes, Positions
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks, Rows

CLOSE_TIMEOUT_S = 10.0
READ_CHUNK_BYTES = 512 * 1024
"""A read is divided among the threads, but not into less than this: to hand a chunk to a thread and back
takes as long as to read and verify 128 KiB."""

REFUSED_READS_S = 60.0
"""A block whose reads the system refuses (ENOMEM, ESTALE) is kept for so long after the first one: such an
error passes, and a block that is forgotten is lost for good."""
_MAX_REFUSED = 1 << 16

_NO_GENERATIONS = np.empty(0, np.uint64)


@dataclass(eq=False)
class _Request:
    """The tier's record of a request: the keys that it asked for, and the generations that it wrote."""

    context: RequestContext
    written: list[npt.NDArray[np.uint64]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """Blocks that are being read or written.

    Attributes:
        plan: the blocks, pinned or in flight until the job ends.
        ok: its result; `at` are the rows of the plan's blocks in it.
        generations, checksums: of a read, the expected ones; of a write, the real ones, set when it ends.
        outcomes: the outcome of each block.
        remaining: chunks that have not been handed back.
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


class DiskTier(SecondaryTier):
    """Blocks in a directory: bounded in bytes, verified when read, and still there after a crash.

    `SecondaryTier` has the contract of each method. In addition: a write is reported when its blocks would
    survive a power loss; after a crash at any instant the tier opens with every block that was reported and
    not evicted since, in the order of its policy; a block is served only if key, producer, length, generation
    and checksum are those of the write, otherwise it is forgotten and counted. The guarantees of
    docs/formats.md hold on every file system that keeps what it has synced.

    For several disks use a `StripedTier` of several of these; a `BudgetedTier` limits the wear of a disk.

    Args:
        path: the directory. It is made if it is absent, and has one owner at a time.
        capacity_bytes: the most that all files in the directory take; reserved when it is opened.
        block_bytes: bytes of a block. Multiples of 4096, if aligned to it in their pool, are moved in place.
        key_bytes: length of every key.
        fingerprint: identifies the producer: model, dtype, layout, parallel shape. Blocks of another producer
            are never served: they have a slab of their own, which stays while its room is not needed.
        policy, admission: which blocks leave, and which may enter; as for `OffloadingManager`.
        num_threads: threads that move blocks. From two on, one of them only reads.
        queue_bytes: bytes of writes that may be queued; more are dropped.
        progress: called while the metadata are read, if there are many.
        files: the system calls; for tests.

    Memory: 210 bytes a block; 4 MiB a thread if blocks are not whole pages.
    Raises: `ConfigError` for options that cannot be used; `UnavailableError` for a directory that cannot be
    used now: another process keeps it open, it has no room, or it cannot be read; `MisuseError` after
    `close`, and in a process that was forked from the one that opened it.
    """

    name = "disk"

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
        progress: Progress | None = None,
        files: Files | None = None,
    ) -> None:
        if not isinstance(fingerprint, str) or not fingerprint:
            raise ConfigError("fingerprint", fingerprint, "allowed: a text that identifies the producer")
        for option, value in (("num_threads", num_threads), ("queue_bytes", queue_bytes)):
            if value < 1:
                raise ConfigError(option, value, "allowed: 1 or more")

        def manager_of(layout: Layout) -> OffloadingManager:
            return OffloadingManager(
                layout.num_blocks, key_bytes=key_bytes, policy=policy, admission=admission
            )

        layout = Layout.within(capacity_bytes, block_bytes, key_bytes)
        # First, because it may raise: nothing is open yet.
        self._manager = manager_of(layout)
        self._directory, self._log = Path(path), RateLimitedLog("kvoffload.disk")
        self._lock, self._slab, self._journal, contents = open_directory(
            self._directory,
            Geometry(layout, capacity_bytes, fingerprint),
            files or Files(),
            self._log,
            progress,
        )
        with ExitStack() as undo:
            # A policy may fail while it is told of what was found.
            undo.callback(self._lock.release)
            undo.callback(self._slab.close)
            if self._slab.layout.num_blocks != layout.num_blocks:
                # Its capacity has changed before: it may have a longer journal than a new one.
                self._manager = manager_of(self._slab.layout)
            # Also above the generations that a crashed process may have left in slots without an entry.
            next_generation = max(contents.last_generation + 1, self._slab.void_before, time.time_ns())
            self._placement = Placement(self._slab.layout, next_generation)
            leftover = self._placement.restore(contents, self._manager)
            self._next_stamp = int(contents.stamp.max(initial=0)) + 1
            self.identity, self.written_before = self._slab.identity.slab_id, contents.written
            self.block_bytes, self.stored_bytes = block_bytes, layout.slot_bytes
            self._counts = TierStats(restored=self._manager.stats().ready)
            self._pause = WritePause()
            self._use_before = self._reserved_then = self._slab.layout.num_slots
            if not self._slab.may_grow:
                self._confine()
            self._refused = dict[int, float]()
            self._queue_blocks, self._num_queued = max(1, queue_bytes // layout.slot_bytes), 0
            self._next_job, self._results = 0, list[JobResult]()
            self._closed, self._ending = False, threading.Lock()
            self._num_threads = num_threads
            self._handed_back: deque[Chunk] = deque()
            try:
                self._committer = Committer(self._slab, self._journal, self._log)
                self._pipeline = Pipeline(
                    self._slab, self._committer, num_threads, self._handed_back.append, self._log
                )
            except RuntimeError as error:
                raise UnavailableError(
                    "num_threads", num_threads, f"they cannot be started ({error})"
                ) from None
            if len(leftover):
                self._placement.set_gate(leftover, self._committer.remove(leftover))
            undo.pop_all()

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return _Request(self._manager.begin_request(request_id))

    def finish_request(self, request: object, path: Keys) -> None:
        self._refuse_a_child()
        known = self._known(request)
        self._manager.finish_request(known.context, path)
        # From the last to the first, as the policy takes them: the head of a prefix ends as the most recent.
        slots = self._manager.slots_of(path)[::-1]
        slots = slots[slots >= 0]
        if len(slots):
            own = np.concatenate([_NO_GENERATIONS, *known.written])
            records = self._placement.places(slots).astype(np.uint32)
            records[~np.isin(self._placement.generation[slots], own)] |= REUSE
            self._committer.access(records, self._stamps(len(slots)))

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        if request is not None:
            # Blocks that a request asks for are not evicted for blocks that it writes.
            self._known(request).context.extend(keys)
        found: Mask = self._manager.ready_slots_of(keys) >= 0
        return found

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked = self._checked(keys, pool, rows)
        at = np.flatnonzero(self._manager.ready_slots_of(keys) >= 0)
        ok = np.zeros(len(keys), np.bool_)
        if len(at):
            return self._submit(self._manager.prepare_load(keys.take(at)), ok, at, pool, checked[at])
        job = self._new_job()
        self._results.append(JobResult(job, ok, 0.0))
        return job

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        """As `SecondaryTier.submit_write`. Of a batch that does not fit into the queue the head is taken."""
        checked = self._checked(keys, pool, rows)
        known = self._known(request) if request is not None else None
        self._follow_the_file(len(keys))
        taken = np.zeros(len(keys), np.bool_)
        missing = np.flatnonzero(self._manager.slots_of(keys) < 0)
        room = max(0, self._queue_blocks - self._num_queued) if self.accepts_writes else 0
        if len(missing) > room:
            self._counts.dropped += len(missing) - room
            keys = keys[: missing[room]]
        if min(len(missing), room) == 0:
            return NO_JOB, taken
        plan = self._manager.prepare_store(keys, known.context if known is not None else None)
        if plan is None or len(plan.slots) == 0:
            return NO_JOB, taken
        if len(plan.evicted):
            # New blocks are written into slots that have been empty for longer.
            evicted = plan.slots[-len(plan.evicted) :]
            self._forget(evicted)
            self._placement.rotate(evicted)
        self._placement.renew(plan.slots)
        if known is not None:
            known.written.append(self._placement.generation[plan.slots])
        taken[plan.rows] = True
        count = len(plan.slots)
        self._num_queued += count
        job = self._submit(plan, np.zeros(count, np.bool_), np.arange(count), pool, checked[plan.rows])
        return job, taken

    @property
    def queue_room(self) -> int:
        """As `SecondaryTier.queue_room`; no limit while it accepts no writes, because it drops them."""
        return max(0, self._queue_blocks - self._num_queued) if self.accepts_writes else sys.maxsize

    def finished(self) -> list[JobResult]:
        self._refuse_a_child()
        while self._handed_back:
            chunk = self._handed_back.popleft()
            job: Job = chunk.owner
            job.outcomes[chunk.index], job.checksums[chunk.index] = chunk.outcomes, chunk.checksums
            job.remaining -= 1
            if job.remaining == 0:
                self._end(job)
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        self._refuse_a_child()
        slots = self._manager.ready_slots_of(keys)
        ready = slots >= 0
        if ready.any():
            self._manager.discard(keys.take(ready))
            self._forget(slots[ready])
        return int(np.count_nonzero(ready))

    def clear(self) -> None:
        """As `SecondaryTier.clear`, including blocks in flight; durable after a `drain`."""
        self._refuse_a_child()
        self._committer.void(self._placement.next_generation)
        occupied = np.flatnonzero(self._placement.generation > 0).astype(np.int32)
        self._manager.reset()
        if len(occupied):
            self._forget(occupied)

    def drain(self, timeout_s: float) -> bool:
        """As `SecondaryTier.drain`. Deletions, accesses and `clear` are durable too; after a failure of the
        journal only `clear` is."""
        self._refuse_a_child()
        return self._pipeline.drain(timeout_s)

    @property
    def accepts_writes(self) -> bool:
        """False for a while after a write has failed; for good after the journal has failed."""
        return not self._committer.broken and self._pause.is_over

    def stats(self) -> TierStats:
        counts, blocks = self._counts, self._manager.stats()
        return replace(
            counts,
            capacity=blocks.capacity - self._placement.num_withheld,
            ready=blocks.ready,
            free=blocks.free,
            in_flight=blocks.writing + blocks.ready - blocks.evictable,
            evicted=blocks.evicted,
            refused=blocks.refused,
            dropped=counts.dropped + blocks.dropped,
            bytes_written=counts.written * self.block_bytes,
            bytes_read=counts.read * self.block_bytes,
            journal_damage=self._journal.damaged,
        )

    def close(self) -> None:
        """As `SecondaryTier.close`. Returns after some seconds even if the disk hangs: then file and lock
        stay open until it answers, or the process ends."""
        hung, self._closed = self._closed, True
        if not self._lock.held:
            return
        if self._pipeline.close(CLOSE_TIMEOUT_S):
            self._release()
        elif not hung:
            self._log.warn("hang", "disk tier: %s does not answer: it stays open until then", self._directory)
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

    def _refuse_a_child(self) -> None:
        """A process that was forked has none of the threads, and locks as they were held at that moment."""
        if self._lock.is_of_parent:
            raise MisuseError("this disk tier was opened before this process was forked: it is the parent's")

    def _known(self, request: object) -> _Request:
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
        """Begin the job of a plan; returns its number."""
        placement, slots = self._placement, plan.slots
        outcomes = np.full(len(slots), UNREADABLE, np.uint8)
        job = Job(
            self._new_job(), plan, ok, at, placement.generation[slots], placement.checksum[slots], outcomes,
            time.monotonic(),
        )  # fmt: skip
        chunks = self._chunks(job, pool, rows)
        job.remaining = len(chunks)
        self._pipeline.submit(chunks)
        return job.number

    def _chunks(self, job: Job, pool: Blocks, rows: Positions) -> list[Chunk]:
        """The blocks of a job in the order of the slab; a read is divided among the threads."""
        plan, writes = job.plan, isinstance(job.plan, StorePlan)
        places = self._placement.places(plan.slots)
        order = np.argsort(places, kind="stable")
        size, gate, stamps = self._slab.chunk_blocks, 0, np.zeros(len(places), np.uint64)
        if writes:
            gate = self._placement.gate(plan.slots)
            # The last block of a prefix counts as used first, so that the head is the most recent.
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
        """The blocks in these slots have left: the next writes there wait until that is durable."""
        emptied = self._placement.empty(slots)
        self._placement.set_gate(emptied, self._committer.remove(emptied))

    def _end(self, job: Job) -> None:
        """End a job whose chunks have all been handed back."""
        sound: Mask = job.outcomes == SOUND
        if isinstance(job.plan, StorePlan):
            self._end_write(job, job.plan, sound)
        else:
            self._end_read(job, job.plan, sound)
        job.ok[job.at] = sound
        self._results.append(JobResult(job.number, job.ok, time.monotonic() - job.began))

    def _end_write(self, job: Job, plan: StorePlan, sound: Mask) -> None:
        num_sound = int(np.count_nonzero(sound))
        self._num_queued -= len(sound)
        self._placement.checksum[plan.slots] = job.checksums
        self._counts.written += num_sound
        if num_sound == len(sound):
            self._manager.complete_store(plan)
            self._pause.succeeded()
            return
        self._counts.failed += len(sound) - num_sound
        self._placement.generation[plan.slots[~sound]] = 0
        has_grown = (self._placement.places(plan.slots[~sound]) < self._slab.num_reserved).any()
        for one, success in zip(plan.split(), sound.tolist(), strict=True):
            self._manager.complete_store(one, success)
        if has_grown:
            self._pause.failed()
        else:
            self._confine()

    def _confine(self) -> None:
        """The file cannot be longer now: what is reserved is the capacity, until it has grown."""
        self._use_before = self._reserved_then = self._slab.num_reserved
        self._placement.confine(self._use_before, self._manager)

    def _follow_the_file(self, num_blocks: int) -> None:
        """Use slots behind the end of the file if it has grown, or for so many blocks if it may grow
        again."""
        end, reserved = self._slab.layout.num_slots, self._slab.num_reserved
        if self._use_before == end:
            return
        if not self._slab.may_grow:
            end = reserved
        elif reserved == self._reserved_then:
            end = min(end, reserved + num_blocks)
        if end > self._use_before:
            self._use_before = end
            self._placement.confine(end, self._manager)

    def _end_read(self, job: Job, plan: LoadPlan, sound: Mask) -> None:
        self._counts.read += int(np.count_nonzero(sound))
        if self._refused:
            for generation in job.generations[sound].tolist():
                self._refused.pop(generation, None)
        bad = np.flatnonzero(~sound)
        # A block that was deleted or replaced meanwhile is no damage; its slot may hold another block now.
        bad = bad[self._placement.generation[plan.slots[bad]] == job.generations[bad]]
        wrong = bad[job.outcomes[bad] == MISMATCH]
        self._counts.mismatches += len(wrong)
        self._counts.failed += len(bad) - len(wrong)
        bad = bad[[not self._may_pass(job, row) for row in bad.tolist()]] if len(bad) else bad
        self._manager.complete_load(plan, bad)
        if len(bad) == 0:
            return
        for row in wrong[:1].tolist():
            self._log.warn(
                "mismatch", "disk tier: %d blocks are not what was stored under their key: forgotten; "
                "key %s, slot %d of %s", len(wrong), plan.keys[row].hex(),
                self._placement.places(plan.slots)[row], self._directory,
            )  # fmt: skip
        self._forget(plan.slots[bad])

    def _may_pass(self, job: Job, row: int) -> bool:
        """Whether the system has refused to read a block, and has not done so for long: then it is kept."""
        generation = int(job.generations[row])
        if job.outcomes[row] != REFUSED:
            self._refused.pop(generation, None)
            return False
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        now = time.monotonic()
        if now < self._refused.setdefault(generation, now) + REFUSED_READS_S:
            return True
        del self._refused[generation]
        return False
