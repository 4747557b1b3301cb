"""SGLang's own device pools, host pools and controllers on a CPU, with our storage backend attached.

SGLang's code runs unchanged. Copies between device and host pool need compiled kernels; instead, tests fill
the host pools themselves with the result of a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str

from support.launcher import Launcher, launcher

PAGE = 16
LAYERS = 3
PATIENCE_S = 60.0
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
"""The configuration of a tiny model."""


def forks() -> Launcher:
    """The process that forks programs with SGLang."""
    return launcher("support.sglang_pools", "sglang.srt.mem_cache.storage", "sglang.srt.server_args")


@contextlib.contextmanager
def start_distributed(rendezvous: Path) -> Iterator[None]:
    """Make a process group of one rank, and register it as SGLang's only rank."""
    runtime_context.get_parallel().override_permanently(
        attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
    )
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_pool(kind: str, pages: int, dtype: torch.dtype) -> Any:
    """Return a device pool, on the CPU."""
    common: dict[str, Any] = {
        "size": PAGE * pages, "page_size": PAGE, "dtype": dtype, "layer_num": LAYERS, "device": "cpu",
        "enable_memory_saver": False,
    }  # fmt: skip
    if kind == "mla":
        return MLATokenToKVPool(**common, kv_lora_rank=64, qk_rope_head_dim=32)
    if kind == "asymmetric":
        return MHATokenToKVPool(**common, head_num=2, head_dim=64, v_head_dim=32)
    return MHATokenToKVPool(**common, head_num=2, head_dim=64)


def host_pool(kind: str, device: Any, layout: str) -> Any:
    """SGLang's host pool for a device pool."""
    buffer_info = device.get_device_pool_infos()[0].buffer_info
    settings: dict[str, Any] = {
        "host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False,
        "device_capacity_tokens": device.size, "start_layer": 0, "end_layer": LAYERS - 1,
    }  # fmt: skip
    if kind == "mla":
        return MLATokenToKVPoolHost(buffer_info, **settings, target_layer_num=LAYERS)
    pool = AsymmetricMHATokenToKVPoolHost if kind == "asymmetric" else MHATokenToKVPoolHost
    return pool(buffer_info, **settings)


