"""Eviction policies: one file each, found by name."""

from __future__ import annotations

from kvoffload.plugins import Registry
from kvoffload.policies.base import REFUSED, BlockwisePolicy, EvictionPolicy

POLICIES: Registry[EvictionPolicy] = Registry(
    "policy",
    EvictionPolicy,
    "kvoffload.policies",
    {
        "arc": "kvoffload.policies.arc:ARC",
        "hazard": "kvoffload.policies.hazard:Hazard",
        "lru": "kvoffload.policies.lru:LRU",
    },
)

__all__ = ["POLICIES", "REFUSED", "BlockwisePolicy", "EvictionPolicy"]
