"""Arrays and numbers that kernels take together, as one argument: by address.

A call of a kernel costs 50 ns and as much again for every few arrays that are passed to it. So arrays that
belong together are one `Struct`, and a kernel gets its address; inside, ``struct.field`` is an array or a
number, and the compiler sees through it. This is the only place that knows how a struct lies in memory: a
field is one 64-bit word, and one more for each dimension of an array. The word of an array, or of another
struct, is its distance from the struct itself: so memory that holds both may be copied.

A struct's arrays are set once, when it is made, and never replaced: compiled code holds their addresses. A
struct in it may be, between two calls of kernels (`Struct.exchange`).
"""

from __future__ import annotations

import ctypes
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
"""`PyBUF_WRITABLE` without any other flag: bytes in a row, which may be changed."""

S = TypeVar("S", bound="Struct")


class Field(NamedTuple):
    """One field: the word at which it begins, and numba's type of it; of an array also numpy's, and its
    number of dimensions."""

    at: int
    type: Any
    dtype: Any
    ndim: int


class StructType(nb.Type):
    """A struct in kernels: a 64-bit address."""

    def __init__(self, struct: type[Struct]) -> None:
        self.struct = struct
        super().__init__(name=f"{struct.__module__}.{struct.__qualname__}")


class Struct:
    """What kernels get of an object. Its annotations are its fields: arrays of `jit`'s types, ``int``,
    ``float`` or other structs; in Python they are attributes as in kernels.

    Args:
        fields: every field by name. Numbers may be left out: they are 0.

    Attributes:
        memory: what is passed to a kernel for the struct.

    Thread: that of its owner. Cost: a number read or written in Python takes 0.1 us; an array is an
    attribute. Raises: `AttributeError` when an array or a struct is replaced.
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
        """What a kernel's argument of this type is to numba."""
        return StructType(cls)

    def __init__(self, **fields: Any) -> None:
        self._take(bytearray(8 * self.num_words))
        here = _address(self.memory)
        for name, field in self.fields.items():
            if isinstance(field.type, nb.Array):
                array = fields[name]
                if array.dtype != field.dtype or not array.flags.c_contiguous:
                    raise TypeError(f"{name} is an array of {array.dtype}, its field is one of {field.type}")
                self._words[field.at] = array.ctypes.data - here
                for dimension in range(field.ndim):
                    self._words[field.at + 1 + dimension] = array.shape[dimension]
                self._fields[name] = array
            elif isinstance(field.type, StructType):
                self._words[field.at] = _address(fields[name].memory) - here
                self._fields[name] = fields[name]
            elif name in fields:
                setattr(self, name, fields[name])

    @property
    def address(self) -> int:
        """Where its memory is, for other structs and kernels to keep."""
        return _address(self.memory)

    def exchange(self, name: str, struct: Struct) -> None:
        """Put another struct of the same kind in the place of one, between two calls of kernels. Nobody else
        may keep the address of the one before."""
        self._words[self.fields[name].at] = _address(struct.memory) - _address(self.memory)
        self._fields[name] = struct

    def contents(self) -> dict[str, Any]:
        """Every field: numbers, arrays and structs, by name."""
        return {name: getattr(self, name) for name in self.fields}

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.contents())

    def _take(self, memory: bytearray) -> None:
        self.memory: Any = memory
        self._words = memoryview(memory).cast("q")
        self._fields: dict[str, Any] = {}
        self._start = 0

    @classmethod
    def blank(cls, **shapes: Any) -> bytes:
        """Memory for a struct, its arrays and those of structs in it, in one piece; all zero.

        ``bytearray(blank)`` is passed to kernels; `over` shows what is in it.

        Args:
            shapes: the shape of each array; for a struct, a dictionary of its shapes.
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
    def over(cls: type[S], memory: bytearray, start: int = 0) -> S:
        """The struct that begins at byte `start` of memory that was made by `blank`. Its arrays are made when
        they are asked for."""
        self = cls.__new__(cls)
        self._take(memory)
        self._start = start
        if start:
            self._words = self._words[start // 8 :]
        return self

    def _part(self, name: str) -> Any:
        """An array or a struct of a piece of memory, the first time that it is asked for."""
        at, kind, _, num_dimensions = self.fields[name]
        if num_dimensions == 0:
            part: Any = kind.struct.over(self.memory, self._start + self._words[at])
        else:
            part = self.array(self.memory, name, start=self._start)
        self._fields[name] = part
        return part

    @classmethod
    def array(cls, memory: bytearray, name: str, count: int = -1, start: int = 0) -> npt.NDArray[Any]:
        """One array of a struct that `blank` made, or its first `count` rows."""
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
    """Any struct, where its kind does not matter."""


def _type_of(hint: Any) -> Any:
    """numba's type of a field."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return StructType(hint)
    plain = {int: nb.int64, float: nb.float64}
    return plain[hint] if hint in plain else get_args(hint)[1]


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _attribute(name: str, at: int, kind: Any) -> Any:
    """A field in Python."""

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
    return property(lambda self: self._fields[name] if name in self._fields else self._part(name))


# ---- structs in kernels


@register_model(StructType)
class _Address(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)


def c_function(builder: Any, result: Any, arguments: list[Any], name: str) -> Any:
    """A function of Python's own C interface, for compiled code to call."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@unbox(StructType)
def _unbox(kind: Any, value: Any, c: Any) -> Any:
    """The address of anything that can be written: raises `TypeError` for other objects."""
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
        # It never changes: so it is read once, and not after every write to anything.
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
    """Call the function that `jit.by_address` compiled, at its address, with two structs."""
    return nb.void(nb.int64, a, b), _jump


def _call_4(typing_context: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """As `call_2`, with four structs."""
    return nb.void(nb.int64, a, b, c, d), _jump


call_2: Any = intrinsic(_call_2)
call_4: Any = intrinsic(_call_4)
