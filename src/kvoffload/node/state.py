"""The file with a shared manager's state: its lock, its structs, and a record for each engine."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.core.hints import NUM_LABELS
from kvoffload.core.state import Cache
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node.keeper import MAX_MEMBERS
from kvoffload.node.mutex import MUTEX_BYTES, Mutex
from kvoffload.node.pool_directory import FORMAT, open_own
from kvoffload.structures.placement import Placement, aligned
from kvoffload.structures.structs import Struct
from kvoffload.text import size

_MAGIC = 0x6B766F66_73746174
_MUTEX_AT, _NUMBERS_AT, _LABELS_AT, _HEADER_BYTES = 128, 256, 512, 4096
_LISTENING_AT, _HAS_HOLDS_AT = _HEADER_BYTES - MAX_MEMBERS, _HEADER_BYTES - 2 * MAX_MEMBERS
_IS_COMPLETE_AT, _CAPACITY_AT = 7, 8
"""Positions of two words in the header. Words 0 to 6: magic, format, number of bytes, signature (4 words)."""
COUNTERS = tuple(name for name in Cache.fields if Cache.fields[name].at >= Cache.fields["stored"].at)
"""Names of the counters, which are the last fields of the struct `Cache`."""
DEPARTED = MAX_MEMBERS
"""Row of `StateFile.counters` with the sums over engines that have left the pool."""


class Numbers(Struct):
    """Numbers that all members share.

    Attributes:
        news: grows with each change that members must read: a reset, an engine that joins or leaves, or the
            release of a dead engine's blocks.
        epoch: number of resets.
        generation: number of times that the expected keys were cleared.
        num_events: number of all events ever written to the ring.
        has_shares: 1 after the first engine with a share has joined. From then on, blocks have owners.
        num_buried: number of engines that ended without `close`.
        num_died_inside: number of engines that died inside a call.
    """

    news: int
    epoch: int
    generation: int
    num_events: int
    has_shares: int
    num_buried: int
    num_died_inside: int


class StateFile:
    """The mapped state of a pool, for one member.

    Attributes:
        mutex: the lock that guards the other attributes.
        numbers: see `Numbers`.
        listening: ``(MAX_MEMBERS,)`` bool: True for each member that takes events.
        labels: digests of hints (`hints.Labels`).
        counters: ``(MAX_MEMBERS + 1, len(COUNTERS))`` int64: a row for each member, and the row `DEPARTED`.
        events: ``(num, 1 + words_per_key)`` uint64: a ring buffer. The first word of an event is 1 for a
            removal and 0 for a store; the key follows.
        created: True if this call created the file, and copied the structs to the file.

    A file that is incomplete, damaged, or of another version, size or geometry is unusable. The constructor
    replaces an unusable file if `is_alone`, that is, if no other engine uses the pool.

    Raises: `UnavailableError` if memory is full, or if the file is unusable and not `is_alone`.
    """

    def __init__(
        self, path: Path, placement: Placement, capacity: int, words_per_key: int, *, is_alone: bool
    ) -> None:
        stride, self._capacity, self._path = aligned(8 * Cache.num_words), capacity, path
        caches_at = _HEADER_BYTES
        events_at = caches_at + aligned(stride * (MAX_MEMBERS + 1))
        num_events = max(4096, 2 * capacity)
        structs_at = events_at + aligned(num_events * 8 * (1 + words_per_key))
        self._holds_at = -(-(structs_at + placement.num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._holds_stride = -(-4 * capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = self._holds_at + MAX_MEMBERS * self._holds_stride
        signature = np.frombuffer(placement.signature, np.uint64)
        facts = np.array([_MAGIC, FORMAT, num_bytes, *signature.tolist()], np.uint64).tobytes()
        self.created = not _is_sound(path, facts, num_bytes)
        if self.created and path.exists():
            if not is_alone:
                raise UnavailableError("ram", str(path), "the pool's state is damaged, or of another version")
            path.unlink()
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            if self.created:
                self._allocate(0, self._holds_at)
                os.ftruncate(self._fd, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)
        except BaseException:
            os.close(self._fd)
            if self.created:
                path.unlink()
            raise
        memory = memoryview(self._map)
        header = np.frombuffer(memory, np.uint64, _HEADER_BYTES // 8)
        if self.created:
            memory[: len(facts)] = facts
            header[_CAPACITY_AT] = capacity
        self.numbers = Numbers.over(memory[_NUMBERS_AT : _NUMBERS_AT + 8 * Numbers.num_words])
        news = np.frombuffer(memory, np.int64, 1, _NUMBERS_AT + 8 * Numbers.fields["news"].at)
        self.mutex = Mutex(memory[_MUTEX_AT : _MUTEX_AT + MUTEX_BYTES], news, create=self.created)
        self.listening = np.frombuffer(memory, np.bool_, MAX_MEMBERS, _LISTENING_AT)
        self.labels = np.frombuffer(memory, np.uint64, NUM_LABELS, _LABELS_AT)
        rows = np.frombuffer(memory, np.int64, stride // 8 * (MAX_MEMBERS + 1), caches_at)
        first = Cache.fields["stored"].at
        self.counters = rows.reshape(MAX_MEMBERS + 1, -1)[:, first : first + len(COUNTERS)]
        shape = (num_events, 1 + words_per_key)
        self.events = np.frombuffer(memory, np.uint64, shape[0] * shape[1], events_at).reshape(shape)
        flat = np.frombuffer(memory, np.int32, MAX_MEMBERS * self._holds_stride // 4, self._holds_at)
        self._holds = flat.reshape(MAX_MEMBERS, -1)[:, :capacity]
        self._has_holds = np.frombuffer(memory, np.bool_, MAX_MEMBERS, _HAS_HOLDS_AT)
        self._memory, self._caches_at, self._stride = memory, caches_at, stride
        placement.move(memory[structs_at : structs_at + placement.num_bytes], copy=self.created)
        header[_IS_COMPLETE_AT] = 1

    def holds_of(self, number: int) -> npt.NDArray[np.int32]:
        """Return the `Cache.holds` of a member, or zeros if the member has not called `adopt` yet.

        Before `adopt`, this memory may not be allocated, and a read could kill the process.
        """
        return self._holds[number] if self._has_holds[number] else np.zeros(self._capacity, np.int32)

    def adopt(self, cache: Cache, number: int) -> npt.NDArray[np.int32]:
        """Move a manager's `Cache` into the record of a member; returns the member's row of `holds`."""
        self._allocate(self._holds_at + number * self._holds_stride, self._holds_stride)
        self._has_holds[number] = True
        structs = {name: field for name, field in cache.contents().items() if isinstance(field, Struct)}
        holds: npt.NDArray[np.int32] = self._holds[number]
        holds.fill(0)
        start = self._caches_at + number * self._stride
        cache.move(self._memory[start : start + 8 * Cache.num_words], {**structs, "holds": holds}, copy=True)
        self.counters[number] = 0
        return holds

    def close(self) -> None:
        """Close the file, and unmap the memory if no view of it exists. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self._map.close()

    def _allocate(self, start: int, num_bytes: int) -> None:
        """Allocate memory of the file, because a write to unallocated memory could kill the process.

        Raises: `UnavailableError` if there is not enough memory.
        """
        try:
            os.posix_fallocate(self._fd, start, num_bytes)
        except OSError as error:
            why = f"no room for another {size(num_bytes)} of the pool's state ({error.strerror})"
            raise UnavailableError("ram", str(self._path.parent), why) from None


