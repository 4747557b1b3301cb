"""The layout of an engine's KV tensors: the names and sizes of their axes.

Checks the tensors that an engine passes, and divides them into views of whole blocks. Does not copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvoffload.errors import ConfigError, Problems, check_integer
from kvoffload.transfer.engine import is_tensor
from kvoffload.transfer.parts import View

AXES = ("layer", "kv", "block", "batch", "head", "token", "dim")
_AXES_ALLOWED = (
    f"allowed: names from {', '.join(AXES)}, each once, with token, dim, and one of block and batch"
)
DTYPES = {
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "uint8", "int8"), 1),
    "float64": 8,
}
"""Mapping: name of a dtype -> bytes of one element."""
_LARGEST = 2**31 - 1

KVTensors: TypeAlias = Any
"""The engine's KV cache: one tensor per layer, a pair (keys, values) per layer, or a single tensor for all
layers."""


class _Tensor(NamedTuple):
    name: str
    array: View
    is_value: bool


@dataclass(frozen=True)
class KVLayout:
    """The layout of an engine's KV tensors, numpy arrays or torch tensors::

        KVLayout("block token head dim", layers=32, heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")

    | KV cache | `axes` of one tensor | tensors |
    |---|---|---|
    | paged | ``block token head dim``, or ``block head token dim`` | a pair (keys, values) for each layer |
    | paged, keys and values stacked | ``kv block token head dim``, or ``block kv ...`` | one for each layer |
    | contiguous | ``batch head token dim`` | a pair (keys, values) for each layer |
    | MLA | ``block token dim`` | one for each layer |

    - With the axis ``layer``, one tensor has all layers.
    - Without the axis ``head`` (MLA), a layer has a single tensor for keys and values.
    - With ``batch`` in place of ``block``, each sequence has its own row, and you choose `block_tokens`.

    Args:
        axes: names of a tensor's axes, in order, from ``layer``, ``kv``, ``block``, ``batch``, ``head``,
            ``token``, ``dim``.
        layers: number of layers.
        heads: KV heads of this process; 1 without the axis ``head``.
        head_dim: size of the axis ``dim``: the size of a head, or with MLA the size of the latent vector.
        block_tokens: tokens of a block.
        dtype: dtype of the tensors: ``bfloat16``, ``float16``, ``float32``, ``float8_e4m3fn``, ``uint8``, ...
        value_dim: size of the axis ``dim`` in the values, if it differs from the size in the keys.

    Raises: `ConfigError`, all problems at once.
    """

    axes: str
    layers: int
    head_dim: int
    block_tokens: int
    dtype: str
    heads: int = 1
    value_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _name_of_dtype(self.dtype))
        if not isinstance(self.axes, str):
            raise ConfigError("axes", self.axes, _AXES_ALLOWED)
        problems = Problems("KVLayout")
        with problems:
            _check_axes(self.names)
        for name in ("layers", "heads", "head_dim", "block_tokens"):
            with problems:
                object.__setattr__(self, name, check_integer(name, getattr(self, name), _LARGEST))
        with problems:
            if self.dtype not in DTYPES:
                raise ConfigError("dtype", self.dtype, f"allowed: {', '.join(DTYPES)}")
        with problems:
            if self.heads != 1 and "head" not in self.names:
                raise ConfigError("heads", self.heads, "allowed: 1 without the axis head")
        with problems:
            if self.value_dim is not None and not _has_pairs(self.names):
                raise ConfigError("value_dim", self.value_dim, "allowed: only for pairs (keys, values)")
            if self.value_dim is not None:
                object.__setattr__(self, "value_dim", check_integer("value_dim", self.value_dim, _LARGEST))
        problems.check()

    @classmethod
    def of(cls, kv: KVTensors, axes: str, block_tokens: int | None = None) -> KVLayout:
        """Return the layout of existing tensors.

        Args:
            kv: the tensors, as for `KVRequest.load_into`.
            block_tokens: tokens of a block. Required with the axis ``batch``. Without ``batch``, the default
                is the size of the axis ``token``.
        """
        names = tuple(axes.split()) if isinstance(axes, str) else ()
        _check_axes(names)
        has_pairs = _has_pairs(names)
        if "layer" not in names and not (isinstance(kv, Sequence) and len(kv)):
            raise ConfigError("kv", kv if isinstance(kv, Sequence) else type(kv).__name__, "give all layers")
        first = kv if "layer" in names else kv[0]
        if has_pairs and not _is_pair(first):
            raise ConfigError("kv", type(first).__name__, "allowed: pairs (keys, values)")
        key, value = (first[0], first[1]) if has_pairs else (first, first)
        for array in (key, value):
            if not hasattr(array, "shape") or len(array.shape) != len(names):
                shape = tuple(array.shape) if hasattr(array, "shape") else type(array).__name__
                raise ConfigError("kv", shape, f"allowed: tensors of {len(names)} axes: {axes}")
        size = dict(zip(names, key.shape, strict=True))
        value_dim = value.shape[names.index("dim")]
        if "batch" in names and block_tokens is None:
            raise ConfigError("block_tokens", None, "give the tokens of a block")
        if "batch" not in names and block_tokens not in (None, size["token"]):
            raise ConfigError("block_tokens", block_tokens, f"axis token has {size['token']}")
        return cls(
            axes,
            layers=size.get("layer", len(kv)),
            heads=size.get("head", 1),
            head_dim=size["dim"],
            block_tokens=size["token"] if block_tokens is None else block_tokens,
            dtype=_name_of_dtype(key.dtype),
            value_dim=None if value_dim == size["dim"] else value_dim,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.axes.split())

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: all layers, keys and values."""
        values = 0 if "head" not in self.names else self.value_dim or self.head_dim
        return self.layers * self.heads * self.block_tokens * (self.head_dim + values) * DTYPES[self.dtype]

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON, for the fingerprint of a producer."""
        return {"axes": " ".join(self.names)} | {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "axes"
        }

    def views(self, kv: KVTensors, row: int | None = None, start: int = 0) -> list[View]:
        """Return views of shape ``(num_blocks, ...)``: for each layer the keys, then the values.

        Args:
            kv: the tensors, with the axes `axes`.
            row: row of a sequence in the axis ``batch``.
            start: position of the sequence's first token in the row.

        Raises: `ConfigError` that names the first tensor and axis that differ from the layout.
        """
        tensors = list(self._tensors(kv))
        for tensor in tensors:
            self._check(tensor, tensors[0])
        if "batch" not in self.names:
            if row is not None:
                raise ConfigError("row", row, "allowed: only with the axis batch; give block_ids")
            return [view for tensor in tensors for view in _halves(self.names, tensor.array)]
        rows, tokens = (tensors[0].array.shape[self.names.index(axis)] for axis in ("batch", "token"))
        row = check_integer("row", row, rows - 1, 0, "a row of the axis batch")
        start = check_integer("start", start, tokens, 0)
        return [
            view
            for tensor in tensors
            for view in _halves(*_in_blocks(self.names, tensor.array, row, start, self.block_tokens))
        ]

    # ---- private

    def _tensors(self, kv: KVTensors) -> Iterator[_Tensor]:
        """Yield the tensors layer by layer, keys before values.

        If ``layer`` is an axis, yield only one tensor or one pair.
        """
        if "layer" in self.names:
            named = {"kv": kv}
        elif isinstance(kv, Sequence) and len(kv) == self.layers:
            named = {f"kv[{layer}]": tensor for layer, tensor in enumerate(kv)}
        else:
            got = f"{len(kv)} layers" if isinstance(kv, Sequence) else type(kv).__name__
            raise ConfigError("kv", got, f"allowed: a list of {self.layers} layers")
        for name, tensor in named.items():
            if not _has_pairs(self.names):
                yield _Tensor(name, tensor, False)
                continue
            if not _is_pair(tensor):
                raise ConfigError(name, type(tensor).__name__, "allowed: a pair (keys, values)")
            yield _Tensor(f"{name}[0]", tensor[0], False)
            yield _Tensor(f"{name}[1]", tensor[1], True)

    def _check(self, tensor: _Tensor, first: _Tensor) -> None:
        """Compare a tensor with the layout and with the first tensor. Raises `ConfigError` if they differ."""
        name, array = tensor.name, tensor.array
        if not is_tensor(array) and not isinstance(array, np.ndarray):
            raise ConfigError(name, type(array).__name__, "allowed: a numpy array or a torch tensor")
        shape = tuple(array.shape)
        if len(shape) != len(self.names):
            raise ConfigError(f"{name}.shape", shape, f"allowed: {len(self.names)} axes: {self.axes}")
        if (dtype := _name_of_dtype(array.dtype)) != self.dtype:
            raise ConfigError(f"{name}.dtype", dtype, f"the layout has {self.dtype}")
        for axis, size in zip(self.names, shape, strict=True):
            if size != (expected := self._size(axis, tensor, first)):
                raise ConfigError(f"{name}.shape", shape, f"axis {axis} has {size}; allowed: {expected}")
        if (place := _device(array)) != _device(first.array):
            raise ConfigError(f"{name}.device", place, f"{first.name} is on {_device(first.array)}")

    def _size(self, axis: str, tensor: _Tensor, first: _Tensor) -> int:
        sizes = {"layer": self.layers, "kv": 2, "head": self.heads, "dim": self.head_dim}
        if tensor.is_value and self.value_dim is not None:
            sizes["dim"] = self.value_dim
        if "batch" not in self.names:
            sizes["token"] = self.block_tokens
        return sizes.get(axis, int(first.array.shape[self.names.index(axis)]))


def _check_axes(names: Sequence[str]) -> None:
    places = [name for name in names if name in ("block", "batch")]
    is_known = set(names) <= set(AXES) and len(set(names)) == len(names)
    if not is_known or len(places) != 1 or not {"token", "dim"} <= set(names):
        raise ConfigError("axes", " ".join(names), _AXES_ALLOWED)
    if "kv" in names and "head" not in names:
        raise ConfigError("axes", " ".join(names), "kv needs the axis head; MLA has one tensor for a layer")


def _in_blocks(
    names: tuple[str, ...], array: View, row: int, start: int, block_tokens: int
) -> tuple[tuple[str, ...], View]:
    """Return the axes and the view of one sequence, divided into whole blocks.

    The returned axes are `names` without ``batch``, and with ``block token`` in place of ``token``.
    """
    array = _at(array, names.index("batch"), row)
    names = tuple(name for name in names if name != "batch")
    at = names.index("token")
    count = (array.shape[at] - start) // block_tokens
    array = _at(array, at, slice(start, start + count * block_tokens))
    shape = (*array.shape[:at], count, block_tokens, *array.shape[at + 1 :])
    return (*names[:at], "block", *names[at:]), array.reshape(shape)


def _halves(names: tuple[str, ...], array: View) -> Iterator[View]:
    """Split a tensor along ``layer`` and ``kv``. Yields views with ``block`` as the first axis."""
    for axis in ("layer", "kv"):
        if axis in names:
            at = names.index(axis)
            rest = names[:at] + names[at + 1 :]
            for number in range(array.shape[at]):
                yield from _halves(rest, _at(array, at, number))
            return
    for at in range(names.index("block"), 0, -1):
        array = array.swapaxes(at, at - 1)
    yield array


def _at(array: View, axis: int, index: int | slice) -> View:
    return array[(slice(None),) * axis + (index,)]


def _has_pairs(names: Sequence[str]) -> bool:
    """Return True if a tensor with the axes `names` is one half of a pair (keys, values)."""
    return "head" in names and "kv" not in names


def _is_pair(given: object) -> bool:
    return isinstance(given, Sequence) and len(given) == 2


def _name_of_dtype(dtype: object) -> str:
    """Return the plain name, such as ``bfloat16``, of a dtype from numpy or torch, or of a text."""
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return str(np.dtype(dtype).name)
    return str(dtype).removeprefix("torch.")


def _device(array: View) -> str:
    return str(array.device) if is_tensor(array) else "cpu"
