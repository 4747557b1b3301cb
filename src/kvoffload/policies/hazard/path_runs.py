"""A recency list of slots that is divided into *runs*.

A run is a group of blocks of one path that entered one after the other. The last block of a run is the block
farthest from the start of the path. Knows no policy.
"""

from __future__ import annotations

import numpy as np

from kvoffload.structures.jit import I32Matrix, inline
from kvoffload.structures.lists import PREV, Lists, push_head, unlink
from kvoffload.structures.structs import Struct

TAIL, LENGTH, RUN_OF, SPARE = 0, 1, 2, 3


class PathRuns(Struct):
    """Runs of positions, empty at first. A position is a slot's number. Memory: 28 bytes a position.

    Attributes:
        order: list of all positions, most recent first.
        runs: four columns, int32. TAIL and LENGTH belong to runs: row `r` has the last position and the
            length of run `r`. RUN_OF belongs to positions: row `p` has the run of position `p`. SPARE is a
            stack of the numbers of unused runs; its last row is the height of the stack.
    """

    order: Lists
    runs: I32Matrix

    def __init__(self, num_positions: int) -> None:
        # One run more than positions: a new run is created before its first position leaves the old run.
        super().__init__(order=Lists(num_positions, 1), runs=np.zeros((num_positions + 2, 4), np.int32))
        self.clear()

    def clear(self) -> None:
        """Forget every position. Cost: O(positions)."""
        self.order.clear()
        height = len(self.runs) - 1
        self.runs[:height, LENGTH] = 0
        self.runs[:, SPARE] = np.arange(height + 1)

    def members(self) -> list[list[int]]:
        """Return the runs, most recent first, each with its head first. Cost: O(members), for audits."""
        runs: list[list[int]] = []
        for position in self.order.members(0):
            if not runs or self.runs[position, RUN_OF] != self.runs[runs[-1][0], RUN_OF]:
                runs.append([])
            runs[-1].append(position)
        return runs


@inline
def new_run(order: PathRuns) -> int:
    """Return an empty run.

    The caller must add at least one position, otherwise the run's row is never reused.
    """
    runs = order.runs
    height = runs.shape[0] - 1
    runs[height, SPARE] -= 1
    run = runs[runs[height, SPARE], SPARE]
    runs[run, LENGTH] = 0
    return run


@inline
def join(order: PathRuns, run: int, position: int) -> None:
    """Add `position` at the head of the list, and to `run`, which must be empty or the list's first run."""
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
    """Return the last position of the run that contains `position`."""
    return order.runs[order.runs[position, RUN_OF], TAIL]
