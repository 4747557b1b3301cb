"""An order of slots that also records what is left of each request's path.

Owns a list of slots, most recent first, divided into *runs*: a run is a sequence of slots that were put there
together, the last one deepest. Does not know why an order changes.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import I32Matrix, inline
from kvoffload.structures.lists import PREV, Lists, push_head, unlink
from kvoffload.structures.structs import Struct

TAIL, LENGTH, RUN_OF, SPARE = 0, 1, 2, 3


class PathRuns(Struct):
    """An order over `num_positions` positions, empty at first. Memory: 28 bytes a position.

    Attributes:
        order: the list.
        runs: shape ``(num_positions + 2, 4)``, int32. Row `r` is run `r`: its last position and its
            length; row `p` also says which run position `p` is in. The column SPARE is a stack of unused
            runs, its height in the last row.
    """

    order: Lists
    runs: I32Matrix

    def __init__(self, num_positions: int) -> None:
        # One run more than positions: a position leaves its old run after the new one was made.
        super().__init__(order=Lists(num_positions, 1), runs=np.zeros((num_positions + 2, 4), np.int32))
        self.clear()

    def clear(self) -> None:
        """Forget every position. Cost: O(positions)."""
        self.order.clear()
        height = len(self.runs) - 1
        self.runs[:height, LENGTH] = 0
        self.runs[:, SPARE] = np.arange(height + 1)

    def members(self) -> list[list[int]]:
        """The runs, most recent first, each with its head first. Cost: O(members), for audits."""
        found: list[list[int]] = []
        for position in self.order.members(0):
            if not found or self.runs[position, RUN_OF] != self.runs[found[-1][0], RUN_OF]:
                found.append([])
            found[-1].append(position)
        return found


@inline
def new_run(order: PathRuns) -> int:
    """An empty run. A position must join it, otherwise its row is lost."""
    runs = order.runs
    height = runs.shape[0] - 1
    runs[height, SPARE] -= 1
    run = runs[runs[height, SPARE], SPARE]
    runs[run, LENGTH] = 0
    return run


@inline
def join(order: PathRuns, run: int, position: int) -> None:
    """Make `position` the head of the order, and of `run`, which is at the head or empty."""
    runs = order.runs
    push_head(order.order.links, order.order.num_positions, position)
    if runs[run, LENGTH] == 0:
        runs[run, TAIL] = position
    runs[run, LENGTH] += 1
    runs[position, RUN_OF] = run


@inline
def leave(order: PathRuns, position: int) -> None:
    """Remove `position` from the order and its run; an empty run becomes unused."""
    runs, links = order.runs, order.order.links
    run = runs[position, RUN_OF]
    runs[run, LENGTH] -= 1
    if runs[run, LENGTH] == 0:
        height = runs.shape[0] - 1
        runs[runs[height, SPARE], SPARE] = run
        runs[height, SPARE] += 1
    elif runs[run, TAIL] == position:
        runs[run, TAIL] = links[position, PREV]
    unlink(links, position)


@inline
def deepest_of_run(order: PathRuns, position: int) -> int:
    """The last position of the run that `position` is in."""
    return order.runs[order.runs[position, RUN_OF], TAIL]
