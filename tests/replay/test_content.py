"""Block contents derived from keys: against the formula in plain Python, and detection of wrong bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.replay.content import fill, matches
from kvoffload.structures.keys import Keys

M64 = 2**64 - 1


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & M64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & M64
    return word ^ (word >> 31)


def naive(key: bytes, block_bytes: int) -> bytes:
    digest = len(key)
    for start in range(0, len(key), 8):
        word = int.from_bytes(key[start : start + 8].ljust(8, b"\0"), "little")
        digest = mix((digest ^ word) + 0x9E3779B97F4A7C15 & M64)
    words = (mix(digest + j * 0x9E3779B97F4A7C15 & M64) for j in range(block_bytes // 8))
    return b"".join(word.to_bytes(8, "little") for word in words)


def pack(*keys: bytes) -> Keys:
    return Keys.pack(keys, len(keys[0]))


@given(data=st.data())
def test_contents_equal_the_formula_in_plain_python(data):
    size, block_bytes = data.draw(st.integers(1, 40)), 8 * data.draw(st.integers(1, 40))
    keys = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=5))
    rows = np.array(data.draw(st.permutations(range(6)))[: len(keys)], np.int64)
    out = np.zeros((6, block_bytes), np.uint8)
    fill(Keys.pack(keys, size), out, rows)
    for key, row in zip(keys, rows, strict=True):
        assert out[row].tobytes() == naive(key, block_bytes)
    assert out.any(axis=1).sum() == len(keys)
    assert matches(Keys.pack(keys, size), out, rows).all()


def test_contents_are_equal_on_every_machine():
    out = np.zeros((1, 4096), np.uint8)
    fill(pack(b"kvoffload"), out, np.array([0]))
    assert (
        hashlib.sha256(out).hexdigest() == "32865988b983f1951b934b46d8be43ffe0fc01961209c201e71e1954b7b862e2"
    )


@given(st.integers(0, 4096 * 8 - 1))
def test_each_flipped_bit_is_found(bit):
    keys, data = pack(b"one", b"two"), np.zeros((2, 4096), np.uint8)
    fill(keys, data, np.arange(2))
    data[1, bit // 8] ^= 1 << bit % 8
    assert matches(keys, data, np.arange(2)).tolist() == [True, False]


def test_swapped_shifted_torn_and_empty_blocks_are_found():
    keys, data, rows = pack(b"one", b"two"), np.zeros((2, 4096), np.uint8), np.arange(2)
    fill(keys, data, rows)
    swapped = data[::-1].copy()
    torn = data.copy()
    torn[:, 2048:] = swapped[:, 2048:]
    for wrong in (
        swapped,
        torn,
        np.zeros_like(data),
        *(np.roll(data, shift, axis=1) for shift in (1, 8, 512)),
    ):
        assert not matches(keys, np.ascontiguousarray(wrong), rows).any()
    # All words of the blocks are different.
    assert len(np.unique(data.view(np.uint64))) == data.size // 8


def test_data_may_be_read_only_and_rows_of_32_bits():
    keys, data = pack(b"one", b"two"), np.zeros((9, 64), np.uint8)
    fill(keys, data, np.array([7, 2], np.int32))
    data.flags.writeable = False
    assert matches(keys, data, np.array([7, 2], np.int32)).all()
    with pytest.raises(ValueError, match="read-only"):
        fill(keys, data, np.array([7, 2]))


def test_misuse_is_refused():
    keys, data, rows = pack(b"one", b"two"), np.zeros((4, 64), np.uint8), np.arange(2)
    with pytest.raises(IndexError, match=r"rows\[1\] is 4; there are 4"):
        fill(keys, data, np.array([0, 4]))
    assert not data.any()
    with pytest.raises(ValueError, match="2 keys but 1 rows"):
        matches(keys, data, rows[:1])
    with pytest.raises(ValueError, match="block_bytes is 60"):
        matches(keys, np.zeros((4, 60), np.uint8), rows)
    with pytest.raises(ValueError, match="C-contiguous"):
        matches(keys, data[:, :32], rows)
    with pytest.raises(ValueError, match="multiple of 8 bytes"):
        matches(keys, np.zeros(65 * 4, np.uint8)[1:257].reshape(4, 64), rows)


def test_digests_equal_the_tiers_digests():
    out = np.zeros((1, 8), np.uint8)
    fill(pack(b"12345678"), out, np.array([0]))
    assert int(out.view(np.uint64)[0, 0]) == mix(int(pack(b"12345678").digests[0]))
