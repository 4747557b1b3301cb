"""``hazard``, our own policy. The module `policy` has the decisions; the other modules are its data
structures."""

from kvoffload.policies.hazard.policy import Hazard

__all__ = ["Hazard"]
