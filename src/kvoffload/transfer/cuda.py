"""The copy engine of a CUDA tensor: pinned pools, a stream for each direction, batched copies.

Imported only for a CUDA tensor. A batch is copied in one of three ways:

- *runs*: one `cudaMemcpyAsync` for each run of consecutive rows. On an H100 a command took 16 µs, in which
  the bus could move 0.9 MB, so this way suits long runs.
- *kernels*: kernels on the device read or write scattered slots of the pinned pool over the bus. This is
  faster for small blocks. An H100, whose bus copies 52 to 54 GB/s, wrote 28 to 32 GB/s to the pool and read
  42 to 44 GB/s from it. The kernels occupy some of the device's multiprocessors.
- *buffer*: for a pool that kernels cannot access. The device gathers the blocks into a buffer, one copy moves
  the buffer over the bus, and the host copies the blocks into their slots. A load works in reverse.

The module's functions work with any tensors, so that tests can run them on the CPU. The class `CudaEngine`
adds streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch as untyped_torch

from kvoffload.transfer.copies import Blocks, Rows, check_rows, coalesce, copy_blocks
from kvoffload.transfer.engine import Transfer, byte_rows
from kvoffload.transfer.pinned import PinnedPools, host_buffer, on_device, synchronized

# torch is only partly typed, and mypy must report the same with and without it.
torch: Any = untyped_torch
Tensor: TypeAlias = Any
Stream: TypeAlias = Any

RUN_BYTES = 512 * 1024
"""Blocks are copied in runs if the runs have at least this size on average, in bytes. The value was measured
on an H100."""

RowsArray = npt.NDArray[np.int64]


def runs_of(
    device_rows: RowsArray, slots: RowsArray, block_bytes: int, packed: bool = True
) -> RowsArray | None:
    """Return the start of each run of a batch, like `coalesce`; None if the runs are too short.

    If the blocks have gaps on either side (`packed` is False), each run is a single block. Otherwise torch
    would copy a run with gaps through a temporary buffer, and with `non_blocking` this is a race.
    """
    starts = coalesce(device_rows, slots) if packed else np.arange(len(slots) + 1)
    num_runs = len(starts) - 1
    return None if num_runs > 1 and len(slots) * block_bytes < num_runs * RUN_BYTES else starts


class CudaEngine:
    """Moves blocks between a CUDA tensor and pools in host memory, while the engine computes.

    A transfer starts after all work already submitted to the caller's current stream. A store therefore reads
    the results of this work, and a load does not overwrite data that this work reads. But no stream waits for
    a transfer. Therefore call `Transfer.wait`, or check `Transfer.done`, before you launch work that reads
    the rows of a load or overwrites the rows of a store.

    Call `wait` or `done` for every transfer. If a pool is not pinned, a store to it ends with a copy on the
    host. This copy runs in the first call of `wait`, or of `done` after the bytes have arrived.

    A pool is pinned, and all its pages are allocated (`cudaHostRegister`), from its first use until `close`.
    Close the engine before you release the memory of a pool. If pinning fails, a warning is logged, and
    copies of this pool are slower. Pinning fails if there is too little memory, if the pool is read-only, or
    if another owner has pinned a part of it.

    Args:
        device: CUDA tensor that `byte_rows` accepts. The engine keeps it alive.

    Thread: any, one at a time, in the process that created the tensor. Raises: torch's `RuntimeError` for
    errors of the device.
    """

    def __init__(self, device: Tensor) -> None:
        self.blocks = byte_rows(device)
        self.num_blocks, self.block_bytes = self.blocks.shape
        with on_device(self.blocks.device):
            self._storing = torch.cuda.Stream(self.blocks.device)
            self._loading = torch.cuda.Stream(self.blocks.device)
        self._pools = PinnedPools(self.blocks.device)

    def store(self, device_rows: Rows, pool: Blocks, slots: Rows) -> Transfer:
        if not pool.flags.writeable:
            raise ValueError("pool is read-only")
        rows, slots, host = self._checked(device_rows, pool, slots)
        with self._submitting(self._storing):
            if host is not None and (starts := self._runs(rows, slots, host)) is not None:
                copy_runs(self.blocks, rows, host, slots, starts)
            elif (mapped := self._pools.mapped(pool)) is not None:
                copy_by_kernels(self.blocks, rows, mapped, slots)
            else:
                bounce = host_buffer((len(rows), self.block_bytes), torch.uint8)
                arrived = np.arange(len(rows))
                if (starts := self._runs(rows, arrived, bounce)) is not None:
                    copy_runs(self.blocks, rows, bounce, arrived, starts)
                else:
                    gather(self.blocks, rows, bounce)
                return _CudaTransfer(
                    self._storing, finish=lambda: copy_blocks(bounce.numpy(), arrived, pool, slots)
                )
            return _CudaTransfer(self._storing)

    def load(self, pool: Blocks, slots: Rows, device_rows: Rows) -> Transfer:
        rows, slots, host = self._checked(device_rows, pool, slots)
        with self._submitting(self._loading):
            if host is not None and (starts := self._runs(rows, slots, host)) is not None:
                copy_runs(host, slots, self.blocks, rows, starts)
            elif (mapped := self._pools.mapped(pool)) is not None:
                copy_by_kernels(mapped, slots, self.blocks, rows)
            else:
                bounce = host_buffer((len(rows), self.block_bytes), torch.uint8)
                leaving = np.arange(len(rows))
                copy_blocks(pool, slots, bounce.numpy(), leaving)
                if (starts := self._runs(rows, leaving, bounce)) is not None:
                    copy_runs(bounce, leaving, self.blocks, rows, starts)
                else:
                    scatter(bounce, self.blocks, rows)
            return _CudaTransfer(self._loading)

    def close(self) -> None:
        """Wait for the copies in flight and unpin the pools. Idempotent.

        Raises: the error of the device, if a copy failed. The pools are then unpinned only if the device can
            still be synchronized; otherwise the device might still write to the pools.
        """
        failed: Exception | None = None
        with on_device(self.blocks.device):
            for stream in (self._storing, self._loading):
                try:
                    stream.synchronize()
                except Exception as error:
                    failed = failed or error
            if failed is None or synchronized(self.blocks.device):
                self._pools.unpin()
            else:
                self._pools.abandon()
        if failed is not None:
            raise failed

    def _checked(
        self, device_rows: Rows, pool: Blocks, slots: Rows
    ) -> tuple[RowsArray, RowsArray, Tensor | None]:
        """Check rows and slots; return both, and the pool as a pinned tensor (None if not pinned).

        The returned slots are a copy, because a transfer may use them after the call (`_CudaTransfer`).
        """
        if pool.shape[1] != self.block_bytes:
            raise ValueError(f"pool has blocks of {pool.shape[1]} bytes, the device of {self.block_bytes}")
        rows = check_rows("device_rows", device_rows, self.num_blocks)
        checked_slots = check_rows("slots", slots, len(pool)).copy()
        if len(rows) != len(checked_slots):
            raise ValueError(f"{len(rows)} device_rows but {len(checked_slots)} slots")
        return rows, checked_slots, self._pools.tensor(pool)

    def _runs(self, rows: RowsArray, slots: RowsArray, host: Tensor) -> RowsArray | None:
        packed = self.blocks.is_contiguous() and host.is_contiguous()
        return runs_of(rows, slots, self.block_bytes, packed)

    def _submitting(self, stream: Stream) -> Any:
        """Return a context that submits work to `stream`, after the work on the caller's stream."""
        stream.wait_stream(torch.cuda.current_stream(self.blocks.device))
        # The engine may be deleted with copies in flight. The allocator must not reuse the tensor's memory
        # until the copies are done.
        self.blocks.record_stream(stream)
        return torch.cuda.stream(stream)


