"""Hazard with small tables, for state machines."""

from __future__ import annotations

from kvoffload.policies.hazard.policy import Hazard


class SmallHazard(Hazard):
    """Small enough that its history and sample overflow, and that its guards change their mind."""

    history_capacity, sample_capacity, half_life, duel_window, warm_up = 9, 2, 40, 8, 1
