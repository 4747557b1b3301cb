"""The choice of blocks that are worth reading, and of each block's tier. Starts no read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.tiering.lane import TierLane
from kvoffload.tiers.contract import SharedTier

Rows: TypeAlias = npt.NDArray[np.intp]


def fastest_source(
    lanes: Sequence[TierLane], in_tiers: npt.NDArray[np.bool_], compute_s: float | None
) -> Rows:
    """Choose for each block the tier with the shortest expected read. Returns the tiers' indices in `lanes`.

    While `compute_s` is None, as in a replay, chooses the first tier that has the block.

    Args:
        in_tiers: shape ``(tiers, blocks)``; True if the tier has the block.
    """
    if len(lanes) == 1 or compute_s is None:
        first: Rows = in_tiers.argmax(axis=0)
        return first
    seconds = [[lane.read_s(in_tiers.shape[1])] for lane in lanes]
    fastest: Rows = np.where(in_tiers, np.array(seconds), math.inf).argmin(axis=0)
    return fastest


def num_worth_reading(
    lanes: Sequence[TierLane],
    sources: Rows,
    wanted: Rows,
    length: int,
    compute_s: float | None,
    now: float,
    spent_s: float = 0.0,
) -> int:
    """Return the number of leading blocks to read, so that the read takes no longer than computing.

    Returns the largest such number, or 0. In two cases, returns the number of all blocks instead: if
    `compute_s` is None; and if the result would be 0, but a trial is due (`TierLane.is_trial_due`).

    A read makes two kinds of blocks usable, which the engine need not compute: the blocks that it reads, and
    the blocks in RAM between or directly behind them. Without the read, these blocks in RAM would be behind a
    gap, and useless.

    Args:
        sources: index in `lanes` of the tier from which each block would be read.
        wanted: position of each of these blocks in a prefix of `length` blocks, which are in RAM or in tiers.
        compute_s: seconds to compute a block; None while unknown.
        spent_s: time that the request has already waited for probes.
    """
    if compute_s is None:
        return len(wanted)
    num_reached = np.append(wanted[1:], length) - wanted[0]
    seconds = np.zeros(len(wanted))  # tiers read in parallel
    counts = [np.cumsum(sources == row) for row in range(len(lanes))]
    for lane, count in zip(lanes, counts, strict=True):
        seconds = np.maximum(seconds, np.where(count > 0, lane.read_s(count), 0.0))
    worth = np.flatnonzero(seconds + spent_s <= num_reached * compute_s)
    if len(worth):
        return int(worth[-1]) + 1
    trials = [lane.is_trial_due(now) for lane, count in zip(lanes, counts, strict=True) if count[-1]]
    return len(wanted) if all(trials) else 0


def break_even(tier: SharedTier, compute_s: float | None) -> str:
    """Return a sentence for the log: the speed above which reading from a shared tier beats computing.

    If `compute_s` is None, the sentence says that all blocks of the tier are read.
    """
    if compute_s is None:
        return "all its blocks are read; with recompute_tokens_per_s only reads that pay are made"
    bytes_per_s = tier.block_bytes / compute_s
    return (
        f"a read pays if blocks arrive faster than {bytes_per_s / 1e9:.3g} GB/s; "
        "`kvoffload tier bench` measures the server"
    )
