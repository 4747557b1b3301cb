"""Eviction policies: one file each, found by name."""

from __future__ import annotations

from kvoffload.plugins import Registry
from kvoffload.policies.base import BlockwisePolicy, EvictionPolicy

POLICIES: Registry[EvictionPolicy] = Registry(
    "policy",
    EvictionPolicy,
    "kvoffload.policies",
    {
        "lru": "kvoffload.policies.lru:LRU",
        "arc": "kvoffload.policies.arc:ARC",
        "2q": "kvoffload.policies.two_q:TwoQ",
        "lirs": "kvoffload.policies.lirs:LIRS",
        "wtinylfu": "kvoffload.policies.wtinylfu:WTinyLFU",
        "gdsf": "kvoffload.policies.gdsf:GDSF",
    },
)

__all__ = ["POLICIES", "BlockwisePolicy", "EvictionPolicy"]
