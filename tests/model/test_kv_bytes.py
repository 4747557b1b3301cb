"""Bytes of a token, from published configurations of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import ConfigError
from kvoffload.model.kv_bytes import block_bytes, bytes_per_token, sliding_layers

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            "torch_dtype": "bfloat16"}  # fmt: skip

CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "grouped heads": (LLAMA_8B, 128 * 1024),
    "of 70B": (
        {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192},
        320 * 1024,
    ),
    "heads of their own size": ({**LLAMA_8B, "head_dim": 256}, 256 * 1024),
    "as many KV heads as heads": (
        {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"},
        512 * 1024,
    ),
    "names of GPT-2": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"},
        12 * 2 * 768 * 2,
    ),
    "latent attention": (
        {
            "num_hidden_layers": 61,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "num_attention_heads": 128,
            "hidden_size": 7168,
            "torch_dtype": "bfloat16",
        },
        61 * 576 * 2,
    ),
    "latent vectors that are expanded (MiniCPM3)": (
        {
            "model_type": "minicpm3",
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "hidden_size": 2560,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "torch_dtype": "bfloat16",
        },
        62 * 2 * 40 * 96 * 2,
    ),
    "sliding windows count": (
        {**LLAMA_8B, "layer_types": ["full_attention", "sliding_attention"] * 16},
        128 * 1024,
    ),
    "linear attention does not": (
        {**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
        32 * 1024,
    ),
    "one KV head (Falcon)": (
        {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
        8192,
    ),
    "groups (ChatGLM)": (
        {
            "num_layers": 40,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_group_num": 2,
            "torch_dtype": "float16",
        },
        40960,
    ),
    "hybrid layers (Zamba2)": ({**LLAMA_8B, "layers_block_type": ["mamba", "hybrid"] * 16}, 64 * 1024),
    "no text_config": ({**LLAMA_8B, "text_config": None}, 128 * 1024),
    "dtype outside": (
        {"text_config": {**LLAMA_8B, "torch_dtype": None}, "dtype": "float8_e4m3fn"},
        64 * 1024,
    ),
    "layers_block_type": ({**LLAMA_8B, "layers_block_type": ["mamba"] * 28 + ["attention"] * 4}, 16 * 1024),
    "Nemotron-H": ({**LLAMA_8B, "hybrid_override_pattern": "M-M*-M*-"}, 8 * 1024),
    "text of a model that sees": (
        {"text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 9}},
        128 * 1024,
    ),
    "one KV head, whatever the number of KV heads (Falcon 7B)": (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "num_kv_heads": 71,
            "new_decoder_architecture": False,
        },
        8192,
    ),
    "KV heads of Falcon's first configurations": (
        {"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192, "n_head_kv": 8},
        60 * 2 * 8 * 64 * 2,
    ),
    "KV heads of Step": ({**LLAMA_8B, "num_key_value_heads": None, "num_attention_groups": 8}, 128 * 1024),
    "heads twice as large (Zamba2)": ({**LLAMA_8B, "attention_head_dim": 256}, 256 * 1024),
    "layers that share keys and values (Gemma 3n)": (
        {
            "text_config": {
                "num_hidden_layers": 35,
                "num_kv_shared_layers": 15,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "hidden_size": 2048,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            }
        },
        20 * 2 * 2 * 256 * 2,
    ),
    "newer name of the dtype": (
        {**{k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"}, "dtype": "float32"},
        128 * 1024,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_token(tmp_path: Path, name: str) -> None:
    config, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bytes_per_token(str(tmp_path / "config.json")) == bytes_per_token(str(tmp_path)) == expected


def test_the_cache_may_have_another_dtype_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for dtype, kib in (("auto", 128), ("bfloat16", 128), ("float16", 128), ("fp8", 64), ("fp8_e5m2", 64)):
        assert bytes_per_token(str(tmp_path), dtype) == kib * 1024
        assert bytes_per_token("meta-llama/llama-3.1-8b", dtype) == kib * 1024
        assert block_bytes(str(tmp_path), None, 16, dtype) == 16 * kib * 1024
    with pytest.raises(ConfigError, match="kv-cache-dtype: 'int8' is invalid; allowed: auto, bfloat16"):
        bytes_per_token(str(tmp_path), "int8")
    with pytest.raises(ConfigError, match="kv-cache-dtype: 'fp8' is invalid; it needs --model"):
        block_bytes(None, "128KiB", 16, "fp8")


FP8_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("inside", "beside", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, None, "FP8"),
        ({"producer": {"name": "modelopt"}, "kv_cache_scheme": FP8_SCHEME}, None, "8-bit float"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}, None, "8-bit float"),
        (
            None,
            {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "NVFP4",
        ),
    ],
)
def test_a_checkpoint_that_sets_the_dtype_of_the_cache_needs_the_option(
    tmp_path: Path, inside: dict[str, Any] | None, beside: dict[str, Any] | None, dtype: str
) -> None:
    """In this case vLLM's ``auto`` is the checkpoint's dtype, not the model's."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": inside}))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(
        ConfigError, match=f"^model: .* stores the KV cache as {dtype}; give --kv-cache-dtype"
    ):
        bytes_per_token(str(tmp_path))
    assert bytes_per_token(str(tmp_path), "fp8") == 64 * 1024


