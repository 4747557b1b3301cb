"""Which engine moves the blocks of a device."""

from __future__ import annotations

from typing import Any

from kvoffload.transfer.engine import CopyEngine, DeviceArray, HostEngine, is_tensor


def copy_engine_for(device: DeviceArray | CopyEngine) -> CopyEngine:
    """The engine for a device: a numpy array, a torch tensor, or an engine, which is returned as it is.

    Cost: small on the host; on CUDA it creates streams, so make one engine for each device and keep it.
    Raises: `TypeError` for anything else, `ValueError` as `as_blocks`.
    """
    if isinstance(device, CopyEngine):
        return device
    if is_tensor(device) and device.device.type == "cuda":
        from kvoffload.transfer.cuda import CudaEngine

        return CudaEngine(device)
    return HostEngine(device)


def gpu_blocks(num_blocks: int, block_bytes: int) -> DeviceArray | None:
    """Blocks on the first CUDA device, to measure copies with; None without torch, or if it sees none."""
    torch = _torch_with_gpu()
    return None if torch is None else torch.zeros((num_blocks, block_bytes), dtype=torch.uint8, device="cuda")


def gpu_name() -> str:
    """What the first CUDA device is called; empty as above."""
    torch = _torch_with_gpu()
    return "" if torch is None else str(torch.cuda.get_device_name(0))


def _torch_with_gpu() -> Any | None:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
