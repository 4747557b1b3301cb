"""The internal lists of compiled policies, in the form in which their naive twins report them. O(blocks)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.policies import _2q, gdsf, lirs, s3fifo, wtinylfu
from kvoffload.policies.arc import ARC
from kvoffload.policies.sieve import SIEVE
from kvoffload.structures.heap import RANK
from kvoffload.structures.index import ABSENT


def lists_of(policy: Any) -> Any:
    """Return the lists of a policy or its twin, most recent first; None for a policy that is one list."""
    if isinstance(policy, ARC):
        return policy.lists()
    for policy_class, read in _READERS.items():
        if isinstance(policy, policy_class):
            return read(policy)
    twin_methods = (getattr(policy, name, None) for name in ("lists", "marks", "queues", "ranks"))
    return next((method() for method in twin_methods if method is not None), None)


def _two_q(policy: Any) -> tuple[list[int], list[int], list[bytes]]:
    """Return slots of A1in and Am, and keys of A1out."""
    lists = policy.state.lists
    return lists.members(_2q.A1IN), lists.members(_2q.AM), policy.state.a1out.members(_2q.A1OUT)


def _gdsf(policy: Any) -> list[tuple[int, float, float]]:
    """Return slot, frequency and H of every block, in ascending order of H."""
    heap, weights = policy.state.heap, policy.state.weights
    return [(s, float(weights[s, gdsf.FREQUENCY]), float(heap.order[s, RANK])) for s in heap.members()]


def _lirs(policy: Any) -> tuple[list[bytes], list[int], list[int], list[bytes]]:
    """Return keys in S, slots of LIR blocks and of Q, and ghosts."""
    state, ghosts = policy.state, policy.state.gone
    lir, queue = state.lists.members(lirs.LIR), state.lists.members(lirs.QUEUE)
    used_at = {policy.index.key_at(slot): int(state.used_at[slot]) for slot in lir + queue}
    for position in ghosts.lists.members(lirs.GONE):
        used_at[ghosts.index.key_at(position)] = int(state.gone_used_at[position])
    bottom = int(state.used_at[lir[-1]]) if lir else lirs.NO_BOTTOM
    in_stack = sorted((key for key in used_at if used_at[key] >= bottom), key=lambda key: -used_at[key])
    return in_stack, lir, queue, ghosts.members(lirs.GONE)


def _s3fifo(policy: Any) -> tuple[list[int], list[int], list[bytes], dict[int, int]]:
    """Return slots of S and M, keys of G, and use counts by slot."""
    state = policy.state
    small, main = state.queues.members(s3fifo.SMALL), state.queues.members(s3fifo.MAIN)
    counts = {slot: int(state.counts[slot]) for slot in small + main}
    return small, main, state.ghosts.members(s3fifo.GHOSTS), counts


def _sieve(policy: Any) -> tuple[int | None, list[int]]:
    """Return the slot under the hand, None for the oldest, and visited slots."""
    hand = policy.state.hand
    return None if hand == ABSENT else hand, np.flatnonzero(policy.state.visited).tolist()


def _wtinylfu(policy: Any) -> tuple[list[int], ...]:
    """Return slots of window, probation and protected."""
    segments = (wtinylfu.WINDOW, wtinylfu.PROBATION, wtinylfu.PROTECTED)
    return tuple(policy.state.lists.members(segment) for segment in segments)


_READERS = {
    _2q.TwoQ: _two_q,
    gdsf.GDSF: _gdsf,
    lirs.LIRS: _lirs,
    s3fifo.S3FIFO: _s3fifo,
    SIEVE: _sieve,
    wtinylfu.WTinyLFU: _wtinylfu,
}
