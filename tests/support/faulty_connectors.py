"""Connectors that load faulty KV, for tests of the canary. vLLM's processes import them by name.

The file ``$FAULT_FILE`` contains the name of the fault; every load reads it, so that one server can show all
faults. A load whose bytes the fault has changed appends its name to the file ``$FAULT_FILE.changed``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvoffload.integrations.vllm.connector import KVOffloadConnector

FAULT_FILE = "FAULT_FILE"


def other_block(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Replace each block by another loaded block; replace a single block by any other block."""
    sources = blocks[1:] + blocks[:1] if len(blocks) > 1 else [blocks[0] - 1 or blocks[0] + 1]
    for kv in layers:
        kv[blocks] = kv[sources].clone()


def missing_layer(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Zero one layer, as if it had not been loaded."""
    layers[len(layers) // 2][blocks] = 0


def half_a_block(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Zero the second half of the last block, as if it had not been loaded."""
    for kv in layers:
        kv[blocks[-1], :, kv.shape[2] // 2 :] = 0


def keys_and_values_swapped(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Exchange keys and values of one layer."""
    half = layers[0].shape[-1] // 2
    layers[0][blocks] = layers[0][blocks].roll(half, -1)


def other_adapter(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Add a tenth of the next element to each value, like a small low-rank change of the weights."""
    for kv in layers:
        values = kv[blocks][..., kv.shape[-1] // 2 :]
        kv[blocks, ..., kv.shape[-1] // 2 :] = values + 0.1 * values.roll(1, -1)


def one_token_off(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Shift all tokens of a block by one place."""
    for kv in layers:
        kv[blocks] = kv[blocks].roll(1, 2)


def stale_weights(layers: list[torch.Tensor], blocks: list[int]) -> None:
    """Add noise of 2 % of the spread, as if the weights were older by a small training step."""
    generator = torch.Generator().manual_seed(1)
    for kv in layers:
        loaded = kv[blocks].float()
        kv[blocks] = (loaded + 0.02 * loaded.std() * torch.randn(loaded.shape, generator=generator)).to(kv)


def groups_swapped(layers: list[torch.Tensor], blocks: list[int], of_next: list[int]) -> None:
    """Exchange the blocks of two KV groups, or the first and the last layer of a single group."""
    if of_next:
        count = min(len(blocks), len(of_next))
        for kv in layers:
            kv[blocks[:count] + of_next[:count]] = kv[of_next[:count] + blocks[:count]].clone()
        return
    kept = layers[0][blocks].clone()
    layers[0][blocks] = layers[-1][blocks]
    layers[-1][blocks] = kept


_SIMPLE: tuple[Callable[[list[torch.Tensor], list[int]], None], ...] = (
    *(other_block, missing_layer, half_a_block, keys_and_values_swapped),
    *(other_adapter, one_token_off, stale_weights),
)
FAULTS = [*(fault.__name__ for fault in _SIMPLE), groups_swapped.__name__]


def changed(fault_file: Path) -> Counter[str]:
    """Count the loads whose bytes a fault has changed, by fault."""
    lines = fault_file.with_suffix(".changed")
    return Counter(lines.read_text().split() if lines.exists() else ())


class Faulty:
    """Mixin before a connector: damages loaded blocks before the engine reads them."""

    _layers: list[torch.Tensor]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._begins: dict[str, int] = {}
        # Device blocks being loaded, by request, for each KV group. They go from the scheduler to the worker
        # with the metadata of a step.
        self._blocks: dict[str, list[list[int]]] = {}
        vllm_config = arguments[0] if arguments else named["vllm_config"]
        self._tokens = vllm_config.cache_config.block_size

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._begins[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if num_external_tokens:
            begin = self._begins[request.request_id]
            first, last = begin // self._tokens, -(-(begin + num_external_tokens) // self._tokens)
            self._blocks[request.request_id] = [list(ids[first:last]) for ids in blocks.get_block_ids()]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        metadata.loaded_blocks, self._blocks = self._blocks, {}
        return metadata

    # ---- worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self._blocks |= connector_metadata.loaded_blocks

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Each (block, head, token, keys then values). Layers of two groups may share a tensor.
        self._layers = [*{kv.data_ptr(): kv for kv in kv_caches.values()}.values()]
        super().register_kv_caches(kv_caches)  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        for request_id in received or ():
            self._damage(request_id)
        return sent, received

    def _damage(self, request_id: str) -> None:
        groups, file = self._blocks.pop(request_id, None), Path(os.environ[FAULT_FILE])
        name = file.read_text().strip()
        if name not in FAULTS or groups is None:
            return
        first_group, *other_groups = ([block for block in blocks if block] for blocks in groups)
        if not first_group:
            return
        before = [kv[first_group].clone() for kv in self._layers]
        if name == groups_swapped.__name__:
            groups_swapped(self._layers, first_group, other_groups[0] if other_groups else [])
        else:
            next(fault for fault in _SIMPLE if fault.__name__ == name)(self._layers, first_group)
        if not all(torch.equal(was, kv[first_group]) for was, kv in zip(before, self._layers, strict=True)):
            with file.with_suffix(".changed").open("a") as lines:
                lines.write(f"{name}\n")


class FaultyKVOffloadConnector(Faulty, KVOffloadConnector):
    """Our connector."""


class FaultyOffloadingConnector(Faulty, OffloadingConnector):
    """vLLM's connector with our specification."""
