"""The numerical difference of two blocks, and the limit up to which it may be due to rounding. For audits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as untyped_torch

from kvoffload.transfer.copies import Blocks

torch: Any = untyped_torch

LIMITS = {"float32": 0.005, "float16": 0.1, "bfloat16": 0.25, "float8_e4m3fn": 0.3, "float8_e5m2": 0.5}
"""Largest difference that counts as rounding, by the type of the stored values. Except for float32, a limit
is 3.5 to 4.5 times the largest difference that `bench/rounding.py` measured: models with random weights and
4 to 80 layers computed the same blocks in this type and in float32. Unrelated blocks differ by 1.4 to 1.8
(docs/canary.md)."""
_TF32_LIMIT = 0.1
"""Limit for float32 on a GPU, where kernels may multiply with a mantissa as short as that of float16."""

RUN_VALUES = 64
"""Number of consecutive values that are compared as one run. In every layout, a run is about one head of one
token."""
_LEAST_SHARE = 0.01
"""Least divisor in `difference`, as a share of the root mean square of the block's values."""


def difference(computed: Blocks, stored: Blocks, value_type: str) -> float:
    """Compare two blocks in runs of `RUN_VALUES` values; return the largest relative difference of a run.

    The relative difference of a run is the root mean square of the differences of its values, divided by the
    root mean square of its computed values. It is 0 for equal values, and about 1.4 for unrelated values.
    Returns infinity if the blocks differ in a value that is not finite.

    Runs are short because the values of heads and tokens differ by orders of magnitude. If the difference
    were relative to a whole layer, wrong values in a head of small values would be hidden.
    """
    kind = getattr(torch, value_type)
    computed_values, stored_values = (
        torch.from_numpy(np.ascontiguousarray(rows)).view(kind).double().numpy()
        for rows in (computed, stored)
    )
    finite = np.isfinite(computed_values) & np.isfinite(stored_values)
    if not np.array_equal(computed_values[~finite], stored_values[~finite], equal_nan=True):
        return float("inf")
    squared_value = np.where(finite, computed_values, 0.0) ** 2
    squared_difference = np.where(finite, computed_values - stored_values, 0.0) ** 2
    begins = np.arange(0, len(squared_value), RUN_VALUES)
    counts = np.diff([*begins.tolist(), len(squared_value)])
    near = np.add.reduceat(squared_value, begins) / counts
    apart = np.add.reduceat(squared_difference, begins) / counts
    least = _LEAST_SHARE**2 * squared_value.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(apart > 0.0, apart / np.maximum(near, least), 0.0)
    return float(np.sqrt(relative.max()))


def is_rounding(distance: float, value_type: str, *, on_cpu: bool) -> bool:
    """Return True if `distance`, a result of `difference`, may be due to rounding alone."""
    return distance <= (_TF32_LIMIT if value_type == "float32" and not on_cpu else LIMITS[value_type])
