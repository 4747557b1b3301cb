"""A minimal engine whose KV cache continues in RAM and on a disk, and is found again after a restart.

A real engine has attention kernels instead of a hash. The six lines with `kvoffload`, `cache` or `request`
stay the same:

    python examples/embed_minimal.py /nvme/kv
"""

from __future__ import annotations

import hashlib
import sys
import tempfile

import numpy as np

import kvoffload

LAYERS, BLOCK_TOKENS, HEADS, HEAD_DIM, DEVICE_BLOCKS = 4, 16, 2, 64, 64


class Engine:
    """An engine for one sequence at a time; `num_computed` counts the tokens that it has computed."""

    def __init__(self) -> None:
        shape = (2, DEVICE_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self.kv = [np.zeros(shape, np.float32) for _ in range(LAYERS)]
        self.num_computed = 0

    def run(self, cache: kvoffload.KVCache, tokens: list[int]) -> None:
        """Put the KV of a prompt into the first blocks of the device."""
        block_ids = list(range(-(-len(tokens) // BLOCK_TOKENS)))  # yours: the allocated blocks
        with cache.request(tokens) as request:
            hit = request.load_into(self.kv, block_ids)
            self.forward(tokens, hit)
            request.store_from(self.kv, block_ids)

    def forward(self, tokens: list[int], first: int) -> None:
        """Yours: the model. Here the KV of a token is drawn from a hash of all tokens up to it."""
        for position in range(first, len(tokens)):
            seed = hashlib.sha256(np.array(tokens[: position + 1])).digest()[:8]
            drawn = np.random.default_rng(int.from_bytes(seed, "little")).random((LAYERS, 2, HEADS, HEAD_DIM))
            for tensor, values in zip(self.kv, drawn, strict=True):
                tensor[:, position // BLOCK_TOKENS, position % BLOCK_TOKENS] = values
        self.num_computed += len(tokens) - first


if __name__ == "__main__":
    disk = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    conversation = list(range(300))
    for life in ("first", "second"):
        engine = Engine()
        layout = kvoffload.KVLayout.of(engine.kv, "kv block token head dim")
        with kvoffload.open(model="toy", layout=layout, ram="64MiB", tiers=[f"disk:{disk}:64MiB"]) as cache:
            for turn in (100, 200, 300):
                engine.run(cache, conversation[:turn])
            loaded = cache.stats().hit_tokens
        print(f"{life} life: {engine.num_computed} of 600 tokens computed, loaded {loaded}")
