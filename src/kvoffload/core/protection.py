"""Protected slots, for policies in Python. A protected slot must not be evicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.core.expected import num_expected
from kvoffload.core.request import Path
from kvoffload.core.state import Cache, evictable, is_quiet
from kvoffload.structures.batches import OneKey
from kvoffload.structures.index import ABSENT, find_key
from kvoffload.structures.jit import kernel


class Protected:
    """The slots that must not be evicted during one store.

    These are free slots, slots in flight, pinned slots, and slots of the storing request's own blocks. Also
    protected are blocks that waiting requests expect and blocks that a quota protects. Policies in Python
    test ``slot in protected``. Compiled policies call `state.evictable` instead. The object is valid during
    one call of `EvictionPolicy.replace`.

    Attributes:
        entering: slots to which the policy has assigned new blocks in this call. A policy in Python adds each
            such slot, so that no later block of the call evicts it. A compiled policy does not need the set,
            because it inserts the new blocks after it has chosen every victim.
        one_prefix: True if the new blocks follow one another in one request, so that each block needs the
            blocks before it.
        admitted: True if the policy must accept all new blocks.
        cache, path: the state of the manager and of the storing request, for kernels.
    """

    __slots__ = ("admitted", "cache", "entering", "one_prefix", "path")

    def __init__(self, cache: Any, path: Any, *, one_prefix: bool = True, admitted: bool = False) -> None:
        self.cache, self.path = cache, path
        self.one_prefix, self.admitted = one_prefix, admitted
        self.entering: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self.entering or not _may_leave(self.cache, self.path, slot)

    @property
    def is_quiet(self) -> bool:
        """True if the policy should not learn from this store. Without quotas it is always False.

        With quotas it is True if the store evicts only its own tenant's blocks, and `tenants.may_learn` is
        False.
        """
        return bool(_is_quiet(self.cache))

    def expects(self, key: bytes) -> bool:
        """Return True if a waiting request expects this block. A policy should not refuse such blocks."""
        return bool(_is_expected(self.cache, key))

    def depth_of(self, key: bytes) -> int:
        """Return a block's position on the storing request's path, from 0; -1 if it is not on the path."""
        return _depth_of(self.path, key)


@kernel
def _may_leave(cache: Cache, path: Path, slot: int) -> bool:
    return evictable(cache, path, slot)


@kernel
def _is_quiet(cache: Cache) -> bool:
    return is_quiet(cache)


@kernel
def _is_expected(cache: Cache, key: OneKey) -> bool:
    if num_expected(cache.expected) == 0 or key.size != cache.index.key_bytes:
        return False
    return find_key(cache.expected.keys.index, key.address) != ABSENT


@kernel
def _depth_of(path: Path, key: OneKey) -> int:
    return find_key(path.index, key.address) if key.size == path.index.key_bytes else np.int64(ABSENT)
