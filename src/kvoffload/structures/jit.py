"""Compilation of kernels with numba. Only this module configures numba.

A kernel is a function with loops over flat arrays. It is compiled for the types of its annotations; a call
with other types fails. Kernels are compiled before they are needed, never inside a request, because
compilation takes about a second per kernel. Later starts load a kernel in milliseconds, from the wheel
(`shipped`) or from numba's on-disk cache (`kernel_cache`).
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from llvmlite.binding import ffi
from numba import types as nb
from numba.core.ccallback import CFunc
from numba.core.compiler import Compiler
from numba.extending import intrinsic

from kvoffload.structures import kernel_cache, shipped

# From vLLM 0.31 on, a starting CPU worker without Triton reads `vars(value)` of each value in each module.
# llvmlite's library handle returns a function for `__dict__`, and the engine dies of an AttributeError. With
# this entry the handle returns an empty dictionary.
ffi.lib._fntab.setdefault("__dict__", {})

F = TypeVar("F", bound=Callable[..., Any])

# Annotations of kernels: the type for mypy and the type for numba. A `Read` type is for arrays that a kernel
# does not write. It accepts read-only and writeable arrays.
BoolArray: TypeAlias = Annotated[npt.NDArray[np.bool_], nb.Array(nb.boolean, 1, "C")]
U8Array: TypeAlias = Annotated[npt.NDArray[np.uint8], nb.Array(nb.uint8, 1, "C")]
I16Array: TypeAlias = Annotated[npt.NDArray[np.int16], nb.Array(nb.int16, 1, "C")]
I32Array: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 1, "C")]
I64Array: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 1, "C")]
F64Array: TypeAlias = Annotated[npt.NDArray[np.float64], nb.Array(nb.float64, 1, "C")]
U32Array: TypeAlias = Annotated[npt.NDArray[np.uint32], nb.Array(nb.uint32, 1, "C")]
U64Array: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 1, "C")]
F64Matrix: TypeAlias = Annotated[npt.NDArray[np.float64], nb.Array(nb.float64, 2, "C")]
I32Matrix: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 2, "C")]
I64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 2, "C")]
U64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 2, "C")]
ReadI32Array: TypeAlias = Annotated[npt.NDArray[np.int32], nb.Array(nb.int32, 1, "C", readonly=True)]
ReadI64Array: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 1, "C", readonly=True)]
ReadI64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], nb.Array(nb.int64, 2, "C", readonly=True)]
ReadU64Array: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 1, "C", readonly=True)]
ReadU64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], nb.Array(nb.uint64, 2, "C", readonly=True)]
_PLAIN = {
    int: nb.int64,
    float: nb.float64,
    bool: nb.boolean,
    bytes: nb.Bytes(nb.uint8, 1, "C", readonly=True),
    type(None): nb.void,
}


# Reference counting is off, so `np.empty` in a kernel does not compile. numba would count references to
# arrays at every call of a helper, which costs up to six times an inner loop. Counting is not needed: the
# caller keeps all arrays of a kernel alive, and a kernel creates none.
_OPTIONS: Any = {"_nrt": False}

_SHIPPED = shipped.find(kernel_cache.digest_of_sources())
_HAS_FILES = kernel_cache.prepare(is_needed=not _SHIPPED.is_usable)


class Kernel:
    """A function that is compiled on first use, together with all other registered kernels.

    Constructors of managers and pools call `compile_all`, so that nothing is compiled inside a request. After
    compilation, the compiled function replaces this object in the kernel's module.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[Callable[..., Any]], Any]) -> None:
        self.function, self._make, self._made = function, make, None
        functools.update_wrapper(self, function)
        _WAITING.append(self)

    def __call__(self, *arguments: Any) -> Any:
        compile_all()
        return self.made(*arguments)

    @property
    def address(self) -> int:
        """Address of the machine code. Only functions that are marked with `by_address` have it."""
        compile_all()
        address: int = self.made.address
        return address

    @property
    def made(self) -> Any:
        """The compiled function. The first access compiles it."""
        if self._made is None:
            try:
                self._made = self._make(self.function)
            except (EOFError, pickle.UnpicklingError):
                # The cached file is incomplete.
                kernel_cache.forget(self.function)
                self._made = self._make(self.function)
            home = vars(sys.modules[self.function.__module__])
            if home.get(self.function.__name__) is self and not hasattr(self._made, "address"):
                home[self.function.__name__] = self._made
        return self._made


_WAITING: list[Kernel] = []
_COMPILING = threading.RLock()


