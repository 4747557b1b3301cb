"""One directory of the disk tier, as the scheduler's thread sees it: its blocks, and who of them leaves.

Owns a manager of its own, and ties its slots to slots of the slab. Decides and never waits: the pipeline's
threads do the work, and what they hand back is taken in by `end`. Does not know jobs, nor other directories.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.core.admission import Admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, StorePlan
from kvoffload.core.policy import EvictionPolicy
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import Mask
from kvoffload.tiers.disk.files import Files
from kvoffload.tiers.disk.format import REUSE
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.lock import DirectoryLock
from kvoffload.tiers.disk.notices import Notices
from kvoffload.tiers.disk.opening import Geometry, open_slab
from kvoffload.tiers.disk.pipeline import Chunk, Pipeline
from kvoffload.tiers.disk.recovery import Contents, Progress, recover
from kvoffload.tiers.disk.slab import MISMATCH, SOUND, UNREADABLE, Checksums, Outcomes
from kvoffload.transfer import Blocks

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""After a write that failed: how long nothing is written. It doubles while writes go on failing."""

_RESTORE_BLOCKS = 65536


@dataclass(eq=False)
class Part:
    """What one volume does of a job.

    Attributes:
        at: which rows of the job these are.
        checksums: what they should be, of blocks that are read; of those written, what they are when it ends.
        outcomes: how each of them went.
        remaining: chunks that have not been handed back.
    """

    volume: Volume
    job: int
    at: npt.NDArray[np.int64]
    plan: LoadPlan | StorePlan
    generations: npt.NDArray[np.uint64]
    checksums: Checksums
    outcomes: Outcomes
    remaining: int = 0


