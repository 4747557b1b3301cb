"""Tiny models of transformers with random weights, in float32 on the CPU."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "gemma3_text": {
        "sliding_window": 12, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_neox": {},
    "phi3": {},
    "gemma2": {
        "sliding_window": 12, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model, the same for equal arguments; `changes` are fields of its configuration."""
    return _model(name, seed, json.dumps(changes))


@functools.cache
def _model(name: str, seed: int, changes: str) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**_SIZES, **MODELS.get(name, {}), **json.loads(changes)})
    model = AutoModelForCausalLM.from_config(config).eval()
    # Random weights of 0.02 give nearly uniform logits: larger weights make every token count.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random prompts without special tokens."""
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch of prompts with padding on the left."""
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = row
        mask[number, width - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}
