"""All decisions of every compiled policy, compared with its naive twin.

test_hazard.py compares `hazard`. The file of each policy has the paper's example worked by hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.core.hints import Hints
from kvoffload.core.plans import STORES
from kvoffload.core.policy import POLICIES
from kvoffload.core.tenants import Quota
from kvoffload.testing.scripts import Step, play, scripts
from support.twin_scripts import PAIRS, both, inside

FEWER = settings(max_examples=settings().max_examples // 3)
"""Settings of tests with longer scripts."""


def test_every_policy_has_a_twin() -> None:
    assert sorted([*PAIRS, "hazard"]) == POLICIES.names()


@given(scripts(max_steps=80), st.sampled_from([1, 2, 3, 4, 5, 7, 9]), st.booleans(), st.sampled_from(STORES))
@pytest.mark.parametrize("name", PAIRS)
def test_decides_as_its_naive_twin(
    name: str, script: list[Step], capacity: int, tight: bool, store: str
) -> None:
    kernel, twin = both(name, capacity, tight=tight, store=store)
    for decision, expected in zip(play(kernel, script, inside), play(twin, script, inside), strict=True):
        assert decision == expected


@FEWER
@given(scripts(num_keys=40, max_steps=120), st.integers(6, 14), st.integers(1, 5), st.sampled_from(STORES))
@pytest.mark.parametrize("name", PAIRS)
def test_with_tenants(name: str, script: list[Step], capacity: int, low: int, store: str) -> None:
    """A search of a kernel begins where an earlier one ended, a search of a twin at the coldest block."""
    logs, requests = [], [Hints(tenant=tenant) for tenant in ("a", "b", "")]
    for manager in both(name, capacity, store=store):
        manager.set_tenants({"a": Quota(low), "b": Quota(1, capacity - low), "other": Quota(0, low)})
        manager.store_mode.cache.tenants.stride = 1
        logs.append(play(manager, script, inside, requests))
    assert logs[0] == logs[1]


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
    """With 200 blocks the window of W-TinyLFU and the HIR part of LIRS have two blocks."""
    logs = []
    for manager in both(name, 200):
        plan = manager.prepare_store([bytes([200 + n % 50, n]) * 4 for n in range(195)])
        assert plan is not None
        manager.complete_store(plan)
        logs.append(play(manager, script, lambda manager: manager.policy.order()))
    assert logs[0] == logs[1]
