"""Adapter of `PrefixCache.generate` with a disk to `contract`, for a tiny Llama in float32.

A block is the KV of a prompt. Its bytes come from the model, not from `content`: a block is right if the next
logits equal the logits of ``model.generate``. Each version has its own weights.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvoffload import __version__
from kvoffload.integrations.transformers import PrefixCache, kv_layout
from peers.contract import Adapter, content
from peers.kvoffload_open import TOKENS, KvoffloadOpen

torch.set_num_threads(1)
HEADS, HEAD_DIM = 4, 64
LAYER_BYTES = 2 * HEADS * HEAD_DIM * TOKENS * 4
TOLERANCE = 1e-4


class KvoffloadInTransformers(KvoffloadOpen):
    """A `Product`: `PrefixCache.generate`."""

    def __init__(self, directory: Path, model: str, block_bytes: int, num_blocks: int) -> None:
        self.pool = np.empty((num_blocks, block_bytes), np.uint8)
        self._name, self._layers = model, block_bytes // LAYER_BYTES
        self._open(directory, model, kv_layout(_model(model, 1, self._layers), TOKENS), num_blocks)
        self.salt = f"0/{self._prefix(1)._digest}/"

    @functools.cache  # noqa: B019
    def _prefix(self, version: int) -> PrefixCache:
        return PrefixCache(_model(self._name, version, self._layers), self._cache)

    def write(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        for row, number in enumerate(numbers):
            if not self._is_content(row, number, 1):
                self._newer(number).touch()
            self._prefix(self._version(number)).generate(self._ids(number), max_new_tokens=1, do_sample=False)
        return [self._cache.flush()] * len(numbers)

    def read(self, numbers: Sequence[int], blocks_per_job: int) -> list[bool]:
        self._empty_ram()
        served = []
        for row, number in enumerate(numbers):
            self._end_pause()
            version = self._version(number)
            before = sum(self._cache.stats().hit_tokens.values())
            options: dict[str, Any] = {
                "max_new_tokens": 2, "do_sample": False, "output_logits": True,
                "return_dict_in_generate": True,
            }  # fmt: skip
            cached = self._prefix(version).generate(self._ids(number), **options)
            served.append(sum(self._cache.stats().hit_tokens.values()) > before)
            alone = _model(self._name, version, self._layers).generate(self._ids(number), **options)
            if torch.equal(cached.sequences, alone.sequences) and all(
                torch.allclose(logits, expected, atol=TOLERANCE)
                for logits, expected in zip(cached.logits, alone.logits, strict=True)
            ):
                self.pool[row] = content(number, self._name, version, self.pool.shape[1])
        return served

    def _ids(self, number: int) -> torch.Tensor:
        return torch.tensor([self.prompt(number)])

    def _is_content(self, row: int, number: int, version: int) -> bool:
        return bool((self.pool[row] == content(number, self._name, version, self.pool.shape[1])).all())

    def _newer(self, number: int) -> Path:
        """Return a marker file: it exists if the second version was written, for the next life."""
        return self._directory.with_name(f"{self._directory.name}-newer-{number}")

    def _version(self, number: int) -> int:
        return 2 if self._newer(number).exists() else 1


@functools.cache
def _model(name: str, version: int, layers: int) -> Any:
    torch.manual_seed(zlib.crc32(f"{name} {version}".encode()))
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=HEADS * HEAD_DIM, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # larger weights make every token count
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


ADAPTERS = {
    "kvoffload-transformers": Adapter(
        __version__,
        f"`PrefixCache.generate`, a disk, transformers {transformers.__version__}",
        KvoffloadInTransformers,
    )
}
