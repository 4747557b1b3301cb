"""``hazard``, our own policy. `policy` decides; the other files are its data structures."""

from kvoffload.policies.hazard.policy import Hazard

__all__ = ["Hazard"]
