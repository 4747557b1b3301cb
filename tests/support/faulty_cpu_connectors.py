"""vLLM's own connectors to RAM and disk on its CPU build, with faults in the loaded KV."""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from support.cpu_transfers import run_on_cpu
from support.faulty_connectors import Faulty


class FaultySimpleCPUOffloadConnector(Faulty, SimpleCPUOffloadConnector):
    """vLLM's simple connector to RAM or a disk."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        run_on_cpu()
        super().register_kv_caches(kv_caches)


class FaultyNativeConnector(Faulty, OffloadingConnector):
    """vLLM's connector with `cpu_transfers.NativeSpec`."""
