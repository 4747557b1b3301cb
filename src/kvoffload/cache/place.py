"""The place of a request in the engine's tensors: block numbers, or a row and a position in the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.cache.key_chain import integers
from kvoffload.cache.kv_layout import KVLayout, KVTensors
from kvoffload.errors import ConfigError
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.engine import is_tensor
from kvoffload.transfer.parts import Parts, parts_of

BlockIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"


class Place(NamedTuple):
    """The place of a request in the engine's tensors. The fields are arguments of `KVRequest.load_into`."""

    block_ids: BlockIds | None
    row: int | None
    start: int

    def in_tensors(
        self, kv: KVTensors, layout: KVLayout, pins: DevicePins, *, writeable: bool = False
    ) -> tuple[Parts, npt.NDArray[np.int64]]:
        """Check the tensors and the place.

        Returns the tensors' views by block, and the numbers of the request's blocks in order.

        Args:
            pins: pins RAM for a CUDA device.
            writeable: True to refuse read-only tensors.

        Raises: `ConfigError` if the tensors differ from the layout or are read-only, or if the place is
        invalid.
        """
        if self.row is None and self.start and "batch" not in layout.names:
            raise ConfigError("start", self.start, "allowed: only with the axis batch, and row")
        views = layout.views(kv, self.row, self.start)
        if writeable and not all(is_tensor(view) or view.flags.writeable for view in views):
            raise ConfigError("kv", "read-only", "allowed: tensors that a load can write to")
        count = len(views[0])
        if self.row is None:
            return parts_of(views, pins), _checked(self.block_ids, count)
        if self.block_ids is not None:
            raise ConfigError("block_ids", "given", "allowed: only with the axis block; give row and start")
        return parts_of(views, pins), np.arange(count)


def _checked(block_ids: BlockIds | None, count: int) -> npt.NDArray[np.int64]:
    if block_ids is None:
        raise ConfigError("block_ids", None, "give the engine's blocks for the request, in order")
    ids = integers("block_ids", block_ids, "one dimension of integers, the blocks of all layers")
    outside = np.flatnonzero((ids < 0) | (ids >= count))
    if len(outside):
        raise ConfigError(f"block_ids[{outside[0]}]", int(ids[outside[0]]), f"allowed: 0 to {count - 1}")
    if len(np.unique(ids)) < len(ids):
        raise ConfigError("block_ids", ids.tolist(), "allowed: each block once")
    return ids.astype(np.int64)