def test_other_quantization_leaves_the_cache_as_in_the_model(tmp_path: Path) -> None:
    for quantization in (
        {"quant_method": "fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
        None,
        [],
    ):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": quantization}))
        assert bytes_per_token(str(tmp_path)) == 128 * 1024


def test_names_and_paths_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_per_token("meta-llama/Llama-3.1-8B-Instruct") == 128 * 1024
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 1}))
    assert bytes_per_token("some/model") == 4096


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "is not a model configuration"),
        ("{", "is not a model configuration"),
        ("{}", "its configuration has no num_hidden_layers; give --bytes-per-token"),
        (json.dumps({**LLAMA_8B, "torch_dtype": "int4"}), "its dtype 'int4' is not known"),
        (json.dumps({**LLAMA_8B, "torch_dtype": ["x"]}), "is not known"),
        (json.dumps({**LLAMA_8B, "attn_layer_period": 8}), "depend on attn_layer_period; give"),
        (json.dumps({**LLAMA_8B, "full_attention_interval": 4}), "depend on full_attention_interval; give"),
        (json.dumps({**LLAMA_8B, "full_attn_idxs": [2, 5]}), "depend on full_attn_idxs; give"),
        (json.dumps({**LLAMA_8B, "layer_types": ["mamba"] * 9}), "it has no layer with attention"),
        (json.dumps({**LLAMA_8B, "swa_num_key_value_heads": 4}), "depend on swa_num_key_value_heads; give"),
        (json.dumps({**LLAMA_8B, "global_head_dim": 512}), "depend on global_head_dim; give"),
        (json.dumps({**LLAMA_8B, "block_configs": [{}]}), "depend on block_configs; give"),
        (json.dumps({**LLAMA_8B, "model_type": "longcat_flash"}), "depend on model_type; give"),
        (json.dumps({**LLAMA_8B, "v_head_dim": 64}), "its keys and values have different sizes; give"),
        (json.dumps({**LLAMA_8B, "num_key_value_heads": [8, 4]}), "its layers differ in num_key_value_heads"),
        (json.dumps({**LLAMA_8B, "linear_attn_config": {}}), "depend on linear_attn_config; give"),
        (
            json.dumps({**LLAMA_8B, "index_head_dim": 128}),
            "the bytes of a token depend on index_head_dim",
        ),
    ],
)
def test_unknown_configurations_are_refused_with_the_reason(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"^model: .*{reason}"):
        bytes_per_token(str(tmp_path))


def test_bytes_of_a_block() -> None:
    assert block_bytes(None, None, 512) is None
    assert block_bytes(None, "128KiB", 512) == 64 * 2**20
    assert block_bytes("qwen/qwen3-8b", None, 16) == 36 * 8 * 128 * 4 * 16
    with pytest.raises(ConfigError, match="leave out --model or"):
        block_bytes("qwen/qwen3-8b", "1KiB", 16)
    with pytest.raises(ConfigError, match="at least one byte"):
        block_bytes(None, "0", 16)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_8B, (0, 0)),
        ({**LLAMA_8B, "layer_types": ["sliding_attention", "full_attention"] * 18}, (18, 36)),
        ({"text_config": {"num_hidden_layers": 62, "sliding_window_pattern": 6}}, (52, 62)),
    ],
)
def test_layers_with_a_sliding_window(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sliding_layers(str(tmp_path)) == expected
    assert sliding_layers("meta-llama/Llama-3.1-8B") == (0, 0)
