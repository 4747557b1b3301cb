"""The RAM pool that an engine's scheduler and workers share.

Owns a file in shared memory: its name, size and removal. Does not know the blocks in the slots.

Each worker allocates the memory that it will use, on its own NUMA node.

The file has a name only while the engine starts. The process that is last to attach and allocate memory
removes the name. So the kernel frees the memory when the last process ends, even if the process is killed. An
engine that is killed during its start leaves an unlocked file. The next start of any engine removes this
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.vllm.shared import first_touch
from kvoffload.node.keeper import is_named
from kvoffload.node.pool_directory import (
    ALLOCATION_S,
    SHARED_MEMORY,
    SLOTS,
    PoolDirectory,
    locked,
    open_own,
    wait_for_lock,
)
from kvoffload.structures.index import MAX_POSITIONS
from kvoffload.text import size
from kvoffload.tiers.contract import Checksums, Mask, block_checksums
from kvoffload.tiers.memory import available_bytes
from kvoffload.transfer import Blocks
from kvoffload.transfer.copies import address_of

SCHEDULER = 0
"""Member number of the scheduler. Rank `r` is member ``1 + r``. The scheduler has no part in a slot."""
_PREFIX, _MAGIC = "kvoffload-", 0x6B766F66_00000003
_PAGE = mmap.PAGESIZE
_MAGIC_AT, _SLOTS, _PART_BYTES, _PARTS, _MEMBERS, _HAS_FAILED, _IS_ALLOCATED, _FIRST_MEMBER = range(8)
"""Positions of words in the pool's header.

From `_FIRST_MEMBER` on, each process has a word: 0 until the process attaches, then pid and state bits.
"""
_IS_READY, _HAS_NO_MEMORY = np.uint64(1 << 62), np.uint64(1 << 63)
_POLL_S = 0.02
EQUAL, CLOSE, UNJUDGED, DIFFERENT = 1, 2, 3, 4
"""Results of an audit of a block, the most serious last: equal; a difference like a rounding error; other
bytes, but the type of the values is unknown; different. 0 means that the block was not compared."""
FINDING = np.dtype(
    [("result", np.uint8), ("group", np.uint8), ("tensor", np.uint16), ("difference", np.float32)]
)
"""Record of a block's audit: the result, the largest difference, and the KV group and tensor that have it."""


