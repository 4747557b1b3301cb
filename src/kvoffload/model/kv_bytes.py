"""KV bytes per token of a model, from its configuration.

This number converts sizes such as ``64GiB`` to blocks.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.settings.paths import expanded
from kvoffload.settings.read import nearest, parse_size

_KNOWN: dict[str, tuple[int, int, int]] = {
    "meta-llama/llama-3.1-8b": (32, 8, 128),
    "meta-llama/llama-3.1-70b": (80, 8, 128),
    "meta-llama/llama-3.3-70b": (80, 8, 128),
    "mistralai/mistral-7b-v0.3": (32, 8, 128),
    "qwen/qwen2.5-7b": (28, 4, 128),
    "qwen/qwen2.5-72b": (80, 8, 128),
    "qwen/qwen3-8b": (36, 8, 128),
    "qwen/qwen3-32b": (64, 8, 128),
}
"""Built-in table: model name without -Instruct -> (number of layers, number of KV heads, head size)."""

KV_CACHE_DTYPES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Value of vLLM's ``--kv-cache-dtype`` -> bytes of one element. 0 means that the model's dtype decides."""

_DTYPE_BYTES = {"float32": 2, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_HYBRID = {
    *("attn_layer_period", "attn_type_list", "full_attention_interval", "attn_layer_indices"),
    *("linear_attn_config", "full_attn_idxs", "block_types", "mamba_step", "mb_per_layer"),
}
"""Keys in the configurations of models in which only some layers have attention. A model with such a key is
refused unless its configuration lists the kind of each layer."""
_BESIDES = {
    *("index_head_dim", "compress_ratios"),
    *("global_head_dim", "num_global_key_value_heads", "swa_head_dim", "swa_num_key_value_heads"),
    *("attention_other_setting", "block_configs", "per_layer_config"),
}
"""Configuration keys of models that store more than keys and values, or whose layers differ.
`bytes_per_token` refuses such models."""
_UNCLEAR_TYPES = {"longcat_flash"}
"""Model types that are refused, because each layer has two attentions and the number of layers is
ambiguous."""
_EXPANDED = {"minicpm3"}
"""Model types with latent attention that nevertheless store keys and values of all heads."""
_KV_HEADS = (
    *("n_head_kv", "num_key_value_heads", "num_kv_heads"),
    *("multi_query_group_num", "num_attention_groups"),
)
_ALLOWED = "allowed: a config.json, a directory with one, or a model in the Hugging Face cache or of: "


def bytes_per_token(model: str, kv_cache_dtype: str = "auto") -> int:
    """Compute the KV bytes of one token, summed over all layers and heads.

    The result equals vLLM's allocation (tests/vllm/test_kv_bytes.py starts engines with seven kinds of
    attention). Each head counts once, even if several ranks store it (`kv_heads`). With ``auto``, a 32-bit
    model has a 16-bit cache. Layers with a sliding window count in full, because whole blocks are offloaded.
    Layers without KV of their own do not count: Mamba, linear attention, and layers that use the keys and
    values of an earlier layer (Gemma 3n).

    Args:
        model: a ``config.json``, a directory with one, or the name of a model in the local cache of Hugging
            Face or in the built-in table.
        kv_cache_dtype: vLLM's option: one of `KV_CACHE_DTYPES`.

    Raises: `ConfigError` that names the option ``model`` or ``kv-cache-dtype``.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError("kv-cache-dtype", kv_cache_dtype, f"allowed: {', '.join(KV_CACHE_DTYPES)}")
    place, name = _config_file(model), model.lower().removesuffix("-instruct")
    if place is None and name in _KNOWN:
        layers, heads, head_size = _KNOWN[name]
        return 2 * layers * heads * head_size * (KV_CACHE_DTYPES[kv_cache_dtype] or 2)
    if place is None:
        raise ConfigError("model", model, _ALLOWED + ", ".join(_KNOWN) + nearest(name, _KNOWN))
    config = _read(model, place)
    if kv_cache_dtype == "auto" and (dtype := _quantized_cache(place, config)):
        why = f"its checkpoint stores the KV cache as {dtype}; give --kv-cache-dtype or --bytes-per-token"
        raise ConfigError("model", model, why)
    return _of_config(model, config, KV_CACHE_DTYPES[kv_cache_dtype])


def sliding_layers(model: str) -> tuple[int, int]:
    """Return the number of layers with a sliding window, and the number of all layers; (0, 0) if unknown.

    In a layer with a sliding window, vLLM frees the blocks outside the window. So the KV cache of a GPU holds
    more tokens of the model than `bytes_per_token` suggests.
    """
    if (place := _config_file(model)) is None:
        return 0, 0
    config = _read(model, place)
    text = _object(config, "text_config") or config
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return sum("sliding" in str(kind) for kind in kinds), len(kinds)
    pattern, layers = text.get("sliding_window_pattern"), text.get("num_hidden_layers")
    if isinstance(pattern, int) and isinstance(layers, int) and pattern > 1:
        return layers - layers // pattern, layers
    return 0, 0


def kv_heads(model: str) -> int:
    """Return the number of KV heads of a model that `bytes_per_token` knows; 0 for latent attention (MLA).

    The ranks of tensor parallelism share the heads. If there are more ranks than heads, several ranks store
    the same head. With latent attention, every rank stores the whole latent vector.
    """
    place = _config_file(model)
    if place is None:
        return _KNOWN[model.lower().removesuffix("-instruct")][1]
    config = _read(model, place)
    text = _object(config, "text_config") or config
    number = _numbers(model, text)
    if "kv_lora_rank" not in text:
        return _heads_with_kv(text, number)
    return number("num_attention_heads") if text.get("model_type") in _EXPANDED else 0


def _config_file(model: str) -> Path | None:
    """Return the path of a model's configuration file; None for a built-in or an unknown model."""
    place = Path(expanded("model", model))
    if place.is_dir():
        place = place / "config.json"
    if place.is_file():
        return place
    return None if model.lower().removesuffix("-instruct") in _KNOWN else _in_hub_cache(model)


def _read(model: str, place: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(place.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError("model", model, f"{place} cannot be read ({error.strerror})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError("model", model, f"{place} is not a model configuration ({error})") from None


def block_bytes(
    model: str | None, token_bytes: str | None, block_tokens: int, kv_cache_dtype: str = "auto"
) -> int | None:
    """Compute the bytes of a block; None if neither `model` nor `token_bytes` is given."""
    if model is not None and token_bytes is not None:
        raise ConfigError("bytes-per-token", token_bytes, "leave out --model or --bytes-per-token")
    if model is None and kv_cache_dtype != "auto":
        raise ConfigError("kv-cache-dtype", kv_cache_dtype, "it needs --model")
    if model is not None:
        return bytes_per_token(model, kv_cache_dtype) * block_tokens
    if token_bytes is None:
        return None
    size = parse_size("bytes-per-token", token_bytes)
    if size < 1:
        raise ConfigError("bytes-per-token", token_bytes, "allowed: at least one byte")
    return size * block_tokens


def _quantized_cache(place: Path, config: Mapping[str, Any]) -> str:
    """Return the dtype of the KV cache that a checkpoint of ModelOpt or llm-compressor sets, or "".

    vLLM's ``auto`` means this dtype. Older checkpoints store this dtype in ``hf_quant_config.json``, or in
    ``compression_config``.
    """
    places = (config, _object(config, "text_config"))
    names = ("quantization_config", "compression_config")
    given = next((section for name in names for at in places if (section := _object(at, name))), {})
    if not given:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            older = place.parent / "hf_quant_config.json"
            given = msgspec.json.decode(older.read_bytes(), type=dict[str, Any])
    makers = (given.get("quant_method"), _object(given, "producer").get("name"))
    if not any(str(maker).lower().startswith(("modelopt", "compressed-tensors")) for maker in makers):
        return ""
    inner = _object(given, "quantization")
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = next((at[name] for name in names for at in (inner, given) if at.get(name)), "")
    return f"{scheme.get('num_bits')}-bit {scheme.get('type')}" if isinstance(scheme, dict) else str(scheme)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the JSON object in the field `name` of a configuration.

    Returns an empty dictionary if the field is absent or contains something else than an object.
    """
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _of_config(model: str, config: Mapping[str, Any], number_bytes: int) -> int:
    """Compute the KV bytes of one token.

    `number_bytes`: bytes of one element of the cache; 0 if the model's dtype decides.
    """
    text = _object(config, "text_config") or config
    number = _numbers(model, text)
    named = [at.get(name) for at in (text, config) for name in ("torch_dtype", "dtype")]
    dtype = next((str(name) for name in named if name), "bfloat16")
    if dtype not in _DTYPE_BYTES:
        raise ConfigError("model", model, f"its dtype {dtype!r} is not known; give --bytes-per-token")
    layers = _attention_layers(model, text, number("num_hidden_layers", "n_layer", "num_layers"))
    unclear = sorted(_BESIDES & {name for name, value in text.items() if value})
    unclear += ["model_type"] if text.get("model_type") in _UNCLEAR_TYPES else []
    if unclear:
        why = f"the bytes of a token depend on {unclear[0]}; give --bytes-per-token"
        raise ConfigError("model", model, why)
    if "kv_lora_rank" in text and text.get("model_type") in _EXPANDED:
        # vLLM stores keys and values of all heads, with values padded to the size of keys.
        size = number("qk_nope_head_dim") + number("qk_rope_head_dim")
        values = 2 * size * number("num_attention_heads")
    elif "kv_lora_rank" in text:
        # Latent attention (DeepSeek) stores one vector for all heads, and the positional part of the keys.
        values = number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        values = _values_of_heads(model, text, number)
    if layers * values < 1:
        raise ConfigError("model", model, "it has no layer with attention; give --bytes-per-token")
    return layers * values * (number_bytes or _DTYPE_BYTES[dtype])


def _numbers(model: str, text: Mapping[str, Any]) -> Callable[..., int]:
    """Return a function that reads a positive integer from the configuration `text` of a model.

    The returned function, ``number(*names, default=None)``, tries the field names in order and returns the
    first positive integer. If there is none, it returns `default`, or raises `ConfigError` if `default` is
    None. A list also raises `ConfigError`, because it means that the layers differ.
    """

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if isinstance(value, list):
                why = f"its layers differ in {name}; give --bytes-per-token"
                raise ConfigError("model", model, why)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise ConfigError("model", model, f"its configuration has no {names[0]}; give --bytes-per-token")
        return default

    return number


def _values_of_heads(model: str, text: Mapping[str, Any], number: Callable[..., int]) -> int:
    """Return the number of values that a layer without latent attention stores for a token."""
    heads = number("num_attention_heads", "n_head")
    sizes = ("head_dim", "attention_head_dim", "hidden_size_per_head", "kv_channels")
    size = number(*sizes, default=number("hidden_size", "n_embd") // heads)
    if number("v_head_dim", "v_channels", default=size) != size:
        why = "its keys and values have different sizes; give --bytes-per-token"
        raise ConfigError("model", model, why)
    return 2 * size * _heads_with_kv(text, number)


def _heads_with_kv(text: Mapping[str, Any], number: Callable[..., int]) -> int:
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return 1  # one head, even if `num_kv_heads` is larger, as in Falcon 7B
    return number(*_KV_HEADS, "num_attention_heads", "n_head")


def _attention_layers(model: str, text: Mapping[str, Any], num_layers: int) -> int:
    kinds = text.get("layer_types") or text.get("layers_block_type")
    num_shared = text.get("num_kv_shared_layers")
    if isinstance(num_shared, int) and 0 < num_shared < num_layers:
        num_layers -= num_shared
    if isinstance(kinds, list):
        # A "hybrid" layer has attention and a state, in parallel or in sequence.
        names = [str(kind) for kind in kinds[:num_layers]]
        return sum(("attention" in kind or kind == "hybrid") and "linear" not in kind for kind in names)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("*")
    if unclear := sorted(_HYBRID & set(text)):
        why = f"its layers with attention depend on {unclear[0]}; give --bytes-per-token"
        raise ConfigError("model", model, why)
    return num_layers


def _in_hub_cache(model: str) -> Path | None:
    """Return the path of a model's configuration in the local Hugging Face cache; None if it is not there."""
    configs = [place / "config.json" for place in snapshots(model) if (place / "config.json").exists()]
    return configs[-1] if configs else None


def snapshots(model: str, download_dir: str = "") -> list[Path]:
    """List the directories of a model's revisions in the local Hugging Face cache. Their names are commits.

    Args:
        download_dir: a second cache, in which the engine stores weights; empty for none.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser()
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    pattern = f"models--{glob.escape(model.replace('/', '--'))}/snapshots/*"
    places = {Path(cache).expanduser() for cache in (hub, download_dir) if cache}
    return sorted(place for cache in places for place in cache.glob(pattern))
