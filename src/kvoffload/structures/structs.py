"""Structs: arrays and numbers that kernels take as one argument, by address.

A kernel call costs 50 ns, and every few array arguments add another 50 ns. Therefore related arrays are
fields of one `Struct`, and the kernel gets only the struct's address. In the kernel, ``struct.field`` is an
array, a number or a nested struct.

A struct consists of 64-bit words. A number takes one word. A nested struct takes one word, which has the
offset of the nested struct from this struct in bytes. An array takes one word for its offset, followed by one
word for the length of each dimension.

The arrays of a struct are never replaced, because compiled code assumes constant addresses. A nested struct
can be replaced between two kernel calls (`Struct.exchange`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types as nb
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, register_model, unbox
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import as_dtype

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_WRITABLE = 1
"""Value of `PyBUF_WRITABLE`, which requests a contiguous, writable buffer in Python's C interface."""

S = TypeVar("S", bound="Struct")


class Field(NamedTuple):
    """A field of a struct.

    Attributes:
        at: index of the field's first word in the struct.
        type: numba type of the field.
        dtype, ndim: for an array, its numpy type and number of dimensions; for other fields, None and 0.
    """

    at: int
    type: Any
    dtype: Any
    ndim: int

    @property
    def is_number(self) -> bool:
        """True for a field of type ``int`` or ``float``."""
        return not isinstance(self.type, (nb.Array, StructType))


class StructType(nb.Type):
    """numba's type of a struct, which kernels receive as a 64-bit address."""

    def __init__(self, struct: type[Struct]) -> None:
        self.struct = struct
        super().__init__(name=f"{struct.__module__}.{struct.__qualname__}")


