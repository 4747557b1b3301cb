"""Interface of a product's tier, and the content of its blocks. Knows no product."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Pool: TypeAlias = npt.NDArray[np.uint8]
"""Shape ``(num_blocks, block_bytes)``, page-aligned for direct I/O."""

KEY_BYTES = 32
TIMEOUT_S = 300.0
_POLL_S = 0.0002


class Medium(Protocol):
    """Storage of a product's bytes, accessed without the product. Equal objects are the same storage."""

    def read(self, offset: int, end: int) -> bytes: ...

    def write(self, offset: int, memory: bytes) -> None: ...

    def truncate(self, length: int) -> None: ...


class File(NamedTuple):
    """A `Medium`. Direct I/O reads the written bytes, because Linux writes dirty pages back first."""

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
    """Bytes ``[offset, end)`` of a medium: a block, or metadata of many blocks."""

    medium: Any
    offset: int
    end: int

    def read(self) -> bytes:
        memory: bytes = self.medium.read(self.offset, self.end)
        return memory


class Product(Protocol):
    """An open tier of a product. Blocks are numbered; each product derives its keys from the numbers.

    Attributes:
        pool: row `i` is block `i` of a call.
    """

    pool: Pool

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Store ``pool[i]`` as block ``numbers[i]``; returns for each if the product reports it as stored."""
        ...

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        """Look up blocks and load hits into ``pool[i]``; returns for each if it is reported as loaded."""
        ...

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove blocks to make room, as the product does or as its documentation expects."""
        ...

    def places(self, numbers: Sequence[int]) -> dict[int, Place]:
        """Locate the bytes of blocks."""
        ...

    def records(self) -> list[Place]:
        """Locate the metadata of blocks."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class FileProduct(Product, Protocol):
    """A `Product` that stores its blocks in files of this machine."""

    def make_unreadable(self, places: Sequence[Place]) -> None:
        """Make every later read of these places fail."""
        ...


class Adapter(NamedTuple):
    """A product that can be opened.

    Attributes:
        version: of the installed product.
        configuration: its settings, and protections that are off.
        open: ``open(directory, model, block_bytes, num_blocks)``; `num_blocks` is the capacity, if bounded.
        keeps: False if its blocks do not outlive the process.
    """

    version: str
    configuration: str
    open: Callable[[Path, str, int, int], Product]
    keeps: bool = True


def key(number: int) -> bytes:
    """Derive a key of 32 bytes, random as a block hash."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(number: int, model: str, version: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Generate the bytes of a block; they depend on number, model and version."""
    seed = hashlib.sha256(f"{number} {version} {model}".encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, block_bytes, np.uint8)


def page_aligned(num_blocks: int, block_bytes: int) -> Pool:
    """Allocate a page-aligned pool with all pages resident."""
    pool = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes), np.uint8).reshape(num_blocks, block_bytes)
    pool[:] = 1
    return pool


def until_ended(jobs: set[Any], poll: Callable[[], None]) -> None:
    """Poll until `jobs` is empty. Raises `TimeoutError`."""
    deadline = time.monotonic() + TIMEOUT_S
    while jobs:
        poll()
        if not jobs:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(jobs)} jobs did not end within {TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def parts(count: int, size: int) -> list[range]:
    """Split ``range(count)`` into pieces of `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def files_to_unreadable(places: Sequence[Place]) -> None:
    """Replace the file of each block with a file of the kernel that exists but cannot be read.

    A read through the page cache fails with EIO, an open for direct I/O with EINVAL.
    """
    for place in places:
        path = Path(place.medium.path)
        path.unlink()
        path.symlink_to("/proc/self/mem")
