"""An engine that derives the KV of a token from the hash of all tokens up to it, in any layout of `KVLayout`.

`check` compares tensors with the tokens, and so detects any wrong byte of a cache.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload import KVCache, KVLayout

PAGED, HEADS_FIRST, STACKED, STACKED_IN_BLOCK, MLA, CONTIGUOUS, WHOLE = (
    "block token head dim",
    "block head token dim",
    "kv block token head dim",
    "block kv token head dim",
    "block token dim",
    "batch head token dim",
    "layer kv block token head dim",
)
LAYOUTS = (PAGED, HEADS_FIRST, STACKED, STACKED_IN_BLOCK, MLA, CONTIGUOUS, WHOLE)
BLOCK_TOKENS, NUM_BLOCKS = 4, 24
NUM_TOKENS = BLOCK_TOKENS * NUM_BLOCKS
"""Tokens of a row of a contiguous cache."""
ROWS = 3


def layout_of(axes: str = PAGED, dtype: str = "float32", **sizes: int) -> KVLayout:
    heads = 2 if "head" in axes else 1
    given = {"layers": 2, "heads": heads, "head_dim": 3, "block_tokens": BLOCK_TOKENS} | sizes
    return KVLayout(axes, dtype=dtype, **given)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def _state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(8, "little"), digest_size=16).digest()


class TokenEngine:
    """Tensors in one layout, with the KV of requests."""

    def __init__(self, layout: KVLayout, seed: int = 1, torch: Any = None) -> None:
        self.layout, self._seed = layout, seed
        size = {
            "layer": layout.layers, "kv": 2, "block": NUM_BLOCKS, "batch": ROWS, "head": layout.heads,
            "token": BLOCK_TOKENS if "block" in layout.names else NUM_TOKENS, "dim": layout.head_dim,
        }  # fmt: skip
        shape = tuple(size[axis] for axis in layout.names)
        self.arrays = [
            np.zeros(shape, layout.dtype)
            for _ in range(
                1 if "layer" in size and "layer" in layout.names else layout.layers * (1 + self._has_pairs)
            )
        ]
        given: list[Any] = [torch.from_numpy(array) for array in self.arrays] if torch else self.arrays
        if "layer" in layout.names:
            self.kv: Any = given[0]
        elif self._has_pairs:
            self.kv = list(zip(given[::2], given[1::2], strict=True))
        else:
            self.kv = given

    @property
    def _has_pairs(self) -> bool:
        return "head" in self.layout.names and "kv" not in self.layout.names

    def where(self, block_ids: Sequence[int]) -> dict[str, Any]:
        """Return a request's place as arguments of `load_into`; a contiguous cache uses row and start."""
        if "block" in self.layout.names:
            return {"block_ids": block_ids}
        return {"row": block_ids[0] % ROWS, "start": block_ids[-1] % 5}

    def compute(self, tokens: Sequence[int], place: dict[str, Any], first: int = 0) -> None:
        """Write the KV of the tokens from `first` on."""
        for number, values in enumerate(self._values(tokens)):
            if number >= first:
                for view, value in zip(self._at(number, place), values, strict=True):
                    view[...] = value

    def check(self, tokens: Sequence[int], place: dict[str, Any], count: int) -> None:
        """Assert that the KV of the first `count` tokens is correct."""
        for number, values in enumerate(self._values(tokens[:count])):
            for view, value in zip(self._at(number, place), values, strict=True):
                assert np.array_equal(view, value), f"the KV of token {number} is wrong"

    def clear(self) -> None:
        for array in self.arrays:
            array[...] = 0

    def _values(self, tokens: Sequence[int]) -> list[npt.NDArray[Any]]:
        """Return the KV of each token, one array for each view of `_at`."""
        state, values = self._seed.to_bytes(8, "little"), []
        parts = self.layout.layers * (2 if "head" in self.layout.names else 1)
        shape = (self.layout.heads, self.layout.head_dim)
        for token in tokens:
            state = _state(state, token)
            drawn = np.random.default_rng(int.from_bytes(state, "little")).integers(1, 100, (parts, *shape))
            values.append(drawn if "head" in self.layout.names else drawn[:, 0])
        return values

    def _at(self, number: int, place: dict[str, Any]) -> list[npt.NDArray[Any]]:
        """Return views of the KV of token `number`: for each layer the keys, then the values."""
        views = []
        for array in self.arrays:
            index: dict[str, Any] = {axis: slice(None) for axis in self.layout.names}
            if "block" in index:
                index["block"] = place["block_ids"][number // BLOCK_TOKENS]
                index["token"] = number % BLOCK_TOKENS
            else:
                index["batch"], index["token"] = place["row"], place["start"] + number
            for layer in range(self.layout.layers if "layer" in index else 1):
                for kv in range(2 if "kv" in index else 1):
                    chosen = index | {"layer": layer, "kv": kv}
                    views.append(array[tuple(chosen[axis] for axis in self.layout.names)])
        return views


def serve_requests(cache: KVCache, layout: KVLayout, seed: int, count: int) -> int:
    """Load, check, compute and store random requests of six families in one thread; returns the hits."""
    chance, engine, hits = random.Random(seed), TokenEngine(layout), 0
    for _ in range(count):
        family, length = chance.randrange(6), chance.randrange(1, 60)
        tokens, ids = [family * 100 + n for n in range(length)], chance.sample(range(24), 16)
        engine.clear()
        with cache.request(tokens) as request:
            hit = request.load_into(engine.kv, ids)
            engine.check(tokens, {"block_ids": ids}, hit)
            engine.compute(tokens, {"block_ids": ids}, first=hit)
            request.store_from(engine.kv, ids)
        hits += hit
    return hits
