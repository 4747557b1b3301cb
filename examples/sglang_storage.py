"""SGLang's storage factory and host pool with our backend: pages survive a restart.

Needs SGLang, and runs on a CPU:

    python examples/sglang_storage.py disk:/nvme/kv:50GiB

Checks a tier before a server uses it. Each run after the first finds the pages. A server reads the same
configuration from a file:

    python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --enable-hierarchical-cache \
      --hicache-mem-layout page_first --hicache-storage-backend dynamic \
      --hicache-storage-backend-extra-config @examples/sglang_hicache.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

CONFIGURATION = Path(__file__).with_name("sglang_hicache.json")
PAGE, PAGES, LAYERS = 16, 8, 2


def host_pool() -> MHATokenToKVPoolHost:
    """Create the host pool (L2) of a small model, as SGLang does."""
    device = MHATokenToKVPool(
        size=PAGE * PAGES, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=64, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, "page_first", pin_memory=False,
        device_capacity_tokens=device.size, start_layer=0, end_layer=LAYERS - 1,
    )  # fmt: skip


def main(tier: str) -> None:
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{CONFIGURATION}")
    # A server's own arguments identify the weights. Here there is no server, so a name does.
    extra |= {"tiers": [tier], "identity": "an example"}
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="example", extra_config=extra,
    )  # fmt: skip
    pool = host_pool()
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()

    hashes = get_storage_hash_str(list(range(PAGE * PAGES)), None, page_size=PAGE)
    slots = torch.arange(PAGE * PAGES)
    hits = storage.batch_exists(hashes)
    print(f"{hits} of {PAGES} pages found")
    if hits:
        pool.kv_buffer.zero_()
        print(f"{sum(storage.batch_get_v1(hashes, slots))} pages read")
    else:
        pool.kv_buffer.normal_()
        print(f"{sum(storage.batch_set_v1(hashes, slots))} pages written")
    storage.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    runtime_context.get_parallel().override_permanently(
        attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
    )
    main(sys.argv[1])
