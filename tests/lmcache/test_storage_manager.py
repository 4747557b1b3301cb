"""LMCache's own storage manager, L1 memory and controllers, with our adapter as L2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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

from kvoffload.tiers.waiting import wait_until
from support import servers
from support.servers import CREDENTIALS, KINDS

LAYOUT = MemoryLayoutDesc([torch.Size([2, 2, 16, 64])], [torch.bfloat16])
KEYS = [ObjectKey(n.to_bytes(32, "big"), "model", 0x01000100) for n in range(6)]


def manager(tier: str) -> Any:
    adapter = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvoffload.integrations.lmcache",
            "class_name": "KVOffloadAdapter",
            "adapter_params": {"tiers": [tier], "block": "8KiB", "deadline": "60s"},
        }
    )
    memory = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([adapter]))
    )


def spec() -> PrefetchTaskSpec:
    return PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT, FULL_ATTENTION_WINDOW_CHUNKS)])


@pytest.fixture(params=["disk", *KINDS])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "disk":
        yield f"disk:{tmp_path / 'kv'}:64MiB"
        return
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with servers.running(request.param, tmp_path / "server") as running:
        yield running.url


def test_objects_go_to_a_tier_and_come_back_after_a_restart(tier: str) -> None:
    first = manager(tier)
    objects = first.reserve_write(KEYS, LAYOUT)
    assert len(objects) == len(KEYS)
    written = []
    for number, key in enumerate(KEYS):
        data = torch.randint(
            0, 256, (objects[key].get_size(),), generator=torch.Generator().manual_seed(number)
        )
        objects[key].raw_data[: len(data)] = data.to(torch.uint8)
        written.append(bytes(objects[key].byte_array))
    first.finish_write(KEYS)
    ((_, adapter),) = first.l2_adapters()

    def all_written() -> bool:
        (counts,) = adapter.report_status()["tiers"].values()
        return bool(counts.get("written", 0) >= len(KEYS))

    assert wait_until(all_written, 60.0)
    first.close()

    second = manager(tier)
    handle = second.submit_prefetch_task(spec())
    assert second.wait_prefetch_status(handle, 60.0)
    result = second.query_prefetch_status(handle)
    assert result.l2_hit_count == len(KEYS)
    with second.read_prefetched_results(KEYS) as found:
        assert [bytes(obj.byte_array) for obj in found] == written
    second.close()
