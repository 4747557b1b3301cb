"""``hazard``: `policy` is the policy, the other files are what it learns from."""

from kvoffload.policies.hazard.policy import Hazard

__all__ = ["Hazard"]
