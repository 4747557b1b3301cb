"""Properties of a transformers model: the layout of its KV, and a digest of its configuration. Refuses models
whose KV cannot be cached.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvoffload.cache.kv_layout import KVLayout
from kvoffload.errors import ConfigError
from kvoffload.integrations.transformers.rope import check_rope, probe_rope

AXES = "batch head token dim"
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the cache in arguments and results of models: ``cache`` since transformers 5.24, formerly
``past_key_values``."""
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_WITHOUT_EFFECT = {
    *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    "dtype",  # in the layout; `save_pretrained` changes it
}


def kv_layout(model: Any, block_tokens: int = 16) -> KVLayout:
    """Return the layout of a model's KV. To find the layout, the model computes one token.

    Raises: `ConfigError` for a model in training mode or with unsuitable KV. The KV must be one key and one
    value for each token and layer, of equal shape and on one device. Therefore these are refused:
    encoder-decoders, linear attention, paged attention, and rope that depends on the total length.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError("model", type(model).__name__, "allowed: decoder-only; it is an encoder-decoder")
    if str(getattr(model.config, "_attn_implementation", "")).startswith("paged"):
        attention = model.config._attn_implementation
        raise ConfigError("attn_implementation", attention, "allowed: any but paged (continuous batching)")
    if model.training:
        raise ConfigError("model.training", True, "allowed: False, without dropout; call model.eval()")
    check_rope(model.config.to_dict())
    with torch.no_grad():
        made = model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True)
    cache = getattr(made, CACHE, None)
    if not isinstance(cache, DynamicCache):
        raise ConfigError("model", type(model).__name__, "allowed: models whose cache is a DynamicCache")
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _LAYERS:
            raise ConfigError(
                f"model.layers[{number}]",
                type(layer).__name__,
                "allowed: full and sliding attention; the state of linear attention has no prefixes",
            )
    kv = [(layer.keys, layer.values) for layer in cache.layers]
    layout = KVLayout.of(kv, AXES, block_tokens)
    try:
        layout.views(kv, row=0)
    except ConfigError as error:
        allowed = "allowed: models whose layers have equal shapes, dtypes and devices"
        raise ConfigError("model", type(model).__name__, f"{allowed}; {error}") from None
    _probe(model)
    return layout


def configuration_digest(model: Any) -> str:
    """Return a digest of a model's configuration, without the fields that do not change KV."""
    fields = {k: v for k, v in model.config.to_dict().items() if k not in _WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _probe(model: Any) -> None:
    """Refuse a model whose KV depends on the length of the sequence."""
    parameters = inspect.signature(model.forward).parameters
    is_wrapper = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters and not is_wrapper:
        return  # positions are column numbers
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0

    def kv_of(positions: list[int]) -> list[torch.Tensor]:
        ids = torch.ones((1, len(positions)), dtype=torch.long, device=model.device)
        places = torch.tensor([positions], device=model.device)
        with torch.no_grad():
            cache = getattr(model(ids, position_ids=places, use_cache=True), CACHE)
        return [tensor[:, :, :-1] for layer in cache.layers for tensor in (layer.keys, layer.values)]

    if "position_ids" not in parameters:
        try:
            kv_of([0, 1])
        except (TypeError, ValueError):
            return  # the wrapped model takes no positions either
    probe_rope(model, longest, kv_of)
