"""The interface of copy engines, which store rows of a device into slots of a pool and load them back.

A device is an array of blocks; each index of its first dimension (a row) is one block. Does not know the
meaning of the bytes.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvoffload.structures.jit import compile_all
from kvoffload.transfer.copies import Blocks, Rows, copy_blocks

DeviceArray: TypeAlias = Any
"""A numpy array, or a torch tensor on the CPU or a CUDA device, shape ``(num_blocks, ...)``, any dtype."""


class Transfer(Protocol):
    """Copies in flight. Thread: any, one at a time."""

    def done(self) -> bool:
        """Return True if every byte has arrived, without waiting."""
        ...

    def wait(self) -> None:
        """Wait until every byte has arrived."""
        ...


@runtime_checkable
class CopyEngine(Protocol):
    """Moves blocks between one device and pools in host memory.

    During a transfer, the caller must not write to the source, and must not access the destination.
    Transfers are not ordered. Therefore load a slot only after the store to this slot is done.

    Thread: any, one at a time. Raises, before any byte is copied: `IndexError`, which names the first row out
    of range; `ValueError`, which names shapes that do not match.

    Attributes:
        num_blocks: number of rows of the device.
        block_bytes: bytes of a row of the device and of every pool.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def store(self, device_rows: Rows, pool: Blocks, slots: Rows) -> Transfer:
        """Copy from the device to the pool: ``pool[slots[i]] = device[device_rows[i]]``."""
        ...

    def load(self, pool: Blocks, slots: Rows, device_rows: Rows) -> Transfer:
        """Copy from the pool to the device: ``device[device_rows[i]] = pool[slots[i]]``."""
        ...

    def close(self) -> None:
        """Release the pools. All transfers must be done before."""
        ...


class HostEngine:
    """The copy engine of a device in host memory. Each copy is done when the call returns.

    Args:
        device: an array or tensor that `as_blocks` accepts. Its memory is used in place.

    Thread: any; two threads may copy different rows at a time.
    """

    def __init__(self, device: DeviceArray) -> None:
        self.blocks = as_blocks(device)
        self.num_blocks, self.block_bytes = self.blocks.shape
        compile_all()

    def store(self, device_rows: Rows, pool: Blocks, slots: Rows) -> Transfer:
        copy_blocks(self.blocks, device_rows, pool, slots)
        return _DONE

    def load(self, pool: Blocks, slots: Rows, device_rows: Rows) -> Transfer:
        copy_blocks(pool, slots, self.blocks, device_rows)
        return _DONE

    def close(self) -> None:
        pass


class _Done:
    """A finished transfer."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_DONE = _Done()


def as_blocks(device: DeviceArray, block_bytes: int | None = None) -> Blocks:
    """View a device in host memory as ``(num_blocks, block_bytes)`` of uint8. Nothing is copied.

    Args:
        device: numpy array or torch CPU tensor of any dtype (also bfloat16), shape ``(num_blocks, ...)``.
            The bytes of a block are contiguous; blocks may have gaps between them. If keys and values of a
            block are in different places, treat them as two devices.
        block_bytes: the expected size of a block.

    Raises: `TypeError` for other objects or devices; `ValueError` if a block is not contiguous, or its size
        is not `block_bytes`.
    """
    if is_tensor(device):
        if device.device.type != "cpu":
            raise TypeError(f"a tensor on {device.device} has no bytes in host memory: use copy_engine_for")
        blocks: Blocks = byte_rows(device).numpy()
    elif isinstance(device, np.ndarray):
        blocks = _byte_rows_of_array(device)
    else:
        raise TypeError(f"expected a numpy array or a torch tensor, not {type(device).__name__}")
    if block_bytes is not None and blocks.shape[1] != block_bytes:
        raise ValueError(
            f"a block of {device.dtype} {device.shape} has {blocks.shape[1]} bytes, not {block_bytes}"
        )
    return blocks


def byte_rows(tensor: Any) -> Any:
    """View a torch tensor of any device as ``(num_blocks, block_bytes)`` of ``torch.uint8``."""
    tensor = tensor.detach()
    if tensor.dim() == 0 or tensor.numel() == 0 or not tensor[0].is_contiguous():
        raise _not_blocks(tensor)
    block_items = tensor[0].numel()
    rows = tensor.as_strided((len(tensor), block_items), (tensor.stride(0), 1))
    return rows.view(sys.modules["torch"].uint8)


def _byte_rows_of_array(array: np.ndarray[Any, Any]) -> Blocks:
    if array.ndim == 0 or array.size == 0 or array.dtype.hasobject or not array[:1].flags.c_contiguous:
        raise _not_blocks(array)
    shape = (len(array), math.prod(array.shape[1:]))
    strides = (array.strides[0], array.itemsize)
    rows = np.lib.stride_tricks.as_strided(array, shape, strides)
    blocks: Blocks = rows.view(np.uint8)
    return blocks


def _not_blocks(device: DeviceArray) -> ValueError:
    return ValueError(
        f"{device.dtype} of shape {tuple(device.shape)} is not an array of blocks: "
        f"expected (num_blocks, ...), not empty, each block contiguous"
    )


def cpu_capability() -> str:
    """Return the instruction set that torch uses, such as ``AVX512``; empty if torch is not installed.

    The layout in which an engine stores KV blocks on this CPU depends on it.
    """
    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.backends.cpu.get_cpu_capability())


def is_tensor(candidate: object) -> bool:
    """Return True for a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(candidate, torch.Tensor)
