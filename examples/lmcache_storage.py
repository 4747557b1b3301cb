"""LMCache's storage manager with our adapter as L2: objects survive a restart.

Needs LMCache, and runs on a CPU:

    python examples/lmcache_storage.py disk:/nvme/kv:50GiB

Checks a tier before a server uses it. Each run after the first finds the objects. A server reads the same
configuration from a file:

    lmcache server --l1-size-gb 64 --eviction-policy LRU --l2-adapter "$(cat examples/lmcache_adapter.json)"
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

LAYOUT = MemoryLayoutDesc([torch.Size([2, 2, 16, 64])], [torch.bfloat16])
KEYS = [ObjectKey(number.to_bytes(32, "big"), "example", 0x01000100) for number in range(8)]
SPEC = PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT, FULL_ATTENTION_WINDOW_CHUNKS)])
TIMEOUT_S = 60.0


def storage_of(tier: str, **params: str) -> StorageManager:
    """Create LMCache's storage manager with lmcache_adapter.json, this tier and further parameters."""
    adapter = json.loads(Path(__file__).with_name("lmcache_adapter.json").read_text())
    adapter["adapter_params"] |= {"tiers": [tier], "block": "8KiB", **params}
    l1 = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(l1),
            EvictionConfig("LRU"),
            L2AdaptersConfig([PluginL2AdapterConfig.from_dict(adapter)]),
        )
    )


def main(tier: str) -> None:
    storage = storage_of(tier)
    task = storage.submit_prefetch_task(SPEC)
    storage.wait_prefetch_status(task, TIMEOUT_S)
    hits = storage.query_prefetch_status(task).l2_hit_count
    print(f"{hits} of {len(KEYS)} objects found")
    if not hits:
        for memory in storage.reserve_write(KEYS, LAYOUT).values():
            memory.raw_data.random_(256)
        storage.finish_write(KEYS)  # LMCache writes to L2 in the background
        ((_, l2),) = storage.l2_adapters()
        until, written = time.monotonic() + TIMEOUT_S, 0
        while written < len(KEYS) and time.monotonic() < until:
            counts = l2.report_status()["tiers"].values()
            written = sum(tier.get("written", 0) for tier in counts)
            time.sleep(0.01)
        print(f"{written} objects written")
    storage.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
