"""Several ranks and processes: shared pages, separate pages, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from kvoffload import ConfigError
from kvoffload.integrations.sglang import KVOffloadStorage
from kvoffload.integrations.sglang import ranks as ranks_module
from kvoffload.integrations.sglang import storage as storage_module
from kvoffload.settings.read import parse_size
from support.sglang_pools import (
    MODEL,
    PAGE,
    device_pool,
    fill,
    forks,
    host_pool,
    page_of,
    storage_config,
    zero,
)

HASHES = [f"{number:064x}" for number in range(6)]


class Rank:
    """Host pool and storage of a rank."""

    def __init__(self, settings: HiCacheStorageConfig, kind: str = "mha") -> None:
        self.pool = host_pool(kind, device_pool(kind, 16, torch.bfloat16), "page_first")
        self.storage = KVOffloadStorage(settings, {})
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        self.indices = torch.arange(len(HASHES) * PAGE)

    def write(self, seed: int) -> list[bytes]:
        fill(self.pool, seed)
        assert all(self.storage.batch_set_v1(HASHES, self.indices))
        return self.pages()

    def read(self) -> list[bytes]:
        zero(self.pool)
        return self.pages() if all(self.storage.batch_get_v1(HASHES, self.indices)) else []

    def pages(self) -> list[bytes]:
        return [page_of(self.pool, int(index)) for index in self.indices[::PAGE]]


def test_ranks_share_a_directory_in_parts(tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path / 'kv'}:64MiB"]
    ranks = [Rank(storage_config(tiers, tp_rank=rank, tp_size=2)) for rank in range(2)]
    written = [rank.write(number) for number, rank in enumerate(ranks)]
    assert [rank.read() for rank in ranks] == written
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["tp0of2", "tp1of2"]
    used = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert used <= 64 << 20
    for rank in ranks:
        rank.storage.close()


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}, {"attn_cp_size": 2}], ids=str)
def test_another_shape_gets_nothing(tmp_path: Path, ranks: dict[str, int]) -> None:
    tiers = [f"disk:{tmp_path / 'kv'}:64MiB"]
    first = Rank(storage_config(tiers))
    first.write(1)
    first.storage.close()
    second = Rank(storage_config(tiers, **ranks))
    assert second.storage.batch_exists(HASHES) == 0
    second.storage.close()


def test_replicated_pages_need_a_shared_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with MLA only one of 2 ranks writes"):
        KVOffloadStorage(storage_config([f"disk:{tmp_path}:64MiB"], is_mla=True, tp_size=2), {})
    KVOffloadStorage(storage_config([f"disk:{tmp_path}:64MiB"], is_mla=True), {})
    KVOffloadStorage(storage_config(["valkey://127.0.0.1:1/team"], is_mla=True, tp_size=2), {})


@pytest.mark.parametrize("kind", ["attention", "replicas"])
def test_data_parallel_ranks_divide_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tiers = [f"disk:{tmp_path / 'kv'}:64MiB,max_write_bytes_per_day=4GiB"]
    opened = list[Any]()
    open_tiers = storage_module.open_tiers
    monkeypatch.setattr(
        storage_module, "open_tiers", lambda tiers, owner: (opened.extend(tiers), open_tiers(tiers, owner))[1]
    )
    ranks = list[Rank]()
    for rank in range(4):
        context = {"attn_dp_size": 4} if kind == "attention" else {"dp_size": 4, "dp_rank": rank}
        monkeypatch.setattr(ranks_module, "of_context", context.get)
        ranks.append(Rank(storage_config(tiers, dp_rank=rank if kind == "attention" else 0)))
    written = [rank.write(number) for number, rank in enumerate(ranks)]
    assert [rank.read() for rank in ranks] == written
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"dp{n}of4" for n in range(4)]
    assert [parse_size("", tier.capacity) for tier in opened] == [16 << 20] * 4
    assert [tier.max_write_bytes_per_day for tier in opened] == [1 << 30] * 4
    for rank in ranks:
        rank.storage.close()


def test_an_unknown_replica_needs_a_shared_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "of_context", {"dp_size": 2}.get)
    with pytest.raises(ConfigError, match="the number of this replica, of 2, is unknown"):
        KVOffloadStorage(storage_config([f"disk:{tmp_path}:64MiB"]), {})
    KVOffloadStorage(storage_config(["valkey://127.0.0.1:1/team"]), {})


DATA_PARALLEL = """
import sys
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from support.sglang_pools import storage_config
from kvoffload.integrations.sglang.ranks import directory_of, num_ranks

model, kind = sys.argv[1:]
if kind == "attention":
    settings, ranks = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, SpawnRanks(world_rank=3)
else:
    settings, ranks = {"dp_size": 4}, SpawnRanks(world_rank=0, dp_rank=3)
arguments = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True, **settings)
publish(arguments, role="scheduler", ranks=ranks)
config = storage_config(["disk:/nvme:1GiB"], dp_rank=3 if kind == "attention" else 0)
print("found", directory_of(config), num_ranks(config))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "replicas"])
def test_sglang_tells_the_data_parallel_rank(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    done = forks().run(["-c", DATA_PARALLEL, str(tmp_path), kind], {**os.environ})
    assert "found dp3of4 4" in done.stdout, done.stderr


def test_keys_of_ranks() -> None:
    """Ranks with equal pages have equal keys; all other ranks have different keys."""

    def keys(is_mla: bool, name: str = "kv", **ranks: int) -> bytes:
        storage = KVOffloadStorage(storage_config(["valkey://127.0.0.1:1/team"], is_mla=is_mla, **ranks), {})
        storage._register(name, pool)
        (key,) = storage._keys(name, HASHES[:1])
        return key

    pool = host_pool("mha", device_pool("mha", 4, torch.bfloat16), "page_first")
    ranks = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    assert len({keys(True, **rank) for rank in ranks}) == 1
    assert len({keys(True, "mamba", **rank) for rank in ranks}) == 2
    assert len({keys(False, **rank) for rank in ranks}) == 2
    assert len({keys(True, pp_rank=rank, pp_size=2) for rank in range(2)}) == 2


def test_metrics(tmp_path: Path) -> None:
    rank = Rank(storage_config([f"disk:{tmp_path}:64MiB"]))
    rank.write(1)
    rank.read()
    metrics = rank.storage.get_stats()
    assert metrics.backup_pgs == metrics.prefetch_pgs == [len(HASHES)]
    assert min(metrics.backup_bandwidth + metrics.prefetch_bandwidth) > 0
    assert rank.storage.get_stats().backup_pgs == []
    rank.storage.close()
