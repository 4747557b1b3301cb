"""The checksums of many blocks in one call, without the GIL. The checksum is the hash xxh3_64.

The results equal the results of the `xxhash` library. Blocks of up to 240 bytes are passed to this library,
because the algorithm hashes short inputs in another way.

A tier of small blocks computes half a million checksums a second, on several threads. If it called the
library for each block, the calls would cost more than the hashing, and the threads would wait for the GIL.

Source: Collet, xxHash fast digest algorithm, doc/xxhash_spec.md, "XXH3 Algorithm Overview", the case of
seeded inputs of more than 240 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba import types as nb
from numba.core import cgutils
from numba.extending import intrinsic

from kvoffload.structures.jit import I64Array, ReadI64Array, ReadU64Array, U64Array, inline, long_kernel

# Typed for mypy, because numba has no types.
_intrinsic: Callable[[Any], Any] = intrinsic
_cgutils: Any = cgutils

_SHORT_BYTES = 240
_STRIPE, _STRIPES = 64, 16
_WORK_WORDS = 32
"""Scratch memory in words of 8 bytes: 24 words for the secret of a seed, and 8 for the accumulators."""

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
        "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
        "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5, _MIX = np.uint64(0x27D4EB2F165667C5), np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)


def checksums(addresses: I64Array, num_bytes: int, seeds: U64Array) -> U64Array:
    """Compute the xxh3_64 of `num_bytes` bytes at each address, with a seed for each address.

    The caller keeps the memory alive. Cost: 3 µs a call, then memory speed. Thread: any, several at a time.
    """
    sums = np.empty(len(addresses), np.uint64)
    if num_bytes > _SHORT_BYTES:
        work = np.empty(_WORK_WORDS, np.uint64)
        _xxh3(addresses, num_bytes, seeds, _SECRET, work, work.ctypes.data, sums)
        return sums
    for i, (address, seed) in enumerate(zip(addresses.tolist(), seeds.tolist(), strict=True)):
        sums[i] = xxhash.xxh3_64_intdigest((ctypes.c_char * num_bytes).from_address(address), seed)
    return sums


@_intrinsic
def _load(typing_context: Any, address: int) -> Any:
    """Load the eight bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return nb.uint64(nb.int64), generate


@_intrinsic
def _accumulate(typing_context: Any, lanes: int, data: int, secret: int, num_stripes: int) -> Any:
    """Add `num_stripes` stripes of 64 bytes to the eight lanes. The secret advances by 8 bytes a stripe.

    `lanes`, `data` and `secret` are addresses.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, i64 = ir.VectorType(ir.IntType(64), 8), ir.IntType(64)
        lanes, data, secret, count = arguments

        def vector(address: Any) -> Any:
            return builder.load(builder.inttoptr(address, word.as_pointer()), align=1)

        low, high = ir.Constant(word, [0xFFFFFFFF] * 8), ir.Constant(word, [32] * 8)
        crosswise = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
        total = _cgutils.alloca_once(builder, word)
        builder.store(vector(lanes), total)
        with _cgutils.for_range(builder, count) as loop:
            stripe = vector(builder.add(data, builder.mul(loop.index, i64(_STRIPE))))
            mixed = builder.xor(stripe, vector(builder.add(secret, builder.mul(loop.index, i64(8)))))
            product = builder.mul(builder.and_(mixed, low), builder.lshr(mixed, high))
            crossed = builder.shuffle_vector(stripe, ir.Constant(word, ir.Undefined), crosswise)
            builder.store(builder.add(builder.load(total), builder.add(product, crossed)), total)
        builder.store(builder.load(total), builder.inttoptr(lanes, word.as_pointer()), align=1)
        return context.get_dummy_value()

    return nb.void(nb.int64, nb.int64, nb.int64, nb.int64), generate


@inline
def _fold(a: Any, b: Any) -> Any:
    """Multiply two words to 128 bits; return the upper half xor the lower half."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> np.uint64(32), b & _LOW, b >> np.uint64(32)
    low = a_low * b_low
    middle = a_high * b_low + (low >> np.uint64(32))
    other = a_low * b_high + (middle & _LOW)
    upper = a_high * b_high + (middle >> np.uint64(32)) + (other >> np.uint64(32))
    return upper ^ ((other << np.uint64(32)) | (low & _LOW))


@long_kernel
def _xxh3(
    addresses: ReadI64Array,
    num_bytes: int,
    seeds: ReadU64Array,
    default: ReadU64Array,
    work: U64Array,
    secret: int,
    sums: U64Array,
) -> None:
    """Write the checksum of each block to `sums`.

    Args:
        default: the secret of the specification, for seed 0.
        work: scratch memory of 32 words: the secret for the seed, then the eight lanes.
        secret: address of `work`.
    """
    lanes, stride = secret + 192, _STRIPE * _STRIPES
    num_rounds = (num_bytes - 1) // stride
    num_rest = (num_bytes - 1 - stride * num_rounds) // _STRIPE
    for n in range(len(addresses)):
        data, seed = addresses[n], seeds[n]
        for i in range(0, 24, 2):
            work[i] = default[i] + seed
            work[i + 1] = default[i + 1] - seed
        work[24], work[25], work[26], work[27] = _P32_3, _P64_1, _P64_2, _P64_3
        work[28], work[29], work[30], work[31] = _P64_4, _P32_2, _P64_5, _P32_1
        for number in range(num_rounds):
            _accumulate(lanes, data + number * stride, secret, _STRIPES)
            for i in range(8):
                lane = work[24 + i]
                work[24 + i] = (lane ^ (lane >> np.uint64(47)) ^ work[16 + i]) * _P32_1
        _accumulate(lanes, data + num_rounds * stride, secret, num_rest)
        _accumulate(lanes, data + num_bytes - _STRIPE, secret + 121, 1)
        total = np.uint64(num_bytes) * _P64_1
        for i in range(0, 8, 2):
            at = secret + 11 + 8 * i
            total += _fold(work[24 + i] ^ _load(at), work[25 + i] ^ _load(at + 8))
        total = (total ^ (total >> np.uint64(37))) * _MIX
        sums[n] = total ^ (total >> np.uint64(32))
