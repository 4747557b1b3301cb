"""RAM that several processes share: joins the pool, and maps the memory of the slots.

Owns the list of settings that must be equal in all processes of a pool, and the file ``slots`` of the pool's
directory. Does not know which slots are in use.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import time
import uuid
from pathlib import Path

import numpy as np

from kvoffload.core.policy import EvictionPolicy
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node.mutex import check_platform
from kvoffload.node.pool_directory import (
    ALLOCATION_S,
    FACTS,
    SHARED_MEMORY,
    SLOTS,
    PoolDirectory,
    log_other_pools,
    open_own,
    wait_for_lock,
)
from kvoffload.settings.ram import RamOptions
from kvoffload.text import size
from kvoffload.tiers.memory import MemoryTier, SlotMemory, available_bytes, slot_stride

_FORMAT = 1
"""Version of the file `SLOTS`. Increment it with every change of the file's layout."""
_MAGIC = 0x6B766F66_736C6F74
_STEP_BYTES = 256 * 1024 * 1024
_log = logging.getLogger(__name__)


def join_pool(ram: RamOptions, producer: str, policy: str | type[EvictionPolicy]) -> PoolDirectory:
    """Join the pool of shared RAM, or create the pool. Processes share a pool if producer, policy and size of
    RAM are equal.

    Raises: as `PoolDirectory.join`, and `UnavailableError` if the pool's directory was created with other
    settings.
    """
    check_platform()
    name = policy if isinstance(policy, str) else f"{policy.__module__}:{policy.__qualname__}"
    facts = {"producer": producer, "policy": name, "ram_bytes": ram.size, "slots": f"open {_FORMAT}"}
    engine_id = f"{os.getpid()}-{uuid.uuid4()}"
    pool = PoolDirectory.join(facts, engine_id, keep_s=ram.keep_s, root=SHARED_MEMORY)
    try:
        _check_facts(pool.path / FACTS, facts)
    except ConfigError:
        pool.close()
        raise
    _log.info("kvoffload: RAM of %s is shared in the pool %s", size(ram.size), pool.path.name)
    log_other_pools(pool, facts, _log)
    return pool


def _check_facts(path: Path, facts: dict[str, object]) -> None:
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError):
        recorded = None
    if recorded != facts:
        why = "the pool was made for another model, layout, policy or size; stop its processes and remove it"
        raise UnavailableError("ram", str(path), why)


def shared_memory_tier(pool: PoolDirectory, num_slots: int, block_bytes: int) -> MemoryTier:
    """Open a `MemoryTier` whose slots and checksums are in a file, which all processes of a pool share.

    Every block is verified when it is read, because other processes write blocks, too. The first process
    allocates all the memory, and the other processes wait for it.

    Args:
        pool: this process's membership in the pool. `close` of the tier does not close the membership.
        num_slots, block_bytes: equal in all processes.

    Raises: `UnavailableError` in three cases: the machine lacks free memory, another process needs too long
    to allocate the memory, or other processes use a file that is damaged or of another version.
    """
    slots_at = mmap.PAGESIZE + -(-8 * num_slots // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = slots_at + num_slots * slot_stride(block_bytes)
    facts = np.array([_MAGIC, _FORMAT, num_slots, block_bytes], np.uint64).tobytes()
    path = pool.path / SLOTS
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        wait_for_lock(fd, path, time.monotonic() + ALLOCATION_S)
        if os.fstat(fd).st_size != num_bytes or os.pread(fd, len(facts), 0) != facts:
            _make(pool, fd, facts, num_bytes)
        mapping = mmap.mmap(fd, num_bytes)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping has a copy of the descriptor, which would keep the lock
        os.close(fd)
    checksums = np.frombuffer(mapping, np.uint64, num_slots, mmap.PAGESIZE)
    return MemoryTier(num_slots, block_bytes, memory=SlotMemory(mapping, slots_at, checksums))


def _make(pool: PoolDirectory, fd: int, facts: bytes, num_bytes: int) -> None:
    """Allocate the file of the slots. Replaces an incomplete or damaged file if no other process uses it.

    Writes the settings last. So if the process is killed during the allocation, other processes recognize the
    file as incomplete.
    """
    path = pool.path / SLOTS
    is_new = not os.pread(fd, 1, 0).strip(b"\0")
    if not is_new and pool.has_others():
        why = "the file is damaged, or of another version; stop the processes of the pool and delete it"
        raise UnavailableError("ram", str(path), why)
    os.ftruncate(fd, 0)
    free = os.statvfs(path)
    num_free = min(free.f_bavail * free.f_frsize, available_bytes())
    if num_bytes > num_free:
        why = f"{path.parent.parent} and this machine have {size(num_free)} free"
        raise UnavailableError("ram", size(num_bytes), why)
    try:
        # Allocated now: a later write to memory that the machine lacks would kill the process. In steps,
        # because a signal makes the system repeat a call.
        for start in range(0, num_bytes, _STEP_BYTES):
            os.posix_fallocate(fd, start, min(_STEP_BYTES, num_bytes - start))
    except OSError as error:
        os.ftruncate(fd, 0)
        raise UnavailableError("ram", size(num_bytes), f"no room ({error.strerror})") from None
    os.pwrite(fd, facts, 0)