def _is_sound(path: Path, facts: bytes, num_bytes: int) -> bool:
    """Return True if the file has this length, begins with these facts, and is complete."""
    if not os.path.lexists(path):
        return False
    fd = open_own(path, os.O_RDWR)
    try:
        wanted = facts + (1).to_bytes(8, "little")
        return os.fstat(fd).st_size == num_bytes and os.pread(fd, len(wanted), 0) == wanted
    finally:
        os.close(fd)


def read_counts(path: Path) -> dict[str, int]:
    """Return the counters, summed over all engines, and the pool's ``capacity`` and number of ``blocks``.

    Reads without the lock, so the counters may be slightly inconsistent. Returns an empty dictionary if the
    file is missing or of another version.
    """
    stride, first = aligned(8 * Cache.num_words), Cache.fields["stored"].at
    try:
        fd = open_own(path, os.O_RDONLY)
    except ConfigError:
        return {}
    try:
        content = os.pread(fd, _HEADER_BYTES + stride * (MAX_MEMBERS + 1), 0)
    finally:
        os.close(fd)
    words = np.frombuffer(content[: len(content) // 8 * 8], np.int64)
    if len(content) < _HEADER_BYTES + stride * (MAX_MEMBERS + 1) or words[:2].tolist() != [_MAGIC, FORMAT]:
        return {}
    rows = words[_HEADER_BYTES // 8 :].reshape(MAX_MEMBERS + 1, -1)[:, first : first + len(COUNTERS)]
    counts = dict(zip(COUNTERS, rows.sum(axis=0).tolist(), strict=True))
    blocks = counts["stored"] - counts["evicted"] - counts["discarded"]
    return {"capacity": int(words[_CAPACITY_AT]), "blocks": blocks, **counts}
