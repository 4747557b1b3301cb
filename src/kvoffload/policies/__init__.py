"""Eviction policies: one file each, found by name."""

from __future__ import annotations

from kvoffload.plugins import Registry
from kvoffload.policies.base import REFUSED, BlockwisePolicy, EvictionPolicy

POLICIES: Registry[EvictionPolicy] = Registry(
    "policy",
    EvictionPolicy,
    "kvoffload.policies",
    {
        "2q": "kvoffload.policies.two_q:TwoQ",
        "arc": "kvoffload.policies.arc:ARC",
        "fifo": "kvoffload.policies.fifo:FIFO",
        "gdsf": "kvoffload.policies.gdsf:GDSF",
        "hazard": "kvoffload.policies.hazard:Hazard",
        "lfu": "kvoffload.policies.lfu:LFU",
        "lirs": "kvoffload.policies.lirs:LIRS",
        "lru": "kvoffload.policies.lru:LRU",
        "s3fifo": "kvoffload.policies.s3fifo:S3FIFO",
        "sieve": "kvoffload.policies.sieve:SIEVE",
        "slru": "kvoffload.policies.slru:SLRU",
        "wtinylfu": "kvoffload.policies.wtinylfu:WTinyLFU",
    },
)

DEFAULT = "lru"
"""What is used if nobody says otherwise."""

FLAGSHIP = "hazard"
"""What we would use ourselves."""

__all__ = ["DEFAULT", "FLAGSHIP", "POLICIES", "REFUSED", "BlockwisePolicy", "EvictionPolicy"]
