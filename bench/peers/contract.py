"""What a tier is asked for here, and the bytes that it is given. Knows no product."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Pool: TypeAlias = npt.NDArray[np.uint8]
"""Shape ``(num_blocks, block_bytes)``, on a page: what direct I/O accepts."""

KEY_BYTES = 32
TIMEOUT_S = 300.0
_POLL_S = 0.0002


class Medium(Protocol):
    """What a product keeps bytes in, through its own door, and not the product's. Equal ones are one."""

    def read(self, offset: int, end: int) -> bytes: ...

    def write(self, offset: int, memory: bytes) -> None: ...

    def truncate(self, length: int) -> None: ...


class File(NamedTuple):
    """A `Medium`. Direct I/O sees what is written: Linux writes back what it goes past."""

    path: str

    def read(self, offset: int, end: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(end - offset)

    def write(self, offset: int, memory: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(memory)

    def truncate(self, length: int) -> None:
        os.truncate(self.path, length)


class Place(NamedTuple):
    """The bytes ``[offset, end)`` of a medium: a block, or what the product keeps about many."""

    medium: Any
    offset: int
    end: int

    def read(self) -> bytes:
        """All of it."""
        memory: bytes = self.medium.read(self.offset, self.end)
        return memory


class Product(Protocol):
    """An open tier of some product. Blocks have numbers here; each product makes its own keys of them.

    Attributes:
        pool: block `i` of a call lies in row `i`.
    """

    pool: Pool

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Store ``pool[i]`` as block ``numbers[i]``; which the product says are stored."""
        ...

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Ask for blocks, load those that it says it has into ``pool[i]``; which it says are loaded."""
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """Make room: take these blocks out, as the product does it or expects it to be done."""
        ...

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Where these blocks lie."""
        ...

    def records(self) -> list[Place]:
        """Where what it keeps about blocks, apart from their bytes, lies."""
        ...

    def make_unreadable(self, places: Sequence[Place]) -> None:
        """From now on reading these places fails."""
        ...

    def close(self) -> None: ...


class Adapter(NamedTuple):
    """A product that can be opened.

    Attributes:
        version: of the product, as installed.
        configuration: what is set, and what is off that could be on.
        open: ``open(directory, model, block_bytes, num_blocks)``; room for so many blocks, if it is bounded.
        keeps: False if the end of the process is the end of its blocks.
    """

    version: str
    configuration: str
    open: Callable[[Path, str, int, int], Product]
    keeps: bool = True


def key(number: int) -> bytes:
    """32 bytes that look like a hash, as block hashes do."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(number: int, model: str, version: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a block: others for another number, model or version."""
    seed = hashlib.sha256(f"{number} {version} {model}".encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, block_bytes, np.uint8)


def page_aligned(num_blocks: int, block_bytes: int) -> Pool:
    """A pool; every page of it is there already."""
    pool = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8).reshape(num_blocks, block_bytes)
    pool[:] = 1
    return pool


def until_ended(jobs: set[Any], poll: Callable[[], None]) -> None:
    """Poll until no job is left. Raises `TimeoutError`."""
    deadline = time.monotonic() + TIMEOUT_S
    while jobs:
        poll()
        if not jobs:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(jobs)} jobs have not ended")
        time.sleep(_POLL_S)


def parts(count: int, size: int) -> list[range]:
    """``range(count)`` in pieces of `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def files_to_unreadable(places: Sequence[Place]) -> None:
    """Put a file of the kernel's in place of each block's: it is there, and reading it fails.

    With EIO where the product reads through the page cache, with EINVAL on opening for direct I/O.
    """
    for place in places:
        path = Path(place.medium.path)
        path.unlink()
        path.symlink_to("/proc/self/mem")
