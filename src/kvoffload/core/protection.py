"""Which slots must survive an eviction. Owns no state: it reads pins, index and path."""

from __future__ import annotations

from kvoffload.core.request import RequestContext
from kvoffload.structures.index import ABSENT, Index, find, find_one, hash_row
from kvoffload.structures.jit import I32Array, I32Matrix, U64Array, U64Matrix, inline
from kvoffload.structures.keys import Keys
from kvoffload.structures.lists import PREV


class Protected:
    """The slots that an eviction must leave alone: free, in flight, pinned, or of the storing request.

    Python asks ``slot in protected``; kernels take `ref_cnt`, `path_table`, `path_keys`, `index_keys`
    and ask `evictable`. Valid during one call of `EvictionPolicy.replace`.

    Attributes:
        entering: slots that a policy has already given to blocks of this call. Python policies add to it;
            kernels keep such slots out of their lists until they have chosen every victim.
        one_prefix: whether the new blocks follow one another in one request, so that a block is useless
            without those before it.
        admitted: whether the new blocks always enter: a policy refuses none of them.
    """

    __slots__ = (
        "admitted",
        "entering",
        "index_keys",
        "key_bytes",
        "one_prefix",
        "path_keys",
        "path_table",
        "ref_cnt",
    )

    def __init__(
        self,
        ref_cnt: I32Array,
        index: Index,
        ctx: RequestContext,
        *,
        one_prefix: bool = True,
        admitted: bool = False,
    ) -> None:
        self.one_prefix, self.admitted = one_prefix, admitted
        self.ref_cnt = ref_cnt
        self.index_keys, self.key_bytes = index.keys, index.key_bytes
        self.path_table, self.path_keys = ctx.path.table, ctx.path.keys
        self.entering: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        if self.ref_cnt[slot] != 0 or slot in self.entering:
            return True
        key = Keys(self.index_keys[slot : slot + 1], self.key_bytes)
        return bool(find_one(self.path_table, self.path_keys, key.words, 0) != ABSENT)


@inline
def evictable(
    ref_cnt: I32Array, path_table: U64Array, path_keys: U64Matrix, index_keys: U64Matrix, slot: int
) -> bool:
    """Whether the block in `slot` may leave."""
    if ref_cnt[slot] != 0:
        return False
    h = hash_row(index_keys, slot)
    return find(path_table, path_keys, index_keys, slot, h) == ABSENT


@inline
def coldest_evictable(
    links: I32Matrix,
    slot: int,
    sentinel: int,
    ref_cnt: I32Array,
    path_table: U64Array,
    path_keys: U64Matrix,
    index_keys: U64Matrix,
) -> int:
    """The coldest block of a list, from `slot` towards its head, that may leave; the sentinel if none may."""
    while slot != sentinel and not evictable(ref_cnt, path_table, path_keys, index_keys, slot):
        slot = links[slot, PREV]
    return slot
