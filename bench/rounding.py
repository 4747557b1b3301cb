"""Differences of KV blocks by rounding, and of wrong blocks; the basis of `kvoffload.transfer.difference`.

    .venv-vllm/bin/python bench/rounding.py [--layers 4,32,80]     (needs torch and transformers, a minute)

A Llama with random weights computes 256 tokens in bfloat16 and in float16; the same rounded weights compute
them in float32. "rounding" is the difference between the two, for blocks of 16 tokens, separately for keys
and values of each layer. "wrong" is the largest difference after a change of the first token. For fp8, both
results are rounded again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvoffload.transfer.difference import LIMITS, difference

SEED = 0
NUM_TOKENS, BLOCK_TOKENS, VOCABULARY = 256, 16, 2048
OF_MODEL = {"bfloat16": ("bfloat16", "float8_e4m3fn", "float8_e5m2"), "float16": ("float16",)}


def model(num_layers: int) -> LlamaForCausalLM:
    """Return a model whose layers preserve the scale of their input, so that many layers do not saturate."""
    made = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=num_layers, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, vocab_size=VOCABULARY,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for weights in made.parameters():
            if weights.dim() == 2:
                weights.normal_(0, weights.shape[-1] ** -0.5)
        made.model.embed_tokens.weight.normal_(0, 1)
    return made


def keys_and_values(computing: LlamaForCausalLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        cache = computing(tokens, use_cache=True).past_key_values
    return [tensor[0] for layer in cache.layers for tensor in (layer.keys, layer.values)]


def differences(first: list[torch.Tensor], second: list[torch.Tensor], value_type: str) -> Iterator[float]:
    for kv_first, kv_second in zip(first, second, strict=True):
        for begin in range(0, NUM_TOKENS, BLOCK_TOKENS):
            blocks = (kv[:, begin : begin + BLOCK_TOKENS] for kv in (kv_first, kv_second))
            computed, stored = (as_bytes(block, value_type) for block in blocks)
            yield difference(computed, stored, value_type)


def as_bytes(values: torch.Tensor, value_type: str) -> np.ndarray[Any, Any]:
    stored = values.to(getattr(torch, value_type)).contiguous()
    return stored.view(torch.uint8).numpy().ravel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="4,32,80")
    layers = [int(number) for number in parser.parse_args().layers.split(",")]
    torch.manual_seed(SEED)
    print(f"seed {SEED}\n{'values':15}{'layers':>7}{'rounding: median':>18}", end="")
    print(f"{'largest':>9}{'limit':>7}{'wrong':>7}")
    for num_layers in layers:
        exact = model(num_layers)
        tokens = torch.randint(0, VOCABULARY, (1, NUM_TOKENS))
        changed = tokens.clone()
        changed[0, 0] = (changed[0, 0] + 7) % VOCABULARY
        for computed_as, stored_types in OF_MODEL.items():
            rounded = LlamaForCausalLM(exact.config).eval()
            rounded.load_state_dict(exact.state_dict())
            rounded.to(getattr(torch, computed_as))
            in_float32 = LlamaForCausalLM(exact.config).eval()
            in_float32.load_state_dict(rounded.state_dict())
            computed, wrong = (keys_and_values(rounded, ids) for ids in (tokens, changed))
            expected = keys_and_values(in_float32.float(), tokens)
            for value_type in stored_types:
                noise = [*differences(computed, expected, value_type)]
                worst = max(differences(computed, wrong, value_type))
                print(
                    f"{value_type:15}{num_layers:7}{np.median(noise):18.4f}{max(noise):9.4f}"
                    f"{LIMITS[value_type]:7.2f}{worst:7.2f}"
                )


if __name__ == "__main__":
    main()