class SharedPool:
    """Slots of blocks in shared memory, with checksums and marks of failed copies.

    A slot consists of *parts*. Each worker has one part, and only this worker writes it. If all workers hold
    the same bytes (MLA under tensor parallelism), a slot has a single part, which one worker writes and all
    workers read. The first process to attach creates the pool and sets the geometry. Later processes must use
    the same geometry.

    Attributes:
        num_slots, num_parts, part_bytes: geometry.
        slot_stride: bytes from one slot to the next.
        checksums: ``(num_parts, num_slots)`` uint64, written by the workers; 0 if there is no checksum.
        failed: ``(num_parts, num_slots)`` uint8; 1 for a part that a worker could not copy. A worker sets the
            mark (`fail`) before it reports the job. Only the scheduler clears marks (`take_failed`), after
            all workers have reported the job.
        findings: ``(num_parts, num_slots)`` of `FINDING`: results of audits. A worker writes findings before
            it reports the job. The scheduler clears findings (`take_findings`). If engines share the pool,
            each engine has its own findings, because two engines may audit one slot at the same time.

    Thread: any. Concurrent calls must use distinct slots.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd, self._num_bytes = path, fd, os.fstat(fd).st_size
        self._map: mmap.mmap | None = mmap.mmap(fd, self._num_bytes)
        self._header = np.frombuffer(self._map, np.uint64, _PAGE // 8)
        self.num_slots, self.part_bytes, self.num_parts, self.num_members = (
            int(word) for word in self._header[_SLOTS:_HAS_FAILED]
        )
        self._members = self._header[_FIRST_MEMBER : _FIRST_MEMBER + self.num_members]
        self.slot_stride, ledger, _ = _sizes(self.num_slots, self.num_parts, self.part_bytes)
        self._slots_at = _PAGE + ledger
        shape, count = (self.num_parts, self.num_slots), self.num_parts * self.num_slots
        self.checksums = np.frombuffer(self._map, np.uint64, count, _PAGE).reshape(shape)
        self.failed = np.frombuffer(self._map, np.uint8, count, _PAGE + 8 * count).reshape(shape)
        self.findings = np.frombuffer(self._map, FINDING, count, _PAGE + 9 * count).reshape(shape)
        slots = np.frombuffer(self._map, np.uint8, self.num_slots * self.slot_stride, self._slots_at)
        self._slots = slots.reshape(self.num_slots, self.slot_stride)

    @classmethod
    def attach(
        cls,
        engine_id: str,
        *,
        member: int,
        num_members: int,
        num_parts: int,
        part_bytes: int,
        capacity_bytes: int,
        directory: Path = SHARED_MEMORY,
    ) -> SharedPool:
        """Find the pool of this engine, or create it.

        Args:
            engine_id: equal in all processes of an engine, and different in every other engine.
            member: number of this process in the engine, from 0 to ``num_members - 1``.
            num_parts: parts of a slot.
            part_bytes: bytes that this process needs in each part.
            capacity_bytes: memory for slots, all parts together.

        Raises: `ConfigError` if there is not enough memory, if another engine uses the pool, or if another
        user of the machine has created a file with our name.
        Cost: a worker allocates its memory in this call (`first_touch.take`), because the kernel would kill
        a process that runs out of memory later.
        """
        digest = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
        with locked(directory):
            _remove_abandoned(directory)
            existing = sorted(directory.glob(f"{_PREFIX}{digest}-*"))
            if existing:
                fd = open_own(existing[0], os.O_RDWR)
                fcntl.flock(fd, fcntl.LOCK_SH)
                pool = cls(existing[0], fd)
            else:
                geometry = (_slots_for(capacity_bytes, num_parts, part_bytes), part_bytes, num_parts)
                pool = cls._make(directory / f"{_PREFIX}{digest}-{os.getpid()}", geometry, num_members)
            try:
                pool._join(member, (num_members, num_parts), part_bytes)
            except ConfigError:
                pool.close()
                raise
        pool._take(member, is_maker=not existing)
        with locked(directory):
            pool._members[member] |= _IS_READY
            if (pool._members & _IS_READY).all():
                pool.path.unlink(missing_ok=True)
        return pool

    @classmethod
    def attach_shared(
        cls, node_pool: PoolDirectory, *, member: int, num_parts: int, part_bytes: int, capacity_bytes: int
    ) -> SharedPool:
        """Find or create the slots of a pool that several engines share. Arguments and errors as in `attach`.

        The first process allocates all memory. Other processes wait for the allocation.

        Args:
            node_pool: this engine's membership in the pool.

        Raises: `UnavailableError` if the wait takes longer than `ALLOCATION_S` seconds.
        """
        path = node_pool.path / SLOTS
        with locked(path.parent.parent):
            if path.exists():
                pool = cls(path, _open_complete(path))
            else:
                pool = cls._make(
                    path, (_slots_for(capacity_bytes, num_parts, part_bytes), part_bytes, num_parts), 0
                )
        try:
            wait_for_lock(pool._fd, path, time.monotonic() + ALLOCATION_S)  # another process allocates
        except UnavailableError:
            pool.close()
            raise
        if not is_named(pool._fd, path):  # the other process had no memory, and has removed the file
            pool.close()
            return cls.attach_shared(
                node_pool,
                member=member,
                num_parts=num_parts,
                part_bytes=part_bytes,
                capacity_bytes=capacity_bytes,
            )
        try:
            pool._join(member, (0, num_parts), part_bytes)
            if not pool._header[_IS_ALLOCATED]:
                pool._take(SCHEDULER, is_maker=True)
                pool._header[_IS_ALLOCATED] = 1
            pool.findings = _findings_of(node_pool, pool.findings.shape)
            if member == SCHEDULER:
                pool.findings[:] = np.zeros((), FINDING)  # of a killed engine that had the same number
        except ConfigError:
            pool.close()
            raise
        fcntl.flock(pool._fd, fcntl.LOCK_UN)
        return pool

    @classmethod
    def _make(cls, path: Path, geometry: tuple[int, int, int], num_members: int) -> SharedPool:
        """Create the file under a temporary name, and rename the complete file to `path`."""
        num_slots, part_bytes, num_parts = geometry
        _, _, num_bytes = _sizes(num_slots, num_parts, part_bytes)
        _check_memory(path.parent, num_bytes)
        new = path.with_name(f".{_PREFIX}{os.geteuid()}.new")
        fd = open_own(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.ftruncate(fd, num_bytes)
        header = np.array([_MAGIC, num_slots, part_bytes, num_parts, num_members], np.uint64)
        os.pwrite(fd, header.tobytes(), 0)
        os.rename(new, path)
        return cls(path, fd)

    def _take(self, member: int, is_maker: bool) -> None:
        """Allocate the memory of this member. The creator of the pool also allocates header and ledger."""
        num_workers, address = max(1, self.num_members - 1), address_of(self._header.view(np.uint8))
        spans = _share(self, member)
        if is_maker:
            spans.insert(0, (0, self._slots_at))
        # The parts of a slot are adjacent. A huge page would put the parts of several workers on one node.
        if self.num_parts == 1 or not first_touch.has_several_nodes():
            first_touch.ask_for_huge_pages(address, self._num_bytes)
        try:
            first_touch.take(self._fd, address, spans, first_touch.num_threads(num_workers))
        except (OSError, RuntimeError) as error:
            if self.num_members:
                self._members[member] |= _HAS_NO_MEMORY
            self.path.unlink(missing_ok=True)
            self.close()
            raise ConfigError("ram", size(self._num_bytes), str(error)) from error

    def wait_for_workers(self, timeout_s: float) -> bool:
        """Wait until every worker has allocated its memory. Returns False on time-out.

        Call this method before the first access to parts of other workers. An earlier access would allocate
        their memory on the wrong NUMA node.

        Raises: `ConfigError` if a worker could not allocate its memory.
        """
        until = time.monotonic() + timeout_s
        workers = self._members[1:]
        while not (workers & _IS_READY).all():
            if (workers & _HAS_NO_MEMORY).any():
                raise ConfigError(
                    "ram", size(self._num_bytes), "another worker could not allocate its part of the pool"
                )
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def slots(self) -> Blocks:
        """Slots with all parts and padding: a page-aligned view, ``(num_slots, slot_stride)`` uint8."""
        return self._slots

    def part(self, number: int) -> Blocks:
        """Return a worker's part of every slot: a view, ``(num_slots, part_bytes)`` uint8."""
        start = number * self.part_bytes
        return self._slots[:, start : start + self.part_bytes]

    @property
    def address(self) -> int:
        """Address of slot 0 in this process; slots are `slot_stride` bytes apart."""
        return address_of(self._slots)

    def seal(self, part: int, slots: npt.NDArray[np.int32], digests: Checksums) -> None:
        """Compute and store the checksums of one worker's part of the blocks in `slots`.

        Args:
            part: number of the worker.
            slots: slots of the blocks.
            digests: digests of the blocks' keys. The digests seed the checksums, so that `verify` detects a
                block in a wrong slot.
        """
        self.checksums[part, slots] = self._compute(part, slots, digests)

    def verify(self, slots: npt.NDArray[np.int32], digests: Checksums) -> Mask:
        """Return a mask of the slots whose checksums match in all parts. `digests`: see `seal`."""
        sound: Mask = np.ones(len(slots), np.bool_)
        for part in range(self.num_parts):
            sound &= self.checksums[part, slots] == self._compute(part, slots, digests)
        return sound

    def fail(self, part: int, slots: npt.NDArray[np.int32]) -> None:
        """Mark the slots that the worker of this part could not copy."""
        if len(slots):
            self.failed[part, slots] = 1
            self._header[_HAS_FAILED] = 1

    def take_failed(self, slots: npt.NDArray[np.int32]) -> Mask | None:
        """Return a mask of the failed slots, and clear the marks. Returns None if no worker has ever failed.

        The scheduler calls this method when a job has ended in all workers. If the scheduler drops a job, the
        marks stay. The next job that uses a marked slot then counts its block as failed.
        """
        if not self._header[_HAS_FAILED]:
            return None
        marks = self.failed[:, slots]
        parts, rows = marks.nonzero()
        self.failed[parts, slots[rows]] = 0
        return np.asarray(marks.any(axis=0), np.bool_)

    def take_findings(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """Return the most serious finding of each slot, and clear the findings.

        The array has the shape ``(len(slots),)`` and the dtype `FINDING`. If any part of a slot was not
        compared, the slot's result is 0.
        """
        of_parts = self.findings[:, slots]
        self.findings[:, slots] = np.zeros((), FINDING)
        worst = np.lexsort((of_parts["difference"], of_parts["result"]), axis=0)[-1]
        most_serious = of_parts[worst, np.arange(len(slots))]
        most_serious["result"][(of_parts["result"] == 0).any(axis=0)] = 0
        return most_serious

    def close(self) -> None:
        """Release the memory. The memory is unmapped when the last view is gone. Idempotent."""
        if self._map is None:
            return
        memory, self._map = self._map, None
        del self._header, self._members, self.checksums, self.failed, self.findings, self._slots
        with contextlib.suppress(BufferError):
            memory.close()
        os.close(self._fd)

    def _compute(self, part: int, slots: npt.NDArray[np.int32], digests: Checksums) -> Checksums:
        slots_view = self._slots  # keeps the memory mapped if another thread calls `close`
        first = address_of(slots_view) + part * self.part_bytes
        return block_checksums(first + slots.astype(np.int64) * self.slot_stride, self.part_bytes, digests)

    def _join(self, member: int, counts: tuple[int, int], part_bytes: int) -> None:
        if int(self._header[_MAGIC_AT]) != _MAGIC or counts != (self.num_members, self.num_parts):
            raise ConfigError(
                "engine_id",
                self.path.name,
                "an engine with this id has more or fewer workers; allowed: a different id for each engine",
            )
        if self.num_members and self._members[member]:
            raise ConfigError(
                "engine_id",
                self.path.name,
                "another engine with this id is starting; allowed: a different id for each engine",
            )
        # The scheduler has no part, and its `part_bytes` is only an estimate.
        if member != SCHEDULER and part_bytes > self.part_bytes:
            raise ConfigError(
                "pipeline_parallel_size",
                part_bytes,
                f"a block of this worker is larger than the first worker's {self.part_bytes} bytes; "
                "pipeline stages of different size cannot share a pool",
            )
        if self.num_members:
            self._members[member] = os.getpid()


def _findings_of(node_pool: PoolDirectory, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Map the findings of this engine's audits. Raises `ConfigError` if there is not enough memory."""
    num_bytes = _pages(math.prod(shape) * FINDING.itemsize)
    fd = open_own(node_pool.path / f"findings-{node_pool.number}", os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise ConfigError("ram", size(num_bytes), str(error)) from error
    finally:
        os.close(fd)
    return np.frombuffer(memory, FINDING, math.prod(shape)).reshape(shape)


def _open_complete(path: Path) -> int:
    """Open the slots of a shared pool.

    Raises `UnavailableError` if the file has the wrong size, or the magic number of another version.
    """
    fd = open_own(path, os.O_RDWR)
    header = np.frombuffer(os.pread(fd, 8 * _HAS_FAILED, 0).ljust(8 * _HAS_FAILED, b"\0"), np.uint64)
    num_slots, part_bytes, num_parts = (int(word) for word in header[_SLOTS:_MEMBERS])
    if header[_MAGIC_AT] != _MAGIC or os.fstat(fd).st_size != _sizes(num_slots, num_parts, part_bytes)[2]:
        os.close(fd)
        why = "the file is damaged, or of another version; stop the engines of the pool and delete it"
        raise UnavailableError("ram", str(path), why)
    return fd


def _share(pool: SharedPool, member: int) -> list[first_touch.Span]:
    """Return the spans of whole pages that this member allocates in the file."""
    at, stride, part_bytes = pool._slots_at, pool.slot_stride, pool.part_bytes
    num_workers = max(1, pool.num_members - 1)
    if member == SCHEDULER and pool.num_members > 1:
        return []
    worker = max(0, member - 1)
    if pool.num_parts != num_workers or num_workers == 1:
        # All workers use all slots, so each worker allocates an equal number of slots.
        first, last = (number * pool.num_slots // num_workers for number in (worker, worker + 1))
        return [(at + first * stride, (last - first) * stride)]
    # A page that two parts share is allocated by the first worker that touches it.
    start, end = worker * part_bytes // _PAGE * _PAGE, _pages((worker + 1) * part_bytes)
    return [(at + slot * stride + start, end - start) for slot in range(pool.num_slots)]


def _sizes(num_slots: int, num_parts: int, part_bytes: int) -> tuple[int, int, int]:
    """Return three sizes in bytes: of a slot with padding, of the ledger, and of the whole pool."""
    stride, ledger = _pages(num_parts * part_bytes), _pages((9 + FINDING.itemsize) * num_parts * num_slots)
    return stride, ledger, _PAGE + ledger + num_slots * stride


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _slots_for(capacity_bytes: int, num_parts: int, part_bytes: int) -> int:
    stride = _pages(num_parts * part_bytes)
    num_slots = min(capacity_bytes // stride, MAX_POSITIONS // 2)
    if num_slots < 1:
        raise ConfigError("ram", capacity_bytes, f"allowed: at least {stride:,} bytes, the size of a block")
    return num_slots


def _check_memory(directory: Path, num_bytes: int) -> None:
    """Raise `ConfigError` if `num_bytes` exceed the free memory.

    Without this check, the kernel would later kill a process that touches the memory.
    """
    free, promised = os.statvfs(directory), promised_bytes(directory)
    shm_bytes, ram_bytes = free.f_bavail * free.f_frsize - promised, available_bytes() - promised
    if num_bytes > shm_bytes:
        hint = "in a container set --shm-size, or share the host's with --ipc=host"
        raise ConfigError("ram", size(num_bytes), f"{directory} has {size(shm_bytes)} free; {hint}")
    if num_bytes > ram_bytes:
        raise ConfigError("ram", size(num_bytes), f"this machine has {size(ram_bytes)} of free memory")


def promised_bytes(directory: Path) -> int:
    """Return the number of bytes that starting engines of this user have reserved but not allocated yet."""
    promised = 0
    for path in [*directory.glob(f"{_PREFIX}*"), *directory.glob(f"{_PREFIX}*/{SLOTS}")]:
        with contextlib.suppress(OSError):
            status = path.stat()
            # Files of other users may have any size. Only their allocated pages count, as used memory.
            if status.st_uid != os.geteuid():
                continue
            promised += max(0, status.st_size - 512 * status.st_blocks)
    return promised


def _remove_abandoned(directory: Path) -> None:
    """Remove the files of pools without an attached process. These files are known by their missing lock."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
