"""Places structs in one piece of memory that several processes can map.

The offset of a struct or array depends only on the classes of the structs and the shapes of their arrays. It
is therefore the same in all processes that build the same structs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvoffload.structures.structs import Struct

ALIGNMENT = 64
"""Size of a cache line in bytes. The offsets of structs and arrays are multiples of this number."""


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Placement:
    """Assigns an offset in memory to structs, and to their nested structs and arrays.

    If a struct or array belongs to several structs, it is placed only once.

    Attributes:
        num_bytes: size of the memory that is needed.
        signature: SHA-256 of the classes, types and shapes, in order. If the signatures of two processes are
            equal, their offsets are equal, too.
    """

    def __init__(self, structs: Sequence[Struct]) -> None:
        self._structs: list[tuple[Struct, int]] = []
        self._arrays: dict[int, tuple[Any, int]] = {}
        self._seen: set[int] = set()
        self._digest, self.num_bytes = hashlib.sha256(), 0
        for struct in structs:
            self._add(struct)
        self.signature = self._digest.digest()

    def move(self, memory: memoryview, *, copy: bool) -> None:
        """Move the structs into `memory`. Their Python objects stay valid and refer to the new memory.

        Args:
            memory: `num_bytes` bytes, aligned to `ALIGNMENT`.
            copy: True: the structs' contents are copied to the memory. False: the structs adopt the contents
                that the memory already has.
        """
        arrays: dict[int, Any] = {}
        for number, (array, at) in self._arrays.items():
            there = np.frombuffer(memory, array.dtype, array.size, at).reshape(array.shape)
            if copy:
                there[...] = array
            arrays[number] = there
        for struct, at in self._structs:
            parts = {
                name: field if isinstance(field, Struct) else arrays[id(field)]
                for name, field in struct.contents().items()
                if isinstance(field, (Struct, np.ndarray))
            }
            struct.move(memory[at : at + 8 * struct.num_words], parts, copy=copy)
        self._structs.clear()
        self._arrays.clear()

    def _add(self, struct: Struct) -> None:
        """Assign offsets to a struct's nested structs and arrays, then to the struct itself."""
        if id(struct) in self._seen:
            return
        self._seen.add(id(struct))
        self._note(f"{type(struct).__module__}.{type(struct).__qualname__}")
        for name, field in struct.contents().items():
            self._note(name)
            if isinstance(field, Struct):
                self._add(field)
            elif isinstance(field, np.ndarray):
                self._note(f"{field.dtype.str}{field.shape}")
                if id(field) not in self._arrays:
                    self._arrays[id(field)] = (field, self._take(field.nbytes))
        self._structs.append((struct, self._take(8 * struct.num_words)))

    def _note(self, text: str) -> None:
        self._digest.update(text.encode() + b"\0")

    def _take(self, num_bytes: int) -> int:
        at, self.num_bytes = self.num_bytes, self.num_bytes + aligned(num_bytes)
        return at
