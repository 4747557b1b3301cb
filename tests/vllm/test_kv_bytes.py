"""`kvoffload.model.kv_bytes` gives the bytes that vLLM allocates, for each kind of attention.

A plan divides sizes by these bytes. The engines have dummy weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload.model.kv_bytes import bytes_per_token
from support.vllm_needs import DEVICES, needs

# vLLM's warnings are not ours. Before 0.32 it lays out the tensors of a cache in other ways.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*DEVICES)]

LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    # All layers are dense.
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
EXPANDED = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "scale_emb": 1,
    "dim_model_base": 256,
    "scale_depth": 1.0,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 80}

# Changes of the tiny Llama (four layers, four heads of 64, two KV heads), settings of vLLM, bytes of a token.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "a KV head for each head": ({"num_key_value_heads": 4}, {}, 4 * 2 * 4 * 64 * 2),
    "grouped heads": ({}, {}, 4 * 2 * 2 * 64 * 2),
    "one KV head, weights of 32 bits": (
        {"num_key_value_heads": 1, "torch_dtype": "float32"},
        {},
        4 * 2 * 1 * 64 * 2,
    ),
    "latent (MLA)": (LATENT, {}, 3 * 576 * 2),
    "latent, expanded (MiniCPM3)": (EXPANDED, {}, 3 * 2 * 4 * 64 * 2),
    "every other layer with a window": (
        WINDOWS,
        {"disable_hybrid_kv_cache_manager": False},
        4 * 2 * 2 * 64 * 2,
    ),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}, 4 * 2 * 2 * 64),
}


def allocated_bytes_per_token(engine: Any) -> float:
    """Return the bytes of the worker's tensors for a token with a block in each group."""
    config = engine.core.scheduler.kv_cache_config
    caches = engine.core.model_executor.driver_worker.worker.model_runner.kv_caches
    storages = {
        storage.data_ptr(): storage.nbytes() for cache in caches for storage in [cache.untyped_storage()]
    }
    # Groups share the blocks: a token takes one block for each of its groups.
    return sum(
        sum(storages.values()) / config.num_blocks / group.kv_cache_spec.block_size
        for group in config.kv_cache_groups
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_equal_vllms_allocation(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path, kind: str
) -> None:
    changes, settings, expected = KINDS[kind]
    config = json.loads((llama / "config.json").read_text()) | {"torch_dtype": "bfloat16"} | changes
    if "kv_lora_rank" in changes:
        del config["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, tmp_path)
    token_bytes = bytes_per_token(str(tmp_path), settings.get("kv_cache_dtype", "auto"))
    assert token_bytes == expected
    if kind == "fp8" and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip(
            "vLLM has no fp8 cache on a processor without AVX-512 or AMX, so its allocation cannot be checked"
        )
    engine = start_engine(
        tmp_path, None, load_format="dummy", dtype="auto", num_gpu_blocks_override=64, **settings
    )
    assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == (2 if changes is WINDOWS else 1)
    assert token_bytes == allocated_bytes_per_token(engine)
