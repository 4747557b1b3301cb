"""Value of a purchase: the GPUs that it replaces, the price of their hours, and the payback time."""

from __future__ import annotations

import msgspec

from kvoffload.plan.clock import InTime
from kvoffload.plan.findings import Findings
from kvoffload.plan.rows import PlanRow

LIFE_DAYS = 5 * 365
"""Assumed life of hardware, in days. If the payback time is longer, the purchase does not pay off."""
NO_MORE = 0.0005
"""Smallest share that is not printed as 0.0%."""
LEAST_GPUS = 0.005
"""Smallest number of GPUs that is not printed as 0.00."""


class Payback(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a purchase, computed from the price of a GPU-hour.

    Attributes:
        gpus: number of GPUs that the purchase replaces (`gpus_saved`).
        saved_a_year: price of these GPUs for a year.
        days: days until the price of these GPUs' hours equals the price of the purchase. Null if `gpus` is
            below `LEAST_GPUS`.
    """

    gpus: float
    saved_a_year: float
    days: float | None


def saves_less_in_time(row: PlanRow, timed: InTime | None) -> bool:
    """Return True if a timed replay of all engines saves less than the untimed replay of the row."""
    if timed is None or timed.is_one_of_several:
        return False
    return row.saved - timed.with_offload.hit_ratio >= NO_MORE


def gpus_saved(row: PlanRow, timed: InTime | None) -> float | None:
    """Return the number of GPUs that a purchase replaces; None without speeds or times.

    If the timed replay saves less than the untimed replay, the result is less than `PlanRow.gpus_worth`.
    """
    if row.gpus_worth is None:
        return None
    if timed is None or not saves_less_in_time(row, timed):
        return row.gpus_worth
    gain = max(0.0, timed.with_offload.hit_ratio - timed.without.hit_ratio)
    share = min(1.0, gain / (row.saved - row.by_gpus)) if row.saved > row.by_gpus else 0.0
    return share * row.gpus_worth


def payback_of(findings: Findings) -> Payback | None:
    """Compute the payback of the recommended purchase.

    Returns None if nothing is purchased, or if the speed of the GPUs, the times or the price of an hour is
    unknown.
    """
    row, gpu_hour = findings.row, findings.fleet.prices.gpu_hour
    gpus = gpus_saved(row, findings.in_time)
    if gpus is None or not row.price or not gpu_hour:
        return None
    a_day = 24 * gpus * gpu_hour
    days = row.price / a_day if gpus >= LEAST_GPUS else None
    return Payback(gpus=gpus, saved_a_year=365 * a_day, days=days)
