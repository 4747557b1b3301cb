"""Checksums of a batch equal the xxhash library's checksums."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.tiers.checksum import checksums

MEMORY = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
# Sizes around the algorithm's case distinctions: short inputs, stripes of 64, rounds of 1024, and remainders.
SIZES = [1, 3, 8, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 4096, 65536]


def check(num_bytes: int, starts: list[int], seeds: list[int]) -> None:
    addresses = MEMORY.ctypes.data + np.array(starts, np.int64)
    expected = [
        xxhash.xxh3_64_intdigest(MEMORY[start : start + num_bytes], seed)
        for start, seed in zip(starts, seeds, strict=True)
    ]
    assert checksums(addresses, num_bytes, np.array(seeds, np.uint64)).tolist() == expected


@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_size(num_bytes: int) -> None:
    check(num_bytes, [0, 64, 1, 7, 4099], [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])


@given(
    st.integers(1, 20_000),
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 2**64 - 1)), max_size=5),
)
def test_random_sizes_and_seeds(num_bytes: int, blocks: list[tuple[int, int]]) -> None:
    check(num_bytes, [start for start, _ in blocks], [seed for _, seed in blocks])
