"""What Hazard learns from, part by part: kernels that are compiled for each test run, so never stale."""

from __future__ import annotations

import numpy as np

from kvoffload.policies.hazard import history, lifetimes, policy, shadow
from kvoffload.policies.hazard.history import History
from kvoffload.policies.hazard.lifetimes import Lifetimes
from kvoffload.policies.hazard.policy import State
from kvoffload.policies.hazard.shadow import ShadowLRU
from kvoffload.structures.index import hash_row
from kvoffload.structures.jit import BoolArray, I32Array, I64Array, ReadI32Array, ReadU64Matrix, compiled
from kvoffload.structures.keys import Keys


def _helper(function):  # type: ignore[no-untyped-def]
    return compiled(function, cache=False)


@_helper
def _remember(of: History, path: ReadU64Matrix, start: int, now: int, classes: I32Array) -> None:
    history.begin_path(of, path, start, now)
    for row in range(path.shape[0] - 1, start - 1, -1):
        classes[row - start] = history.use_key(of, path, row, hash_row(path, row), now)


@_helper
def _classify(of: History, batch: ReadU64Matrix, now: int, classes: I32Array, last: I64Array) -> None:
    for row in range(batch.shape[0]):
        classes[row], last[row] = history.classify(of, batch, row, now)


@_helper
def _live(of: Lifetimes, path: ReadU64Matrix, now: int, classes: ReadI32Array) -> None:
    lifetimes.let_age(of, now)
    for row in range(path.shape[0] - 1, -1, -1):
        lifetimes.live_on(of, path, row, hash_row(path, row), classes[row], now)


@_helper
def _compare(of: ShadowLRU, path: ReadU64Matrix, held: BoolArray, is_victim_tier: bool) -> None:
    for row in range(path.shape[0] - 1, -1, -1):
        shadow.compare(of, path, row, hash_row(path, row), held[row], is_victim_tier)
    shadow.end_path(of, path, 0, is_victim_tier)


@_helper
def _take_in(of: ShadowLRU, batch: ReadU64Matrix) -> None:
    shadow.take_in(of, batch, 0, batch.shape[0])


def remember(of: History, path: Keys, now: int, start: int = 0) -> list[int]:
    """A request uses the blocks of `path` from `start` on: the class of each."""
    classes = np.empty(len(path) - start, np.int32)
    _remember(of.memory, path.words, start, now, classes)
    return classes.tolist()


def classify(of: History, keys: Keys, now: int) -> list[tuple[int, int]]:
    """The class of each key, and the time of its last use."""
    classes, last = np.empty(len(keys), np.int32), np.empty(len(keys), np.int64)
    _classify(of.memory, keys.words, now, classes, last)
    return list(zip(classes.tolist(), last.tolist(), strict=True))


def live(of: Lifetimes, path: Keys, now: int, block_class: int = 0) -> None:
    """A request uses blocks that have this class, and what follows from it where that is due."""
    _live(of.memory, path.words, now, np.full(len(path), block_class, np.int32))
    if now >= of.next_evaluation:
        of.evaluate(now)


def compare(of: ShadowLRU, path: Keys, held: BoolArray, is_victim_tier: bool = False) -> None:
    """A request uses these blocks; `held` are those that the owner has."""
    _compare(of.memory, path.words, held, is_victim_tier)


def take_in(of: ShadowLRU, keys: Keys) -> None:
    """The device drops these blocks."""
    _take_in(of.memory, keys.words)


@_helper
def end_duel_window(own: State) -> None:
    policy._end_duel_window(own)
