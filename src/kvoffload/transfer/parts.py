"""Copies of whole blocks between the slots of a pool and an engine's KV tensors.

A block is spread over many tensors, at least one for each layer. Each tensor is given as a *view*, whose
first dimension is blocks. In a slot, the parts of a block are consecutive, in the order of the views. Does
not know layers, tokens or keys.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """Copies blocks of an engine. Thread: any; concurrent calls must copy different blocks.

    Attributes:
        chunk_bytes: best size of a call. Host: the CPU's cache keeps the blocks between checksum and copy.
            Device: few launches of kernels.
    """

    chunk_bytes: int

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        """Copy ``blocks[i]`` into slot ``slots[i]``. All bytes have arrived when the call returns."""
        ...

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        """Copy slot ``slots[i]`` into ``blocks[i]``. All bytes have arrived when the call returns."""
        ...


class PoolPins:
    """The pools that devices access directly, of one owner. A pool is pinned on the first copy of a device.

    Pinning takes 0.7 s per GiB. Thread: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, Any] = {}

    def mapped(self, pool: Blocks, device: Any) -> Any | None:
        """Return the pool as a tensor on a CUDA device; None if this device cannot access it."""
        if device.type != "cuda":
            return None
        from kvoffload.transfer.pinned import PinnedPools

        with self._lock:
            if str(device) not in self._pools:
                self._pools[str(device)] = PinnedPools(device)
            return self._pools[str(device)].mapped(pool)

    def close(self) -> None:
        """Unpin the pools. They must no longer be in use. Idempotent."""
        with self._lock:
            for pools in self._pools.values():
                pools.unpin()
            self._pools.clear()


def parts_of(views: Sequence[View], pins: PoolPins | None = None) -> Parts:
    """Create the `Parts` of an engine's blocks. In a slot, the parts are in the order of `views`.

    All views are in host memory, or all are on one device. Cost: 5 µs a view in host memory.

    Args:
        pins: pins the pools for a CUDA device. None: pools are not pinned, and their copies are slower.
    """
    compile_all()
    if is_tensor(views[0]) and views[0].device.type != "cpu":
        return DeviceParts(views, pins)
    return HostParts(views)


class HostParts:
    """Parts in host memory, copied in place.

    If the blocks of a view have gaps, the view is divided into contiguous parts. An example is the view
    ``(blocks, heads, tokens, dim)`` of a contiguous cache.
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


class DeviceParts:
    """Parts on one device of torch.

    If the device can access the pool, kernels copy each part between the engine's blocks and the slots.
    Otherwise whole slots cross the bus in one copy, and the device spreads their parts.

    Copies run on the stream that was current when the object was created, in order with the other work of
    that stream.
    """

    chunk_bytes = 64 * 1024 * 1024

    def __init__(self, views: Sequence[View], pins: PoolPins | None = None) -> None:
        self._torch: Any = sys.modules["torch"]
        self._views = [_items(view) for view in views]
        self._device, self._pins = views[0].device, pins
        self._stream = self._torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def store(self, blocks: Rows, pool: Blocks, slots: Rows) -> None:
        checked, mapped = self._checked(blocks), self._mapped(pool)
        if mapped is None:
            self._store_staged(checked, pool, slots)
            return
        with self._copying():
            chosen, into = self._indices(checked), self._indices(check_rows("slots", slots, len(pool)))
            for view, in_slots in zip(self._views, self._parts(mapped), strict=True):
                target, blocks_of_view = self._words(in_slots, self._bytes(view.index_select(0, chosen)))
                target.index_copy_(0, into, blocks_of_view)

    def load(self, pool: Blocks, slots: Rows, blocks: Rows) -> None:
        checked, mapped = self._checked(blocks), self._mapped(pool)
        if mapped is None:
            self._load_staged(pool, slots, checked)
            return
        with self._copying():
            chosen, wanted = self._indices(checked), self._indices(check_rows("slots", slots, len(pool)))
            for view, in_slots in zip(self._views, self._parts(mapped), strict=True):
                (words,) = self._words(in_slots)
                self._spread(view, chosen, words.index_select(0, wanted))

    def _store_staged(self, blocks: npt.NDArray[np.int64], pool: Blocks, slots: Rows) -> None:
        with self._copying():
            chosen = self._indices(blocks)
            parts = [self._bytes(view.index_select(0, chosen)) for view in self._views]
            staged = self._buffer(len(blocks), pool.shape[1])
            staged.copy_(self._torch.cat(parts, 1))
        copy_blocks(staged.numpy(), np.arange(len(blocks)), pool, slots)

    def _load_staged(self, pool: Blocks, slots: Rows, blocks: npt.NDArray[np.int64]) -> None:
        staged = self._buffer(len(blocks), pool.shape[1])
        copy_blocks(pool, slots, staged.numpy(), np.arange(len(blocks)))
        with self._copying():
            chosen, arrived = self._indices(blocks), staged.to(self._device)
            for view, in_slots in zip(self._views, self._parts(arrived), strict=True):
                self._spread(view, chosen, in_slots.contiguous())

    def _mapped(self, pool: Blocks) -> Any | None:
        return None if self._pins is None else self._pins.mapped(pool, self._device)

    def _parts(self, slots: Any) -> Iterator[Any]:
        """Yield the part of each view in slots on the device, ``(num_slots, part_bytes)`` uint8."""
        begin = 0
        for view in self._views:
            end = begin + view[0].numel() * view.element_size()
            yield slots[:, begin:end]
            begin = end

    def _words(self, *tensors: Any) -> list[Any]:
        from kvoffload.transfer.cuda import as_words

        return as_words(*tensors)

    def _spread(self, view: View, blocks: Any, arrived: Any) -> None:
        """Copy contiguous bytes into blocks of a view."""
        items = arrived.view(view.dtype).view(len(arrived), *view.shape[1:])
        view.index_copy_(0, blocks, items)

    def _indices(self, rows: npt.NDArray[np.int64]) -> Any:
        return self._torch.from_numpy(rows).to(self._device)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Submit work to the stream, and wait for it.

        Inference mode is needed to write to inference tensors. The mode is per thread.
        """
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Even after an error: nothing may write to the slots when their owner reuses them.
                if self._stream is not None:
                    self._stream.synchronize()

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
