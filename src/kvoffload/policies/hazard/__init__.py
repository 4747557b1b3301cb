"""``hazard``: the policy itself is `policy`, what it learns from stands beside it."""

from kvoffload.policies.hazard.policy import Hazard

__all__ = ["Hazard"]
