"""First uses of blocks: the earlier prompt that a request shares most with, and the place where they differ.

Depends on the trace only, not on caches. Token ids are used if the recording has them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.explain.history import NO_REQUEST
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

_WINDOW = 16
"""Tokens that must be equal for two places of two prompts to count as alike."""
_MOST_COMPARED = 32_768
"""Tokens of a prompt that are compared behind the first difference."""
_CANDIDATES, _COMPARED_CANDIDATES = 16, 3
"""Latest different continuations of a beginning: kept, and compared in full."""
_MOST_SHOWN = 4
_ROOT = -1
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(_WINDOW)], np.uint64)

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of the blocks of a trace.

    Attributes:
        ids: shape ``(unique_blocks, block_tokens)``, int64; token ids of each block.
        prefixes: shape ``(unique_blocks,)``, int64; equal for blocks that end equal prefixes, also if their
            ids in the trace differ because of a `cache_salt`.
    """

    ids: Tokens
    prefixes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """The first difference of a prompt from an earlier one. Positions are token numbers from 0.

    Attributes:
        start: first token that differs.
        end: first token behind the difference, in this prompt; `start` if the rest is not equal again.
        equal_after: number of equal tokens from `end` on; 0 if the rest is not equal again.
        shift: by how many tokens the equal rest is later in this prompt than in the earlier prompt.
        ours, theirs: token ids of the difference, up to four; from `start` on if the rest is not equal again.
    """

    start: int
    end: int
    equal_after: int
    shift: int
    ours: list[int]
    theirs: list[int]


@dataclass(frozen=True)
class Beginnings:
    """Leading blocks of each request that earlier requests had, and the nearest earlier prompt.

    Attributes:
        known: shape ``(requests,)``; number of leading blocks that an earlier request had.
        nearest: shape ``(requests,)``; the latest earlier request that shares these blocks and has further,
            different blocks, or `NO_REQUEST`.
        continues: shape ``(requests,)``, bool; the request continues an earlier prompt: all known blocks are
            the earlier prompt, or no earlier prompt is longer.
        shares: shape ``(requests,)``, bool; the known blocks are a shared prompt (`Turns.is_shared_prompt`).
        differences: of requests that differ from the nearest prompt, if token ids are known.
        other_tenant: shape ``(unique_blocks,)``, bool; the first use of the block ends a prefix that an
            earlier request had with another `cache_salt`.
    """

    known: npt.NDArray[np.int64]
    nearest: npt.NDArray[np.int64]
    continues: npt.NDArray[np.bool_]
    shares: npt.NDArray[np.bool_]
    differences: dict[int, Difference]
    other_tenant: npt.NDArray[np.bool_]


def beginnings(trace: Trace, tokens: BlockTokens | None = None) -> Beginnings:
    """Compare each request with the earlier requests.

    Args:
        tokens: tokens of the blocks; None if unknown.

    Cost: about 10 us per request; with `tokens` about 1 ms for each request that differs.
    """
    lengths, found = np.diff(trace.offsets), turns(trace)
    known = lengths - found.new_blocks
    nearest = _nearest(trace, known)
    previous = found.previous_turn
    is_next_turn = (previous != NO_REQUEST) & (lengths[previous] <= known)
    continues = (known > 0) & (is_next_turn | (nearest == NO_REQUEST))
    shares, has_known = np.zeros(trace.requests, np.bool_), np.flatnonzero(known)
    shares[has_known] = found.is_shared_prompt[
        trace.refs[trace.offsets[:-1][has_known] + known[has_known] - 1]
    ]
    differences: dict[int, Difference] = {}
    other_tenant = np.zeros(trace.unique_blocks, np.bool_)
    if tokens is not None:
        nearest, differences = _compared(trace, tokens.ids, known, nearest, continues)
        # Codes are numbered by first use.
        _, first, prefix = np.unique(tokens.prefixes, return_index=True, return_inverse=True)
        other_tenant = first[prefix.reshape(-1)] < np.arange(trace.unique_blocks)
    return Beginnings(known, nearest, continues, shares, differences, other_tenant)


