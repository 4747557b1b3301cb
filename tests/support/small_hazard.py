"""A Hazard policy with small tables, for state machines."""

from __future__ import annotations

from kvoffload.policies.hazard.policy import Hazard


class SmallHazard(Hazard):
    """A Hazard policy whose history and sample overflow, and whose guards switch often."""

    history_capacity, sample_capacity, half_life, warm_up = 9, 2, 40, 1
