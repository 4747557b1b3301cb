"""Comparison of prompts, to explain first uses of blocks. Finds, for each request, the most similar earlier
prompt, and the first difference between the two prompts.

The result depends only on the trace, not on caches. If the recording has token ids, prompts are compared by
tokens, otherwise by blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.explain.history import NO_REQUEST
from kvoffload.traces.statistics import turns
from kvoffload.traces.trace import Trace

_WINDOW = 16
"""Smallest number of consecutive equal tokens that counts as an equal passage of two prompts."""
_MOST_COMPARED = 32_768
"""Largest number of tokens that are compared after the first difference of two prompts."""
_CANDIDATES, _COMPARED_CANDIDATES = 16, 3
"""Limits for comparing a prompt with the earlier prompts that have the same prefix. `_CANDIDATES`: the
number of latest earlier prompts that are remembered. `_COMPARED_CANDIDATES`: how many of them, the most
similar in the next block, are compared in full."""
_MOST_SHOWN = 4
_ROOT = -1
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(_WINDOW)], np.uint64)

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of the blocks of a trace.

    Attributes:
        ids: shape ``(unique_blocks, block_tokens)``, int64; token ids of each block.
        prefixes: shape ``(unique_blocks,)``, int64; identifies all tokens from the start of the prompt to the
            end of the block. Blocks with the same tokens up to their end have the same value, even if their
            block ids differ because of `cache_salt`.
    """

    ids: Tokens
    prefixes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """The first difference between a prompt and an earlier prompt. Positions are token numbers from 0.

    Attributes:
        start: first token that differs.
        end: the position in this prompt at which the prompts are equal again; `start` if they are not.
        equal_after: number of equal tokens from `end` on; 0 if the prompts do not become equal again.
        shift: position of the equal tokens in this prompt, minus their position in the earlier prompt.
        ours, theirs: up to four first token ids of the difference, in this prompt and in the earlier prompt.
    """

    start: int
    end: int
    equal_after: int
    shift: int
    ours: list[int]
    theirs: list[int]


@dataclass(frozen=True)
class Beginnings:
    """Comparison of each request with earlier requests. The *nearest* request has the most similar prompt.

    Attributes:
        known: shape ``(requests,)``; number of leading blocks that an earlier request also had.
        nearest: shape ``(requests,)``; an earlier request that has the known blocks and then continues with
            other blocks; `NO_REQUEST` if there is none. If there are several: the most similar request or,
            without token ids, the latest request.
        continues: shape ``(requests,)``, bool; True if the known blocks contain the whole prompt of the
            previous turn, or if no earlier prompt continues the known blocks differently. With token ids also
            True if the nearest prompt differs only in `cache_salt` and length.
        shares: shape ``(requests,)``, bool; True if the known blocks are a shared prompt
            (`Turns.is_shared_prompt`).
        differences: mapping from a request to its difference from the nearest prompt. Has no entry for a
            request that does not differ, and is empty without token ids.
        other_tenant: shape ``(unique_blocks,)``, bool; True if an earlier request with another `cache_salt`
            had all tokens up to the end of the block.
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

    Cost: about 10 us per request. With `tokens` also about 1 ms for each request that differs from an earlier
    prompt.
    """
    lengths, history = np.diff(trace.offsets), turns(trace)
    known = lengths - history.new_blocks
    nearest = _nearest(trace, known)
    previous = history.previous_turn
    is_next_turn = (previous != NO_REQUEST) & (lengths[previous] <= known)
    continues = (known > 0) & (is_next_turn | (nearest == NO_REQUEST))
    shares, has_known = np.zeros(trace.requests, np.bool_), np.flatnonzero(known)
    shares[has_known] = history.is_shared_prompt[
        trace.refs[trace.offsets[:-1][has_known] + known[has_known] - 1]
    ]
    differences: dict[int, Difference] = {}
    other_tenant = np.zeros(trace.unique_blocks, np.bool_)
    if tokens is not None:
        nearest, continues, differences = _compared(trace, tokens, known, nearest, continues)
        # Codes are numbered by first use.
        _, first, prefix = np.unique(tokens.prefixes, return_index=True, return_inverse=True)
        other_tenant = first[prefix.reshape(-1)] < np.arange(trace.unique_blocks)
    return Beginnings(known, nearest, continues, shares, differences, other_tenant)


