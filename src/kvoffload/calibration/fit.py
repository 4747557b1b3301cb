"""From times of prompts to the cost of a step, of a token, and of attention: least squares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_prefill(
    tokens: Sequence[int], seconds: Sequence[float], step_tokens: int
) -> tuple[float, float, float]:
    """Seconds of a step, of a token and of a squared length: what `Machine` calls `step_s`,
    `prefill_s_per_token` and `prefill_s_per_token_squared`.

    ``seconds = step_s * steps + linear * n + squared * n * n``, where a prompt of `n` tokens takes a step for
    each `step_tokens` of them. Relative errors count, so that short prompts do. None of the three is
    negative: of all choices of them the one with the smallest error is taken.
    """
    lengths, times = np.array(tokens, float), np.array(seconds, float)
    columns = np.stack([np.ceil(lengths / step_tokens), lengths, lengths * lengths])
    best, least = np.zeros(3), np.inf
    for count in range(1, min(3, len(set(tokens))) + 1):
        for chosen in combinations((1, 2, 0), count):
            weighted = (columns[list(chosen)] / times).T
            found, *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
            error = float(np.square(weighted @ found - 1.0).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])