def _nearest(trace: Trace, known: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the latest earlier request that shares the known blocks and is longer."""
    longer = np.full(trace.unique_blocks, NO_REQUEST, np.int64)
    nearest = np.full(trace.requests, NO_REQUEST, np.int64)
    offsets = trace.offsets.tolist()
    for request, count in enumerate(known.tolist()):
        codes = trace.refs[offsets[request] : offsets[request + 1]]
        if 0 < count < len(codes):
            nearest[request] = longer[codes[count - 1]]
        longer[codes[:-1]] = request
    return nearest


def _compared(
    trace: Trace,
    tokens: Tokens,
    known: npt.NDArray[np.int64],
    nearest: npt.NDArray[np.int64],
    continues: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int64], dict[int, Difference]]:
    """Choose the nearest prompts by tokens, and find the differences from them."""
    nearest, differences = nearest.copy(), dict[int, Difference]()
    latest: defaultdict[int, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=_CANDIDATES))
    offsets = trace.offsets.tolist()
    for request, count in enumerate(known.tolist()):
        codes = trace.refs[offsets[request] : offsets[request + 1]]
        if count == len(codes):
            continue
        siblings = latest[int(codes[count - 1]) if count else _ROOT]
        if siblings and not continues[request]:
            best = _best(trace, tokens, codes, count, siblings)
            if best is not None:
                nearest[request], differences[request] = best
        # All further new blocks have one continuation so far.
        siblings.append((int(codes[count]), request))
        for parent, child in zip(codes[count:-1].tolist(), codes[count + 1 :].tolist(), strict=True):
            latest[parent].append((child, request))
    return nearest, differences


def _best(
    trace: Trace, tokens: Tokens, codes: npt.NDArray[np.int32], count: int, siblings: deque[tuple[int, int]]
) -> tuple[int, Difference] | None:
    """Return the request with the most equal tokens, of the latest that share `count` blocks.

    None if they share less than a block, in no known block.
    """
    children = np.array([child for child, _ in siblings])
    equal = tokens[children] == tokens[codes[count]]
    common = np.where(equal.all(axis=1), equal.shape[1], (~equal).argmax(axis=1))
    # Ties: the latest.
    order = np.lexsort((np.arange(len(children)), common))[::-1][:_COMPARED_CANDIDATES]
    best: tuple[int, Difference] | None = None
    for number in order.tolist():
        request = siblings[number][1]
        others = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
        found = difference(tokens, codes, others, count)
        if best is None or found.start + found.equal_after > best[1].start + best[1].equal_after:
            best = request, found
    assert best is not None
    is_alike = count > 0 or best[1].start + best[1].equal_after >= trace.block_tokens
    return best if is_alike else None


def difference(
    tokens: Tokens, codes: npt.NDArray[np.int32], others: npt.NDArray[np.int32], count: int
) -> Difference:
    """Compare two prompts from block `count` on, in which they differ."""
    before, most = count * tokens.shape[1], -(-_MOST_COMPARED // tokens.shape[1])
    ours = tokens[codes[count : count + most]].reshape(-1)
    theirs = tokens[others[count : count + most]].reshape(-1)
    shared = min(len(ours), len(theirs))
    start = int((ours[:shared] != theirs[:shared]).argmax())
    end, equal, shift = _equal_rest(ours[start:], theirs[start:])
    ours, theirs = ours[start : start + _MOST_SHOWN], theirs[start : start + _MOST_SHOWN]
    if equal:
        ours, theirs = ours[:end], theirs[: end - shift]
    return Difference(before + start, before + start + end, equal, shift, ours.tolist(), theirs.tolist())


def _equal_rest(ours: Tokens, theirs: Tokens) -> tuple[int, int, int]:
    """Return start, length and shift of the longest equal run at the most frequent shift; zeros for none."""
    if min(len(ours), len(theirs)) < _WINDOW:
        return 0, 0, 0
    known, first = np.unique(_hashes(theirs), return_index=True)
    wanted = _hashes(ours)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    alike = np.flatnonzero(known[at] == wanted)
    if len(alike) == 0:
        return 0, 0, 0
    shifts, counts = np.unique(alike - first[at[alike]], return_counts=True)
    shift = int(shifts[counts.argmax()])
    begin, end = max(shift, 0), min(len(ours), len(theirs) + shift)
    equal = ours[begin:end] == theirs[begin - shift : end - shift]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0, 0
    longest = int((ends - starts).argmax())
    return begin + int(starts[longest]), int(ends[longest] - starts[longest]), shift


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Hash each window of tokens."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), _WINDOW)
    hashes: npt.NDArray[np.uint64] = windows @ _FACTORS
    return hashes
