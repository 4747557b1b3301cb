"""Batches of keys as arguments of kernels: a list of ``bytes``, or the words of a `Keys`.

Kernels read a list in place through Python's C interface, so kernels with a `KeyBatch` keep the GIL.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types as nb
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import NativeValue, intrinsic, make_attribute_wrapper, register_model, unbox

from kvoffload.structures.jit import U64Matrix, inline
from kvoffload.structures.structs import c_function

WRONG_KEY = 0
"""Result of `key_at` instead of an address, for a key of the wrong length or type."""

_WORD, _INT, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)


class KeyBatchType(nb.Type):
    """numba's type of a batch: its address, its size, and a flag that is True for a list.

    For a list, the size is its number of keys. For packed keys, it is their number of bytes.
    """

    def __init__(self) -> None:
        super().__init__(name="KeyBatch")


KeyBatch: TypeAlias = Annotated[Any, KeyBatchType()]
"""Annotation for a kernel's argument that is a batch of keys: a list of ``bytes``, or `Keys.words`."""


class OneKeyType(nb.Type):
    """numba's type of a single key: the address and number of its bytes."""

    def __init__(self) -> None:
        super().__init__(name="OneKey")


OneKey: TypeAlias = Annotated[Any, OneKeyType()]
"""Annotation for a kernel's argument that is one key, as ``bytes``. Other objects raise `TypeError`."""


@register_model(OneKeyType)
class _Key(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("address", nb.int64), ("size", nb.int64)])


@register_model(KeyBatchType)
class _Batch(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("address", nb.int64), ("size", nb.int64), ("is_list", nb.boolean)])


for _name in ("address", "size", "is_list"):
    make_attribute_wrapper(KeyBatchType, _name, _name)
for _name in ("address", "size"):
    make_attribute_wrapper(OneKeyType, _name, _name)


@unbox(KeyBatchType)
def _unbox(kind: Any, value: Any, c: Any) -> Any:
    builder, api = c.builder, c.pyapi
    batch = cgutils.create_struct_proxy(kind)(c.context, builder)
    buffer, failed = api.alloca_buffer(), cgutils.alloca_once_value(builder, cgutils.false_bit)
    check = c_function(builder, _INT, [api.pyobj], "PyObject_CheckBuffer")
    has_buffer = cgutils.is_not_null(builder, builder.call(check, [value]))
    with builder.if_else(has_buffer) as (words, a_list):
        with words:
            # Without flags the buffer is contiguous, or an error is raised.
            get = c_function(builder, _INT, [api.pyobj, buffer.type, _INT], "PyObject_GetBuffer")
            result = builder.call(get, [value, buffer, _INT(0)])
            builder.store(cgutils.is_not_null(builder, result), failed)
            fields = builder.bitcast(buffer, _WORD.as_pointer())
            batch.address = builder.load(fields)
            batch.size = builder.load(builder.gep(fields, [_WORD(2)]))
            batch.is_list = cgutils.false_bit
        with a_list:
            batch.size = builder.call(c_function(builder, _WORD, [api.pyobj], "PyList_Size"), [value])
            builder.store(builder.icmp_signed("<", batch.size, _WORD(0)), failed)
            batch.address = builder.ptrtoint(value, _WORD)
            batch.is_list = cgutils.true_bit

    def cleanup() -> None:
        with builder.if_then(has_buffer):
            api.release_buffer(buffer)

    return NativeValue(batch._getvalue(), is_error=builder.load(failed), cleanup=cleanup)


@unbox(OneKeyType)
def _unbox_key(kind: Any, value: Any, c: Any) -> Any:
    builder, pointer = c.builder, _BYTE.as_pointer()
    data, size = cgutils.alloca_once(builder, pointer), cgutils.alloca_once(builder, _WORD)
    get = c_function(builder, _INT, [c.pyapi.pyobj, data.type, size.type], "PyBytes_AsStringAndSize")
    failed = cgutils.is_not_null(builder, builder.call(get, [value, data, size]))
    key = cgutils.create_struct_proxy(kind)(c.context, builder)
    key.address, key.size = builder.ptrtoint(builder.load(data), _WORD), builder.load(size)
    return NativeValue(key._getvalue(), is_error=failed)


