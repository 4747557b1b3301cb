"""Time to first token of ten turns in transformers, with and without a prefix cache; break-even; memory.

    python bench/transformers_ttft.py [--layers 8] [--hidden 512] [--turn-tokens 200]

The model has random weights, so only the times are meaningful. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvoffload
from kvoffload.integrations.transformers import PrefixCache, kv_layout


def made(layers: int, hidden: int) -> Any:
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=8192,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def seconds(generate: Callable[..., Any], text: torch.Tensor) -> float:
    """Measure the time to first token."""
    start = time.perf_counter()
    generate(text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=1)
    return time.perf_counter() - start


def turns(model: Any, prefix: PrefixCache, turn_tokens: int) -> None:
    print(f"{'turn':>4} {'tokens':>7} {'alone':>9} {'with cache':>11} {'cached':>7}")
    text = torch.zeros((1, 0), dtype=torch.long)
    for turn in range(1, 11):
        text = torch.cat([text, torch.randint(0, 32_000, (1, turn_tokens))], 1)
        with prefix.begin(text) as batch:
            cached = batch.num_cached
        alone, warm = seconds(model.generate, text), seconds(prefix.generate, text)
        print(f"{turn:>4} {text.shape[1]:>7} {1e3 * alone:>6.0f} ms {1e3 * warm:>8.0f} ms {cached:>7}")


def break_even(model: Any, prefix: PrefixCache) -> int | None:
    """Find the shortest measured prompt that is faster from the cache than computed."""
    for length in (17, 33, 65, 129, 257, 513):
        text = torch.randint(0, 32_000, (1, length))
        seconds(prefix.generate, text)
        alone, warm = (
            statistics.median(seconds(generate, text) for _ in range(5))
            for generate in (model.generate, prefix.generate)
        )
        print(f"{length:>5} tokens: alone {1e3 * alone:6.1f} ms, from the cache {1e3 * warm:6.1f} ms")
        if warm < alone:
            return length
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--turn-tokens", type=int, default=200)
    options = parser.parse_args()
    model = made(options.layers, options.hidden)
    layout = kv_layout(model)
    with tempfile.TemporaryDirectory() as disk:
        tiers = [f"disk:{disk}:1GiB"]
        with kvoffload.open(model="bench", layout=layout, ram="1GiB", tiers=tiers) as cache:
            prefix = PrefixCache(model, cache)
            seconds(prefix.generate, torch.ones((1, 40), dtype=torch.long))  # compiles kernels
            turns(model, prefix, options.turn_tokens)
            shortest = break_even(model, prefix)
            used = cache.stats().ram.ready * layout.block_bytes
    print(f"break-even: {shortest or 'more than 513'} tokens")
    print(
        f"KV of a token: {layout.block_bytes // layout.block_tokens:,} bytes; RAM used {used / 2**20:.0f} MiB"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
