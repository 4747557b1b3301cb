"""The engine of a CUDA tensor: pinned pools, a stream for each direction, batched copies.

Imports torch, and is imported only for a CUDA tensor. There are two ways across the bus, and `plan` chooses:

- *runs*: one `cudaMemcpyAsync` for each run of neighbours. No other work, but a launch costs 5-10 µs of
  host time, in which the bus moves half a megabyte.
- *gathered*: the device gathers scattered blocks into one buffer, which crosses the bus in one copy, and
  the host then copies the blocks into their slots; the reverse for a load. Faster for many small blocks,
  where launches would take longer than the bytes.

Functions over tensors move the bytes and are tested with CPU tensors; the class adds streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch as untyped_torch

from kvoffload.transfer.copies import Blocks, Rows, address_of, check_rows, coalesce, copy_blocks
from kvoffload.transfer.engine import Transfer, byte_rows

# torch is only partly typed, and mypy must report the same with and without it.
torch: Any = untyped_torch
Tensor: TypeAlias = Any
Stream: TypeAlias = Any

RUN_BYTES = 256 * 1024
"""Blocks are gathered if their runs are smaller than this on average."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process.

RowsArray = npt.NDArray[np.int64]


class Plan(NamedTuple):
    """How one batch crosses the bus: `starts` of its runs as from `coalesce`, and whether to gather."""

    starts: RowsArray
    gathered: bool


def plan(device_rows: RowsArray, slots: RowsArray, block_bytes: int, packed: bool = True) -> Plan:
    """Choose between runs and gathering, by the average size of a run.

    If the blocks are not `packed` on both sides, a run is one block: torch copies memory with gaps through a
    temporary buffer of its own, and then `non_blocking` would be a race.
    """
    starts = coalesce(device_rows, slots) if packed else np.arange(len(slots) + 1)
    num_runs = len(starts) - 1
    return Plan(starts, num_runs > 1 and len(slots) * block_bytes < num_runs * RUN_BYTES)


class CudaEngine:
    """Moves blocks between a CUDA tensor and pools in host memory, while the engine computes.

    Both directions begin after the work that is already on the caller's current stream: a store reads what
    that work computes, a load does not overwrite what it still reads. No stream waits for a transfer: `wait`
    for a load (or check `done`) before launching work that reads its rows, and for a store before launching
    work that overwrites them.

    The host's part of a gathered store, a copy at memory speed, runs in the call of `done` or `wait` that
    finds the bytes arrived: so call one of them for every transfer.

    A pool is pinned (`cudaHostRegister`, which also populates it) on its first use until `close`, and must
    exist that long: close the engine before the tier.

    Args:
        device: CUDA tensor as for `byte_rows`, kept alive by the engine.

    Thread: one at a time, of the device's process. Errors of the device surface as torch's RuntimeError.
    """

    def __init__(self, device: Tensor) -> None:
        self.blocks = byte_rows(device)
        self.num_blocks, self.block_bytes = self.blocks.shape
        self._storing = torch.cuda.Stream(self.blocks.device)
        self._loading = torch.cuda.Stream(self.blocks.device)
        self._pools: dict[tuple[int, int], _PinnedPool] = {}

    def store(self, device_rows: Rows, pool: Blocks, slots: Rows) -> Transfer:
        rows, slots, host = self._checked(device_rows, pool, slots)
        chosen = self._plan(rows, slots, host)
        with self._submitting(self._storing):
            if not chosen.gathered:
                copy_runs(self.blocks, rows, host, slots, chosen.starts)
                return _CudaTransfer(self._storing)
            bounce = _pinned_buffer(len(rows), self.block_bytes)
            gather(self.blocks, rows, bounce)
            arrived = np.arange(len(rows))
            return _CudaTransfer(
                self._storing, finish=lambda: copy_blocks(bounce.numpy(), arrived, pool, slots)
            )

    def load(self, pool: Blocks, slots: Rows, device_rows: Rows) -> Transfer:
        rows, slots, host = self._checked(device_rows, pool, slots)
        chosen = self._plan(rows, slots, host)
        with self._submitting(self._loading):
            if not chosen.gathered:
                copy_runs(host, slots, self.blocks, rows, chosen.starts)
            else:
                bounce = _pinned_buffer(len(rows), self.block_bytes)
                copy_blocks(pool, slots, bounce.numpy(), np.arange(len(rows)))
                scatter(bounce, self.blocks, rows)
            return _CudaTransfer(self._loading)

    def close(self) -> None:
        self._storing.synchronize()
        self._loading.synchronize()
        for pool in self._pools.values():
            pool.unpin()
        self._pools.clear()

    def _checked(self, device_rows: Rows, pool: Blocks, slots: Rows) -> tuple[RowsArray, RowsArray, Any]:
        if pool.shape[1] != self.block_bytes:
            raise ValueError(f"pool has blocks of {pool.shape[1]} bytes, the device of {self.block_bytes}")
        rows = check_rows("device_rows", device_rows, self.num_blocks)
        checked_slots = check_rows("slots", slots, len(pool))
        if len(rows) != len(checked_slots):
            raise ValueError(f"{len(rows)} device_rows but {len(checked_slots)} slots")
        return rows, checked_slots, self._pinned(pool)

    def _plan(self, rows: RowsArray, slots: RowsArray, host: Tensor) -> Plan:
        packed = self.blocks.is_contiguous() and host.is_contiguous()
        return plan(rows, slots, self.block_bytes, packed)

    def _pinned(self, pool: Blocks) -> Tensor:
        identity = (address_of(pool), pool.strides[0] * len(pool))
        if identity not in self._pools:
            self._pools[identity] = _PinnedPool(pool)
        return self._pools[identity].tensor

    def _submitting(self, stream: Stream) -> Any:
        """Context in which work goes to `stream`, after the work on the caller's stream."""
        stream.wait_stream(torch.cuda.current_stream(self.blocks.device))
        # The engine may be dropped with copies under way: before they are done the allocator must not reuse
        # the memory of a tensor that only the engine still holds.
        self.blocks.record_stream(stream)
        return torch.cuda.stream(stream)