def copy_runs(src: Tensor, src_rows: RowsArray, dst: Tensor, dst_rows: RowsArray, starts: RowsArray) -> None:
    """Copy rows, one copy for each run. Tensors are ``(num_blocks, block_bytes)`` uint8 on any devices."""
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        s, d, n = int(src_rows[start]), int(dst_rows[start]), end - start
        dst[d : d + n].copy_(src[s : s + n], non_blocking=True)


def copy_by_kernels(src: Tensor, src_rows: RowsArray, dst: Tensor, dst_rows: RowsArray) -> None:
    """Copy scattered rows between two tensors on one device. One tensor may be mapped host memory."""
    src, dst = as_words(src, dst)
    selected = src.index_select(0, _indices(src_rows, src))
    dst.index_copy_(0, _indices(dst_rows, dst), selected)


def gather(device: Tensor, device_rows: RowsArray, bounce: Tensor) -> None:
    """Copy scattered rows of the device into the contiguous rows of `bounce`."""
    (words,) = as_words(device)
    gathered = words.index_select(0, _indices(device_rows, device))
    bounce.copy_(gathered.view(torch.uint8), non_blocking=True)


def scatter(bounce: Tensor, device: Tensor, device_rows: RowsArray) -> None:
    """Copy the contiguous rows of `bounce` into scattered rows of the device."""
    arrived = bounce.to(device.device, non_blocking=True)
    words, arrived = as_words(device, arrived)
    words.index_copy_(0, _indices(device_rows, device), arrived)


def tensor_over(array: npt.NDArray[Any]) -> Tensor:
    """View an array as a tensor in host memory, without a copy."""
    return torch.from_numpy(array)


def as_words(*tensors: Tensor) -> list[Tensor]:
    """View the rows of all tensors as 8-byte words if possible.

    This makes kernels faster, because each of their threads moves one item.
    """
    aligned = 0
    for each in tensors:
        aligned |= each.data_ptr() | each.shape[1] | each.stride(0) | each.storage_offset()
    return [each.view(torch.int64) for each in tensors] if aligned % 8 == 0 else list(tensors)


def _indices(rows: RowsArray, device: Tensor) -> Tensor:
    if device.device.type == "cpu":
        return torch.from_numpy(rows.copy())
    # Pinned, because a copy from pageable memory may block the host until the stream reaches it.
    indices = host_buffer((len(rows),), torch.int64)
    indices.numpy()[:] = rows
    return indices.to(device.device, non_blocking=True)


class _CudaTransfer:
    """A transfer on a stream. It is done when the stream has done its work and `finish`, if any, has run."""

    def __init__(self, stream: Stream, finish: Callable[[], None] | None = None) -> None:
        self._passed = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
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
