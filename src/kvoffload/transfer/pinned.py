"""Pinned host memory for copies to and from a CUDA device.

Owns the pinned pools. Around calls of the CUDA runtime, sets the device and clears errors. Does not know
blocks or slots.

If a copy command crosses the end of a pinned range, CUDA reports an error. Therefore a pool is pinned as a
whole or not at all. If another owner has pinned a part of a pool, the pool counts as not pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch as untyped_torch

from kvoffload.transfer.copies import Blocks, address_of

torch: Any = untyped_torch
Tensor: TypeAlias = Any

logger = logging.getLogger(__name__)

PIN_AT_ONCE_BYTES = 64 * 2**30
"""Largest size of memory that is pinned in one call, because drivers refuse more."""

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: pinned and mapped for all devices of the process.
_NOT_REGISTERED = 713
ABANDONED: list[Blocks] = []
"""Pools to which a device may still write, because waiting for the device failed.

Their memory is never reused.
"""
_borders: set[int] = set()
"""Addresses at which pieces of pinned pools begin, for all owners in this process."""


def on_device(device: Any) -> Any:
    """Return a context in which this CUDA device is the current device; an empty context for other devices.

    A call of the CUDA runtime acts on the current device, and creates a CUDA context there (0.5 GiB).
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronized(device: Any) -> bool:
    """Wait for all work on this device; return False if the wait fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)
    except Exception:
        logger.exception("cannot synchronize device %s", device)
        return False
    return True


def host_buffer(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Allocate a tensor in pinned memory. torch reuses the memory only after its copies are done.

    If no pinned memory is available, allocates pageable memory. Copies to and from it block the host.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        warn_once(f"no pinned memory for a buffer, so copies block the host: {error}")
        return torch.empty(shape, dtype=dtype)


class _Pinned(NamedTuple):
    """A pinned pool, and the addresses at which its separately pinned pieces begin."""

    pool: Blocks
    pieces: list[int]

    def unpin(self) -> None:
        """Unpin the pieces. If CUDA fails to unpin a piece, the pool's memory is never reused."""
        failed = 0
        for piece in self.pieces:
            error = int(torch.cuda.cudart().cudaHostUnregister(piece))
            if error:
                clear_error()
            if error in (0, _NOT_REGISTERED):
                _borders.discard(piece)
            else:
                failed = error
        if failed:
            ABANDONED.append(self.pool)
            logger.warning("cudaHostUnregister: error %d; the memory stays pinned and allocated", failed)