def copy_runs(src: Tensor, src_rows: RowsArray, dst: Tensor, dst_rows: RowsArray, starts: RowsArray) -> None:
    """Copy each run of neighbours at once. Tensors are ``(num_blocks, block_bytes)`` uint8, any devices."""
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        s, d, n = int(src_rows[start]), int(dst_rows[start]), end - start
        dst[d : d + n].copy_(src[s : s + n], non_blocking=True)


def gather(device: Tensor, device_rows: RowsArray, bounce: Tensor) -> None:
    """Copy scattered rows of the device into the contiguous rows of `bounce`."""
    found = _wide(device).index_select(0, _indices(device_rows, device))
    bounce.copy_(found.view(torch.uint8), non_blocking=True)


def scatter(bounce: Tensor, device: Tensor, device_rows: RowsArray) -> None:
    """Copy the contiguous rows of `bounce` into scattered rows of the device."""
    arrived = bounce.to(device.device, non_blocking=True)
    wide = _wide(device)
    wide.index_copy_(0, _indices(device_rows, device), arrived.view(wide.dtype))


def tensor_over(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor in host memory; nothing is copied."""
    return torch.from_numpy(array)


def _wide(blocks: Tensor) -> Tensor:
    """The same rows as 8-byte words if possible: a device moves one item per thread."""
    aligned = blocks.data_ptr() | blocks.shape[1] | blocks.stride(0) | blocks.storage_offset()
    return blocks.view(torch.int64) if aligned % 8 == 0 else blocks


def _indices(rows: RowsArray, device: Tensor) -> Tensor:
    # From pageable memory: the driver copies it before the call returns, so `rows` may be freed.
    return torch.from_numpy(rows.copy()).to(device.device, non_blocking=True)


def _pinned_buffer(num_blocks: int, block_bytes: int) -> Tensor:
    # torch's pinned allocator keeps buffers and reuses one only when the copies that use it are done.
    return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True)


class _CudaTransfer:
    """Done when the stream has passed this point and the host's part, if there is one, has run."""

    def __init__(self, stream: Stream, finish: Callable[[], None] | None = None) -> None:
        self._passed = torch.cuda.Event()
        self._passed.record(stream)
        self._finish = finish

    def done(self) -> bool:
        if not self._passed.query():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        self._passed.synchronize()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class _PinnedPool:
    """A pool as a tensor in pinned memory; `unpin` undoes only the pinning done here."""

    def __init__(self, pool: Blocks) -> None:
        self.tensor = torch.from_numpy(pool)
        self._address = 0
        if not self.tensor.is_pinned():
            num_bytes = pool.strides[0] * (len(pool) - 1) + pool.shape[1]
            _check(torch.cuda.cudart().cudaHostRegister(address_of(pool), num_bytes, _PORTABLE))
            self._address = address_of(pool)

    def unpin(self) -> None:
        if self._address:
            _check(torch.cuda.cudart().cudaHostUnregister(self._address))
            self._address = 0


def _check(status: Any) -> None:
    torch.cuda.check_error(int(status))
