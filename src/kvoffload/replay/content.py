"""Block contents for replays with bytes: the bytes of each block are computed from its key.

A replay writes these contents to a tier, and later compares the bytes that it reads with them.

Word `j` of a block (64 bits, little-endian) is ``mix(digest + j * ODD)``, where `digest` is the key's digest
(`Keys.digests`) and `mix` is splitmix64's finisher. Both steps are bijections of 64-bit numbers. Hence:

- every wrong byte is detected, because the comparison is exact;
- no two words of a block are equal, so bytes that were moved by whole words within a block are detected;
- blocks of two keys differ in every word, unless the keys have equal digests (probability 2^-64), so a block
  that is stored under the wrong key is detected.

Knows keys and arrays, but no tiers, devices or traces.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.structures.digests import ODD, mix
from kvoffload.structures.jit import (
    BoolArray,
    I64Array,
    ReadU64Matrix,
    U64Array,
    U64Matrix,
    inline,
    long_kernel,
)
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums, Mask
from kvoffload.transfer import Blocks, Rows, check_rows

Words = npt.NDArray[np.uint64]


def fill(keys: Keys, out: Blocks, rows: Rows) -> None:
    """Write the content of ``keys[i]`` to ``out[rows[i]]``.

    Args:
        keys: keys of the blocks to write.
        out: uint8 array of shape ``(num_blocks, block_bytes)``, C-contiguous and writeable. Its address and
            `block_bytes` are multiples of 8.
        rows: for each key, the row of its block in `out`; shape ``(len(keys),)``.

    Cost: the speed of writing memory. Thread: any. Releases the GIL. Raises: `IndexError` that names the
    first row out of range, `ValueError` for an unsuitable array. After an error nothing has been written.
    """
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    words, digests, checked = _prepared(keys, out, rows)
    _fill(digests, words, checked)


def matches(keys: Keys, data: Blocks, rows: Rows) -> Mask:
    """Compare ``data[rows[i]]`` with the content of ``keys[i]``. Returns a mask: True if both are equal.

    Arguments, cost, thread and errors are the same as for `fill`. Makes no copy.
    """
    words, digests, checked = _prepared(keys, data, rows)
    equal = np.empty(len(checked), np.bool_)
    _compare(digests, words, checked, equal)
    return equal


def _prepared(keys: Keys, blocks: Blocks, rows: Rows) -> tuple[Words, Checksums, npt.NDArray[np.int64]]:
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or not blocks.flags.c_contiguous:
        raise ValueError(
            f"expected C-contiguous (num_blocks, block_bytes) uint8, not {blocks.dtype} {blocks.shape}"
        )
    if blocks.shape[1] == 0 or blocks.shape[1] % 8:
        raise ValueError(f"block_bytes is {blocks.shape[1]}; contents are made of words of 8 bytes")
    words = blocks.view(np.uint64)
    if not words.flags.aligned:
        raise ValueError("the array does not start at a multiple of 8 bytes")
    checked = check_rows("rows", rows, len(blocks))
    if len(keys) != len(checked):
        raise ValueError(f"{len(keys)} keys but {len(checked)} rows")
    return words, keys.digests, checked


@inline
def _word(digest: np.uint64, position: int) -> Any:
    return mix(digest + np.uint64(position) * ODD)


@long_kernel
def _fill(digests: U64Array, words: U64Matrix, rows: I64Array) -> int:
    for i in range(len(rows)):
        block = words[rows[i]]
        for j in range(len(block)):
            block[j] = _word(digests[i], j)
    return len(rows)


@long_kernel
def _compare(digests: U64Array, words: ReadU64Matrix, rows: I64Array, equal: BoolArray) -> int:
    for i in range(len(rows)):
        block = words[rows[i]]
        # No early exit: without a branch the loop becomes vector instructions, and damage is rare.
        difference = np.uint64(0)
        for j in range(len(block)):
            difference |= block[j] ^ _word(digests[i], j)
        equal[i] = difference == 0
    return len(rows)
