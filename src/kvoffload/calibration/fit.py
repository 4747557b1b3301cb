"""Fits prefill times by least squares. Determines the costs of a step, of a token, and of attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_prefill(
    tokens: Sequence[int], seconds: Sequence[float], step_tokens: int
) -> tuple[float, float, float]:
    """Fit ``seconds = step_s * steps + linear * n + squared * n * n`` for prompts of `n` tokens.

    Args:
        tokens: length of each measured prompt.
        seconds: measured time of each prompt.
        step_tokens: largest number of tokens that a step computes. It determines the number of steps.

    Returns `step_s`, `linear` and `squared`. In `Machine` these are `step_s`, `prefill_s_per_token` and
    `prefill_s_per_token_squared`. No coefficient is negative. The fit minimizes relative errors, so that
    short prompts have the same weight as long prompts.
    """
    lengths, times = np.array(tokens, float), np.array(seconds, float)
    columns = np.stack([np.ceil(lengths / step_tokens), lengths, lengths * lengths])
    best, least_error = np.zeros(3), np.inf
    for count in range(1, min(3, len(set(tokens))) + 1):
        for chosen in combinations((1, 2, 0), count):
            weighted = (columns[list(chosen)] / times).T
            coefficients, *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
            error = float(np.square(weighted @ coefficients - 1.0).sum())
            if (coefficients >= 0).all() and error < least_error - 1e-12:
                best, least_error = np.zeros(3), error
                best[list(chosen)] = coefficients
    return float(best[0]), float(best[1]), float(best[2])