class Struct:
    """Base class of structs: groups of arrays and numbers that a kernel takes as one argument.

    The annotations of a subclass declare its fields. A field is an array of one of `jit`'s types, an ``int``,
    a ``float`` or a nested struct. Fields are attributes in Python and in kernels.

    Args:
        fields: values of the fields, by name. Missing numbers are 0.

    Attributes:
        memory: the memory of the struct's words, a ``bytearray`` or ``memoryview``. Pass it to kernels as the
            argument that is annotated with the struct's class.

    Thread: use a struct only in the thread of its owner. Cost: in Python, each access to a number takes 0.1
    us. An assignment to an array or a nested struct raises `AttributeError`; to replace a nested struct, use
    `exchange`.
    """

    fields: ClassVar[dict[str, Field]] = {}
    num_words: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls.fields, at = {}, 0
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if get_origin(hint) is ClassVar:
                continue
            kind = _type_of(hint)
            is_array = isinstance(kind, nb.Array)
            cls.fields[name] = Field(
                at, kind, as_dtype(kind.dtype) if is_array else None, kind.ndim if is_array else 0
            )
            setattr(cls, name, _attribute(name, at, kind))
            at += 1 + cls.fields[name].ndim
        cls.num_words = at

    @classmethod
    def compiled_type(cls) -> StructType:
        """Return numba's type of this struct."""
        return StructType(cls)

    def __init__(self, **fields: Any) -> None:
        self._attach(bytearray(8 * self.num_words))
        here = _address(self.memory)
        for name, field in self.fields.items():
            if not field.is_number:
                part = fields[name]
                if field.ndim and (part.dtype != field.dtype or not part.flags.c_contiguous):
                    raise TypeError(f"{name}: expected an array of type {field.type}, got {part.dtype}")
                self._refer(name, part, here)
            elif name in fields:
                setattr(self, name, fields[name])

    @property
    def address(self) -> int:
        """Address of the struct's memory."""
        return _address(self.memory)

    def exchange(self, name: str, struct: Struct) -> None:
        """Replace the nested struct `name` by another of the same type. Allowed between two kernel calls.

        No other object may hold the address of the old struct.
        """
        self._refer(name, struct, self.address)

    def move(self, memory: memoryview, parts: Mapping[str, Any], *, copy: bool) -> None:
        """Move this struct to other memory, which may be shared with other processes (`placement`).

        Args:
            memory: the new memory: 8 bytes for each word of the struct.
            parts: the struct's arrays and nested structs, by field name; they must already be in the new
                memory.
            copy: True: this struct's numbers are copied to the new memory. False: the struct adopts the
                numbers that the memory already has.
        """
        old_words = self._words
        self._attach(memory)
        here = _address(memory)
        for name, field in self.fields.items():
            if name in parts:
                self._refer(name, parts[name], here)
            elif copy:
                self._words[field.at] = old_words[field.at]

    def _refer(self, name: str, part: Any, here: int) -> None:
        """Make the field `name` refer to an array or nested struct. `here` is the address of this struct."""
        at = self.fields[name].at
        self._words[at] = (part.address if isinstance(part, Struct) else part.ctypes.data) - here
        for dimension in range(self.fields[name].ndim):
            self._words[at + 1 + dimension] = part.shape[dimension]
        self._fields[name] = part

    def contents(self) -> dict[str, Any]:
        """Return a dict of all fields: name -> array, number or nested struct."""
        return {name: getattr(self, name) for name in self.fields}

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.contents())

    def _attach(self, memory: bytearray | memoryview) -> None:
        self.memory: Any = memory
        self._words = memoryview(memory).cast("q")
        self._fields: dict[str, Any] = {}
        self._start = 0

    @classmethod
    def blank(cls, **shapes: Any) -> bytes:
        """Return, in one piece, the bytes of a struct whose numbers and array items are 0.

        The bytes include all arrays and nested structs. Copy them to a ``bytearray`` to use them: kernels
        accept the copy as the struct, and `over` gives access to its fields.

        Args:
            shapes: by field name, the shape of each array and, for each nested struct, a dict of shapes.
        """
        pieces = [bytearray(8 * cls.num_words)]
        words = memoryview(pieces[0]).cast("q")
        end = 8 * cls.num_words
        for name, field in cls.fields.items():
            if isinstance(field.type, StructType):
                pieces.append(bytearray(field.type.struct.blank(**shapes[name])))
                words[field.at] = end
            elif isinstance(field.type, nb.Array):
                shape = np.atleast_1d(shapes[name]).tolist()
                size = int(np.prod(shape)) * field.dtype.itemsize
                pieces.append(bytearray((size + 7) // 8 * 8))
                words[field.at] = end
                for dimension, length in enumerate(shape):
                    words[field.at + 1 + dimension] = length
            else:
                continue
            end += len(pieces[-1])
        words.release()
        return b"".join(pieces)

    @classmethod
    def over(cls: type[S], memory: bytearray | memoryview, start: int = 0) -> S:
        """Return an object for the struct at byte `start` of `memory` (see `blank`). Its arrays are views."""
        self = cls.__new__(cls)
        self._attach(memory)
        self._start = start
        if start:
            self._words = self._words[start // 8 :]
        return self

    def _view(self, name: str) -> Any:
        """Create and cache a view of the array or nested struct `name`, for a struct from `over`."""
        at, kind, _, num_dimensions = self.fields[name]
        if num_dimensions == 0:
            view: Any = kind.struct.over(self.memory, self._start + self._words[at])
        else:
            view = self.array(self.memory, name, start=self._start)
        self._fields[name] = view
        return view

    @classmethod
    def array(cls, memory: bytearray, name: str, count: int = -1, start: int = 0) -> npt.NDArray[Any]:
        """Return a view of the first `count` rows of the array `name` of a struct in `memory`.

        The struct begins at byte `start` of `memory`, which is a copy of `blank`. If `count` is -1, the view
        has all rows.
        """
        at, _, dtype, num_dimensions = cls.fields[name]
        words = memoryview(memory).cast("q")
        at += start // 8
        rows = words[at + 1] if count < 0 else count
        shape = rows if num_dimensions == 1 else (rows, words[at + 2])
        return np.ndarray(shape, dtype, memory, start + words[at])


def _restored(cls: type[S], contents: dict[str, Any]) -> S:
    struct = cls.__new__(cls)
    Struct.__init__(struct, **contents)
    return struct


class Anything(Struct):
    """Annotation for a kernel's argument that may be any struct."""


def _type_of(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return StructType(hint)
    plain = {int: nb.int64, float: nb.float64}
    return plain[hint] if hint in plain else get_args(hint)[1]


def _address(memory: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _attribute(name: str, at: int, kind: Any) -> Any:
    """Create the Python property for a field of a struct."""

    def get_float(self: Struct) -> Any:
        return self._words[at : at + 1].cast("B").cast("d")[0]

    def set_float(self: Struct, value: float) -> None:
        self._words[at : at + 1].cast("B").cast("d")[0] = value

    if kind is nb.float64:
        return property(get_float, set_float)
    if kind is nb.int64:
        return property(
            lambda self: self._words[at], lambda self, value: self._words.__setitem__(at, int(value))
        )
    return property(lambda self: self._fields[name] if name in self._fields else self._view(name))


# ---- structs in kernels


@register_model(StructType)
class _Address(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)


def c_function(builder: Any, result: Any, arguments: list[Any], name: str) -> Any:
    """Declare a function of Python's C interface, so that compiled code can call it."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@unbox(StructType)
def _unbox(kind: Any, value: Any, c: Any) -> Any:
    """Convert an argument, a writable buffer, to its address. Raises `TypeError` for other objects."""
    buffer = c.pyapi.alloca_buffer()
    get = c_function(c.builder, _INT, [c.pyapi.pyobj, buffer.type, _INT], "PyObject_GetBuffer")
    failed = cgutils.is_not_null(c.builder, c.builder.call(get, [value, buffer, _INT(_WRITABLE)]))
    address = c.builder.load(c.builder.bitcast(buffer, _WORD.as_pointer()))

    def cleanup() -> None:
        c.pyapi.release_buffer(buffer)

    return NativeValue(address, is_error=failed, cleanup=cleanup)


@infer_getattr
class _FieldTypes(AttributeTemplate):
    key = StructType

    def generic_resolve(self, kind: Any, name: str) -> Any:  # type: ignore[override]
        return kind.struct.fields[name].type if name in kind.struct.fields else None


def _load(builder: Any, address: Any, word: int, *, fixed: bool) -> Any:
    value = builder.load(_word_at(builder, address, word))
    if fixed:
        # The value is constant, so the compiler may read it once instead of after every write.
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _word_at(builder: Any, address: Any, word: int) -> Any:
    return builder.inttoptr(builder.add(address, _WORD(8 * word)), _WORD.as_pointer())


@lower_getattr_generic(StructType)
def _get_field(context: Any, builder: Any, kind: Any, address: Any, name: str) -> Any:
    at, field, *_ = kind.struct.fields[name]
    if isinstance(field, nb.Array):
        start = builder.add(address, _load(builder, address, at, fixed=True))
        shape = [_load(builder, address, at + 1 + d, fixed=True) for d in range(field.ndim)]
        item = _WORD(context.get_abi_sizeof(context.get_data_type(field.dtype)))
        view = context.make_array(field)(context, builder)
        populate_array(
            view,
            data=builder.inttoptr(start, view.data.type),
            shape=shape,
            strides=[item] if field.ndim == 1 else [builder.mul(shape[1], item), item],
            itemsize=item,
            meminfo=None,
        )
        return view._getvalue()
    if isinstance(field, StructType):
        return builder.add(address, _load(builder, address, at, fixed=True))
    word = _load(builder, address, at, fixed=False)
    return builder.bitcast(word, ir.DoubleType()) if field == nb.float64 else word


@lower_setattr_generic(StructType)
def _set_number(context: Any, builder: Any, signature: Any, arguments: Any, name: str) -> None:
    (kind, given), (address, value) = signature.args, arguments
    at, field, *_ = kind.struct.fields[name]
    if field not in (nb.int64, nb.float64):
        raise TypeError(f"{kind}.{name} is set when the struct is made")
    value = context.cast(builder, value, given, field)
    if field == nb.float64:
        value = builder.bitcast(value, _WORD)
    builder.store(value, _word_at(builder, address, at))


def _jump(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * (len(values) - 1))
    builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
    return context.get_dummy_value()


def _call_2(typing_context: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the function at the address `function` (`jit.by_address`) with two structs."""
    return nb.void(nb.int64, a, b), _jump


def _call_4(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the function at the address `function` (`jit.by_address`) with four structs."""
    return nb.void(nb.int64, a, b, c, d), _jump


def _call_c(typing_context: Any, function: Any, address: Any) -> Any:
    """Call the C function ``int f(void *)`` at the address `function`, with the pointer `address`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_INT, [_WORD])
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return builder.sext(result, _WORD)

    return nb.int64(nb.int64, nb.int64), generate


call_2: Any = intrinsic(_call_2)
call_4: Any = intrinsic(_call_4)
call_c: Any = intrinsic(_call_c)