def _listed_key(typing_context: Any, address: Any, row: Any, key_bytes: Any) -> Any:
    """Return the address of the bytes of item `row` of the list at `address`.

    If the item is not ``bytes`` of length `key_bytes`, returns `WRONG_KEY`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _BYTE.as_pointer()
        item = builder.call(
            c_function(builder, pointer, [pointer, _WORD], "PyList_GetItem"),
            [builder.inttoptr(arguments[0], pointer), arguments[1]],
        )
        data, length = cgutils.alloca_once(builder, pointer), cgutils.alloca_once(builder, _WORD)
        key_address = cgutils.alloca_once_value(builder, _WORD(WRONG_KEY))
        get = c_function(builder, _INT, [pointer, data.type, length.type], "PyBytes_AsStringAndSize")
        is_wrong = cgutils.is_not_null(builder, builder.call(get, [item, data, length]))
        with builder.if_else(is_wrong, likely=False) as (wrong, right):
            with wrong:
                builder.call(c_function(builder, ir.VoidType(), [], "PyErr_Clear"), [])
            with right, builder.if_then(builder.icmp_signed("==", builder.load(length), arguments[2])):
                builder.store(builder.ptrtoint(builder.load(data), _WORD), key_address)
        return builder.load(key_address)

    return nb.int64(nb.int64, nb.int64, nb.int64), generate


_key_in_list: Any = intrinsic(_listed_key)


def _load_at(bits: int, kind: Any) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            value.align = 1
            return value

        return kind(nb.int64), generate

    return intrinsic(load)


_load8, _load4, _load2, _load1 = (
    _load_at(64, nb.uint64),
    _load_at(32, nb.uint32),
    _load_at(16, nb.uint16),
    _load_at(8, nb.uint8),
)


@inline
def num_keys(batch: KeyBatch, num_words: int) -> int:
    """Return the number of keys in a batch. In packed form, a key has `num_words` words."""
    return batch.size if batch.is_list else batch.size // (8 * num_words)


@inline
def key_at(batch: KeyBatch, row: int, key_bytes: int, num_words: int) -> int:
    """Return the address of the bytes of key number `row`; `WRONG_KEY` if its length or type is wrong."""
    if batch.is_list:
        return _key_in_list(batch.address, row, key_bytes)
    return batch.address + row * 8 * num_words


@inline
def word_at(address: int, word: int, key_bytes: int) -> np.uint64:
    """Return word number `word` of the packed form (`Keys.pack`) of the key at `address`.

    Reads no byte beyond the key.
    """
    start, left = address + 8 * word, key_bytes - 8 * word
    if left >= 8:
        return _load8(start)
    packed, shift = np.uint64(0), np.uint64(0)
    if left & 4:
        packed, shift, start = np.uint64(_load4(start)), np.uint64(32), start + 4
    if left & 2:
        packed, shift, start = packed | np.uint64(_load2(start)) << shift, shift + np.uint64(16), start + 2
    if left & 1:
        packed |= np.uint64(_load1(start)) << shift
    return packed


@inline
def pack_key(address: int, key_bytes: int, keys: U64Matrix, row: int) -> None:
    """Write the packed form of the key at `address` to ``keys[row]``."""
    for word in range(keys.shape[1]):
        keys[row, word] = word_at(address, word, key_bytes)


@inline
def is_key_at(address: int, key_bytes: int, keys: U64Matrix, row: int) -> bool:
    """Return True if the unpacked key at `address` equals the packed key ``keys[row]``."""
    for word in range(keys.shape[1]):  # noqa: SIM110  (a generator is not a loop to numba)
        if keys[row, word] != word_at(address, word, key_bytes):
            return False
    return True
