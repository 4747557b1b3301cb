"""The choice of a copy engine for a device."""

from __future__ import annotations

from typing import Any

from kvoffload.transfer.engine import CopyEngine, DeviceArray, HostEngine, is_tensor


def copy_engine_for(device: DeviceArray | CopyEngine) -> CopyEngine:
    """Create the engine for a numpy array or a torch tensor. If `device` is an engine, return it.

    Call this once for each device and keep the engine, because an engine for CUDA creates streams.

    Raises: `TypeError` if `device` is none of these; the `ValueError` of `as_blocks`.
    """
    if isinstance(device, CopyEngine):
        return device
    if is_tensor(device) and device.device.type == "cuda":
        from kvoffload.transfer.cuda import CudaEngine

        return CudaEngine(device)
    return HostEngine(device)


def gpu_blocks(num_blocks: int, block_bytes: int) -> DeviceArray | None:
    """Allocate blocks on the first CUDA device, for measurements; None if torch or a device is missing."""
    torch = _torch_with_gpu()
    return None if torch is None else torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device="cuda")


def gpu_name() -> str:
    """Return the name of the first CUDA device; empty if torch or a device is missing."""
    torch = _torch_with_gpu()
    return "" if torch is None else str(torch.cuda.get_device_name(0))


def _torch_with_gpu() -> Any | None:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
