"""S3-FIFO: algorithm 1 of the paper worked by hand, batches, pins, and our conventions."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.s3fifo import S3FIFO
from kvoffload.testing.audit import audit
from support.letters import begin_store, keys, letters_at, load, make, store, text, use
from support.naive.s3fifo import NaiveS3FIFO
from support.policy_state import lists_of


@pytest.fixture(params=[S3FIFO, NaiveS3FIFO])
def policy(request: pytest.FixtureRequest) -> type[EvictionPolicy]:
    """S3-FIFO with a small queue of two blocks in five; the default tenth would be a single block."""
    return type("Wide", (request.param,), {"small_share": 0.4})


def state(manager: OffloadingManager) -> tuple[str, str, str]:
    """Return S and M with the counts of used blocks, and G, each oldest first."""
    audit(manager)
    policy: Any = manager.policy
    small, main, ghosts, counts = lists_of(policy)

    def marked(slots: list[int]) -> str:
        return "".join(letters_at(manager, [s]) + str(counts[s] or "") for s in reversed(slots))

    return marked(small), marked(main), text(ghosts[::-1])


def test_algorithm_1_by_hand(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde")
    assert state(manager) == ("ab", "cde", ""), "S takes its share, M the rest while slots are free"
    use(manager, "aabc")
    assert state(manager) == ("a2b1", "c1de", "")
    use(manager, "f")  # EVICTS: a has two uses and moves on, b has one and leaves
    assert state(manager) == ("f", "c1dea", "b")
    use(manager, "g")  # S is short: EVICTM: c is spared, d leaves, for good
    assert state(manager) == ("fg", "eac", "b")
    use(manager, "b")  # S is full: f leaves; b is remembered, and enters M
    assert state(manager) == ("g", "eacb", "f")
    use(manager, "h")  # S is short: e leaves
    assert state(manager) == ("gh", "acb", "f")
    use(manager, "ijk")
    assert state(manager) == ("jk", "acb", "ghi"), "G is as large as M may be: f is forgotten"
    use(manager, "aaaaaa")
    assert state(manager) == ("jk", "a3cb", "ghi"), "counts end at three"
    use(manager, "g")  # j leaves for g
    assert state(manager) == ("k", "a3cbg", "hij")
    use(manager, "l")
    assert state(manager) == ("kl", "bga2", "hij"), "a is spared, with one use less; c leaves"


def test_s_moves_to_m_if_all_its_blocks_are_used(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde" + "aabb")
    use(manager, "f")
    assert state(manager) == ("f", "deab", ""), "a and b move on, then M gives c"


def test_a_batch_equals_its_blocks_stored_in_turn(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde" + "fg")
    assert state(manager) == ("fg", "cde", "ab")
    plan = store(manager, "bxa")
    assert text(plan.evicted) == "fcg"
    assert state(manager) == ("x", "deab", "fg"), "b and a were remembered, and x found S short"


def test_the_head_of_a_batch_outlives_its_tail(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    ctx = manager.begin_request("r")
    store(manager, "abcde", ctx)
    assert state(manager) == ("ba", "edc", "")
    manager.finish_request(ctx)
    assert state(manager) == ("ba", "edc", "")


def test_a_protected_queue_leaves_the_victim_to_the_other(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde" + "aabb")
    small = load(manager, "ab")
    assert text(store(manager, "fg").evicted) == "cd", "M gives, without ghosts"
    assert state(manager) == ("a2b2gf", "e", "")
    manager.complete_load(small)
    load(manager, "e")
    assert text(store(manager, "h").evicted) == "g"
    assert state(manager) == ("fh", "eab", "g")


def test_a_moved_block_can_leave_if_all_others_are_protected(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde" + "aabb")
    load(manager, "cde")
    assert text(store(manager, "fg").evicted) == "ab", "moved to M, and taken from there"
    assert state(manager) == ("gf", "cde", "")


def test_failed_and_damaged_blocks_leave_no_ghost(policy: type[EvictionPolicy]) -> None:
    manager = make(policy, 5)
    use(manager, "abcde")
    manager.complete_store(begin_store(manager, "f"), success=False)
    manager.complete_load(load(manager, "e"), damaged=[0])
    assert state(manager) == ("b", "cd", "a")
    use(manager, "e" + "g")
    assert state(manager) == ("be", "cdg", "a"), "free slots again: S has its share, M the rest"


@pytest.mark.parametrize("twin", [S3FIFO, NaiveS3FIFO])
def test_a_call_out_of_patience_evicts_the_next_block(twin: type[EvictionPolicy]) -> None:
    manager = make(type("Hasty", (twin,), {"small_share": 0.4, "patience": 1}), 5)
    use(manager, "abcde" + "aabb" + "ccdde")
    assert text(store(manager, "f").evicted) == "b", "a was spared"
    assert state(manager) == ("f", "c2d2e1a", "b")
    assert text(store(manager, "g").evicted) == "d", "c was spared"


def test_shares(policy: type[EvictionPolicy]) -> None:
    for capacity, small_blocks, ghosts in [(1, 1, 1), (2, 1, 1), (9, 1, 8), (25, 2, 23)]:
        manager = make(S3FIFO, capacity)
        for number in range(60):
            manager.complete_store(begin_store(manager, chr(ord("A") + number)))
        stats = manager.policy.stats()
        assert stats["small_blocks"] == small_blocks
        assert stats["main_blocks"] == capacity - small_blocks
        assert stats["ghost_keys"] == ghosts
    assert manager.lookup(keys("|")).num_ready == 1
