"""Answers with log-probabilities, and the difference between two answers to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

LEAST_LOGPROB = -100.0
"""Lower limit of log-probabilities. Smaller values are raised to the limit, because servers send different
large negative numbers for a probability of 0."""


@dataclass(frozen=True)
class Answer:
    """A completion at temperature 0.

    Attributes:
        tokens: the generated tokens, as text.
        logprobs: log-probabilities of the most probable tokens at each position. A model with damaged KV may
            give NaN.
    """

    tokens: Sequence[str]
    logprobs: Sequence[Mapping[str, float]]

    @property
    def has_logprobs(self) -> bool:
        """True if a log-probability is above `LEAST_LOGPROB`."""
        return any(logprob > LEAST_LOGPROB for row in self.logprobs for logprob in row.values())

    @property
    def has_nan(self) -> bool:
        """True if a log-probability is NaN."""
        return any(math.isnan(logprob) for row in self.logprobs for logprob in row.values())


@dataclass(frozen=True)
class Difference:
    """The largest difference between two answers to one prompt.

    Positions after the first different token are not compared, because their contexts differ.

    Attributes:
        size: difference between the two log-probabilities of `token`. If only one answer lists `token`, a
            lower bound of the difference.
        position: position of the difference among the generated tokens, from 0.
        token: the token whose log-probabilities differ most.
        logprobs: log-probability of `token` in the reference and in the other answer; None if not listed.
        diverges_at: position of the first different token; None if all tokens are equal.
    """

    size: float
    position: int
    token: str
    logprobs: tuple[float | None, float | None]
    diverges_at: int | None


def compare(reference: Answer, other: Answer) -> Difference:
    """Return the largest difference between two answers."""
    tokens = enumerate(zip(reference.tokens, other.tokens, strict=False))
    diverges_at = next((position for position, pair in tokens if pair[0] != pair[1]), None)
    if diverges_at is None and len(reference.tokens) != len(other.tokens):
        diverges_at = min(len(reference.tokens), len(other.tokens))
    largest = Difference(0.0, 0, "", (None, None), diverges_at)
    compared = None if diverges_at is None else diverges_at + 1
    rows = zip(reference.logprobs[:compared], other.logprobs[:compared], strict=False)
    for position, (expected, actual) in enumerate(rows):
        for token in dict.fromkeys(chain(expected, actual)):
            size = _difference(expected, actual, token)
            if size > largest.size:
                logprobs = expected.get(token), actual.get(token)
                largest = Difference(size, position, token, logprobs, diverges_at)
    return largest


def _difference(expected: Mapping[str, float], actual: Mapping[str, float], token: str) -> float:
    """Return the difference between the log-probabilities of a token in two mappings.

    If one mapping lacks the token, returns a lower bound. If one mapping is empty, returns 0.
    """
    if not expected or not actual:
        return 0.0
    # A token that is not listed has at most the least log-probability of the list.
    bounds = [
        _floor(row[token]) if token in row else min(map(_floor, row.values())) for row in (expected, actual)
    ]
    if token in expected and token in actual:
        return abs(bounds[0] - bounds[1])
    return max(0.0, bounds[0] - bounds[1] if token in expected else bounds[1] - bounds[0])


def _floor(logprob: float) -> float:
    """Return the log-probability, at least `LEAST_LOGPROB`. NaN counts as a probability of 0."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
