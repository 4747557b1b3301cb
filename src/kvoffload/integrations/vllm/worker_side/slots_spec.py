"""The scheduler's message to a worker: slots and digests of a transfer. Does not know keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffload.core.slots import SlotArray
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums

_GROUP_BYTES = 4
"""Bytes at the end of a key that hold the number of the KV group."""


class SlotsSpec(CPULoadStoreSpec):
    """Slots of the pool, in the order of their blocks.

    A subclass of vLLM's class, so that vLLM's device copies can read it.

    Attributes:
        block_ids: slots, int32; -1 for an absent block.
        digests: digests of the keys, if checksums are kept; None otherwise.
        num_slots: number of slots of each KV group with slots, in order; None if not needed.
    """

    def __init__(
        self, slots: SlotArray, digests: Checksums | None = None, num_slots: list[int] | None = None
    ) -> None:
        # Not `super().__init__`, which only copies the slots into larger integers.
        self.block_ids = slots
        self.digests = digests
        self.num_slots = num_slots


def slots_per_group(keys: Keys) -> list[int]:
    """Return the number of keys of each KV group, in order; the keys of a group are contiguous."""
    ends = keys.words.view(np.uint8)[:, keys.key_bytes - _GROUP_BYTES : keys.key_bytes]
    begins = np.flatnonzero((ends[1:] != ends[:-1]).any(axis=1)) + 1
    return np.diff([0, *begins.tolist(), len(keys)]).tolist()


def without_torn_groups(
    engine: Any, slots: SlotsSpec, blocks_per_chunk: int
) -> tuple[Any, SlotsSpec, SlotArray]:
    """Remove KV groups with incomplete chunks from a store; returns the store and the removed slots.

    Before the store, the first blocks of a chunk may have left the sliding window. vLLM then stores only the
    other blocks of the chunk, so the slot would keep old bytes, and a later load would return them. If blocks
    in the middle are missing, the blocks after them would be stored at wrong offsets.
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
    blocks = np.asarray(engine.block_ids)[np.repeat(whole, engine.group_sizes)]
    sizes = [size if is_whole else 0 for size, is_whole in zip(engine.group_sizes, whole, strict=True)]
    digests = slots.digests[kept] if slots.digests is not None else None
    return (
        GPULoadStoreSpec(blocks.tolist(), sizes, engine.block_indices),
        SlotsSpec(slots.block_ids[kept], digests),
        slots.block_ids[~kept],
    )
