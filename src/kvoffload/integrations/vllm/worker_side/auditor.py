"""Compares blocks that the engine has just computed with the stored blocks.

Owns the comparison and its thread; `transfer.difference` defines the limits. Reads the engine's tensors
itself. If it used the code that copies blocks to RAM, it could not detect errors of that code. Does not know
keys, and discards no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.slots import SlotArray
from kvoffload.integrations.vllm.shared.pool import CLOSE, DIFFERENT, EQUAL, FINDING, UNJUDGED, SharedPool
from kvoffload.integrations.vllm.worker_side.layout import Layout, Region
from kvoffload.transfer import Blocks
from kvoffload.transfer.difference import LIMITS, difference, is_rounding
from kvoffload.transfer.snapshot import Snapshots, submitted_work

_AT_ONCE_BYTES = 16 * 2**20


class Auditor:
    """Compares one worker's part of the slots with the engine's blocks. Writes the results to the pool.

    Args:
        value_types: for each KV group, the name of the torch dtype of its values. None if the values have
            several types: the result for a block of the group is then either `EQUAL` or `UNJUDGED`.

    Thread: call `submit` on the worker's thread. A second thread, owned by this class, compares.
    """

    def __init__(
        self, kv_caches: Any, layout: Layout, pool: SharedPool, part: int, value_types: Sequence[str | None]
    ) -> None:
        self._device = kv_caches.tensors[0].tensor.device
        self._tensors = [Snapshots(tensor.tensor, tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self._layout, self._pool, self._part_number = layout, pool, part
        self._part: Blocks = pool.part(part)
        self._value_types = value_types
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-audit")

    def submit(self, engine: Any, slots: SlotArray) -> Future[None]:
        """Start to compare the engine's blocks with these slots, and return a future.

        The comparison begins after the work that the engine has submitted to the device so far. Until the
        future is done, the engine must not overwrite the blocks, and the scheduler must not unpin the slots.
        """
        return self._thread.submit(self._compare, submitted_work(self._device), engine, slots)

    def close(self) -> None:
        """Wait for the running comparison, cancel queued comparisons, and release tensors and pool."""
        self._thread.shutdown(cancel_futures=True)
        self._tensors.clear()
        del self._part

    def _compare(self, wait: Callable[[], None], engine: Any, slots: SlotArray) -> None:
        wait()
        findings = {int(slot): np.zeros((), FINDING) for slot in slots}
        for finding in findings.values():
            finding["result"] = EQUAL
        for move in self._layout.moves(engine, slots):
            value_type = self._value_types[move.group]
            for region in self._layout.regions[move.group]:
                at_once = max(1, _AT_ONCE_BYTES // region.num_bytes)
                for first in range(0, len(move.blocks), at_once):
                    rows = slice(first, first + at_once)
                    computed, stored = self._read(region, move.inner, move.blocks[rows], move.slots[rows])
                    for row in np.flatnonzero((computed != stored).any(axis=1)).tolist():
                        finding = findings[int(move.slots[rows][row])]
                        place = move.group, region.tensor
                        self._note(finding, place, computed[row], stored[row], value_type)
        for slot, finding in findings.items():
            self._pool.findings[self._part_number, slot] = finding

    def _note(
        self,
        finding: npt.NDArray[Any],
        place: tuple[int, int],
        computed: Blocks,
        stored: Blocks,
        value_type: str | None,
    ) -> None:
        """Add the difference between the computed and stored bytes of a region to the block's `finding`.

        Args:
            finding: worst result so far, and largest difference so far with its place.
            place: KV group and tensor of the region.
            value_type: dtype of the values. If None, the result is `UNJUDGED`.
        """
        if value_type is None:
            finding["result"] = max(finding["result"], UNJUDGED)
            return
        distance = difference(computed, stored, value_type)
        is_close = is_rounding(distance, value_type, on_cpu=self._device.type == "cpu")
        if distance >= finding["difference"]:
            finding["group"], finding["tensor"], finding["difference"] = *place, distance
        finding["result"] = max(finding["result"], CLOSE if is_close else DIFFERENT)

    def _read(
        self, region: Region, inner: int, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> tuple[Blocks, Blocks]:
        """Return the bytes of a region in the engine's blocks and in the slots, both ``(blocks, bytes)``."""
        begin = region.start + inner * region.stride
        computed = self._tensors[region.tensor].read(blocks)[:, : region.num_bytes]
        return computed, self._part[slots, begin : begin + region.num_bytes]


def value_types(kv_cache_config: Any, cache_dtype: str) -> list[str | None]:
    """Return the argument `value_types` of `Auditor`: the dtype of each KV group's values.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``.
        cache_dtype: vLLM's ``--kv-cache-dtype``.
    """
    return [_value_type(group.kv_cache_spec, cache_dtype) for group in kv_cache_config.kv_cache_groups]


_NO_SCALES_INSIDE = (0, 1)
"""vLLM's ``KVQuantMode`` NONE and FP8_PER_TENSOR. The other modes store scales between the values."""


def _value_type(spec: Any, cache_dtype: str) -> str | None:
    layers = getattr(spec, "kv_cache_specs", None)
    if layers is not None:
        kinds = {_value_type(layer, cache_dtype) for layer in layers.values()}
    elif (states := getattr(spec, "dtypes", None)) is not None:
        kinds = {str(state).removeprefix("torch.") for state in states}
    else:
        kinds = {_attention_type(spec, cache_dtype)}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind if kind in LIMITS else None


def _attention_type(spec: Any, cache_dtype: str) -> str | None:
    if int(getattr(spec, "kv_quant_mode", 0)) not in _NO_SCALES_INSIDE or "mla" in cache_dtype:
        return None
    kind = str(getattr(spec, "dtype", None)).removeprefix("torch.")
    if kind == "uint8" and cache_dtype.startswith("fp8"):
        return "float8_e5m2" if cache_dtype == "fp8_e5m2" else "float8_e4m3fn"
    return kind
