"""Chunks: the units of work that the threads of a disk tier pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import Checksums
from kvoffload.tiers.disk.slab import Outcomes, Positions
from kvoffload.transfer import Blocks

Stamps: TypeAlias = npt.NDArray[np.uint64]
NO_STAMPS: Stamps = np.empty(0, np.uint64)


@dataclass(eq=False)
class Chunk:
    """Blocks that one thread reads or writes together, in ascending order of slots.

    Attributes:
        owner: the job of these blocks.
        index: rows of these blocks in the owner's arrays.
        writes: True for a write, False for a read.
        outcomes: outcome of each block; set before the chunk is delivered.
        checksums: for a read, the expected checksums. A write computes the checksums, and sets them before
            the chunk is delivered.
        stamps: for a write, the access stamp of each block. Later uses of blocks get greater stamps.
        gate: number of removals that must be durable before a write may start (`Committer.remove`).
        written_at_s: time of the write, in seconds since 1970.
    """

    owner: Any
    index: Positions
    writes: bool
    keys: Keys
    slots: Positions
    generations: npt.NDArray[np.uint64]
    pool: Blocks
    rows: Positions
    checksums: Checksums
    stamps: Stamps = field(default_factory=lambda: NO_STAMPS)
    gate: int = 0
    written_at_s: int = 0
    outcomes: Outcomes = field(default_factory=lambda: np.empty(0, np.uint8))
