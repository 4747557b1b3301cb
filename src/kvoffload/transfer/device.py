"""Which engine moves the blocks of a device."""

from __future__ import annotations

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
