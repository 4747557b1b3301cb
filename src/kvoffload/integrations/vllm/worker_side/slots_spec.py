"""The message from the scheduler to a worker, with the slots and digests of a transfer. Does not know
keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffload.core.slots import SlotArray
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums, Mask

_GROUP_BYTES = 4
"""Bytes at the end of a key that hold the number of the KV group."""


class SlotsSpec(CPULoadStoreSpec):
    """Slots of the pool, in the order of their blocks.

    A subclass of vLLM's class, so that vLLM's device copies can read it.

    Attributes:
        block_ids: slots, int32; -1 for an absent block.
        digests: digests of the keys, if the transfer stores blocks with checksums; otherwise None.
        num_slots: for each KV group that has slots, in order, the number of its slots. None if the transfer
            loads blocks, or if a slot holds a single engine block.
        audited: mask of the slots that the worker must compare with the engine's blocks instead of writing
            them. None: the worker writes all slots.
    """

    def __init__(
        self,
        slots: SlotArray,
        digests: Checksums | None = None,
        num_slots: list[int] | None = None,
        audited: Mask | None = None,
    ) -> None:
        # `super().__init__` is not called: it would only copy the slots into larger integers.
        self.block_ids = slots
        self.digests = digests
        self.num_slots = num_slots
        self.audited = audited


def slots_per_group(keys: Keys) -> list[int]:
    """Return the number of keys of each KV group, in order. The keys of a group are contiguous."""
    ends = keys.words.view(np.uint8)[:, keys.key_bytes - _GROUP_BYTES : keys.key_bytes]
    begins = np.flatnonzero((ends[1:] != ends[:-1]).any(axis=1)) + 1
    return np.diff([0, *begins.tolist(), len(keys)]).tolist()


def without_torn_groups(
    engine: Any, slots: SlotsSpec, blocks_per_chunk: int
) -> tuple[Any, SlotsSpec, SlotArray]:
    """Remove KV groups with incomplete chunks from a transfer that stores blocks in RAM.

    Returns the remaining blocks, the remaining slots, and the removed slots except audited slots.

    A chunk is incomplete if some of its blocks have left the sliding window. If the chunk were stored, part
    of its slot would keep old bytes, or blocks would be stored at wrong offsets.
    """
    if slots.num_slots is None:
        return engine, slots, slots.block_ids[:0]
    counts = iter(slots.num_slots)
    wanted = [next(counts) if size else 0 for size in engine.group_sizes]
    whole = [
        size == count * blocks_per_chunk and first % blocks_per_chunk == 0
        for size, count, first in zip(engine.group_sizes, wanted, engine.block_indices, strict=True)
    ]
    if all(whole):
        return engine, slots, slots.block_ids[:0]
    kept = np.repeat(whole, wanted)
    torn = ~kept if slots.audited is None else ~kept & ~slots.audited
    return *_subset(engine, slots, kept, blocks_per_chunk, wanted), slots.block_ids[torn]


def audited_apart(
    engine: Any, slots: SlotsSpec, blocks_per_chunk: int
) -> tuple[tuple[Any, SlotsSpec], tuple[Any, SlotsSpec] | None]:
    """Divide a transfer of complete chunks into blocks to write and blocks to compare.

    The second result is None if there are no blocks to compare.
    """
    if slots.audited is None:
        return (engine, slots), None
    per_group = [size // blocks_per_chunk for size in engine.group_sizes]
    written, compared = (
        _subset(engine, slots, mask, blocks_per_chunk, per_group) for mask in (~slots.audited, slots.audited)
    )
    return written, compared


def _subset(
    engine: Any, slots: SlotsSpec, kept: Mask, blocks_per_chunk: int, slots_per_group: list[int]
) -> tuple[Any, SlotsSpec]:
    """Return the engine's blocks and the slots of the chunks that the mask `kept` selects.

    The selected chunks must be complete.
    """
    blocks = np.asarray(engine.block_ids)
    # A group with incomplete chunks may have no whole number of chunks, so all its blocks are removed.
    ends = np.cumsum(slots_per_group)
    sizes, chosen = [], []
    start = 0
    for size, end, count in zip(engine.group_sizes, ends.tolist(), slots_per_group, strict=True):
        of_group = kept[end - count : end]
        rows = np.repeat(of_group, blocks_per_chunk) if of_group.any() else np.zeros(size, np.bool_)
        chosen.append(blocks[start : start + size][rows])
        sizes.append(len(chosen[-1]))
        start += size
    digests = slots.digests[kept] if slots.digests is not None else None
    audited = slots.audited[kept] if slots.audited is not None else None
    return (
        GPULoadStoreSpec(np.concatenate(chosen).tolist(), sizes, engine.block_indices),
        SlotsSpec(slots.block_ids[kept], digests, audited=audited),
    )
