"""Inline helpers as separate kernels, compiled in each test process that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffload.core.state import Cache
from kvoffload.structures import heap, index, keylists, lists, sketch
from kvoffload.structures.heap import Heap
from kvoffload.structures.index import Index
from kvoffload.structures.jit import I32Matrix, ReadU64Matrix, compiled
from kvoffload.structures.keylists import KeyLists
from kvoffload.structures.keys import Keys
from kvoffload.structures.sketch import FrequencySketch


def helper(function: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call: most test processes import this module and call few kernels."""
    made = functools.cache(lambda: compiled(function, cache=False))
    return lambda *arguments: made()(*arguments)


@helper
def push(of: Heap, position: int, rank: float) -> None:
    heap.push(of, position, rank)


@helper
def take_out(of: Heap, position: int) -> None:
    heap.take_out(of, position)


@helper
def set_aside(of: Heap, position: int) -> None:
    heap.set_aside(of, position)


@helper
def put_back(of: Heap) -> None:
    heap.put_back(of)


@helper
def ref_cnt_of(cache: Cache, slot: int) -> int:
    return cache.slots.ref_cnt[slot]


@helper
def push_head(links: I32Matrix, sentinel: int, position: int) -> None:
    lists.push_head(links, sentinel, position)


@helper
def unlink(links: I32Matrix, position: int) -> None:
    lists.unlink(links, position)


@helper
def move_to_head(links: I32Matrix, sentinel: int, position: int) -> None:
    lists.move_to_head(links, sentinel, position)


@helper
def remember(keys: KeyLists, sentinel: int, batch: ReadU64Matrix) -> None:
    keylists.remember(keys, sentinel, batch, 0, index.hash_row(batch, 0))


@helper
def forget(keys: KeyLists, position: int) -> None:
    keylists.forget(keys, position)


@helper
def forget_coldest(keys: KeyLists, sentinel: int) -> None:
    keylists.forget_coldest(keys, sentinel)


@helper
def remove(of: Index, position: int) -> None:
    index.remove(of, position)


@helper
def _hash(batch: ReadU64Matrix) -> int:
    return np.int64(index.hash_row(batch, 0))


@helper
def _add(of: FrequencySketch, batch: ReadU64Matrix) -> None:
    sketch.add(of, index.hash_row(batch, 0))


@helper
def _estimate(of: FrequencySketch, batch: ReadU64Matrix) -> int:
    return sketch.estimate(of, index.hash_row(batch, 0))


def hash_of(key: bytes) -> int:
    """Return the index's hash of a key."""
    return int(_hash(Keys.pack([key], len(key)).words)) % 2**64


def add(of: FrequencySketch, key: bytes) -> None:
    """Count a reference to a key."""
    _add(of.memory, Keys.pack([key], len(key)).words)


def estimate(of: FrequencySketch, key: bytes) -> int:
    """Return the estimated uses of a key."""
    return int(_estimate(of.memory, Keys.pack([key], len(key)).words))