def _nearest(trace: Trace, known: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each request, the latest earlier request that has its known blocks and then others."""
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
    tokens: BlockTokens,
    known: npt.NDArray[np.int64],
    nearest: npt.NDArray[np.int64],
    continues: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], dict[int, Difference]]:
    """Compare prompts by their tokens.

    Returns the arrays `nearest` and `continues`, corrected, and the differences by request.
    """
    nearest, continues, differences = nearest.copy(), continues.copy(), dict[int, Difference]()
    latest = _Continuations(trace.unique_blocks)
    offsets = trace.offsets.tolist()
    for request, count in enumerate(known.tolist()):
        codes = trace.refs[offsets[request] : offsets[request + 1]]
        if count == len(codes):
            continue
        parent = int(codes[count - 1]) if count else _ROOT
        siblings = latest.of(parent)
        if siblings and not continues[request]:
            best = _best(trace, tokens, codes, count, siblings)
            if best is not None and best[1] is not None:
                nearest[request], differences[request] = best[0], best[1]
            continues[request] = best is not None and best[1] is None
        latest.add(parent, int(codes[count]), request)
        latest.add_chain(codes[count:], request)
    return nearest, continues, differences


class _Continuations:
    """Blocks that followed each block in the latest requests, with these requests.

    The block `_ROOT` stands for the start of every prompt. Most blocks have one following block, which is
    stored in an array. Blocks with several are in a dictionary.
    """

    def __init__(self, num_blocks: int) -> None:
        # The last row belongs to `_ROOT`.
        self._first_child, self._first_request = np.full((2, num_blocks + 1), NO_REQUEST, np.int32)
        self._several: dict[int, deque[tuple[int, int]]] = {}

    def of(self, parent: int) -> Sequence[tuple[int, int]]:
        """Return pairs (following block, request) of the block `parent`, the latest pair last."""
        if parent in self._several:
            return self._several[parent]
        request = int(self._first_request[parent])
        return [] if request == NO_REQUEST else [(int(self._first_child[parent]), request)]

    def add(self, parent: int, child: int, request: int) -> None:
        """Record that the block `child` follows the block `parent` in this request."""
        if self._first_request[parent] == NO_REQUEST:
            self._first_child[parent], self._first_request[parent] = child, request
            return
        if parent not in self._several:
            self._several[parent] = deque(self.of(parent), maxlen=_CANDIDATES)
        self._several[parent].append((child, request))

    def add_chain(self, codes: npt.NDArray[np.int32], request: int) -> None:
        """Record for each of these new blocks that the next block in `codes` follows it in this request."""
        self._first_child[codes[:-1]], self._first_request[codes[:-1]] = codes[1:], request


def _best(
    trace: Trace,
    tokens: BlockTokens,
    codes: npt.NDArray[np.int32],
    count: int,
    siblings: Sequence[tuple[int, int]],
) -> tuple[int, Difference | None] | None:
    """Return the request in `siblings` with the most equal tokens, and the first difference from it.

    The difference is None if the two prompts differ only in `cache_salt` and length. The result is None if
    `count` is 0 and less than a block of tokens is equal.
    """
    children = np.array([child for child, _ in siblings])
    equal = tokens.ids[children] == tokens.ids[codes[count]]
    common = np.where(equal.all(axis=1), equal.shape[1], (~equal).argmax(axis=1))
    # Among equal numbers the latest request comes first.
    order = np.lexsort((np.arange(len(children)), common))[::-1][:_COMPARED_CANDIDATES].tolist()
    best, most_equal = siblings[order[0]][1], -1
    best_difference: Difference | None = None
    for number in order:
        request = siblings[number][1]
        earlier_codes = trace.refs[trace.offsets[request] : trace.offsets[request + 1]]
        same = _equal_blocks(tokens.prefixes, codes, earlier_codes, count)
        difference, num_equal = None, same * trace.block_tokens
        if same < min(len(codes), len(earlier_codes)):
            difference = _difference(tokens.ids, codes, earlier_codes, same)
            num_equal = difference.start + difference.equal_after
        if num_equal > most_equal:
            best, best_difference, most_equal = request, difference, num_equal
    return (best, best_difference) if count > 0 or most_equal >= trace.block_tokens else None


def _equal_blocks(
    prefixes: npt.NDArray[np.int64],
    codes: npt.NDArray[np.int32],
    earlier_codes: npt.NDArray[np.int32],
    count: int,
) -> int:
    """Count the leading blocks with equal tokens.

    The first `count` blocks are equal because they have the same ids. If the prompts have different salts,
    later blocks with different ids can have equal tokens, too.
    """
    shared = min(len(codes), len(earlier_codes))
    differs = prefixes[codes[count:shared]] != prefixes[earlier_codes[count:shared]]
    return count + int(differs.argmax()) if differs.any() else shared


def _difference(
    tokens: Tokens, codes: npt.NDArray[np.int32], earlier_codes: npt.NDArray[np.int32], count: int
) -> Difference:
    """Find the difference of two prompts whose first differing block is number `count`."""
    before, most = count * tokens.shape[1], -(-_MOST_COMPARED // tokens.shape[1])
    new = tokens[codes[count : count + most]].reshape(-1)
    earlier = tokens[earlier_codes[count : count + most]].reshape(-1)
    shared = min(len(new), len(earlier))
    start = int((new[:shared] != earlier[:shared]).argmax())
    end, equal, shift = _equal_rest(new[start:], earlier[start:])
    new, earlier = new[start : start + _MOST_SHOWN], earlier[start : start + _MOST_SHOWN]
    if equal:
        new, earlier = new[:end], earlier[: end - shift]
    return Difference(before + start, before + start + end, equal, shift, new.tolist(), earlier.tolist())


def _equal_rest(new: Tokens, earlier: Tokens) -> tuple[int, int, int]:
    """Find a long passage that is equal in both prompts, but may be shifted, for example by inserted text.

    First finds all short equal passages, and chooses their most frequent shift. Then finds the longest
    passage that is equal at this shift. Returns the passage's start in `new`, its length, and the shift;
    three zeros if no passage is equal.
    """
    if min(len(new), len(earlier)) < _WINDOW:
        return 0, 0, 0
    known, first = np.unique(_hashes(earlier), return_index=True)
    wanted = _hashes(new)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    alike = np.flatnonzero(known[at] == wanted)
    if len(alike) == 0:
        return 0, 0, 0
    shifts, counts = np.unique(alike - first[at[alike]], return_counts=True)
    shift = int(shifts[counts.argmax()])
    begin, end = max(shift, 0), min(len(new), len(earlier) + shift)
    equal = new[begin:end] == earlier[begin - shift : end - shift]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0, 0
    longest = int((ends - starts).argmax())
    return begin + int(starts[longest]), int(ends[longest] - starts[longest]), shift


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), _WINDOW)
    hashes: npt.NDArray[np.uint64] = windows @ _FACTORS
    return hashes
