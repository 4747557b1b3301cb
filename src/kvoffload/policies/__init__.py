"""Eviction policies: one file each, found by name."""

from __future__ import annotations

from kvoffload.plugins import Registry
from kvoffload.policies.base import BlockwisePolicy, EvictionPolicy

POLICIES: Registry[EvictionPolicy] = Registry(
    "policy",
    EvictionPolicy,
    "kvoffload.policies",
    {"lru": "kvoffload.policies.lru:LRU", "arc": "kvoffload.policies.arc:ARC"},
)

DEFAULT = "lru"
"""What is used if nobody says otherwise."""

FLAGSHIP = "lru"
"""What we would use ourselves."""

__all__ = ["DEFAULT", "FLAGSHIP", "POLICIES", "BlockwisePolicy", "EvictionPolicy"]
