"""Which blocks of a prefix are worth reading, and from which tier. Begins nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.tiering.lane import TierLane
from kvoffload.tiers.contract import SharedTier

Rows: TypeAlias = npt.NDArray[np.intp]


def soonest(lanes: Sequence[TierLane], in_tiers: npt.NDArray[np.bool_], compute_s: float | None) -> Rows:
    """Of the tiers that have each block, the one that is expected to bring it first.

    While it is not known how long computing a block takes, as in a replay, time counts for nothing, and it is
    the first of them.

    Args:
        in_tiers: shape ``(tiers, blocks)``.
    """
    if len(lanes) == 1 or compute_s is None:
        first: Rows = in_tiers.argmax(axis=0)
        return first
    seconds = [[lane.seconds_for(in_tiers.shape[1])] for lane in lanes]
    found: Rows = np.where(in_tiers, np.array(seconds), math.inf).argmin(axis=0)
    return found


def num_worth_reading(
    lanes: Sequence[TierLane],
    come_from: Rows,
    wanted: Rows,
    length: int,
    compute_s: float | None,
    now: float,
    spent_s: float = 0.0,
) -> int:
    """How many of these blocks are worth it, from the first on: to read them takes no longer than to compute
    what they make reachable. All of them, if a probe is due.

    Args:
        come_from: the tier of each.
        wanted: the place of each in the prefix, of which `length` blocks are here or in tiers.
        compute_s: for one block; None while it is not known.
        spent_s: how long the request has waited already to learn which tier has what.
    """
    if compute_s is None:
        return len(wanted)
    reached = np.append(wanted[1:], length) - wanted[0]
    seconds = np.zeros(len(wanted))  # tiers read side by side
    asked = [(lane, np.cumsum(come_from == row)) for row, lane in enumerate(lanes)]
    for lane, counts in asked:
        seconds = np.maximum(seconds, np.where(counts > 0, lane.seconds_for(counts), 0.0))
    worth = np.flatnonzero(seconds + spent_s <= reached * compute_s)
    if len(worth):
        return int(worth[-1]) + 1
    probes = [lane.is_probe_due(now) for lane, counts in asked if counts[-1]]
    return len(wanted) if all(probes) else 0


def what_it_needs(tier: SharedTier, compute_s: float | None) -> str:
    """In words, what reads from a tier that machines share have to be like to be worth it, and what they are.

    Args:
        compute_s: for one block; None while it is not known.
    """
    if compute_s is None:
        return "every block that it has is read: give recompute_tokens_per_s, and only where that pays"
    needed = f"a read pays if blocks come faster than {tier.block_bytes / compute_s / 1e9:.3g} GB/s"
    if tier.measured_read is None:
        return f"{needed}; how fast they come was not measured"
    round_trip_s, bytes_per_s = tier.measured_read
    gained_s = compute_s - tier.block_bytes / bytes_per_s
    found = f"{needed}; measured {bytes_per_s / 1e9:.3g} GB/s after {round_trip_s * 1e3:.3g} ms"
    if gained_s <= 0:
        return f"{found}: it does not pay, and is tried every 10 s"
    # A question and a read: two round trips.
    return f"{found}: from {math.ceil(max(1.0, 2 * round_trip_s / gained_s)):,} blocks on"