class Volume:
    """Blocks of one directory.

    Thread: one, the scheduler's. `deliver` is called by others.

    Raises: `ConfigError` when the directory cannot be used, or somebody else uses it and goes on to.
    """

    def __init__(
        self,
        directory: Path,
        geometry: Geometry,
        *,
        policy: str | type[EvictionPolicy],
        admission: str | Admission | None,
        num_threads: int,
        deliver: Callable[[Chunk], None],
        files: Files,
        notices: Notices,
        progress: Progress | None,
    ) -> None:
        self.directory, self._notices = directory, notices
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("path", str(directory), f"a directory ({error.strerror})") from None
        self._lock = DirectoryLock(directory, notices)
        try:
            self._slab = open_slab(directory, geometry, files, notices)
            layout = self._slab.layout
            self.manager = OffloadingManager(
                layout.num_blocks,
                key_bytes=layout.key_bytes,
                policy=policy,
                admission=admission,
                medium="STORAGE",
            )
            found = recover(self._slab, progress)
            try:
                self._journal = Journal(self._slab, found)
            except OSError as error:
                why = f"its journal cannot be written ({error.strerror})"
                raise ConfigError("path", str(directory), why) from None
        except BaseException:
            self._lock.release()
            raise
        n = layout.num_blocks
        self.slab_id = self._slab.identity.slab_id
        self._generation, self._checksum = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        # By the slab's slots: those of the manager's slots, and a queue of others that hold nothing.
        self._physical, self._reserve = np.zeros(n, np.int64), np.empty(0, np.int64)
        self._gate = np.zeros(layout.num_slots, np.int64)
        contents = found.contents
        newest = int(contents.generation.max(initial=0))
        # Also above what a life that ended in a crash may have left in slots, and never entered.
        self._next_generation = max(newest + 1, self._slab.void_before, time.time_ns())
        self._next_stamp = int(contents.stamp.max(initial=0)) + 1
        self.written_before = contents.written
        self.restored, leftover = self._restore(contents)
        self.mismatches = self.failed = self.dropped = self.read = self.written = 0
        self._pause_s, self._paused_until = FIRST_PAUSE_S, 0.0
        self._num_threads = num_threads
        self._pipeline = Pipeline(self._slab, self._journal, num_threads, deliver, notices)
        if len(leftover):
            self._gate[leftover] = self._pipeline.remove(leftover.astype(np.uint32))

    @property
    def slot_bytes(self) -> int:
        """What one block takes on the medium."""
        return self._slab.layout.slot_bytes

    @property
    def damaged(self) -> int:
        """Parts of the journal that could not be read."""
        return self._journal.damaged

    @property
    def accepts_writes(self) -> bool:
        """False after writes have failed, for a while; for good when it was the journal's."""
        return not self._pipeline.broken and time.monotonic() >= self._paused_until

    # ---- blocks

    def ready_slots(self, keys: Keys) -> tuple[npt.NDArray[np.int32], Mask]:
        """The manager's slot of each block, and which of them can be read."""
        slots = self.manager.slots_of(keys)
        return slots, (slots >= 0) & (self.manager.slots.ref_cnt[slots] >= 0)

    def missing(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Rows of blocks that are neither here nor on their way."""
        return np.flatnonzero(self.manager.slots_of(keys) < 0)

    def submit_read(
        self, job: int, at: npt.NDArray[np.int64], keys: Keys, pool: Blocks, rows: npt.NDArray[np.int64]
    ) -> Part | None:
        """Begin to read the blocks that are here; None if none is."""
        _, ready = self.ready_slots(keys)
        which = np.flatnonzero(ready)
        if len(which) == 0:
            return None
        plan = self.manager.prepare_load(Keys(np.ascontiguousarray(keys.words[which]), keys.key_bytes))
        part = self._part(job, at[which], plan)
        self._submit(part, pool, rows[which], writes=False)
        return part

    def submit_write(
        self,
        job: int,
        at: npt.NDArray[np.int64],
        keys: Keys,
        pool: Blocks,
        rows: npt.NDArray[np.int64],
        ctx: RequestContext | None,
    ) -> Part | None:
        """Begin to write the blocks that are not here and that policy and admission let in."""
        plan = self.manager.prepare_store(keys, ctx)
        if plan is None or len(plan.slots) == 0:
            return None
        slots, count = plan.slots, len(plan.slots)
        if len(plan.evicted):
            self._exchange(slots[-len(plan.evicted) :])
        self._generation[slots] = np.arange(count, dtype=np.uint64) + np.uint64(self._next_generation)
        self._next_generation += count
        part = self._part(job, at[plan.rows], plan)
        self._submit(part, pool, rows[plan.rows], writes=True)
        return part

    def end(self, part: Part) -> Mask:
        """Take in a part whose chunks have all been handed back; which of its blocks are sound."""
        sound: Mask = part.outcomes == SOUND
        num_sound = int(np.count_nonzero(sound))
        if isinstance(part.plan, StorePlan):
            self._end_write(part, part.plan, sound, num_sound)
        else:
            self._end_read(part, part.plan, sound, num_sound)
        return sound

    def delete(self, keys: Keys) -> int:
        """Forget blocks that are here; how many were."""
        slots, ready = self.ready_slots(keys)
        if ready.any():
            self.manager.discard(Keys(np.ascontiguousarray(keys.words[ready]), keys.key_bytes))
            self._forget(slots[ready])
        return int(np.count_nonzero(ready))

    def clear(self) -> None:
        """Forget everything, also what is on its way, and for good."""
        self._pipeline.void(self._next_generation)
        occupied = np.flatnonzero(self._generation > 0).astype(np.int32)
        self.manager.reset()
        if len(occupied):
            self._forget(occupied)

    def finish_request(self, ctx: RequestContext, keys: Keys, own: npt.NDArray[np.uint64]) -> None:
        """A request used these blocks, in prefix order; `own` are generations that it wrote itself."""
        self.manager.finish_request(ctx, keys)
        # From the last to the first, as the policy takes them: the head of a prefix ends as the most recent.
        slots = self.manager.slots_of(keys)[::-1]
        slots = slots[slots >= 0]
        if len(slots):
            records = self._physical[slots].astype(np.uint32)
            records[~np.isin(self._generation[slots], own)] |= REUSE
            self._pipeline.access(records, self._stamps(len(slots)))

    def drain(self, timeout_s: float) -> bool:
        """As `Pipeline.drain`."""
        return self._pipeline.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End everything; False if the medium hangs: then file and lock stay open with the process."""
        if not self._pipeline.close(timeout_s):
            self._notices.warn("hang", "disk tier: %s does not answer: left behind as it is", self.directory)
            return False
        self._slab.close()
        self._lock.release()
        return True

    # ---- inside

    def _part(self, job: int, at: npt.NDArray[np.int64], plan: LoadPlan | StorePlan) -> Part:
        outcomes = np.full(len(plan.slots), UNREADABLE, np.uint8)
        return Part(self, job, at, plan, self._generation[plan.slots], self._checksum[plan.slots], outcomes)

    def _submit(self, part: Part, pool: Blocks, rows: npt.NDArray[np.int64], *, writes: bool) -> None:
        slots, plan = self._physical[part.plan.slots], part.plan
        order = np.argsort(slots, kind="stable")
        gate = int(self._gate[slots].max()) if writes else 0
        # In prefix order the last block is the first in line: its head is used last, and so most recent.
        stamps = self._stamps(len(slots))[::-1] if writes else np.empty(0, np.uint64)
        size = self._slab.chunk_blocks
        if not writes:
            size = max(1, min(size, -(-len(slots) // self._num_threads)))
        chunks = []
        for start in range(0, len(order), size):
            index = order[start : start + size]
            chunks.append(
                Chunk(
                    part, index, writes,
                    Keys(np.ascontiguousarray(plan.keys.words[index]), plan.keys.key_bytes),
                    slots[index], part.generations[index], pool, rows[index], part.checksums[index],
                    stamps[index] if writes else stamps, gate,
                )
            )  # fmt: skip
        part.remaining = len(chunks)
        self._pipeline.submit(chunks)

    def _stamps(self, count: int) -> npt.NDArray[np.uint64]:
        stamps = np.arange(self._next_stamp, self._next_stamp + count, dtype=np.uint64)
        self._next_stamp += count
        return stamps

    def _forget(self, slots: npt.NDArray[np.int32]) -> None:
        """The blocks of these slots have gone: what comes there next waits until that is durable."""
        self._generation[slots] = 0
        physical = self._physical[slots]
        self._gate[physical] = self._pipeline.remove(physical.astype(np.uint32))

    def _exchange(self, slots: npt.NDArray[np.int32]) -> None:
        """The blocks of these slots have gone: what comes next goes where nothing has been for longer."""
        self._forget(slots)
        queue = np.concatenate([self._reserve, self._physical[slots]])
        self._physical[slots], self._reserve = queue[: len(slots)], queue[len(slots) :]

    def _end_write(self, part: Part, plan: StorePlan, sound: Mask, num_sound: int) -> None:
        self._checksum[plan.slots] = part.checksums
        self.written += num_sound
        num_failed = len(sound) - num_sound
        if num_failed == 0:
            self.manager.complete_store(plan)
            self._pause_s = FIRST_PAUSE_S
            return
        self.failed += num_failed
        self._generation[plan.slots[~sound]] = 0
        for one, success in zip(plan.split(), sound.tolist(), strict=True):
            self.manager.complete_store(one, success)
        # A medium that takes nothing must not cost the blocks that it holds: to write is to evict.
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _end_read(self, part: Part, plan: LoadPlan, sound: Mask, num_sound: int) -> None:
        self.read += num_sound
        bad = np.flatnonzero(~sound)
        # A block that was deleted or replaced meanwhile is nobody's fault, and its key may be another's now.
        bad_here = bad[self._generation[plan.slots[bad]] == part.generations[bad]]
        self.manager.complete_load(plan, bad_here)
        if len(bad_here):
            self._forget(plan.slots[bad_here])
            wrong = bad_here[part.outcomes[bad_here] == MISMATCH]
            self.mismatches += len(wrong)
            self.failed += len(bad_here) - len(wrong)
            for row in wrong[:1]:
                self._notices.warn(
                    "mismatch", "disk tier: %d blocks are not what was stored under their key: forgotten; "
                    "key %s, slot %d of %s", len(wrong), plan.keys[int(row)].hex(),
                    self._physical[plan.slots[row]], self.directory,
                )  # fmt: skip

    def _restore(self, contents: Contents) -> tuple[int, npt.NDArray[np.int64]]:
        """Give the manager the blocks that were found; how many, and in which slots it did not take them.

        They come in the order of their writing, and are then used as they were: so policies that go by
        insertion and policies that go by use both get their order back.
        """
        found = contents.slots()
        # Only a damaged journal has more blocks than there may be, or one of them twice.
        if len(found) > len(self._physical):
            found = found[np.argsort(contents.stamp[found], kind="stable")][-len(self._physical) :]
        by_age = found[np.argsort(contents.generation[found], kind="stable")]
        slot_of = np.full(len(self._gate), -1, np.int32)
        for start in range(0, len(by_age), _RESTORE_BLOCKS):
            batch = by_age[start : start + _RESTORE_BLOCKS]
            plan = self.manager.prepare_store(contents.keys(batch), admitted=True)
            assert plan is not None, "an empty cache has room for what it held"
            slot_of[batch[plan.rows]] = plan.slots
            self.manager.complete_store(plan)
        restored, empty = np.flatnonzero(slot_of >= 0), np.flatnonzero(slot_of < 0)
        vacant = np.ones(len(self._physical), np.bool_)
        vacant[slot_of[restored]] = False
        num_vacant = int(np.count_nonzero(vacant))
        self._physical[slot_of[restored]] = restored
        self._physical[vacant], self._reserve = empty[:num_vacant], empty[num_vacant:]
        self._generation[slot_of[restored]] = contents.generation[restored]
        self._checksum[slot_of[restored]] = contents.checksum[restored]
        by_use = restored[np.argsort(contents.stamp[restored], kind="stable")[::-1]]
        self.manager.restore_uses(slot_of[by_use], contents.uses[by_use] > 0)
        return len(restored), empty[contents.generation[empty] > 0]
