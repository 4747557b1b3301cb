"""The state machine of `testing.state_machine` on every built-in policy and rule, and on the twins."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.admission import Admission
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.core.policy import POLICIES, REFUSED
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from kvoffload.testing.state_machine import ManagerMachine, manager_machine
from support.naive.arc import NaiveARC
from support.naive.fifo import NaiveFIFO
from support.naive.gdsf import NaiveGDSF
from support.naive.hazard import NaiveHazard
from support.naive.lfu import NaiveLFU
from support.naive.lirs import NaiveLIRS
from support.naive.lru import NaiveLRU
from support.naive.reuse import NaiveReuse
from support.naive.s3fifo import NaiveS3FIFO
from support.naive.sieve import NaiveSIEVE
from support.naive.slru import NaiveSLRU
from support.naive.tinylfu import NaiveTinyLFU
from support.naive.two_q import NaiveTwoQ
from support.naive.wtinylfu import NaiveWTinyLFU
from support.small_hazard import SmallHazard
from support.tenant_machine import TenantMachine


class SmallNaiveHazard(NaiveHazard):
    history_capacity, sample_capacity, half_life, warm_up = 9, 2, 40, 1


class RefusesAtRandom(NaiveLRU):
    """LRU that refuses 30 % of the blocks at random, unless they are admitted."""

    name = "refuses-at-random"
    refuses = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.random = random.Random(5)

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        refusing = False
        entering = []
        for row, key in enumerate(keys):
            if row >= num_free:
                refusing = (refusing and protected.one_prefix) or self.random.random() < 0.3
                refusing = refusing and not protected.admitted
                slots[row] = REFUSED if refusing else self.victim(key, protected)
            if slots[row] != REFUSED:
                entering.append(int(slots[row]))
        self.slots += reversed(entering)


def run_machine(
    policy: Any,
    admission: str | Callable[[], Admission] = "all",
    *,
    store: str = ON_COMPUTE,
    capacity_blocks: int = 5,
    key_bytes: int = 32,
    share: float = 1.0,
    base: type[ManagerMachine] = ManagerMachine,
) -> None:
    """Run the state machine for a share of the profile's histories; `make test` runs half of them."""
    if settings.get_current_profile_name() == "dev":
        share /= 2
    machine = manager_machine(
        policy,
        admission,
        store=store,
        capacity_blocks=capacity_blocks,
        key_bytes=key_bytes,
        max_examples=max(2, round(settings().max_examples * share)),
        base=base,
    )
    run_state_machine_as_test(machine, settings=machine.TestCase.settings)


BUILT_IN: list[Any] = [SmallHazard if name == "hazard" else name for name in POLICIES.names()]
GATES: dict[int, Callable[[], Admission]] = {
    8: lambda: ReuseAdmission(8, 2, 40),
    20: lambda: ReuseAdmission(20, 2, 7),
}
"""Length of keys -> an admission filter that remembers so few keys that it forgets some."""


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_policy(policy: Any) -> None:
    run_machine(policy, key_bytes=36, share=0.6)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_policy_of_one_block(policy: Any) -> None:
    run_machine(policy, capacity_blocks=1, key_bytes=5, share=0.15)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_policy_behind_a_gate(policy: Any) -> None:
    run_machine(policy, GATES[8], capacity_blocks=4, key_bytes=8, share=0.2)
    run_machine(policy, "tinylfu", capacity_blocks=2, share=0.2)


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.slow
def test_a_victim_tier(policy: Any) -> None:
    run_machine(policy, store=ON_DEVICE_EVICTION, key_bytes=8, share=0.5)


@pytest.mark.parametrize("policy", [*BUILT_IN, NaiveLRU, RefusesAtRandom])
def test_tenants(policy: Any) -> None:
    run_machine(policy, key_bytes=8, share=0.3, base=TenantMachine)
    run_machine(policy, key_bytes=8, share=0.2, store=ON_DEVICE_EVICTION, base=TenantMachine)


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.slow
def test_tenants_for_longer(policy: Any) -> None:
    run_machine(policy, key_bytes=8, capacity_blocks=8, base=TenantMachine)
    run_machine(policy, GATES[8], key_bytes=8, share=0.5, base=TenantMachine)
    run_machine(policy, GATES[8], key_bytes=8, store=ON_DEVICE_EVICTION, base=TenantMachine)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.slow
def test_lru_and_arc_for_longer(policy: str) -> None:
    run_machine(policy, GATES[20], capacity_blocks=3, key_bytes=20)
    run_machine(policy, store=ON_DEVICE_EVICTION, admission=GATES[20], key_bytes=20)
    run_machine(policy, store=ON_DEVICE_EVICTION, capacity_blocks=1, key_bytes=5, share=0.2)


@pytest.mark.parametrize("admission", ["reuse:2", "tinylfu"])
@pytest.mark.slow
def test_a_rule_by_name(admission: str) -> None:
    run_machine("lru", admission, share=0.03)  # An audit of `reuse:2` reads its 64,000 places.
    run_machine("lru", admission, store=ON_DEVICE_EVICTION, share=0.03)


@pytest.mark.parametrize("write_cost", [0.0, -1.0])
def test_a_write_cost(write_cost: float) -> None:
    policy = type("Dialled", (SmallHazard,), {"write_cost": write_cost})
    run_machine(policy, share=0.03)
    run_machine(policy, store=ON_DEVICE_EVICTION, share=0.03)


@pytest.mark.parametrize("store", [ON_COMPUTE, ON_DEVICE_EVICTION])
@pytest.mark.parametrize("admission", ["all", GATES[8]], ids=["all", "gated"])
def test_a_policy_that_refuses_at_random(admission: Any, store: str) -> None:
    run_machine(RefusesAtRandom, admission, store=store, key_bytes=8, share=0.4)


@pytest.mark.parametrize(
    "policy",
    [NaiveLRU, NaiveARC, NaiveFIFO, NaiveSLRU, NaiveLFU, NaiveSIEVE, NaiveS3FIFO, NaiveTwoQ, NaiveLIRS,
     NaiveWTinyLFU, NaiveGDSF, SmallNaiveHazard],
)  # fmt: skip
def test_a_naive_twin(policy: Any) -> None:
    """Short, because other tests compare the twins with the kernels."""
    run_machine(policy, share=0.1)
    run_machine(policy, store=ON_DEVICE_EVICTION, share=0.05)


@pytest.mark.parametrize("admission", [lambda: NaiveReuse(2, 4), lambda: NaiveTinyLFU(5)])
def test_a_naive_rule(admission: Callable[[], Admission]) -> None:
    run_machine(NaiveLRU, admission, share=0.2)
    run_machine(RefusesAtRandom, admission, store=ON_DEVICE_EVICTION, share=0.2)
