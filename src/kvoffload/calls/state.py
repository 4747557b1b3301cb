"""The encoded state of a replay. Each later part of a recording begins with the state.

Owns the encoding, a pickle (protocol 5) that is compressed with zstd. The reader accepts only classes that
hold a manager's state. So a malicious file cannot import other code. But the reader does not check slot
numbers, although the kernels trust them. So replay only recordings from a source that you trust.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from kvoffload.structures import structs

_OWN = ("kvoffload.core.", "kvoffload.structures.", "kvoffload.policies.", "kvoffload.admission.")
_REPLAY = "kvoffload.calls.replay"
_FUNCTIONS = {
    (structs.__name__, "_restored"),
    *((__name__, name) for name in ("_array", "_scalar", "_with_parameters")),
}
_FOREIGN = {("collections", "deque")}


class StateError(ValueError):
    """The bytes are not a state that this version of kvoffload can read."""


def encode(state: dict[str, Any]) -> bytes:
    """Encode the state of a replay. Cost: 0.1 s for 100,000 slots of `hazard`."""
    raw = io.BytesIO()
    _Pickler(raw, protocol=5).dump(state)
    return zstandard.ZstdCompressor(level=3).compress(raw.getbuffer())


def decode(data: bytes) -> dict[str, Any]:
    """Decode the state of a replay. Raises `StateError` if `data` is not a state of this version."""
    try:
        state = _Unpickler(io.BytesIO(zstandard.ZstdDecompressor().decompress(data))).load()
    except Exception as error:  # a pickle of another version can fail anywhere
        raise StateError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise StateError(f"it is a {type(state).__name__}, not a dict")
    return state


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # numpy's own functions have other names in other versions of numpy.
        if type(obj) is np.ndarray:
            return _array, (obj.dtype.str, obj.shape, bytearray(obj.tobytes()))
        if isinstance(obj, np.generic):
            return _scalar, (obj.dtype.str, obj.tobytes())
        if isinstance(obj, type) and getattr(sys.modules[obj.__module__], obj.__name__, None) is not obj:
            # `Registry.find` has made a subclass with other parameters.
            return _with_parameters, (obj.__bases__[0], _parameters_of(obj))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS | _FOREIGN:
            return getattr(importlib.import_module(module), name)
        if module.startswith(_OWN) or module == _REPLAY:
            cls = getattr(importlib.import_module(module), name, None)
            if isinstance(cls, type) and cls.__module__ == module:
                return cls
        raise pickle.UnpicklingError(f"a state has no {module}.{name}")


def _array(dtype: str, shape: tuple[int, ...], data: bytearray) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype).reshape(shape)


def _scalar(dtype: str, data: bytes) -> np.generic:
    value: np.generic = np.frombuffer(data, dtype)[0]
    return value


def _with_parameters(base: type, parameters: dict[str, Any]) -> type:
    return type(base)(base.__name__, (base,), {**parameters, "__module__": base.__module__})


def _parameters_of(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}
