"""Pinned host memory for copies to and from a CUDA device.

Owns the list of pinned pools, and the current device and the pending error around calls of the CUDA runtime.
Does not know blocks or slots.

A range of memory is pinned as a whole or not at all: a copy across the end of a pinned range is an error of
CUDA. So a pool that overlaps a pinned range without lying inside counts as not pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from pathlib import Path
from typing import Any, TypeAlias

import torch as untyped_torch

from kvoffload.transfer.copies import Blocks, address_of

torch: Any = untyped_torch
Tensor: TypeAlias = Any

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process.
_ABANDONED: list[Blocks] = []
"""Pools that a device may still write, because it could not be synchronized: their memory is never reused."""


def on_device(device: Any) -> Any:
    """Context in which this device is the current one; nothing for other devices than CUDA.

    A call of the CUDA runtime acts on the current device, and makes a context there (0.5 GiB).
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronized(device: Any) -> bool:
    """Wait for everything on this device; False if it cannot be waited for."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)
    except Exception:
        logger.exception("cannot wait for %s", device)
        return False
    return True


def host_buffer(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A tensor in pinned memory. If none is available, in pageable memory: then copies block the host.

    torch's pinned allocator keeps buffers and reuses one only when the copies that use it are done.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        _say_once(f"no pinned memory for a buffer, copies wait on the host: {error}")
        return torch.empty(shape, dtype=dtype)


class PinnedPools:
    """The pools of one engine that CUDA may copy directly, pinned on their first use.

    Args:
        device: the engine's; pinning is done there.

    Thread: one at a time.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pinned: dict[tuple[int, int], Blocks] = {}
        self._refused: set[tuple[int, int]] = set()

    def tensor(self, pool: Blocks) -> Tensor | None:
        """The pool as a tensor in pinned memory; None if it is not and cannot be pinned."""
        start, end = extent = _extent(pool)
        if not len(pool) or any(first <= start and end <= last for first, last in self._pinned):
            return torch.from_numpy(pool)
        if extent in self._refused:
            return None
        with on_device(self._device):
            if not pool.flags.writeable:
                why = "it is read-only"
            elif any(_pages(extent).overlaps(_pages(other)) for other in self._pinned):
                why = "it shares pages with another pool, which is pinned"
            elif all(_is_pinned(corner) for corner in (pool[:1, :1], pool[-1:, -1:])):
                return torch.from_numpy(pool)  # by somebody else, who unpins it
            elif error := _register(start, end - start):
                why = f"cudaHostRegister: error {error}"
            else:
                self._pinned[extent] = pool
                return torch.from_numpy(pool)
        self._refused.add(extent)
        logger.warning(
            "a pool of %d bytes is not pinned (%s): its copies go through a buffer, slower", end - start, why
        )
        return None

    def unpin(self) -> None:
        """Undo the pinning done here. Nothing may use the pools any more."""
        with on_device(self._device):
            for start, _ in self._pinned:
                error = int(torch.cuda.cudart().cudaHostUnregister(start))
                if error:
                    _clear_error()
                    logger.warning("cudaHostUnregister: error %d; the memory stays pinned", error)
        self._pinned.clear()
        self._refused.clear()

    def abandon(self) -> None:
        """Leave the pools pinned, and keep their memory: the device may still write it."""
        if self._pinned:
            logger.error("%d pools stay pinned: the device cannot be waited for", len(self._pinned))
        _ABANDONED.extend(self._pinned.values())
        self._pinned.clear()
        self._refused.clear()


class _Range(tuple[int, int]):
    """First address and the one behind the last."""

    def overlaps(self, other: _Range) -> bool:
        return self[0] < other[1] and other[0] < self[1]


def _extent(pool: Blocks) -> tuple[int, int]:
    start = address_of(pool)
    return start, start + pool.strides[0] * (len(pool) - 1) + pool.shape[1]


def _pages(extent: tuple[int, int]) -> _Range:
    """The pages of a range: memory is pinned by pages."""
    page = mmap.PAGESIZE
    return _Range((extent[0] // page * page, -(-extent[1] // page) * page))


def _is_pinned(corner: Blocks) -> bool:
    # A tensor of its own, because torch looks at the first byte of a tensor's memory only.
    return bool(torch.from_numpy(corner).is_pinned())


def _register(address: int, num_bytes: int) -> int:
    """Pin a range; returns CUDA's error, 0 for none."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        _clear_error()
    return error


def _clear_error() -> None:
    """Clear the runtime's pending error: the check behind the next launch of any kernel would raise it."""
    cudart = torch.cuda.cudart()
    if hasattr(cudart, "cudaGetLastError"):
        cudart.cudaGetLastError()
    elif library := _loaded_library("libcudart"):
        ctypes.CDLL(library).cudaGetLastError()
    else:
        # torch's check behind a launch reads and clears the error.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)


def _loaded_library(name: str) -> str | None:
    """Path of a shared library that this process has loaded."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith(name):
                return f"/{path}"
    return None


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        logger.warning("%s", message)


_SAID: set[str] = set()
