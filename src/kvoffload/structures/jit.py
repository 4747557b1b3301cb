"""Compiles loops over flat arrays to machine code: the only place that knows how numba is used.

A kernel has one signature, its annotations. It is therefore compiled when its module is imported (from
numba's on-disk cache in milliseconds, the first time in about a second), never inside a request, and a call
with other types fails instead of compiling silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types as nb
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# Annotations of kernels: the type for mypy, and the type for which numba compiles. A `Read` type is for
# arrays that a kernel does not write: it accepts both read-only and writeable arrays.
BoolArray: TypeAlias = Annotated[npt.NDArray[np.bool_], nb.Array(nb.boolean, 1, "C")]
U8Array: TypeAlias = Annotated[npt.NDArray[np.uint8], nb.Array(nb.uint8, 1, "C")]
I32Array: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 1, "C")]
I64Array: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 1, "C")]
F64Array: TypeAlias = Annotated[npt.NDArray[np.float64], nb.Array(nb.float64, 1, "C")]
U32Array: TypeAlias = Annotated[npt.NDArray[np.uint32], nb.Array(nb.uint32, 1, "C")]
U64Array: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 1, "C")]
F64Matrix: TypeAlias = Annotated[npt.NDArray[np.float64], nb.Array(nb.float64, 2, "C")]
I32Matrix: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 2, "C")]
U64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 2, "C")]
ReadI32Array: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 1, "C", readonly=True)]
ReadI64Array: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 1, "C", readonly=True)]
ReadU64Array: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 1, "C", readonly=True)]
ReadBoolArray: TypeAlias = Annotated[npt.NDArray[np.bool_], nb.Array(nb.boolean, 1, "C", readonly=True)]
ReadU64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 2, "C", readonly=True)]
_PLAIN = {
    int: nb.int64,
    float: nb.float64,
    bool: nb.boolean,
    bytes: nb.Bytes(nb.uint8, 1, "C", readonly=True),
    type(None): nb.void,
}


# numba counts references to arrays with atomic instructions at every call of a helper, also in inner loops:
# up to six times the cost of the loop itself. A kernel gets all of its arrays from its caller, which keeps
# them alive, and makes none; so counting is off (`_nrt`), and `np.empty` in a kernel does not compile.


def kernel(function: F) -> F:
    """Compile a function for exactly the types of its annotations, now, through numba's on-disk cache."""
    hints = get_type_hints(function, include_extras=True)
    result, arguments = _compiled_type(hints.pop("return")), [_compiled_type(hint) for hint in hints.values()]
    options: Any = {"cache": True, "nogil": True, "_nrt": False}
    compiled: F = numba.njit(result(*arguments), **options)(function)
    return compiled


def _compiled_type(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        make_tuple: Any = nb.Tuple
        return make_tuple([_compiled_type(part) for part in get_args(hint)])
    return _PLAIN[hint] if hint in _PLAIN else hint.__metadata__[0]


def inline(function: F) -> F:
    """Mark a helper that kernels call: compiled into each of them, never called from Python."""
    options: Any = {"forceinline": True, "_nrt": False}
    compiled: F = numba.njit(**options)(function)
    return compiled


def _prefetch(typing_context: Any, array: Any, row: Any) -> Any:
    """Ask the processor to fetch the first bytes of ``array[row]``; the kernel continues meanwhile.

    With a million blocks most of the control plane's time is waiting for memory, one cache line after the
    other. A loop that first asks for all its lines waits about once.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        view = context.make_array(array_type)(context, builder, arguments[0])
        stride = builder.extract_value(view.strides, 0)
        byte = ir.IntType(8).as_pointer()
        address = builder.gep(builder.bitcast(view.data, byte), [builder.mul(arguments[1], stride)])
        i32 = ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        )
        builder.call(hint, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return nb.void(array, nb.int64), generate


prefetch: Any = intrinsic(_prefetch)


def _load_word(typing_context: Any, buffer: Any, offset: Any) -> Any:
    """Eight bytes of a ``bytes`` object from `offset` on, as an unsigned integer of this machine's order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(view.data, [arguments[1]])
        word = builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return nb.uint64(buffer, nb.int64), generate


load_word: Any = intrinsic(_load_word)


def _drop_stale_kernels() -> None:
    """Delete cached kernels when a source file of the package that has kernels or helpers has changed.

    numba checks only the file that has the kernel, not those of the helpers compiled into it: after an edit
    of `lists.py` a policy would keep running the old code.
    """
    package = Path(__file__).resolve().parent.parent
    sources = sorted(path for path in package.rglob("*.py") if b"structures.jit" in path.read_bytes())
    state = "\n".join(f"{path.relative_to(package)} {path.stat().st_mtime_ns}" for path in sources)
    digest = hashlib.sha256(state.encode()).hexdigest()
    stamp = package / "structures" / "__pycache__" / "kernels.stamp"
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for cached in package.rglob("__pycache__/*.nb[ic]"):
            cached.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest)
    except OSError:
        # An installed package that we cannot write to changes only by an upgrade, which gives its files new
        # times, and numba checks those.
        pass


_drop_stale_kernels()
