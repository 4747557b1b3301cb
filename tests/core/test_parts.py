"""Requests that offer their prefix in parts, as vLLM does: nothing is stored behind a refused block."""

from __future__ import annotations

import random

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_DEVICE_EVICTION, StorePlan
from kvoffload.core.policy import REFUSED
from kvoffload.core.protection import Protected
from kvoffload.core.request import RequestContext
from kvoffload.core.slots import SlotArray
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from support.naive.lru import NaiveLRU
from support.small_hazard import SmallHazard

OLD = [bytes([1, 0, 0, number]) for number in range(4)]
NEW = [bytes([2, 0, 0, number]) for number in range(8)]


class RefusesOnce(NaiveLRU):
    """LRU that refuses once: the first block for which no slot is free, and the later blocks of its offer."""

    name = "refuses-once"
    refuses = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.has_refused = False

    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        stored = len(keys)
        if num_free < stored and not self.has_refused and not protected.admitted:
            self.has_refused, stored = True, num_free
            slots[num_free : len(keys)] = REFUSED
        for row in range(num_free, stored):
            slots[row] = self.victim(keys[row], protected)
        self.slots += map(int, slots[:stored])


def manager_of(**options: str) -> OffloadingManager:
    manager = OffloadingManager(4, policy=RefusesOnce, key_bytes=4, explain_misses=True, **options)
    store(manager, OLD)
    return manager


def store(manager: OffloadingManager, keys: list[bytes]) -> None:
    manager.complete_store(planned(manager.prepare_store(keys)))


def planned(plan: StorePlan | None) -> StorePlan:
    assert plan is not None
    return plan


def test_parts_behind_a_refused_block_are_refused() -> None:
    manager = manager_of()
    request = manager.begin_request("parts", NEW)
    counts = []
    for start in (0, 2, 4, 6):
        plan = planned(manager.prepare_store(NEW[start : start + 2], request))
        counts.append((len(plan), plan.num_refused, plan.num_dropped, sorted(plan.rows.tolist())))
        manager.complete_store(plan)
    assert counts == [(0, 2, 0, [])] * 4
    assert manager.stats().refused == 8
    assert manager.contains(OLD).all()
    manager.finish_request(request)
    manager.lookup(NEW)
    assert manager.stats().evicted == 0


def test_parts_behind_a_refused_block_are_refused_on_a_path_that_grows() -> None:
    manager = manager_of()
    request = manager.begin_request("its later keys are not known yet")
    path = [bytes([3, 0, 0, number]) for number in range(40)]
    for start in range(0, 40, 4):
        assert planned(manager.prepare_store(path[start : start + 4], request)).num_refused == 4
    assert manager.contains(OLD).all()


def test_an_offer_that_contains_the_refused_block_is_decided_anew() -> None:
    manager = manager_of()
    request = manager.begin_request("parts", NEW)
    assert planned(manager.prepare_store(NEW[:2], request)).num_refused == 2
    plan = planned(manager.prepare_store(NEW[1:3], request))
    assert plan.num_refused == 2, "the first refused block is not among them"
    plan = planned(manager.prepare_store(NEW[:3], request))
    assert (len(plan), plan.num_refused) == (3, 0)
    manager.complete_store(plan)
    plan = planned(manager.prepare_store(NEW[3:4], request))
    assert (len(plan), plan.num_refused) == (1, 0), "no block of this prefix is missing now"


def test_other_requests_and_admitted_blocks_are_not_refused() -> None:
    manager = manager_of()
    request = manager.begin_request("parts", NEW)
    assert planned(manager.prepare_store(NEW[:2], request)).num_refused == 2
    assert len(planned(manager.prepare_store(NEW[2:4], request, admitted=True))) == 2
    assert planned(manager.prepare_store(NEW[4:5], request)).num_refused == 1
    other = manager.begin_request("other", NEW)
    plan = planned(manager.prepare_store(NEW[:1], other))
    assert (len(plan), plan.num_refused) == (1, 0)
    manager.complete_store(plan)
    plan = planned(manager.prepare_store(NEW[4:5], request))
    assert (len(plan), plan.num_refused) == (1, 0), "the other request has stored the refused block"


def test_the_admission_rule_is_not_asked_about_unreachable_blocks() -> None:
    manager = manager_of(admission="reuse:1")
    request = manager.begin_request("parts", NEW)
    assert planned(manager.prepare_store(NEW[:2], request)).num_refused == 2
    plan = planned(manager.prepare_store(NEW[2:5], request))
    assert (len(plan), plan.num_refused, plan.num_dropped) == (0, 3, 0)


def test_a_victim_tier_decides_on_each_block() -> None:
    manager = OffloadingManager(4, policy=RefusesOnce, key_bytes=4, store=ON_DEVICE_EVICTION)
    store(manager, OLD)
    request = manager.begin_request("parts", NEW)
    assert planned(manager.prepare_store(NEW[:2], request)).num_refused == 2
    assert len(planned(manager.prepare_store(NEW[2:4], request))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_new_block_follows_a_refused_block(seed: int) -> None:
    """Checked on `hazard`, with concurrent requests in parts of one to four blocks."""
    chance = random.Random(seed)
    manager = OffloadingManager(24, policy=SmallHazard, key_bytes=4)
    running: list[tuple[list[bytes], int, RequestContext]] = []
    refused: dict[str, bytes] = {}
    num_refused = 0
    for step in range(400):
        if len(running) < 3:
            session = chance.randrange(12)
            path = [bytes([session, step % 250 if chance.random() < 0.3 else 0, 0, n]) for n in range(10)]
            running.append((path, 0, manager.begin_request(str(step), path)))
        at = chance.randrange(len(running))
        path, start, request = running[at]
        end = min(start + chance.randint(1, 4), len(path))
        is_cut = request.request_id in refused and not manager.contains([refused[request.request_id]])[0]
        plan = planned(manager.prepare_store(path[start:end], request))
        if is_cut:
            assert len(plan) == 0, f"seed {seed}, step {step}: stored behind a refused block"
        elif plan.num_refused:
            absent = [
                key for key in path[start:end] if not manager.contains([key])[0] and key not in plan.keys
            ]
            refused[request.request_id] = absent[0]
        num_refused += plan.num_refused
        manager.complete_store(plan)
        running[at] = path, end, request
        if end == len(path):
            manager.finish_request(request)
            del running[at]
    assert num_refused > 0
