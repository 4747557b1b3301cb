"""The data structures of Hazard as separate kernels, compiled in each test process that calls them."""

from __future__ import annotations

import numpy as np

from kvoffload.policies.hazard import history, lifetimes, policy, shadow
from kvoffload.policies.hazard.history import History
from kvoffload.policies.hazard.lifetimes import Lifetimes
from kvoffload.policies.hazard.policy import State
from kvoffload.policies.hazard.shadow import ShadowLRU
from kvoffload.structures.index import hash_row
from kvoffload.structures.jit import BoolArray, I32Array, I64Array, ReadI32Array, ReadU64Matrix
from kvoffload.structures.keys import Keys
from support.kernels import helper


@helper
def _remember(of: History, path: ReadU64Matrix, start: int, now: int, classes: I32Array) -> None:
    history.begin_path(of, path, start, 0, now)
    for row in range(path.shape[0] - 1, start - 1, -1):
        place = history.use_key(of, path, row, hash_row(path, row), now)
        classes[row - start] = history.class_at(of, place) // history.NUM_KINDS


@helper
def _classify(of: History, batch: ReadU64Matrix, now: int, classes: I32Array, last: I64Array) -> None:
    for row in range(batch.shape[0]):
        block_class, last[row] = history.classify(of, batch, row, now)
        classes[row] = block_class // history.NUM_KINDS


@helper
def _live(of: Lifetimes, path: ReadU64Matrix, now: int, classes: ReadI32Array, on_device: int) -> None:
    lifetimes.let_age(of, now)
    for row in range(path.shape[0] - 1, -1, -1):
        lifetimes.live_on(of, path, row, hash_row(path, row), classes[row], now, row >= on_device)


@helper
def _live_after(of: Lifetimes, path: ReadU64Matrix, now: int, block_class: int) -> None:
    lifetimes.let_age(of, now)
    for row in range(path.shape[0] - 1, -1, -1):
        lifetimes.live_after(of, path, row, hash_row(path, row), block_class, now)


@helper
def _compare(of: ShadowLRU, positions: ReadI32Array, held: BoolArray, on_device: int, victim: bool) -> None:
    for row in range(positions.shape[0] - 1, -1, -1):
        shadow.compare(of, positions[row], held[row], row >= on_device, victim)
    shadow.end_path(of)


@helper
def _insert_dropped(of: ShadowLRU, positions: ReadI32Array) -> None:
    for row in range(positions.shape[0] - 1, -1, -1):
        shadow.enter_shadow(of, positions[row])
    shadow.shrink_to_capacity(of)


def remember(of: History, path: Keys, now: int, start: int = 0) -> list[int]:
    """Observe a request that uses the blocks of `path` from `start` on; return the class of each."""
    classes = np.empty(len(path) - start, np.int32)
    _remember(of.memory, path.words, start, now, classes)
    return classes.tolist()


def classify(of: History, keys: Keys, now: int) -> list[tuple[int, int]]:
    """Return class and last use of each key."""
    classes, last = np.empty(len(keys), np.int32), np.empty(len(keys), np.int64)
    _classify(of.memory, keys.words, now, classes, last)
    return list(zip(classes.tolist(), last.tolist(), strict=True))


def live(of: Lifetimes, path: Keys, now: int, block_class: int = 0, on_device: int = 0) -> None:
    """Record uses of blocks of this class, and evaluate if due."""
    _live(of.memory, path.words, now, np.full(len(path), block_class, np.int32), on_device)
    if now >= of.next_evaluation:
        of.evaluate(now)


def live_after(of: Lifetimes, path: Keys, now: int, block_class: int) -> None:
    """Record the end of a request that used these blocks, which now have this class."""
    _live_after(of.memory, path.words, now, block_class)


def compare(
    of: ShadowLRU, positions: list[int], held: list[bool], on_device: int = 0, is_victim_tier: bool = False
) -> None:
    """Compare a request's keys at these positions; `held` marks the blocks that the policy holds."""
    of_keys = np.array(positions, np.int32)
    _compare(of.memory, of_keys, np.array(held, np.bool_), on_device, is_victim_tier)


def insert_dropped(of: ShadowLRU, positions: list[int]) -> None:
    """Insert the blocks of these keys, which the device has evicted."""
    _insert_dropped(of.memory, np.array(positions, np.int32))


@helper
def _keep_promise(own: State, count: int) -> None:
    policy.keep_promise(own, count)


def keep_promise(own: State, count: int) -> None:
    """Let the lead fade by `count` references, and update whether LRU decides."""
    _keep_promise(own.memory, count)
