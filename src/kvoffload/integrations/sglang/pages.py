"""Access to the pages in SGLang's host pools: the addresses of each page, and a description of the page
format.

Does not know keys or tiers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.integrations.objects import Extents
from kvoffload.tiers.contract import Mask

_ANATOMY = tuple(
    """
    layout dtype page_size layer_num start_layer end_layer head_num head_dim v_head_dim kv_cache_dim
    kv_lora_rank qk_rope_head_dim index_head_dim storage_format_tag head_group_num dcp_size element_size
    size_per_token temporal_state_shape conv_state_shapes conv_dtype temporal_dtype
    temporal_state_elem_size indexer_dtype index_k_dtype quant_block_size
    """.split()  # noqa: SIM905
)
"""Attributes of host pools that determine the format of a page. A pool has only some of them."""


class HostPages:
    """The pages of a host pool.

    If the pool can report the addresses of its pages (`get_page_buffer_meta`), the pages are transferred
    without a copy. Otherwise the pool itself must copy each page (`get_data_page`,
    `set_from_flat_data_page`).

    Attributes:
        page_bytes: bytes of a page.
        sizes: bytes of each extent (contiguous piece of memory) of a page.
        description: a text that describes the page format. It is equal for pools with equal page formats.

    Raises: `ConfigError` for a pool without a dtype, because then pages of another dtype could be served.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self._pool, self._name = pool, name
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        if getattr(pool, "dtype", None) is None:
            why = "it does not tell the dtype of its pages, so pages of another dtype could be served"
            raise ConfigError(
                f"host pool {name}", type(pool).__name__, f"{why}; allowed: a pool with a dtype"
            )
        self._has_addresses, self.sizes = self._extents_of_a_page()
        self.page_bytes = sum(self.sizes)
        anatomy = {name: _plain(getattr(pool, name)) for name in _ANATOMY if hasattr(pool, name)}
        self.description = json.dumps(
            {"pool": name, "class": type(pool).__name__, "extents": _runs(self.sizes), **anatomy},
            sort_keys=True,
        )

    def _extents_of_a_page(self) -> tuple[bool, tuple[int, ...]]:
        try:
            pointers, sizes = self._pool.get_page_buffer_meta(np.zeros(self.page_size, np.int64))
            if len(pointers) == len(sizes) > 0:
                return True, tuple(map(int, sizes))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass  # this pool or layout has no addresses
        page = self._pool.get_dummy_flat_data_page()
        return False, (page.numel() * page.element_size(),)

    def has_indices_for(self, keys: Sequence[str], indices: Any) -> bool:
        """Return True if `indices` has as many host indices as the pages with these keys have tokens."""
        return indices is not None and int(indices.numel()) == len(keys) * self.page_size

    def stored(self, indices: Any) -> tuple[Extents, object]:
        """Return the memory from which to store pages, and its owner, which the caller must keep."""
        if self._has_addresses:
            return self._addresses(indices), self._pool
        pages = [self._pool.get_data_page(index, flat=True).contiguous() for index in self._heads(indices)]
        return _of_tensors(pages), pages

    def loaded(self, indices: Any) -> tuple[Extents, Callable[[Mask], None]]:
        """Return the memory into which to load pages, and a function to call after the load.

        The function takes the mask of loaded pages, and moves these pages into the pool if they are not yet
        there.
        """
        if self._has_addresses:
            return self._addresses(indices), lambda mask: None
        pages = [self._pool.get_dummy_flat_data_page() for _ in self._heads(indices)]

        def finish(mask: Mask) -> None:
            for index, page, is_loaded in zip(self._heads(indices), pages, mask.tolist(), strict=True):
                if is_loaded:
                    self._pool.set_from_flat_data_page(index, page)

        return _of_tensors(pages), finish

    def _heads(self, indices: Any) -> list[int]:
        heads: list[int] = indices[:: self.page_size].tolist()
        return heads

    def _addresses(self, indices: Any) -> Extents:
        pointers, _ = self._pool.get_page_buffer_meta(indices)
        return Extents(np.array(pointers, np.int64).reshape(-1, len(self.sizes)), self.sizes)


def _of_tensors(pages: Sequence[Any]) -> Extents:
    return Extents.of_buffers(
        [page.data_ptr() for page in pages], pages[0].numel() * pages[0].element_size() if pages else 0
    )


def _runs(sizes: Sequence[int]) -> list[list[int]]:
    """Shorten a list of sizes to pairs [size, how often it is repeated]."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else str(value)


def best_block_bytes(sizes: Sequence[int], extents: Sequence[int]) -> int:
    """Choose the block size, in bytes, for a store whose objects have these sizes.

    - If all objects have the same size, a block is a whole object. Exception: if an object has few large
      extents of equal size, a block is an extent, so that pages can be transferred without a copy.
    - Otherwise a multiple of 4 KiB, for which the cost is lowest: few blocks per object, and little padding.

    Args:
        sizes: for each pool, the bytes of one of its objects.
        extents: bytes of each extent of an object of the first pool.
    """
    if len(set(sizes)) == 1:
        parts = len(extents)
        is_large = len(set(extents)) == 1 and extents[0] >= _LEAST_BLOCK_BYTES and parts <= _MOST_EXTENTS
        return extents[0] if is_large else sizes[0]
    candidates = {
        max(_LEAST_BLOCK_BYTES, -(-size // part // 4096) * 4096) for size in sizes for part in range(1, 9)
    }

    def cost(block_bytes: int) -> float:
        blocks = [-(-size // block_bytes) for size in sizes]
        padding = max(count * block_bytes / size for count, size in zip(blocks, sizes, strict=True))
        return padding + _COST_OF_A_BLOCK * sum(blocks)

    return min(sorted(candidates), key=cost)


_LEAST_BLOCK_BYTES, _MOST_EXTENTS, _COST_OF_A_BLOCK = 4096, 4, 0.005
