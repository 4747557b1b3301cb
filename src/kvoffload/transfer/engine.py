"""One interface over every device: store rows of a device into slots of a pool, load them back.

Defines what a device is: an array whose first dimension is blocks. `device` chooses its engine. Does not know
what the bytes mean, which block is in a slot, or how a copy is done.
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
    """Copies under way. Thread: one at a time, any."""

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits for the device; True stays True."""
        ...

    def wait(self) -> None:
        """Return when every byte has arrived."""
        ...


@runtime_checkable
class CopyEngine(Protocol):
    """Moves blocks between one device and pools in host memory.

    From the call until the transfer is done, its rows and slots belong to the transfer: the caller must not
    write those that are read, nor touch those that are written. Transfers under way at the same time are
    unordered: load a slot only after its store is done.

    Thread: one at a time. Rows and slots are checked before any byte moves: `IndexError` names the first one
    out of range, `ValueError` names the shapes that do not match.

    Attributes:
        num_blocks: rows of the device.
        block_bytes: bytes of one of them; the width of every pool.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def store(self, device_rows: Rows, pool: Blocks, slots: Rows) -> Transfer:
        """Copy device to tier: ``pool[slots[i]] = device[device_rows[i]]``."""
        ...

    def load(self, pool: Blocks, slots: Rows, device_rows: Rows) -> Transfer:
        """Copy tier to device: ``device[device_rows[i]] = pool[slots[i]]``."""
        ...

    def close(self) -> None:
        """Release the pools. All transfers must be done."""
        ...


class HostEngine:
    """The engine of a device in host memory: each copy is done when the call returns.

    Args:
        device: as for `as_blocks`; its memory is used in place.

    Thread: no state but the device; two threads may copy different rows at a time.
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
    """A transfer that is already done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_DONE = _Done()


def as_blocks(device: DeviceArray, block_bytes: int | None = None) -> Blocks:
    """View a device in host memory as ``(num_blocks, block_bytes)`` of uint8. Nothing is copied.

    Args:
        device: numpy array or torch CPU tensor of any dtype (also bfloat16), shape ``(num_blocks, ...)``.
            The bytes of a block are contiguous; there may be gaps between blocks. A view that splits a
            block (keys and values in different places) is two devices.
        block_bytes: the size of a block that the caller expects.

    Raises: `TypeError` for other objects or devices; `ValueError` when a block is not contiguous or has
    another size than `block_bytes`.
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
    """torch's name for this CPU (``AVX512``); engines' KV layout depends on it. Empty without torch."""
    torch = sys.modules.get("torch")
    return "" if torch is None else str(torch.backends.cpu.get_cpu_capability())


def is_tensor(candidate: object) -> bool:
    """Whether this is a torch tensor. Does not import torch: a program with a tensor has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(candidate, torch.Tensor)