def compile_all() -> int:
    """Compile every registered kernel that is not yet compiled; returns their number.

    Cost: about 1 s to compile a kernel, or 5 ms to load it from the wheel or from numba's on-disk cache.
    Thread: any.
    """
    count = 0
    if _WAITING and not _SHIPPED.is_usable:
        kernel_cache.announce_compilation(_SHIPPED.why_not)
    with _COMPILING:
        while _WAITING:
            _WAITING.pop().made  # noqa: B018  (the property compiles)
            count += 1
    return count


def kernel(function: F) -> F:
    """Decorator that turns a function into a kernel, compiled for exactly the types of its annotations.

    The kernel keeps the GIL. If an argument is a struct or a batch of keys, the kernel does not check its
    arguments, because only the control plane calls it. In all other kernels numba checks every argument,
    which costs 0.1 us or more per call.
    """
    return cast(F, Kernel(function, compiled))


def compiled(function: F, *, cache: bool = True, nogil: bool = False) -> F:
    """Compile a kernel now, and return the compiled function.

    Tests pass ``cache=False``, because numba does not notice if only the helpers of a test's kernel have
    changed, and would use old machine code from the cache.
    """
    made = _dispatcher(function, cache=cache, nogil=nogil, **_OPTIONS)
    if all(isinstance(kind, nb.Array) or kind in _PLAIN.values() for kind in _arguments(function)):
        return cast(F, made)
    # The wrapper behind the type checks of numba's dispatcher. numba has no public name for it.
    return cast(F, made.overloads[made.signatures[0]].entry_point)


def long_kernel(function: F) -> F:
    """Decorator like `kernel`, but the kernel releases the GIL; for loops that take milliseconds."""
    return cast(F, Kernel(function, functools.partial(compiled, nogil=True)))


def by_address(function: Callable[..., Any]) -> Kernel:
    """Decorator for a function that kernels call by its address (`structs.call_2`).

    The function must return nothing.
    """
    return Kernel(function, _callback)


class _HelperCompiler(Compiler):
    """Compiles helpers without LLVM's optimization, because kernels are optimized with their helpers.

    This saves a quarter of the compilation time and does not change the speed of kernels.
    """

    def define_pipelines(self) -> Any:
        library: Any = self.state.targetctx.codegen().create_library(self.state.func_id.func_qualname)
        library._optimize_final_module = lambda: None  # numba has no public option
        self.state.library = library
        return super().define_pipelines()


def inline(function: F) -> F:
    """Decorator for a helper, which is compiled into each kernel that calls it. Python cannot call it."""
    options: Any = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return cast(F, numba.njit(pipeline_class=_HelperCompiler, **options)(function))


def _dispatcher(function: Callable[..., Any], *, cache: bool = True, **options: Any) -> Any:
    """Compile a function as ``njit(signature, cache=True)`` does, but with a `shipped.KernelCache`."""
    made: Any = numba.njit(**options)(function)
    if cache:
        made._cache = shipped.KernelCache(function, _SHIPPED, _HAS_FILES)
    made.compile(_signature(function))
    made.disable_compile()
    return made


def _callback(function: Callable[..., Any]) -> Any:
    """Compile a function as ``cfunc(signature, cache=True)`` does, but with a `shipped.KernelCache`."""
    signature = _signature(function)
    made: Any = CFunc(function, (signature.args, signature.return_type), locals={}, options=_OPTIONS)
    made._cache = shipped.KernelCache(function, _SHIPPED, _HAS_FILES)
    made.compile()
    return made


def _signature(function: Callable[..., Any]) -> Any:
    result = _compiled_type(get_type_hints(function)["return"])
    return result(*_arguments(function))


def _arguments(function: Callable[..., Any]) -> list[Any]:
    hints = get_type_hints(function, include_extras=True)
    return [_compiled_type(hint) for name, hint in hints.items() if name != "return"]


def _compiled_type(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        make_tuple: Any = nb.Tuple
        return make_tuple([_compiled_type(item) for item in get_args(hint)])
    if hint in _PLAIN:
        return _PLAIN[hint]
    # A class is a struct, which knows its own type.
    return hint.__metadata__[0] if hasattr(hint, "__metadata__") else hint.compiled_type()


def _prefetch(typing_context: Any, array: Any, row: Any) -> Any:
    """Prefetch the first bytes of ``array[row]`` into the processor's cache, without waiting.

    With a million blocks, the control plane spends most of its time waiting for cache lines. If a loop first
    prefetches all lines that it will read, they are fetched at the same time, and the loop waits about as
    long as for one.
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
