"""Every decision of every kernel against that of a naive twin, which is written to be read, not to be fast.

`hazard`, which has more inside, is compared in test_hazard.py; what a policy's paper says, worked by hand,
stands in the file of the policy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES, EvictionPolicy
from kvoffload.structures.index import ABSENT
from kvoffload.testing.audit import audit
from kvoffload.testing.naive.arc import NaiveARC
from kvoffload.testing.naive.fifo import NaiveFIFO
from kvoffload.testing.naive.gdsf import NaiveGDSF
from kvoffload.testing.naive.lfu import NaiveLFU
from kvoffload.testing.naive.lirs import NaiveLIRS
from kvoffload.testing.naive.lru import NaiveLRU
from kvoffload.testing.naive.s3fifo import NaiveS3FIFO
from kvoffload.testing.naive.sieve import NaiveSIEVE
from kvoffload.testing.naive.slru import NaiveSLRU
from kvoffload.testing.naive.two_q import NaiveTwoQ
from kvoffload.testing.naive.wtinylfu import NaiveWTinyLFU
from kvoffload.testing.scripts import Step, play, scripts

FEWER = settings(max_examples=settings().max_examples // 3)
"""Of scripts that are longer."""


class Pair(NamedTuple):
    """A policy's twin, and settings that make what is rare at the defaults happen in short scripts."""

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
    """Managers of a policy and of its twin."""
    pair = PAIRS[name]
    policies = [POLICIES.find(name), pair.twin]
    if tight:
        policies = [type("Tight", (policy,), pair.tight) for policy in policies]
    return [OffloadingManager(capacity, key_bytes=8, policy=policy, **options) for policy in policies]


def inside(manager: OffloadingManager) -> list[Any]:
    """All that a policy tells of itself, after an audit."""
    audit(manager)
    policy: Any = manager.policy
    told: list[Any] = [policy.order(), policy.stats()]
    told += [
        getattr(policy, part)() for part in ("lists", "marks", "ranks", "queues") if hasattr(policy, part)
    ]
    if hasattr(policy, "queues"):
        ghosts, index = policy.queues()[2], manager.index
        assert len(set(ghosts)) == len(ghosts) <= max(1, manager.capacity_blocks - 1)
        both = [key for key in ghosts if index.position_of(key) != ABSENT]
        assert not both, f"keys are here and remembered as gone: {both}"
    return told


def test_every_policy_has_a_twin() -> None:
    assert sorted([*PAIRS, "hazard"]) == POLICIES.names()


@given(scripts(max_steps=80), st.sampled_from([1, 2, 3, 4, 5, 7, 9]), st.booleans(), st.sampled_from(STORES))
@pytest.mark.parametrize("name", PAIRS)
def test_decides_as_its_naive_twin(
    name: str, script: list[Step], capacity: int, tight: bool, store: str
) -> None:
    kernel, twin = both(name, capacity, tight=tight, store=store)
    for seen, expected in zip(play(kernel, script, inside), play(twin, script, inside), strict=True):
        assert seen == expected


@FEWER
@given(scripts(num_keys=60, num_requests=4, max_steps=120), st.integers(20, 30))
@pytest.mark.parametrize("name", PAIRS)
def test_with_room_for_queues(name: str, script: list[Step], capacity: int) -> None:
    kernel, twin = both(name, capacity)
    assert play(kernel, script, inside) == play(twin, script, inside)


@FEWER
@given(scripts(num_keys=200, max_steps=60))
@pytest.mark.parametrize("name", PAIRS)
def test_when_a_hundredth_is_two_blocks(name: str, script: list[Step]) -> None:
    """The window of W-TinyLFU and the HIR blocks of LIRS, among 200."""
    logs = []
    for manager in both(name, 200):
        plan = manager.prepare_store([bytes([200 + n % 50, n]) * 4 for n in range(195)])
        assert plan is not None
        manager.complete_store(plan)
        logs.append(play(manager, script, lambda manager: manager.policy.order()))
    assert logs[0] == logs[1]
