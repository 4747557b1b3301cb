"""Copies of whole blocks between the slots of a pool and an engine's KV tensors.

The parts of a block are in many tensors, at least one for each layer. Each tensor is given as a *view*, whose
first dimension is the blocks. In a slot, the parts of a block are consecutive, in the order of the views.
Does not know layers, tokens or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvoffload.structures.jit import compile_all
from kvoffload.transfer.copies import Blocks, PartTable, Rows, check_rows, copy_parts
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.engine import is_tensor

View: TypeAlias = Any
"""A numpy array or torch tensor, shape ``(num_blocks, ...)``, with any strides."""


class Parts(Protocol):
    """Copies an engine's blocks to and from a pool. Thread: any; concurrent calls must copy different blocks.

    Attributes:
        chunk_bytes: number of bytes that a caller should copy in one call. For host memory it is small, so
            that blocks stay in the CPU's cache between checksum and copy. For a device it is large, so that
            few kernels are launched.
    """

    chunk_bytes: int

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        """Copy ``blocks[i]`` into slot ``slots[i]``. All bytes have arrived when the call returns."""
        ...

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        """Copy slot ``slots[i]`` into ``blocks[i]``. All bytes have arrived when the call returns."""
        ...


def parts_of(views: Sequence[View], pins: DevicePins) -> Parts:
    """Create the `Parts` of an engine's blocks. In a slot, the parts are in the order of `views`.

    All views are in host memory, or all are on one device. Cost: 5 µs a view in host memory.

    Args:
        pins: the object that pins the pools for a CUDA device.
    """
    compile_all()
    if is_tensor(views[0]) and views[0].device.type != "cpu":
        from kvoffload.transfer.device_parts import DeviceParts

        return DeviceParts(views, pins)
    return HostParts(views)


class HostParts:
    """Implements `Parts` for tensors in host memory, without a buffer.

    If the bytes of a view's blocks are not contiguous, the view is divided into several views, whose blocks
    are contiguous. An example is the view ``(blocks, heads, tokens, dim)`` of a contiguous cache.
    """

    chunk_bytes = 4 * 1024 * 1024

    def __init__(self, views: Sequence[View]) -> None:
        self._views, self._num_blocks = views, len(views[0])
        self._is_writeable = all(is_tensor(view) or view.flags.writeable for view in views)
        columns = [np.concatenate(arrays) for arrays in zip(*map(_contiguous, views), strict=True)]
        self._table = PartTable(*columns)

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        self._copy(blocks, pool, slots, to_pool=True)

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        if not self._is_writeable:
            raise ValueError("the tensors of the engine are read-only")
        self._copy(blocks, pool, slots, to_pool=False)

    def _copy(self, blocks: Rows, pool: Blocks, slots: Rows, to_pool: bool) -> None:
        rows = check_rows("blocks", blocks, self._num_blocks)
        copy_parts(self._table, rows, pool, check_rows("slots", slots, len(pool)), to_pool)


def _contiguous(view: View) -> PartTable:
    """Divide a view into views whose blocks are contiguous."""
    if is_tensor(view):
        address, size = view.data_ptr(), view.element_size()
        strides = [size * stride for stride in view.stride()]
    else:
        address, size, strides = view.__array_interface__["data"][0], view.itemsize, list(view.strides)
    width, axis = size, len(strides)
    while axis > 1 and (view.shape[axis - 1] == 1 or strides[axis - 1] == width):
        axis -= 1
        width *= view.shape[axis]
    begins = np.array([address], np.int64)
    for number in range(1, axis):
        begins = (begins[:, np.newaxis] + np.arange(view.shape[number]) * strides[number]).ravel()
    count = len(begins)
    return PartTable(begins, np.full(count, strides[0], np.int64), np.full(count, width, np.int64))
