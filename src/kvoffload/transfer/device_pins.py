"""Pinned pools of one owner, for each CUDA device. Imports torch only for CUDA tensors."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from kvoffload.transfer.copies import Blocks


class DevicePins:
    """Pins the pools of one owner, for each CUDA device that copies to or from them.

    A pool is pinned for a device when the device first copies to or from it. Pinning allocates all pages of
    the pool; this takes 0.7 s per GiB if they were not yet allocated. Thread: any; while a pool is pinned,
    the owner's other copies wait.
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
        with self._lock, ExitStack() as each:  # one device's error does not leave other devices' pools pinned
            for pools in self._pools.values():
                each.callback(pools.unpin)
            self._pools = {}
