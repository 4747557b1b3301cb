"""Hazard policies with small tables, because an audit reads all of them."""

from __future__ import annotations

from kvoffload.policies.hazard.policy import Hazard


class HazardOfFewKeys(Hazard):
    """Hazard with room for 512 keys instead of 65,536; enough for tests whose keys are letters."""

    history_capacity, sample_capacity = 512, 512


class SmallHazard(Hazard):
    """A Hazard policy whose history and sample overflow, and whose guards switch often."""

    history_capacity, sample_capacity, half_life, warm_up = 9, 2, 40, 1
