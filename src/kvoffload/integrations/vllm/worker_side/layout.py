"""The layout of an engine block in a slot.

Owns the offsets of the engine's tensors in a worker's part of a slot. For each block of a transfer, computes
the source and the destination. Does not know devices or pools: all results are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class Region(NamedTuple):
    """The bytes of a KV group's block in one tensor.

    Attributes:
        tensor: number of the tensor.
        num_bytes: bytes of a block in the tensor, without padding.
        start: offset of the tensor's first block in the part.
        stride: bytes from one block to the next.
    """

    tensor: int
    num_bytes: int
    start: int
    stride: int


class Move(NamedTuple):
    """The blocks of a transfer that have the same offset in their slots.

    Attributes:
        group: number of the KV group.
        inner: position in the chunk, equal for all these blocks.
        blocks: rows of the engine's tensors.
        slots: the slot of each block.
    """

    group: int
    inner: int
    blocks: Rows
    slots: Rows


class Layout:
    """The offset of each tensor in the part of a slot that one worker writes.

    A slot holds a chunk of one KV group, and uses only the tensors with the group's layers. So two tensors
    may have the same offset if no group uses both. A slot of a hybrid model is as large as its largest group.

    Args:
        page_bytes: bytes of a block in each tensor, with padding.
        groups: for each KV group, the tensors of its layers as ``(tensor, bytes without padding)``.
        blocks_per_chunk: engine blocks in a slot.

    Attributes:
        starts: offset of each tensor in the part.
        part_bytes: bytes of the part.
        regions: for each KV group, the regions to copy.
    """

    def __init__(
        self, page_bytes: Sequence[int], groups: Sequence[Sequence[tuple[int, int]]], blocks_per_chunk: int
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.starts = _offsets([size * blocks_per_chunk for size in page_bytes], groups)
        self.part_bytes = max(
            (start + size * blocks_per_chunk for start, size in zip(self.starts, page_bytes, strict=True)),
            default=0,
        )
        self.regions = [
            [
                Region(tensor, size, self.starts[tensor], page_bytes[tensor])
                # Layers of one group may share a tensor; the largest layer covers the others.
                for tensor, size in sorted({t: max(b for s, b in group if s == t) for t, _ in group}.items())
            ]
            for group in groups
        ]

    @classmethod
    def of(cls, kv_caches: Any, blocks_per_chunk: int) -> Layout:
        """Return the layout for vLLM's ``CanonicalKVCaches``."""
        return cls(
            [tensor.page_size_bytes for tensor in kv_caches.tensors],
            [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs],
            blocks_per_chunk,
        )

    def moves(self, engine: Any, slots: npt.NDArray[np.int32]) -> Iterator[Move]:
        """Yield the copies of a transfer.

        Args:
            engine: vLLM's ``GPULoadStoreSpec``: the blocks of all groups in order, and for each group the
                number of blocks and the index, in the request, of the group's first block. A transfer may
                begin in the middle of a chunk.
            slots: the slots of the chunks of all groups, in the same order.

        Raises `ValueError` if the numbers of blocks and slots do not match, or a slot is negative.
        """
        per_chunk, blocks = self.blocks_per_chunk, np.asarray(engine.block_ids, np.int64)
        block_at = slot_at = 0
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not size:
                continue
            position = first % per_chunk + np.arange(size)
            chunk, inner = position // per_chunk, position % per_chunk
            num_slots = int(chunk[-1]) + 1
            group_slots = np.asarray(slots[slot_at : slot_at + num_slots], np.int64)
            if len(group_slots) < num_slots or (group_slots < 0).any():
                raise ValueError(
                    f"{size} blocks of KV group {group} need {num_slots} slots, not {group_slots.tolist()}"
                )
            targets, sources = group_slots[chunk], blocks[block_at : block_at + size]
            for number in range(min(per_chunk, size)):
                chosen = inner == (first + number) % per_chunk
                yield Move(group, int((first + number) % per_chunk), sources[chosen], targets[chosen])
            block_at, slot_at = block_at + size, slot_at + num_slots
        if (block_at, slot_at) != (len(blocks), len(slots)):
            raise ValueError(
                f"{len(blocks)} blocks and {len(slots)} slots do not match the groups of the transfer"
            )

    def num_bytes(self, move: Move) -> int:
        """Return the bytes that a move copies."""
        return len(move.blocks) * sum(region.num_bytes for region in self.regions[move.group])


def _offsets(sizes: Sequence[int], groups: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Return, for each tensor, the lowest offset at which it overlaps no earlier tensor of its KV groups."""
    members = [{tensor for tensor, _ in group} for group in groups]
    starts: list[int] = []
    for tensor, size in enumerate(sizes):
        neighbours = {other for group in members if tensor in group for other in group if other < tensor}
        start = 0
        for begin, end in sorted((starts[other], starts[other] + sizes[other]) for other in neighbours):
            if begin < start + size and start < end:
                start = end
        starts.append(start)
    return starts
