"""The identity of a block: chained hashes of its tokens, and the fingerprint of its producer."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError

KEY_BYTES = 32
_FORMAT = 1
"""Version of the keys and of the order of the bytes in a slot. Increment it when one of them changes."""

_LARGEST_TOKEN = 2**63 - 1

Tokens: TypeAlias = Any
"""Token ids: a sequence of ints, or a numpy array or torch tensor of one dimension."""


def fingerprint(model: str, layout: dict[str, Any]) -> str:
    """Return a text that contains everything that determines the bytes of a block, except the tokens."""
    fields = {"model": model, "layout": layout, "byteorder": sys.byteorder, "format": _FORMAT}
    return json.dumps(fields, sort_keys=True)


class KeyChain:
    """The keys of a growing sequence of tokens, one for each full block.

    A key is the SHA-256 of the previous key and the block's token ids. So the key identifies the block and
    all earlier blocks. The chain begins with a hash of `salt`: sequences with different salts share no key.

    Attributes:
        keys: the keys so far.
        num_tokens: number of tokens so far.
    """

    def __init__(self, block_tokens: int, salt: str | bytes = "") -> None:
        self._block_tokens = block_tokens
        if not isinstance(salt, (str, bytes)):
            raise ConfigError("salt", salt, "allowed: a text or bytes")
        data = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
        self._parent = hashlib.sha256(data).digest()
        self._rest: npt.NDArray[np.int64] = np.empty(0, "<i8")
        self.keys: list[bytes] = []
        self.num_tokens = 0

    def extend(self, token_ids: Tokens) -> None:
        """Append tokens. Cost: 1 µs per block. Raises `ConfigError` if a token is not an integer."""
        new = integers("token_ids", token_ids)
        if new.size and int(new.max()) > _LARGEST_TOKEN:
            raise ConfigError("token_ids", int(new.max()), f"allowed: up to {_LARGEST_TOKEN}")
        self.num_tokens += len(new)
        tokens = np.concatenate((self._rest, new.astype("<i8")))
        full = len(tokens) // self._block_tokens * self._block_tokens
        data, width = tokens[:full].tobytes(), 8 * self._block_tokens
        for begin in range(0, len(data), width):
            self._parent = hashlib.sha256(self._parent + data[begin : begin + width]).digest()
            self.keys.append(self._parent)
        self._rest = tokens[full:]


class GivenKeys:
    """Keys that the engine has computed, one for each full block. Has the attributes of `KeyChain`."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.keys: list[bytes] = []
        self.num_tokens = 0

    def extend(self, keys: Iterable[bytes]) -> None:
        """Append keys. Raises `ConfigError` if a key is not 32 bytes."""
        if not isinstance(keys, Iterable):
            raise ConfigError("keys", keys, f"allowed: a list of hashes of {KEY_BYTES} bytes")
        new = list(keys)
        for number, key in enumerate(new, len(self.keys)):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                raise ConfigError(f"keys[{number}]", key, f"allowed: {KEY_BYTES} bytes, such as a SHA-256")
        self.keys += new
        self.num_tokens = len(self.keys) * self._block_tokens


def integers(field: str, given: Any, allowed: str = "one dimension of integers") -> npt.NDArray[Any]:
    """Convert a sequence of Python ints, a numpy array or a torch tensor to an array. An empty array may have
    any dtype.

    Raises: `ConfigError` if `given` has another number of dimensions than one, or holds other elements than
    integers.
    """
    try:
        array = np.asarray(given.tolist() if hasattr(given, "tolist") else given)
    except ValueError:
        array = np.asarray(None)  # rows of different lengths
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ConfigError(field, f"{array.dtype} of shape {array.shape}", f"allowed: {allowed}")
    return array