def mamba_host_pool(states: int) -> Any:
    """SGLang's host pool of Mamba states."""
    buffer_info = MambaStateBufferInfo(
        temporal=torch.zeros(2, states, 4, 32), conv=(torch.zeros(2, states, 8, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(buffer_info, 2.0, 0, device_capacity=states, pin_memory=False, layout="page_first")


def fill(pool: Any, seed: int) -> None:
    """Fill a host pool with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        flat = buffer.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """The tensors of a host pool."""
    if isinstance(pool, MambaPoolHost):
        return [pool.temporal_buffer, *pool.conv_buffer]
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        return [pool.k_buffer, pool.v_buffer]
    return [pool.kv_buffer]


def zero(pool: Any) -> None:
    """Overwrite a host pool, as other requests would."""
    for buffer in buffers_of(pool):
        buffer.zero_()


def page_of(pool: Any, index: int) -> bytes:
    """The bytes of a page, as SGLang reads them."""
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):  # it has no flat pages
        meta = pool.get_page_buffer_meta(torch.arange(index, index + PAGE))
        return b"".join(ctypes.string_at(address, size) for address, size in zip(*meta, strict=True))
    page: bytes = pool.get_data_page(index).contiguous().view(torch.uint8).numpy().tobytes()
    return page


def extra_config(tiers: Sequence[Any], **options: Any) -> dict[str, Any]:
    """The configuration of our backend."""
    return {
        "backend_name": "kvoffload", "module_path": "kvoffload.integrations.sglang",
        "class_name": "KVOffloadStorage", "interface_v1": 1, "identity": "a test",
        "tiers": list(tiers), **options,
    }  # fmt: skip


def storage_config(tiers: list[str], *, is_mla: bool = False, **ranks: int) -> HiCacheStorageConfig:
    """The configuration of a rank, as SGLang's controller makes it."""
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": is_mla, "enable_storage_metrics": True, "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": extra_config(tiers),
    }  # fmt: skip
    return HiCacheStorageConfig(**{**values, **ranks})


class Stand:
    """A controller of SGLang with a host pool, and the backend attached.

    Args:
        kind: of the pools: ``mha``, ``asymmetric``, ``mla``; ``mamba``: ``mha`` with a pool of Mamba states.
        backend: ``dynamic`` for ours, or the name of one of SGLang's.
    """

    def __init__(
        self, *, kind: str = "mha", layout: str = "page_first", dtype: torch.dtype = torch.bfloat16,
        pages: int = 64, tiers: Sequence[Any] = (), backend: str = "dynamic",
        config: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.device = device_pool(kind, pages, dtype)
        self.host = host_pool(kind, self.device, layout)
        allocator = PagedTokenToKVPoolAllocator(
            self.device.size, page_size=PAGE, dtype=dtype, device="cpu", kvcache=self.device, need_sort=False
        )
        self.mamba = mamba_host_pool(pages) if kind == "mamba" else None
        self.config = extra_config(tiers, **options) if config is None else config
        self.backend_name = backend
        pool, controller = self.host, HiCacheController
        if self.mamba is not None:
            controller = HybridCacheController
            pool = HostPoolGroup([
                PoolEntry(
                    PoolName.KV, self.host, self.device, lambda layer: layer, is_primary_index_anchor=True
                ),
                PoolEntry(PoolName.MAMBA, self.mamba, None, lambda layer: layer),
            ])  # fmt: skip
        self.controller = controller(
            allocator, pool, PAGE, dist.group.WORLD, threading.Event(), io_backend="direct",
            model_name="tiny",
        )  # fmt: skip
        self.attach()

    def attach(self) -> None:
        """Attach the backend, as SGLang does at its start and over HTTP."""
        pools = {} if self.mamba is None else {"host_pools": self.controller.mem_pool_host.entries}
        self.controller.attach_storage_backend(
            self.backend_name, model_name="tiny", storage_backend_extra_config=dict(self.config), **pools
        )

    @property
    def storage(self) -> Any:
        """The backend."""
        return self.controller.storage_backend

    def close(self) -> None:
        """Detach the backend."""
        if self.controller.enable_storage:
            self.controller.detach_storage_backend()

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's keys of the pages of a prompt."""
        page_hashes: list[str] = get_storage_hash_str(list(tokens), None, page_size=PAGE)
        return page_hashes

    def states(self, hashes: Sequence[str], indices: Any = None) -> list[PoolTransfer] | None:
        """The transfer of the state after the last page; None without Mamba."""
        if self.mamba is None:
            return None
        return [
            PoolTransfer(
                PoolName.MAMBA,
                host_indices=indices,
                keys=[hashes[-1]],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
        ]

    def write(self, tokens: Sequence[int], seed: int = 1) -> list[bytes]:
        """Fill the host pools and let SGLang's thread back pages up; returns pages and states."""
        tokens, hashes = list(tokens), self.hashes(tokens)
        indices = self.controller.mem_pool_host.alloc(len(tokens))
        fill(self.host, seed)
        pages = [page_of(self.host, int(index)) for index in indices[::PAGE]]
        if self.mamba is None:
            self.controller.write_storage(indices, tokens, hash_value=hashes, prefix_keys=[])
        else:
            slot = self.mamba.alloc(1)
            fill(self.mamba, seed)
            pages.append(page_of(self.mamba, int(slot[0])))
            self.controller.write_storage(
                indices, tokens, hash_value=hashes, prefix_keys=[], extra_pools=self.states(hashes, slot)
            )
        self.stored_tokens = self.controller.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens
        self.controller.mem_pool_host.free(indices)
        return pages

    def query(self, tokens: Sequence[int]) -> Any:
        """Let SGLang's thread look for a prompt's pages; returns its operation."""
        tokens = list(tokens)
        if self.mamba is None:
            self.controller.prefetch("request", tokens, None, [])
        else:
            from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

            class Handle:
                rid = "request"

            slot = self.mamba.alloc(1)
            operation = PrefetchOperation(
                Handle(), tokens, None, prefix_keys=[], pool_transfers=self.states(self.hashes(tokens), slot)
            )
            self.controller.prefetch_queue.put(operation)
        return self.controller.prefetch_hit_queue.get(timeout=PATIENCE_S)

    def read(self, tokens: Sequence[int]) -> list[bytes]:
        """Overwrite the host pools and let SGLang's threads fetch a prompt; returns the fetched pages."""
        zero(self.host)
        if self.mamba is not None:
            zero(self.mamba)
        operation = self.query(tokens)
        if not operation.storage_hit_count:
            return []
        indices = operation.host_indices = self.controller.mem_pool_host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        completed, hits = 0, {}
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE_S)
            completed = ack.completed_tokens if ack.completed_tokens is not None else completed
            hits.update(ack.pool_hits or {})
            if ack.completed_req:
                break
        pages = [page_of(self.host, int(index)) for index in indices[:completed:PAGE]]
        if self.mamba is not None and hits.get(PoolName.MAMBA):
            slot = operation.pool_transfers[0].host_indices
            pages.append(page_of(self.mamba, int(slot[0])))
        self.controller.mem_pool_host.free(indices)
        return pages
