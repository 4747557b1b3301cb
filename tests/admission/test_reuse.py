"""Reuse-gated admission: counts, forgetting, and all decisions compared with the naive twin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.admission import Admission, create_admission
from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit, snapshot
from kvoffload.testing.scripts import Step, long_lists, play, scripts
from support.letters import keys, load, make, store, text
from support.naive.reuse import NaiveReuse


def gated(admission: str | Admission = "reuse:2", capacity_blocks: int = 8) -> OffloadingManager:
    return make("lru", capacity_blocks, admission=admission)


def offer(manager: OffloadingManager, letters: str) -> str:
    """Run a request that offers its blocks once; return the stored blocks."""
    ctx = manager.begin_request("r")
    plan = store(manager, letters, ctx)
    manager.finish_request(ctx)
    return text(plan.keys)


def tracked(rule: ReuseAdmission | NaiveReuse) -> str:
    return "".join(f"{key.decode()}{count}" for key, count in rule.tracked().items())


def test_a_block_enters_with_the_second_request_that_has_it() -> None:
    manager = gated()
    assert offer(manager, "abc") == ""
    assert manager.stats().refused == 3
    assert offer(manager, "abd") == "ab"
    assert offer(manager, "abcd") == "cd"


@pytest.mark.parametrize("threshold", [2, 3, 5])
def test_a_block_enters_with_the_nth_request(threshold: int) -> None:
    manager = gated(f"reuse:{threshold}")
    assert [offer(manager, "a") for _ in range(threshold)] == [""] * (threshold - 1) + ["a"]


def test_a_request_counts_once_for_any_number_of_lookups() -> None:
    rule = ReuseAdmission(1, 2)
    manager = gated(rule)
    ctx = manager.begin_request("r", keys("ab"))
    for _ in range(3):
        manager.lookup(keys("ab"), ctx)
        manager.lookup_key(b"a", ctx)
        manager.touch(keys("ab"), ctx)
        plan = store(manager, "ab", ctx)
        assert (len(plan.keys), plan.num_refused) == (0, 2)
    manager.finish_request(ctx)
    assert tracked(rule) == "a1b1"


def test_a_lookup_alone_counts_when_its_request_finishes() -> None:
    rule = ReuseAdmission(1, 2)
    manager = gated(rule)
    ctx = manager.begin_request("r")
    manager.lookup(keys("ab"), ctx)
    manager.lookup_key(b"c", ctx)
    assert tracked(rule) == ""
    manager.finish_request(ctx)
    assert tracked(rule) == "a1b1c1"


def test_uses_of_a_resident_block_are_counted() -> None:
    rule = ReuseAdmission(1, 2)
    manager = gated(rule)
    for _ in range(3):
        offer(manager, "a")
    assert tracked(rule) == "a3"


@pytest.mark.parametrize("twin", [False, True])
def test_tails_are_forgotten_before_heads(twin: bool) -> None:
    rule = NaiveReuse(2, 4) if twin else ReuseAdmission(1, 2, 4)
    manager = gated(rule)
    offer(manager, "abc")
    assert tracked(rule) == "a1b1c1"
    offer(manager, "xy")
    assert tracked(rule) == "x1y1a1b1"
    offer(manager, "z")
    assert tracked(rule) == "z1x1y1a1"


@pytest.mark.parametrize("twin", [False, True])
def test_a_tracker_smaller_than_a_request_keeps_its_head(twin: bool) -> None:
    rule = NaiveReuse(2, 3) if twin else ReuseAdmission(1, 2, 3)
    manager = gated(rule)
    assert offer(manager, "abcdef") == ""
    assert tracked(rule) == "a1b1c1"
    assert offer(manager, "abcdef") == "abc"
    assert tracked(rule) == "a2b2c2"
    assert offer(manager, "abcdef") == ""


@pytest.mark.parametrize("twin", [False, True])
def test_a_path_counted_in_parts_is_reordered(twin: bool) -> None:
    rule = NaiveReuse(2, 4) if twin else ReuseAdmission(1, 2, 4)
    manager = gated(rule)
    ctx = manager.begin_request("prefilled in chunks")
    store(manager, "ab", ctx)
    store(manager, "cd", ctx)
    assert tracked(rule) == "c1d1a1b1"
    manager.finish_request(ctx)
    assert tracked(rule) == "a1b1c1d1"
    offer(manager, "x")
    assert tracked(rule) == "x1a1b1c1"


def test_new_blocks_do_not_displace_known_keys_of_the_request() -> None:
    rule = ReuseAdmission(1, 2, 3)
    manager = gated(rule)
    offer(manager, "a")
    offer(manager, "xy")
    offer(manager, "bca")  # a is the coldest when b and c come
    assert tracked(rule) == "b1c1a2"


def test_blocks_after_a_refused_block_are_refused() -> None:
    manager = gated()
    offer(manager, "b")
    assert offer(manager, "ab") == ""
    assert offer(manager, "ab") == "ab"


def test_a_resident_block_does_not_end_the_run() -> None:
    manager = gated()
    offer(manager, "b")
    offer(manager, "b")
    offer(manager, "ac")
    assert offer(manager, "abc") == "ac"


def test_a_store_without_room_is_not_counted() -> None:
    rule = ReuseAdmission(1, 2)
    manager = gated(rule, capacity_blocks=1)
    offer(manager, "a")
    offer(manager, "a")
    load(manager, "a")
    before = snapshot(rule)
    ctx = manager.begin_request("r")
    assert manager.prepare_store(keys("b"), ctx) is None
    assert snapshot(rule) == before


@pytest.mark.parametrize("spec", ["reuse:1", "all"])
def test_a_threshold_of_one_is_no_rule(spec: str) -> None:
    assert create_admission(spec, 8, 10) is None
    manager = gated(spec)
    assert offer(manager, "abc") == "abc"
    assert manager.stats().refused == 0


@pytest.mark.parametrize("spec", ["reuse:", "reuse:0", "reuse:-1", "reuse:x", "reuse:1.5", "al", "all:2"])
def test_invalid_specifications_are_rejected(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"admission: .*(allowed: |no parameters)"):
        gated(spec)


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="store_threshold: 1 is invalid"):
        ReuseAdmission(8, 1)
    with pytest.raises(ConfigError, match="max_tracker_size: 0 is invalid"):
        ReuseAdmission(8, 2, 0)


def test_a_rule_for_keys_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="admission: 32 is invalid; its keys must have 1 bytes"):
        gated(ReuseAdmission(32, 2))


def test_reset_forgets_the_counts() -> None:
    manager = gated()
    offer(manager, "a")
    manager.reset()
    assert offer(manager, "a") == ""
    assert offer(manager, "a") == "a"


batches = long_lists(st.lists(st.integers(0, 15), unique=True, max_size=9), max_size=25)


@given(batches, st.integers(1, 12), st.integers(2, 4))
def test_counts_as_its_naive_twin(requests: list[list[int]], size: int, threshold: int) -> None:
    rule, twin = ReuseAdmission(20, threshold, size), NaiveReuse(threshold, size)
    for request in requests:
        batch = Keys.pack([bytes([number]) * 20 for number in request], 20)
        rule.count(batch)
        twin.count(batch)
        assert list(rule.tracked().items()) == list(twin.tracked().items())
        assert rule.admit(batch).tolist() == twin.admit(batch).tolist()


@given(scripts(), st.integers(1, 12), st.sampled_from(["lru", "arc"]))
def test_decides_as_its_naive_twin(script: list[Step], size: int, policy: str) -> None:
    def run(rule: ReuseAdmission | NaiveReuse) -> list[Any]:
        def look(manager: OffloadingManager) -> Any:
            audit(manager)
            return list(rule.tracked().items())

        return play(OffloadingManager(5, key_bytes=8, policy=policy, admission=rule), script, look)

    assert run(ReuseAdmission(8, 2, size)) == run(NaiveReuse(2, size))
