"""Memory copies that bypass the CPU's caches (streaming stores), as building blocks for kernels.

An ordinary store first reads the cache line that it overwrites, so a copy needs three transfers over the
memory bus instead of two. It also evicts data of other threads from the caches. LLVM compiles a vector store
marked `!nontemporal` to a streaming store (`vmovntps` on x86, `stnp` on ARM), or to an ordinary store if the
CPU has no such instruction. Addresses are plain integers and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types as nb
from numba.extending import intrinsic

from kvoffload.structures.jit import inline

# Typed for mypy: the decorated function is called without its first parameter.
_intrinsic: Callable[[Any], Any] = intrinsic

_LINE = 64
_QUARTERS_FROM_LINES = 192


@_intrinsic
def _stream_line(typing_context: Any, dst: int, src: int) -> Any:
    """Copy one cache line without writing it to the caches. `dst` must be aligned to 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], line), align=1)
        store = builder.store(value, builder.inttoptr(arguments[0], line), align=_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return nb.void(nb.int64, nb.int64), generate


@_intrinsic
def memcpy(typing_context: Any, dst: int, src: int, num_bytes: int) -> Any:
    """Copy bytes with the C library's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, ir.IntType(64)])
        dst, src = (builder.inttoptr(argument, pointer) for argument in arguments[:2])
        builder.call(memcpy, [dst, src, arguments[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return nb.void(nb.int64, nb.int64, nb.int64), generate


@_intrinsic
def fence(typing_context: Any) -> Any:
    """Make streaming stores visible to other threads. x86 does not order them with ordinary stores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # One instruction on every architecture (`lock or`, `mfence`, `dmb`), which drains the buffers of
        # streaming stores.
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return nb.void(), generate


@inline
def stream(dst: int, src: int, num_bytes: int) -> None:
    """Copy bytes with streaming stores. Only incomplete cache lines at both ends go through the caches."""
    head = min(-dst % _LINE, num_bytes)
    memcpy(dst, src, head)
    dst, src, num_bytes = dst + head, src + head, num_bytes - head
    lines = num_bytes // _LINE
    # Four streams hide each other's restarts of the hardware prefetcher, which restarts at each page. 20 %
    # faster at 16 KiB, slower for smaller copies.
    quarter = lines // 4 * _LINE if lines >= _QUARTERS_FROM_LINES else 0
    for offset in range(0, quarter, _LINE):
        _stream_line(dst + offset, src + offset)
        _stream_line(dst + quarter + offset, src + quarter + offset)
        _stream_line(dst + 2 * quarter + offset, src + 2 * quarter + offset)
        _stream_line(dst + 3 * quarter + offset, src + 3 * quarter + offset)
    for offset in range(4 * quarter, lines * _LINE, _LINE):
        _stream_line(dst + offset, src + offset)
    tail = lines * _LINE
    memcpy(dst + tail, src + tail, num_bytes - tail)
