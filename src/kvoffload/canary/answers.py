"""Answers with log-probabilities, and the difference of two answers to one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

LEAST_LOGPROB = -100.0
"""Servers send large negative numbers for a probability of 0."""


@dataclass(frozen=True)
class Answer:
    """A completion at temperature 0.

    Attributes:
        tokens: the generated tokens, as text.
        logprobs: for each position, the log-probabilities of the most probable tokens.
    """

    tokens: Sequence[str]
    logprobs: Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Difference:
    """The largest difference between two answers to one prompt.

    Positions after the first different token are not compared, because their contexts differ.

    Attributes:
        size: difference of the log-probabilities of one token, a lower bound if one answer does not list it.
        position: generated token with this difference, from 0.
        token: the token whose log-probabilities differ most.
        logprobs: its log-probabilities, in the reference and in the other answer; None if not listed.
        diverges_at: position of the first different token; None if all tokens are equal.
    """

    size: float
    position: int
    token: str
    logprobs: tuple[float | None, float | None]
    diverges_at: int | None


def compare(reference: Answer, other: Answer) -> Difference:
    """Return the largest difference between two answers."""
    pairs = zip(reference.tokens, other.tokens, strict=False)
    diverges_at = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
    if diverges_at is None and len(reference.tokens) != len(other.tokens):
        diverges_at = min(len(reference.tokens), len(other.tokens))
    largest = Difference(0.0, 0, "", (None, None), diverges_at)
    both = list(zip(reference.logprobs, other.logprobs, strict=False))
    for position, (left, right) in enumerate(both if diverges_at is None else both[: diverges_at + 1]):
        for token in dict.fromkeys(chain(left, right)):
            size = _difference(left, right, token)
            if size > largest.size:
                largest = Difference(size, position, token, (left.get(token), right.get(token)), diverges_at)
    return largest


def _difference(left: Mapping[str, float], right: Mapping[str, float], token: str) -> float:
    if not left or not right:
        return 0.0
    first, second = left.get(token), right.get(token)
    if first is None and second is None:
        return 0.0
    if first is None:
        # Not among the most probable tokens: its log-probability is at most the least of the list.
        return max(0.0, _floor(second) - _floor(min(left.values())))
    if second is None:
        return max(0.0, _floor(first) - _floor(min(right.values())))
    return abs(_floor(first) - _floor(second))


def _floor(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