class PinnedPools:
    """The pools of one engine that CUDA may access directly. A pool is pinned on first use.

    Args:
        device: the engine's device.

    Thread: any, one at a time.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pinned: dict[tuple[int, int], _Pinned] = {}
        self._refused: set[tuple[int, int]] = set()

    def tensor(self, pool: Blocks) -> Tensor | None:
        """Return the pool as a tensor in host memory; None if asynchronous copy commands cannot use it.

        They cannot if the pool is not pinned, or is pinned in several pieces.
        """
        if not self._ensure_pinned(pool):
            return None
        start, end = _extent(pool)
        if any(start < border < end for border in tuple(_borders)):
            return None
        return torch.from_numpy(pool)

    def mapped(self, pool: Blocks) -> Tensor | None:
        """Return the pool as a tensor on the device, or None if kernels cannot access the pool.

        Kernels access the tensor over the bus. Nothing is copied.
        """
        if not len(pool):
            return None
        if runtime_library() is None:
            warn_once("the CUDA runtime is no shared library: copies of small blocks go through a buffer")
            return None
        if not self._ensure_pinned(pool):
            return None
        with on_device(self._device):
            if _has_own_address(pool):
                # First a row alone: older versions of torch copy memory that was pinned for another device.
                row = torch.as_tensor(_OnDevice(pool[:1]), device=self._device)
                if row.data_ptr() == address_of(pool):
                    return torch.as_tensor(_OnDevice(pool), device=self._device)
        warn_once(f"kernels of {self._device} cannot access pinned memory: copies of small blocks are slower")
        return None

    def _ensure_pinned(self, pool: Blocks) -> bool:
        """Pin the pool if it is not pinned; return False if pinning fails, or failed before."""
        start, end = extent = _extent(pool)
        if not len(pool) or any(first <= start and end <= last for first, last in self._pinned):
            return True
        if extent in self._refused:
            return False
        with on_device(self._device):
            if not pool.flags.writeable:
                reason = "it is read-only"
            elif any(_share_a_page(extent, other) for other in self._pinned):
                reason = "it shares pages with another pool, which is pinned"
            elif any(_share_a_page(extent, _extent(abandoned)) for abandoned in ABANDONED):
                reason = "it was not unpinned after an error"
            elif all(_is_pinned(corner) for corner in (pool[:1, :1], pool[-1:, -1:])):
                return True  # pinned by another owner, which unpins it
            elif error := self._pin(pool):
                reason = f"cudaHostRegister: error {error}"
            else:
                return True
        self._refused.add(extent)
        logger.warning(
            "a pool of %d bytes is not pinned (%s): its copies go through a buffer, slower",
            end - start,
            reason,
        )
        return False

    def _pin(self, pool: Blocks) -> int:
        """Pin a pool in pieces of a size that drivers accept; return CUDA's error code, or 0.

        After an error or an interrupt, no piece stays pinned.
        """
        start, end = extent = _extent(pool)
        pinned, is_complete = _Pinned(pool, []), False
        self._pinned[extent] = pinned
        try:
            while start < end:
                stop = min(end, start // mmap.PAGESIZE * mmap.PAGESIZE + PIN_AT_ONCE_BYTES)
                pinned.pieces.append(start)
                if error := _register(start, stop - start):
                    pinned.pieces.pop()
                    return error
                start = stop
            is_complete = True
        finally:
            if not is_complete:
                del self._pinned[extent]
                pinned.unpin()
        return 0

    def unpin(self) -> None:
        """Unpin the pools that this object pinned. They must no longer be in use."""
        with on_device(self._device):
            for pinned in self._pinned.values():
                pinned.unpin()
        self._pinned.clear()
        self._refused.clear()

    def abandon(self) -> None:
        """Keep the pools pinned and allocated forever, because the device may still write to them."""
        if self._pinned:
            logger.error("%d pools stay pinned: the device cannot be synchronized", len(self._pinned))
        ABANDONED.extend(pinned.pool for pinned in self._pinned.values())
        self._pinned.clear()
        self._refused.clear()


class _OnDevice:
    """Pinned host memory as an array of a device, for `torch.as_tensor`, which keeps this object."""

    def __init__(self, pool: Blocks) -> None:
        self._pool = pool
        self.__cuda_array_interface__ = {
            "shape": pool.shape,
            "strides": pool.strides,
            "typestr": "|u1",
            "data": (address_of(pool), False),
            "version": 3,
        }


def _extent(pool: Blocks) -> tuple[int, int]:
    start = address_of(pool)
    return start, start + pool.strides[0] * (len(pool) - 1) + pool.shape[1]


def _share_a_page(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return True if two address ranges share a page. Memory is pinned in whole pages."""
    page = mmap.PAGESIZE
    return one[0] // page < -(-other[1] // page) and other[0] // page < -(-one[1] // page)


def _is_pinned(corner: Blocks) -> bool:
    # A separate tensor, because torch checks only the first byte of a tensor's memory.
    return bool(torch.from_numpy(corner).is_pinned())


def _has_own_address(pool: Blocks) -> bool:
    """Return True if pinned memory has the same address on the current device as on the host."""
    library, pointer = runtime_library(), ctypes.c_void_p()
    if library is None:
        return False
    address = address_of(pool)
    error = library.cudaHostGetDevicePointer(
        ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
    )
    if error:
        clear_error()
    return not error and pointer.value == address


def _register(address: int, num_bytes: int) -> int:
    """Pin a piece; return CUDA's error code, or 0."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))
    if error:
        clear_error()
    else:
        _borders.add(address)
    return error


def clear_error() -> None:
    """Clear the CUDA runtime's pending error. Otherwise torch would raise it after its next kernel launch."""
    cudart = torch.cuda.cudart()
    if hasattr(cudart, "cudaGetLastError"):
        cudart.cudaGetLastError()
    elif library := runtime_library():
        library.cudaGetLastError()
    else:
        # torch's check after a launch reads and clears the error.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)


@cache
def runtime_library() -> Any | None:
    """Return the CUDA runtime library that this process has loaded, or None."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith("libcudart"):
                return ctypes.CDLL(f"/{path}")
    return None


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same message was logged before."""
    logger.warning("%s", message)
