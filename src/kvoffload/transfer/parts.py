"""Copies of whole blocks between the slots of a pool and an engine's KV tensors.

A block is spread over many tensors, at least one for each layer. Each tensor is given as a *view*, whose
first dimension is blocks. In a slot, the parts of a block are consecutive, in the order of the views. Does
not know layers, tokens or keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.jit import compile_all
from kvoffload.transfer.copies import Blocks, PartTable, Rows, check_rows, copy_blocks, copy_parts
from kvoffload.transfer.engine import is_tensor

View: TypeAlias = Any
"""A numpy array or torch tensor, shape ``(num_blocks, ...)``, with any strides."""

_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Parts(Protocol):
    """Copies blocks of an engine. Thread: any; concurrent calls must copy different blocks."""

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        """Copy ``blocks[i]`` into slot ``slots[i]``. All bytes have arrived when the call returns."""
        ...

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        """Copy slot ``slots[i]`` into ``blocks[i]``. All bytes have arrived when the call returns."""
        ...


def parts_of(views: Sequence[View]) -> Parts:
    """Create the `Parts` of an engine's blocks. In a slot, the parts are in the order of `views`.

    All views are in host memory, or all are on one device. Cost: 5 µs a view in host memory.
    """
    compile_all()
    if is_tensor(views[0]) and views[0].device.type != "cpu":
        return DeviceParts(views)
    return HostParts(views)


class HostParts:
    """Parts in host memory, copied in place.

    If the blocks of a view have gaps, the view is divided into contiguous parts. An example is the view
    ``(blocks, heads, tokens, dim)`` of a contiguous cache.
    """

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


class DeviceParts:
    """Parts on one device of torch. Whole slots cross the bus in one copy; the device spreads their parts.

    Copies run on the stream that was current when the object was created, in order with the other work of
    that stream.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._views = [_items(view) for view in views]
        self._device = views[0].device
        self._stream = self._torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        checked = self._checked(blocks)
        with self._inference(), self._torch.cuda.stream(self._stream):
            chosen = self._torch.from_numpy(checked).to(self._device)
            parts = [self._bytes(view.index_select(0, chosen)) for view in self._views]
            staged = self._buffer(len(checked), pool.shape[1])
            staged.copy_(self._torch.cat(parts, 1))  # waits for the device
        copy_blocks(staged.numpy(), np.arange(len(checked)), pool, slots)

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        checked = self._checked(blocks)
        staged = self._buffer(len(checked), pool.shape[1])
        copy_blocks(pool, slots, staged.numpy(), np.arange(len(checked)))
        with self._inference(), self._torch.cuda.stream(self._stream):
            chosen = self._torch.from_numpy(checked).to(self._device)
            arrived, begin = staged.to(self._device), 0
            for view in self._views:
                end = begin + view[0].numel() * view.element_size()
                part = arrived[:, begin:end].contiguous().view(view.dtype)
                view.index_copy_(0, chosen, part.view(len(checked), *view.shape[1:]))
                begin = end
            if self._stream is not None:
                self._stream.synchronize()

    def _inference(self) -> Any:
        """Return inference mode, which is needed to write to inference tensors. The mode is per thread."""
        return self._torch.inference_mode()

    def _buffer(self, num_blocks: int, block_bytes: int) -> Any:
        from kvoffload.transfer.pinned import host_buffer

        make = host_buffer if self._stream is not None else self._torch.empty
        return make((num_blocks, block_bytes), dtype=self._torch.uint8)

    def _bytes(self, blocks: View) -> View:
        return blocks.contiguous().view(len(blocks), -1).view(self._torch.uint8)

    def _checked(self, blocks: Rows) -> npt.NDArray[np.int64]:
        checked: npt.NDArray[np.int64] = check_rows("blocks", blocks, len(self._views[0])).copy()
        return checked


def _items(tensor: View) -> View:
    """View a tensor as integers of the same size, because few operations support 8-bit float types."""
    return tensor.detach().view(getattr(sys.modules["torch"], _SAME_SIZE[tensor.element_size()]))


def _contiguous(view: View) -> PartTable:
    """Divide the blocks of a view into contiguous parts."""
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
