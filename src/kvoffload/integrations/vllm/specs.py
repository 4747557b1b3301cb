"""What the scheduler tells a worker about our side of a transfer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvoffload.tiers.base import Checksums


class SlotsSpec(CPULoadStoreSpec):
    """Slots of the pool, in the order of the blocks that they belong to.

    Derived from vLLM's own, so that its copies on a device can read it.

    Attributes:
        block_ids: slots, int32; -1 for a block that turned out not to be there.
        digests: of the keys, where checksums are kept; None otherwise.
    """

    def __init__(self, slots: npt.NDArray[np.int32], digests: Checksums | None = None) -> None:
        super().__init__([])
        self.block_ids = np.ascontiguousarray(slots, np.int32)
        self.digests = digests
