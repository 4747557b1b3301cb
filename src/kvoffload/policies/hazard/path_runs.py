"""An order of slots that also records what is left of each request's path.

Owns a list of slots, most recent first, divided into *runs*: a run is a sequence of slots that were put there
together, the last one deepest. Does not know why an order changes.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import I32Matrix, inline, kernel
from kvoffload.structures.lists import PREV, Lists, push_head, unlink

TAIL, LENGTH, RUN_OF, SPARE = 0, 1, 2, 3


class PathRuns:
    """An order over `num_positions` positions, empty at first. Memory: 28 bytes a position.

    Attributes:
        order: the list; kernels get `order.links`.
        runs: shape ``(num_positions + 2, 4)``, int32. Row `r` is run `r`: its last position and its
            length; row `p` also says which run position `p` is in. The column SPARE is a stack of unused
            runs, its height in the last row.
    """

    __slots__ = ("order", "runs")

    def __init__(self, num_positions: int) -> None:
        self.order = Lists(num_positions, 1)
        # One run more than positions: a position leaves its old run after the new one was made.
        self.runs = np.zeros((num_positions + 2, 4), np.int32)
        _clear(self.runs)

    def clear(self) -> None:
        """Forget every position. Cost: O(positions)."""
        self.order.clear()
        _clear(self.runs)

    def members(self) -> list[list[int]]:
        """The runs, most recent first, each with its head first. Cost: O(members), for audits."""
        found: list[list[int]] = []
        for position in self.order.members(0):
            if not found or self.runs[position, RUN_OF] != self.runs[found[-1][0], RUN_OF]:
                found.append([])
            found[-1].append(position)
        return found


@kernel
def _clear(runs: I32Matrix) -> int:
    spare = runs.shape[0] - 1
    for run in range(spare):
        runs[run, LENGTH] = 0
        runs[run, SPARE] = run
    runs[spare, SPARE] = spare
    return spare


@inline
def new_run(runs: I32Matrix) -> int:
    """An empty run. A position must join it, otherwise its row is lost."""
    height = runs.shape[0] - 1
    runs[height, SPARE] -= 1
    run = runs[runs[height, SPARE], SPARE]
    runs[run, LENGTH] = 0
    return run


@inline
def join(order: I32Matrix, runs: I32Matrix, run: int, position: int) -> None:
    """Make `position` the head of the order, and of `run`, which is at the head or empty."""
    push_head(order, order.shape[0] - 1, position)
    if runs[run, LENGTH] == 0:
        runs[run, TAIL] = position
    runs[run, LENGTH] += 1
    runs[position, RUN_OF] = run


@inline
def leave(order: I32Matrix, runs: I32Matrix, position: int) -> None:
    """Remove `position` from the order and its run; an empty run becomes unused."""
    run = runs[position, RUN_OF]
    runs[run, LENGTH] -= 1
    if runs[run, LENGTH] == 0:
        height = runs.shape[0] - 1
        runs[runs[height, SPARE], SPARE] = run
        runs[height, SPARE] += 1
    elif runs[run, TAIL] == position:
        runs[run, TAIL] = order[position, PREV]
    unlink(order, position)


@inline
def deepest_of_run(runs: I32Matrix, position: int) -> int:
    """The last position of the run that `position` is in."""
    return runs[runs[position, RUN_OF], TAIL]
