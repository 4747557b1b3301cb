"""What the threads of a disk tier hand to each other."""

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
    """Blocks that one thread reads or writes at once, slots ascending.

    Attributes:
        owner: the job that they belong to; not used here.
        index: their rows in the owner's arrays.
        outcomes: the outcome of each, set when the chunk is handed back.
        checksums: of a read: the expected ones; of a write: the real ones, set when it is handed back.
        stamps: of a write: when its blocks were first used.
        gate: of a write: how many removals must be durable before it.
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
