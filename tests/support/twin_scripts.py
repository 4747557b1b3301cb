"""Managers of a policy and of its naive twin, for scripts."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.policies.s3fifo import S3FIFO
from kvoffload.structures.index import ABSENT
from kvoffload.testing.audit import audit
from support.naive.arc import NaiveARC
from support.naive.fifo import NaiveFIFO
from support.naive.gdsf import NaiveGDSF
from support.naive.lfu import NaiveLFU
from support.naive.lirs import NaiveLIRS
from support.naive.lru import NaiveLRU
from support.naive.s3fifo import NaiveS3FIFO
from support.naive.sieve import NaiveSIEVE
from support.naive.slru import NaiveSLRU
from support.naive.two_q import NaiveTwoQ
from support.naive.wtinylfu import NaiveWTinyLFU
from support.policy_state import lists_of


class Pair(NamedTuple):
    """A policy's twin, and parameters that make rare cases frequent in short scripts."""

    twin: type[EvictionPolicy]
    tight: dict[str, Any]


PAIRS = {
    "2q": Pair(NaiveTwoQ, {}),
    "arc": Pair(NaiveARC, {}),
    "fifo": Pair(NaiveFIFO, {}),
    "gdsf": Pair(NaiveGDSF, {}),
    "lfu": Pair(NaiveLFU, {"max_count": 3}),
    "lirs": Pair(NaiveLIRS, {}),
    "lru": Pair(NaiveLRU, {}),
    "s3fifo": Pair(NaiveS3FIFO, {"patience": 2, "small_share": 0.3}),
    "sieve": Pair(NaiveSIEVE, {"patience": 2}),
    "slru": Pair(NaiveSLRU, {"proven_share": 0.5}),
    "wtinylfu": Pair(NaiveWTinyLFU, {}),
}


def both(name: str, capacity: int, *, tight: bool = False, **options: Any) -> list[OffloadingManager]:
    """Create managers of a policy and of its twin."""
    pair = PAIRS[name]
    policies = [POLICIES.find(name), pair.twin]
    if tight:
        policies = [type("Tight", (policy,), pair.tight) for policy in policies]
    return [OffloadingManager(capacity, key_bytes=8, policy=policy, **options) for policy in policies]


def inside(manager: OffloadingManager) -> list[Any]:
    """Return the reported state of a policy or its twin, after an audit."""
    audit(manager)
    policy: Any = manager.policy
    lists = lists_of(policy)
    if isinstance(policy, (S3FIFO, NaiveS3FIFO)):
        ghosts, index = lists[2], manager.index
        assert len(set(ghosts)) == len(ghosts) <= max(1, manager.capacity_blocks - 1)
        both = [key for key in ghosts if index.position_of(key) != ABSENT]
        assert not both, f"keys are resident and ghosts: {both}"
    return [policy.order(), policy.stats(), lists]
