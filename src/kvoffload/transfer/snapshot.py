"""Copies of a tensor's blocks to host memory, for audits.

They are slower than the copies that `cuda` makes, but independent of them, so that audits can check the
copies of `cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as untyped_torch

from kvoffload.transfer.copies import Blocks
from kvoffload.transfer.pinned import on_device, synchronized

torch: Any = untyped_torch


def submitted_work(device: Any) -> Callable[[], None]:
    """Return a function that waits for the work submitted to the device so far.

    On CUDA the function waits for the stream that is current when `submitted_work` is called. On other
    devices it waits for the whole device. The function may be called in any thread. It raises `OSError` if
    the wait fails.
    """
    if device.type == "cpu":
        return lambda: None
    if device.type == "cuda":
        with on_device(device):
            event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
            event.record(torch.cuda.current_stream(device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def wait_for_device() -> None:
        if not synchronized(device):
            raise OSError(f"waiting for {device} failed")

    return wait_for_device


class Snapshots:
    """Reads blocks of one tensor.

    Args:
        tensor: shape ``(num_blocks, ...)``. Each block is contiguous in memory; dimensions may be permuted.
        block_bytes: bytes of a block, including padding.

    Thread: one.
    """

    def __init__(self, tensor: Any, block_bytes: int) -> None:
        items = block_bytes // tensor.element_size()
        rows = tensor.detach().as_strided((len(tensor), items), (tensor.stride(0), 1))
        self._rows = rows.view(torch.uint8)
        self._device = tensor.device
        self._stream: Any = None

    def read(self, blocks: npt.NDArray[np.int64]) -> Blocks:
        """Return a copy of these blocks: ``(len(blocks), block_bytes)`` uint8. Waits for the copy.

        Before, call the function that `submitted_work` returns, because on CUDA the copy does not wait for
        work that was submitted earlier.
        """
        wanted = torch.from_numpy(blocks)
        if self._device.type != "cuda":
            copied: Blocks = self._rows.index_select(0, wanted.to(self._device)).cpu().numpy()
            return copied
        with on_device(self._device):
            # On a stream of its own, so that the engine's next step does not wait for this copy.
            self._stream = self._stream or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                copied = self._rows.index_select(0, wanted.to(self._device)).cpu().numpy()
        return copied
