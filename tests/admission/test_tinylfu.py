"""TinyLFU admission: unchecked blocks, the second reference, aging, and the naive twin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.admission.tinylfu import TinyLFUAdmission
from kvoffload.core.admission import Admission, create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit, snapshot
from kvoffload.testing.scripts import Step, long_lists, play, scripts
from support.letters import keys, load, make, store, text
from support.naive.tinylfu import NaiveTinyLFU


def offer(manager: OffloadingManager, letters: str) -> str:
    """Run a request that offers its blocks once; return the stored blocks."""
    ctx = manager.begin_request("r")
    plan = store(manager, letters, ctx)
    manager.finish_request(ctx)
    return text(plan.keys)


@pytest.fixture(params=[TinyLFUAdmission, NaiveTinyLFU])
def manager(request: pytest.FixtureRequest) -> OffloadingManager:
    rule: Admission = request.param(4)
    return make("lru", 4, admission=rule)


def test_the_first_blocks_enter_unchecked_the_others_when_used_again(manager: OffloadingManager) -> None:
    assert offer(manager, "abc") == "abc"
    assert offer(manager, "dxy") == "d"
    assert manager.stats().refused == 2
    assert offer(manager, "z") == ""
    assert offer(manager, "xyz") == "xyz"


def test_a_request_counts_once_for_any_number_of_lookups(manager: OffloadingManager) -> None:
    offer(manager, "abcd")
    ctx = manager.begin_request("r", keys("x"))
    for _ in range(3):
        manager.touch(keys("x"), ctx)
        assert len(store(manager, "x", ctx).keys) == 0
    manager.finish_request(ctx)
    assert offer(manager, "x") == "x"


def test_old_keys_are_forgotten(manager: OffloadingManager) -> None:
    offer(manager, "abcd")
    offer(manager, "x")
    for _ in range(35):  # the 40th reference halves the counts
        manager.touch(keys("a"))
    assert offer(manager, "x") == ""
    assert offer(manager, "x") == "x"


def test_blocks_after_a_refused_block_are_refused(manager: OffloadingManager) -> None:
    offer(manager, "abcd")
    offer(manager, "y")
    assert offer(manager, "xy") == ""
    assert offer(manager, "xy") == "xy"


def test_a_cache_that_holds_its_traffic_refuses_nothing() -> None:
    manager = make("lru", 26, admission="tinylfu")
    assert "".join(
        offer(manager, letters) for letters in ("abc", "abd", "efghijkl", "mnopqrst", "uvwxyz")
    ) == ("abcdefghijklmnopqrstuvwxyz")


def test_a_store_without_room_is_not_counted() -> None:
    rule = TinyLFUAdmission(2)
    manager = make("lru", 2, admission=rule)
    offer(manager, "ab")
    load(manager, "ab")
    before = snapshot(rule)
    assert manager.prepare_store(keys("c")) is None
    assert snapshot(rule) == before


def test_reset_forgets_counts_and_admits_the_first_blocks(manager: OffloadingManager) -> None:
    offer(manager, "abcdx")
    manager.reset()
    assert offer(manager, "vwyzx") == "vwyz"
    assert offer(manager, "x") == "x"


def test_it_is_found_by_name_with_the_size_of_the_cache() -> None:
    rule = make("arc", 16, admission="tinylfu").admission
    assert isinstance(rule, TinyLFUAdmission)
    assert len(rule._sketch.table) == 16


@pytest.mark.parametrize("spec", ["tinylfu:2", "tinylfu:", "tiny", "TinyLFU"])
def test_invalid_specifications_are_rejected(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"admission: .*(allowed: all, reuse, tinylfu|no parameters)"):
        create_admission(spec, 8, 10)


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_blocks: 0 is invalid"):
        TinyLFUAdmission(0)


batches = long_lists(st.lists(st.integers(0, 40), unique=True, max_size=9), max_size=40)


@given(batches, st.sampled_from([1, 3, 8, 17]))
def test_counts_as_its_naive_twin(requests: list[list[int]], capacity: int) -> None:
    rule, twin = TinyLFUAdmission(capacity), NaiveTinyLFU(capacity)
    for request in requests:
        batch = Keys.pack([bytes([number]) * 20 for number in request], 20)
        rule.count(batch)
        twin.count(batch)
        assert rule.admit(batch).tolist() == twin.admit(batch).tolist()


@given(scripts(), st.sampled_from([3, 5]), st.sampled_from(["lru", "2q", "lirs", "wtinylfu", "gdsf"]))
def test_decides_as_its_naive_twin(script: list[Step], capacity: int, policy: str) -> None:
    def run(rule: Admission) -> list[Any]:
        return play(OffloadingManager(capacity, key_bytes=8, policy=policy, admission=rule), script, audit)

    assert run(TinyLFUAdmission(capacity)) == run(NaiveTinyLFU(capacity))
