"""A manager whose keys are single letters, for tests of the control plane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LoadPlan, LookupResult, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.policies.hazard.policy import Hazard
from kvoffload.testing.audit import audit
from support.naive.arc import NaiveARC
from support.naive.lru import NaiveLRU
from support.small_hazard import HazardOfFewKeys

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
POLICIES: list[Any] = ["lru", "arc", "fifo", "slru", "lfu", "sieve", "s3fifo", NaiveLRU, NaiveARC]


def make(policy: Any = "lru", capacity_blocks: int = 4, **options: Any) -> OffloadingManager:
    """Create a manager. Hazard gets small tables, so that audits are fast."""
    if policy in ("hazard", Hazard):
        policy = HazardOfFewKeys
    return OffloadingManager(capacity_blocks, key_bytes=1, policy=policy, enable_events=True, **options)


def keys(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def text(keys_found: Iterable[bytes]) -> str:
    return b"".join(keys_found).decode()


def begin_store(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> StorePlan:
    """Offer blocks; the manager must return a plan."""
    plan = manager.prepare_store(keys(letters), ctx)
    assert plan is not None
    audit(manager)
    return plan


def store(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> StorePlan:
    """Store blocks."""
    plan = begin_store(manager, letters, ctx)
    manager.complete_store(plan)
    audit(manager)
    return plan


def load(manager: OffloadingManager, letters: str, ctx: RequestContext | None = None) -> LoadPlan:
    return manager.prepare_load(keys(letters), ctx)


def use(manager: OffloadingManager, letters: str) -> None:
    """Run a request for each letter, which loads the block if it is ready and stores it otherwise."""
    for letter in letters:
        ctx = manager.begin_request(letter)
        if manager.lookup(keys(letter), ctx).num_ready:
            manager.complete_load(load(manager, letter, ctx))
        else:
            store(manager, letter, ctx)
        manager.finish_request(ctx)


def states(manager: OffloadingManager, letters: str) -> list[LookupResult]:
    return [manager.lookup_key(key) for key in keys(letters)]


def letters_at(manager: OffloadingManager, slots: Sequence[int]) -> str:
    return text(map(manager.index.key_at, slots))


def readable(manager: OffloadingManager) -> str:
    """Return the events since the last call, in order: +a became readable, -a left."""
    return "".join(
        f"{'-' if event.removed else '+'}{key.decode()}"
        for event in manager.take_events()
        for key in event.keys
    )
