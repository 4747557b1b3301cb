"""The RAM tier: one contiguous pool of slots, and a checksum for each slot.

Owns the memory of the pool and the checksums. Does not know which slots are in use: the manager decides.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, MisuseError, check_integer
from kvoffload.structures.jit import compile_all
from kvoffload.structures.keys import Keys
from kvoffload.text import size
from kvoffload.tiers.contract import NO_CHECKSUM, Checksums, Mask, block_checksums
from kvoffload.transfer import Blocks, CopyEngine, Rows, check_rows, copy_engine_for
from kvoffload.transfer.copies import address_of
from kvoffload.transfer.engine import DeviceArray

_SLOT_ALIGNMENT = 64
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass
class SlotMemory:
    """Memory of a `MemoryTier`.

    Attributes:
        mapping: the memory; `MemoryTier.close` unmaps it.
        slots_at: position of slot 0 in the memory, in bytes.
        checksums: ``(num_slots,)`` uint64; None if blocks are not verified.
    """

    mapping: mmap.mmap
    slots_at: int
    checksums: Checksums | None


class MemoryTier:
    """A pool of `num_slots` blocks of `block_bytes` in page-aligned anonymous memory.

    The checksum of a slot is the xxh3_64 of its bytes, seeded with the digest of its key. `read` and
    `verify_slots` detect:

    - damaged, zeroed or torn blocks, with probability 1 - 2^-64;
    - another block in the slot, even together with its checksum, as after a swap of two slots, with
      probability 1 - 2^-64 for each pair of keys;
    - slots that were never written, or were erased.

    If the checksum itself is damaged, a sound block counts as damaged.

    Not detected: bytes that were wrong before `write` computed the checksum, damage between the verification
    and the following copy, and forgery. xxh3 detects accidents, not attacks.

    If `verify` is False, there are no checksums, and every block counts as sound.

    Args:
        num_slots: at least 1.
        block_bytes: at least 1. Slots start at multiples of 64 bytes.
        verify: keep and check checksums.
        memory: existing memory with these slots; None to allocate anonymous memory.

    Attributes:
        slot_stride: bytes from one slot to the next.
        checksums: ``(num_slots,)`` uint64; None if `verify` is False.

    Memory: pages are allocated when slots are first written, or all at once if a GPU pins the pool.
    Thread: one at a time. Callers may also copy to and from `pool` themselves: call `seal` after a copy to
    the pool, and `verify_slots` before a copy from the pool. Until such a copy has ended, its slots must not
    be passed to other calls.
    Cost: a write or read reads each byte twice, once for the checksum.

    Raises:
        ConfigError: the pool is larger than the available memory.
        IndexError: a slot or row is out of range. The message names the first one; nothing was changed.
        MisuseError: the tier is closed.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, *, verify: bool = True, memory: SlotMemory | None = None
    ) -> None:
        self.num_slots = num_slots = check_integer("num_slots", num_slots, sys.maxsize)
        self.block_bytes = block_bytes = check_integer("block_bytes", block_bytes, sys.maxsize)
        self.slot_stride = slot_stride(block_bytes)
        if memory is None:
            mapping = _allocate(num_slots, block_bytes, num_slots * self.slot_stride)
            checksums = np.full(num_slots, NO_CHECKSUM, np.uint64) if verify else None
            memory = SlotMemory(mapping, 0, checksums)
        self._memory: mmap.mmap | None = memory.mapping
        self.checksums = memory.checksums
        slots = np.frombuffer(memory.mapping, np.uint8, num_slots * self.slot_stride, memory.slots_at)
        self._slots = slots.reshape(num_slots, self.slot_stride)
        compile_all()

    @property
    def pool(self) -> Blocks:
        """The slots, ``(num_slots, block_bytes)`` uint8, as a view: row `i` starts at ``i * slot_stride``."""
        self._check_open()
        return self._slots[:, : self.block_bytes]

    def write(self, keys: Keys, slots: Rows, source: DeviceArray | CopyEngine, source_rows: Rows) -> None:
        """Copy block `i` from ``source[source_rows[i]]`` into ``slots[i]``, and compute its checksum.

        `source` is the memory of a device, or a copy engine of the device. For many calls, a copy engine is
        faster. Slots must be distinct. If the device fails, its error is raised, and the unfinished slots
        count as never written.
        """
        engine = self._engine_for(source)
        slots = self._checked(keys, slots)
        source_rows = self._checked_rows("source_rows", source_rows, engine, len(slots))
        pool = self.pool
        self.erase(slots)
        transfers = []
        # The stack waits for the copies in flight even if a later chunk fails, so that nothing writes to the
        # slots after the error.
        with contextlib.ExitStack() as in_flight:
            for batch in self._chunks(slots):
                transfer = engine.store(source_rows[batch], pool, slots[batch])
                in_flight.callback(transfer.wait)
                transfers.append((batch, transfer))
            for batch, transfer in transfers:
                transfer.wait()
                self.seal(keys[batch], slots[batch])

    def read(self, keys: Keys, slots: Rows, dest: DeviceArray | CopyEngine, dest_rows: Rows) -> Mask:
        """Verify blocks, and copy sound block `i` to ``dest[dest_rows[i]]``.

        Returns a mask of the sound blocks, ``(n,)`` bool.
        """
        engine = self._engine_for(dest)
        slots = self._checked(keys, slots)
        dest_rows = self._checked_rows("dest_rows", dest_rows, engine, len(slots))
        pool = self.pool
        sound = np.empty(len(slots), np.bool_)
        # In chunks: a block is still in the CPU's cache when it is copied, and the device copies one chunk
        # while the next chunk is verified.
        with contextlib.ExitStack() as in_flight:
            for batch in self._chunks(slots):
                sound[batch] = good = self.verify_slots(keys[batch], slots[batch])
                transfer = engine.load(pool, slots[batch][good], dest_rows[batch][good])
                in_flight.callback(transfer.wait)
        return sound

    def seal(self, keys: Keys, slots: Rows) -> None:
        """Compute the checksums of blocks that the caller has copied into these slots of the pool."""
        checksums, slots = self.checksums, self._checked(keys, slots)
        if checksums is not None:
            checksums[slots] = self._compute(keys, slots)

    def verify_slots(self, keys: Keys, slots: Rows) -> Mask:
        """Return a mask of the sound blocks, ``(n,)`` bool: their bytes match their keys. Copies nothing."""
        checksums, slots = self.checksums, self._checked(keys, slots)
        if checksums is None:
            return np.ones(len(slots), np.bool_)
        sound: Mask = checksums[slots] == self._compute(keys, slots)
        return sound

    def erase(self, slots: Rows) -> None:
        """Mark slots as never written. Their bytes stay."""
        self._check_open()
        slots = check_rows("slots", slots, self.num_slots)
        if self.checksums is not None:
            self.checksums[slots] = NO_CHECKSUM

    def close(self) -> None:
        """Release the memory. It is unmapped once the last view of `pool` is gone. Idempotent."""
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        del self._slots
        if self.checksums is not None:
            self.checksums = self.checksums[:0].copy()  # may have been a view of the memory
        # BufferError: a view is in use; the memory is unmapped with the last view.
        with contextlib.suppress(BufferError):
            memory.close()

    def _compute(self, keys: Keys, slots: npt.NDArray[np.int64]) -> Checksums:
        held = self._slots  # keeps the memory mapped if another thread calls `close`
        addresses = address_of(held) + slots * self.slot_stride
        return block_checksums(addresses, self.block_bytes, keys.digests)

    def _checked(self, keys: Keys, slots: Rows) -> npt.NDArray[np.int64]:
        self._check_open()
        checked = check_rows("slots", slots, self.num_slots)
        if len(keys) != len(checked):
            raise ValueError(f"{len(keys)} keys but {len(checked)} slots")
        return checked

    def _engine_for(self, device: DeviceArray | CopyEngine) -> CopyEngine:
        engine = copy_engine_for(device)
        if engine.block_bytes != self.block_bytes:
            raise ValueError(
                f"the device has blocks of {engine.block_bytes} bytes, this tier of {self.block_bytes}"
            )
        return engine

    def _checked_rows(
        self, name: str, rows: Rows, engine: CopyEngine, num_slots: int
    ) -> npt.NDArray[np.int64]:
        checked = check_rows(name, rows, engine.num_blocks)
        if len(checked) != num_slots:
            raise ValueError(f"{num_slots} slots but {len(checked)} {name}")
        return checked

    def _check_open(self) -> None:
        if self._memory is None:
            raise MisuseError(f"this memory tier of {self.num_slots} slots is closed")

    def _chunks(self, slots: Rows) -> Iterator[slice]:
        step = max(1, CHUNK_BYTES // self.block_bytes)
        return (slice(start, start + step) for start in range(0, len(slots), step))


def slot_stride(block_bytes: int) -> int:
    """Return the distance in bytes from one slot to the next: `block_bytes`, rounded up to 64 bytes."""
    return -(-block_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


def _allocate(num_slots: int, block_bytes: int, num_bytes: int) -> mmap.mmap:
    available = available_bytes()
    problem = ConfigError(
        "num_slots * block_bytes",
        f"{num_slots} * {block_bytes} = {size(num_bytes)}",
        f"this machine has {size(available)} available",
    )
    if num_bytes > available:
        raise problem
    try:
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise problem from error


def available_bytes() -> int:
    """Return the bytes of memory that this process can still use, on the machine and within its cgroup.

    Callers must check this limit before an allocation. An anonymous mapping of any size succeeds, but the
    kernel kills the process once it has written more pages than the machine has.
    """
    limits = [2**63 - 1]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    for place, most, used in (
        ("/sys/fs/cgroup", "max", "current"),
        ("/sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(f"{place}/memory.{most}").read_text()))
            num_used = int(Path(f"{place}/memory.{used}").read_text())
            # The system drops cached files when memory is short.
            cached = re.findall(r"^(?:in)?active_file (\d+)$", Path(f"{place}/memory.stat").read_text(), re.M)
            limits[-1] -= max(0, num_used - sum(map(int, cached)))
    return max(0, min(limits))
