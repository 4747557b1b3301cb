"""The scheduler's message to a worker about our side of a transfer. Knows slots and digests, not keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffload.core.slots import SlotArray
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums

_GROUP_BYTES = 4
"""Bytes of the number of the KV group, at the end of a key."""


class SlotsSpec(CPULoadStoreSpec):
    """Slots of the pool, in the order of the blocks that they belong to.

    Derived from vLLM's own, so that its copies on a device can read it.

    Attributes:
        block_ids: slots, int32; -1 for an absent block.
        digests: of the keys, if checksums are kept; None otherwise.
        num_slots: number of slots of each KV group that has any, in order; None if not needed.
    """

    def __init__(
        self, slots: SlotArray, digests: Checksums | None = None, num_slots: list[int] | None = None
    ) -> None:
        # Not `super().__init__`: all that it does is to copy the slots, into larger numbers.
        self.block_ids = slots
        self.digests = digests
        self.num_slots = num_slots


def slots_per_group(keys: Keys) -> list[int]:
    """How many of these keys each KV group has, in order; the keys of one group are contiguous."""
    ends = keys.words.view(np.uint8)[:, keys.key_bytes - _GROUP_BYTES : keys.key_bytes]
    begins = np.flatnonzero((ends[1:] != ends[:-1]).any(axis=1)) + 1
    return np.diff([0, *begins.tolist(), len(keys)]).tolist()


def without_torn_groups(
    engine: Any, slots: SlotsSpec, blocks_per_chunk: int
) -> tuple[Any, SlotsSpec, SlotArray]:
    """A store without the KV groups whose chunks are not whole, and the slots that it leaves out.

    A chunk of several blocks may have lost its first ones to the sliding window before it is stored. vLLM
    then leaves out those blocks, not the chunk: the slot would keep old bytes in their place, and they would
    be loaded as this chunk's. With blocks missing in the middle, the others would even go to wrong places.
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
    stays = np.repeat(whole, wanted)
    blocks = np.asarray(engine.block_ids)[np.repeat(whole, engine.group_sizes)]
    sizes = [size if sound else 0 for size, sound in zip(engine.group_sizes, whole, strict=True)]
    digests = slots.digests[stays] if slots.digests is not None else None
    return (
        GPULoadStoreSpec(blocks.tolist(), sizes, engine.block_indices),
        SlotsSpec(slots.block_ids[stays], digests),
        slots.block_ids[~stays],
    )
