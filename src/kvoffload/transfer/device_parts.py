"""Copies of whole blocks between the slots of a pool and an engine's KV tensors on a torch device (a GPU).

Imported only if the tensors are on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch as untyped_torch

from kvoffload.transfer.copies import Blocks, Rows, check_rows, copy_blocks
from kvoffload.transfer.cuda import as_words
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.pinned import host_buffer

torch: Any = untyped_torch
Tensor: TypeAlias = Any
RowsArray: TypeAlias = npt.NDArray[np.int64]

_BUFFER_BYTES = 4 * 1024 * 1024
"""Size of the buffer, on the device and in pinned memory, through which slots are copied."""

_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class DeviceParts:
    """Implements `Parts` for tensors on one torch device.

    If the device can access the pool, kernels copy each part between the engine's blocks and the slots.
    Otherwise whole slots cross the bus in one copy, and the device distributes their parts over the tensors.

    Copies run on the stream that was current when the object was created. They are therefore ordered with the
    other work on that stream.
    """

    chunk_bytes = 64 * 1024 * 1024

    def __init__(self, views: Sequence[Tensor], pins: DevicePins) -> None:
        self._views = [_items(view) for view in views]
        self._block_bytes = sum(map(_part_bytes, self._views))
        self._device, self._pins = views[0].device, pins
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        rows, checked_slots = self._checked(blocks, pool, slots)
        if not pool.flags.writeable:
            raise ValueError("pool is read-only")
        if not len(rows):
            return
        if (mapped := self._mapped(pool)) is None:
            for batch in self._batches(len(rows)):
                self._store_through_buffer(rows[batch], pool, checked_slots[batch])
            return
        with self._copying():
            block_indices, slot_indices = self._indices(rows), self._indices(checked_slots)
            for view, in_slots in zip(self._views, self._parts(mapped), strict=True):
                source = self._bytes(view.index_select(0, block_indices))
                target, source = as_words(in_slots, source)
                target.index_copy_(0, slot_indices, source)

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        rows, checked_slots = self._checked(blocks, pool, slots)
        if not len(rows):
            return
        if (mapped := self._mapped(pool)) is None:
            for batch in self._batches(len(rows)):
                self._load_through_buffer(pool, checked_slots[batch], rows[batch])
            return
        with self._copying():
            block_indices, slot_indices = self._indices(rows), self._indices(checked_slots)
            for view, in_slots in zip(self._views, self._parts(mapped), strict=True):
                (source,) = as_words(in_slots)
                self._write_blocks(view, block_indices, source.index_select(0, slot_indices))

    def _store_through_buffer(self, blocks: RowsArray, pool: Blocks, slots: RowsArray) -> None:
        with self._copying():
            block_indices = self._indices(blocks)
            parts = [self._bytes(view.index_select(0, block_indices)) for view in self._views]
            buffer = self._buffer(len(blocks))
            buffer.copy_(torch.cat(parts, 1))
        copy_blocks(buffer.numpy(), np.arange(len(blocks)), pool, slots)

    def _load_through_buffer(self, pool: Blocks, slots: RowsArray, blocks: RowsArray) -> None:
        buffer = self._buffer(len(blocks))
        copy_blocks(pool, slots, buffer.numpy(), np.arange(len(blocks)))
        with self._copying():
            block_indices, arrived = self._indices(blocks), buffer.to(self._device)
            for view, in_slots in zip(self._views, self._parts(arrived), strict=True):
                self._write_blocks(view, block_indices, in_slots.contiguous())

    def _mapped(self, pool: Blocks) -> Any | None:
        return self._pins.mapped(pool, self._device)

    def _batches(self, count: int) -> list[slice]:
        step = max(1, _BUFFER_BYTES // self._block_bytes)
        return [slice(begin, begin + step) for begin in range(0, count, step)]

    def _parts(self, slots: Any) -> Iterator[Any]:
        """Yield, for each view, its part of the slots on the device, ``(num_slots, part_bytes)`` uint8."""
        begin = 0
        for view in self._views:
            end = begin + _part_bytes(view)
            yield slots[:, begin:end]
            begin = end

    def _write_blocks(self, view: Tensor, block_indices: Any, arrived: Any) -> None:
        """Copy the contiguous bytes `arrived` into the blocks `block_indices` of a view."""
        items = arrived.view(view.dtype).view(len(arrived), *view.shape[1:])
        view.index_copy_(0, block_indices, items)

    def _indices(self, rows: RowsArray) -> Any:
        return torch.from_numpy(rows).to(self._device)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Return a context that submits work to the stream, and at its end waits for the work.

        The context also turns on inference mode in this thread, without which torch does not write to
        inference tensors.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Even after an error: nothing may write to the slots when their owner reuses them.
                if self._stream is not None:
                    self._stream.synchronize()

    def _buffer(self, num_blocks: int) -> Any:
        make = host_buffer if self._stream is not None else torch.empty
        return make((num_blocks, self._block_bytes), dtype=torch.uint8)

    def _bytes(self, blocks: Tensor) -> Tensor:
        return blocks.contiguous().view(len(blocks), -1).view(torch.uint8)

    def _checked(self, blocks: Rows, pool: Blocks, slots: Rows) -> tuple[RowsArray, RowsArray]:
        """Check the arguments; return copies of the blocks and slots."""
        width = pool.shape[1]
        if width != self._block_bytes:
            raise ValueError(f"the pool has blocks of {width} bytes, the parts of {self._block_bytes}")
        rows = check_rows("blocks", blocks, len(self._views[0])).copy()
        checked_slots = check_rows("slots", slots, len(pool)).copy()
        if len(rows) != len(checked_slots):
            raise ValueError(f"{len(rows)} rows but {len(checked_slots)} slots")
        return rows, checked_slots


def _part_bytes(view: Tensor) -> int:
    size: int = math.prod(view.shape[1:]) * view.element_size()
    return size


def _items(tensor: Tensor) -> Tensor:
    """View a tensor as integers of the same size, because few operations support 8-bit float types."""
    return tensor.detach().view(getattr(torch, _SAME_SIZE[tensor.element_size()]))
