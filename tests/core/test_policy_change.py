"""A change of the policy: nothing is evicted, the order stays, and the old policy decides until the end."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.core.hints import NO_HINTS
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, STORES
from kvoffload.core.policy import POLICIES
from kvoffload.core.policy_change import Handover
from kvoffload.core.resident_order import NEW
from kvoffload.errors import ConfigError, MisuseError
from kvoffload.policies.lru import LRU, State
from kvoffload.structures.lists import Lists
from kvoffload.testing.audit import audit
from kvoffload.testing.scripts import Player, Step, play, random_script, scripts
from kvoffload.testing.state_machine import manager_machine
from support.naive.fifo import NaiveFIFO
from support.naive.lru import NaiveLRU
from support.policy_changes import with_policy_changes
from support.small_hazard import SmallHazard

OTHERS: list[Any] = [SmallHazard if name == "hazard" else name for name in POLICIES.names()]
SCRIPTS = scripts(max_steps=80)


def manager_of(policy: Any, capacity: int = 7, **options: Any) -> OffloadingManager:
    return OffloadingManager(capacity, key_bytes=8, policy=policy, **options)


def change(manager: OffloadingManager, policy: Any) -> None:
    manager.begin_policy_change(manager.prepare_policy_change(policy))


class Changing:
    """An `after_step` that begins a change after some steps, and continues it by some blocks a step."""

    def __init__(self, policy: Any, begin_after: int, num_blocks: int) -> None:
        self.policy, self.begin_after, self.num_blocks = policy, begin_after, num_blocks
        self.num_steps = 0
        self.done_after: int | None = None

    def __call__(self, manager: OffloadingManager) -> None:
        self.num_steps += 1
        audit(manager)
        if self.num_steps == self.begin_after:
            before, order = manager.counters(), manager.policy.order()
            change(manager, self.policy)
            assert manager.counters() == before
            assert manager.policy.order() == order
        elif self.num_steps > self.begin_after and self.done_after is None:
            before = manager.counters()
            if not manager.advance_policy_change(self.num_blocks):
                self.done_after = self.num_steps
            assert manager.counters() == before
            audit(manager)


@given(
    scripts(max_steps=80), st.integers(1, 9), st.integers(1, 40), st.integers(1, 5), st.sampled_from(STORES)
)
def test_from_lru_to_lru_no_decision_changes(
    script: list[Step], capacity: int, begin_after: int, num_blocks: int, store: str
) -> None:
    """At every step the order of a new LRU equals the order of an LRU that has seen all traffic."""
    changed, plain = (manager_of("lru", capacity, store=store) for _ in range(2))
    changing = Changing("lru", begin_after, num_blocks)

    def order_of_changed(manager: OffloadingManager) -> Any:
        changing(manager)
        return manager.policy.order()

    decisions = play(changed, script, order_of_changed)
    assert decisions == play(plain, script, lambda manager: manager.policy.order())


@pytest.mark.parametrize("old", ["arc", "lfu", "sieve", SmallHazard])
@given(
    scripts(max_steps=80), st.integers(1, 9), st.integers(1, 40), st.integers(1, 5), st.sampled_from(STORES)
)
@settings(max_examples=settings().max_examples // 3)
def test_the_old_policy_decides_until_the_change_is_complete(
    old: Any, script: list[Step], capacity: int, begin_after: int, num_blocks: int, store: str
) -> None:
    changed, plain = (manager_of(old, capacity, store=store) for _ in range(2))
    changing = Changing("lru", begin_after, num_blocks)
    decisions = play(changed, script, changing)
    expected = play(plain, script)
    equal = len(script) if changing.done_after is None else changing.done_after
    assert [step[:2] for step in decisions[:equal]] == [step[:2] for step in expected[:equal]]


PAIRS = [
    pytest.param(old, new, marks=() if (row + 1) % len(OTHERS) == column else pytest.mark.slow)
    for row, old in enumerate(OTHERS)
    for column, new in enumerate(OTHERS)
]
"""All pairs of policies; in the quick pairs each policy is once the old and once the new one."""


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_from_every_policy_to_every_other(old: Any, new: Any) -> None:
    for seed, store in itertools.product(range(2), STORES):
        manager = manager_of(old, store=store)
        changing = Changing(new, 60, 2)
        play(manager, random_script(seed, num_steps=160, settle=True), changing)
        assert changing.done_after is not None
        assert manager.policy.name == POLICIES.find(new).name


@pytest.mark.parametrize("old", OTHERS)
@pytest.mark.parametrize("new", ["lru", "fifo", SmallHazard])
def test_blocks_keep_their_order(old: Any, new: Any) -> None:
    """Without traffic during the change, the new policy has the order of the old policy."""
    manager = manager_of(old, 40)
    play(manager, random_script(5, num_steps=400, settle=True))
    order = manager.policy.order()
    change(manager, new)
    num_calls = 1
    while manager.advance_policy_change(3):
        num_calls += 1
    assert num_calls >= len(order or []) // 3
    assert manager.policy.order() == order
    assert len(order or []) > 10


@pytest.mark.parametrize("old", ["lru", "fifo", "sieve", "arc", "2q", "lfu", "gdsf", SmallHazard])
@given(scripts(max_steps=80), st.integers(2, 9), st.integers(1, 3), st.sampled_from(STORES))
@settings(max_examples=settings().max_examples // 4)
def test_unused_blocks_keep_their_order_under_traffic(
    old: Any, script: list[Step], capacity: int, num_blocks: int, store: str
) -> None:
    """FIFO adopts blocks that are not used during the change in the order of the old policy.

    These old policies move only used blocks.
    """
    manager = manager_of(old, capacity, store=store)
    player = Player(manager, [NO_HINTS])
    for step in random_script(7, num_steps=60, settle=True):
        player.play(step)
    before, used = manager.policy.order() or [], set[int]()
    change(manager, "fifo")
    assert isinstance(manager.policy, Handover)
    taken = manager.policy.state.taken
    for step in [*script, *random_script(8, num_steps=300, settle=True)]:
        player.play(step)
        used |= {*taken.recent.members(0)}
        if not manager.advance_policy_change(num_blocks):
            break
    order = manager.policy.order()
    assert (manager.policy.name, order is not None) == ("fifo", True)
    unused = [slot for slot in before if slot in order and slot not in used]
    assert [slot for slot in order if slot in unused] == unused


def test_blocks_used_meanwhile_are_the_warmest() -> None:
    manager = manager_of("fifo", 8)
    ctx = manager.begin_request("a")
    keys = [bytes([n]) * 8 for n in range(8)]
    manager.complete_store(manager.prepare_store(keys, ctx))
    manager.finish_request(ctx)
    change(manager, "lru")
    manager.touch([keys[3]])
    assert manager.advance_policy_change(4)
    manager.touch([keys[6]])
    while manager.advance_policy_change(4):
        pass
    by_warmth = [manager.index.key_at(slot)[0] for slot in reversed(manager.policy.order())]
    assert by_warmth == [6, 3, 7, 5, 4, 2, 1, 0]


def test_a_change_ends_whatever_the_traffic() -> None:
    """Four requests use all blocks between two calls of one block each."""
    manager = manager_of("lru", 64)
    keys = [bytes([n]) * 8 for n in range(64)]
    manager.complete_store(manager.prepare_store(keys))
    change(manager, "arc")
    num_calls = 1
    while manager.advance_policy_change(1):
        for first in range(0, 64, 16):
            manager.touch(keys[first : first + 16])
        num_calls += 1
        assert num_calls < 200
    assert manager.policy.name == "arc"


def test_the_order_stays_when_taken_blocks_return_to_the_head() -> None:
    """S3-FIFO spares the coldest blocks of M, which are taken, with the block at the reader's cursor."""
    num_blocks, size = 1000, 25
    manager = manager_of("s3fifo", num_blocks)
    keys = [number.to_bytes(8, "little") for number in range(2 * num_blocks + 10)]
    for first in range(0, num_blocks, size):
        manager.complete_store(manager.prepare_store(keys[first : first + size]))
    leaving = keys[:num_blocks]
    random.Random(1).shuffle(leaving)
    manager.discard(leaving)  # so that the free slots are in no order
    for first in range(num_blocks, 2 * num_blocks, size):
        manager.complete_store(manager.prepare_store(keys[first : first + size]))
    queues = manager.policy.state.queues
    small, main = queues.members(0)[::-1], queues.members(1)[::-1]
    for _ in range(3):
        manager.touch([manager.index.key_at(slot) for slot in small])
    manager.touch([manager.index.key_at(slot) for slot in main[:300]])
    change(manager, "lru")
    handover = manager.policy
    assert isinstance(handover, Handover)
    taken = handover.state.taken
    while not 20 <= sum(taken.where[slot] == NEW for slot in main) <= 280:
        assert manager.advance_policy_change(size)
    manager.complete_store(manager.prepare_store(keys[-10:]))
    assert queues.members(1)[0] == main[299], "spared"
    while manager.advance_policy_change(size):
        pass
    unused = main[310:]
    assert len(unused) > 500
    assert [slot for slot in manager.policy.order() if slot in {*unused}] == unused


MANY = 4000
FEW = 8
MOST_VISITS = 16 * FEW + 64
"""Blocks that a call for `FEW` blocks may pass."""


def with_rare_unused_blocks(old: str) -> tuple[OffloadingManager, Any]:
    """Begin a change to LRU and use 49 of 50 blocks; returns the manager and the change's first reader."""
    manager = manager_of(old, MANY)
    keys = [number.to_bytes(8, "little") for number in range(MANY)]
    for first in range(0, MANY, 1000):
        manager.complete_store(manager.prepare_store(keys[first : first + 1000]))
    changing = manager.prepare_policy_change("lru")
    manager.begin_policy_change(changing)
    reader = changing._readers[0]
    while old == "gdsf" and reader._copied < MANY:
        manager.advance_policy_change(512)
    manager.touch([key for number, key in enumerate(keys) if number % 50])
    return manager, reader


def test_a_call_passes_few_blocks_of_a_list() -> None:
    manager, reader = with_rare_unused_blocks("fifo")
    rank = {slot: number for number, slot in enumerate(manager.policy.order())}
    at, num_calls, taken = -1, 0, manager.policy.state.taken
    while reader._at == 0 and at < MANY - 1:
        manager.advance_policy_change(FEW)
        before, at, num_calls = at, rank.get(taken.cursor, MANY - 1), num_calls + 1
        assert at - before <= MOST_VISITS
        assert num_calls < 2 * MANY // MOST_VISITS + 2


def test_a_call_passes_few_blocks_of_a_heap() -> None:
    manager, reader = with_rare_unused_blocks("gdsf")
    assert reader._heap.size > MANY // 2
    num_calls = 0
    while size := reader._heap.size:
        manager.advance_policy_change(64)
        num_calls += 1
        assert size - reader._heap.size <= 64 + 4
        assert num_calls <= MANY // 64 + 1


@pytest.mark.parametrize("num_blocks", [0, 60])
def test_a_call_passes_few_lists(num_blocks: int) -> None:
    """LFU has 5000 lists, and some of them have one block each."""
    manager = manager_of("lfu,max_count=5000", 100)
    keys = [bytes([n]) * 8 for n in range(num_blocks)]
    if keys:
        manager.complete_store(manager.prepare_store(keys))
    for number in range(num_blocks):
        manager.touch(keys[number:])
    changing = manager.prepare_policy_change("lru")
    manager.begin_policy_change(changing)
    reader, order, num_calls = changing._readers[0], manager.policy.order(), 0
    while not reader.is_done:
        at = reader._at
        manager.advance_policy_change(FEW)
        num_calls += 1
        assert reader._at - at <= MOST_VISITS // 16
        assert num_calls <= 5000 // FEW + num_blocks
    while manager.advance_policy_change(FEW):
        pass
    assert manager.policy.order() == order


@pytest.mark.parametrize("store", STORES)
def test_a_reset_during_a_change(store: str) -> None:
    manager = manager_of("lru", store=store)
    player = Player(manager, [NO_HINTS])
    for step in random_script(2, num_steps=80):
        player.play(step)
    change(manager, "arc")
    manager.advance_policy_change(2)
    manager.reset()
    audit(manager)
    for step in random_script(3, num_steps=80, settle=True):
        player.play(step)
        manager.advance_policy_change(1)
        audit(manager)
    assert manager.policy.name == "arc"


@pytest.mark.parametrize(
    ("old", "new"), [(NaiveLRU, "arc"), ("arc", NaiveFIFO), (NaiveLRU, NaiveFIFO)], ids=str
)
@pytest.mark.parametrize("store", STORES)
def test_a_policy_in_python_adopts_all_blocks_at_once(old: Any, new: Any, store: str) -> None:
    manager = manager_of(old, 40, store=store)
    play(manager, random_script(5, num_steps=400, settle=True))
    order = manager.policy.order()
    change(manager, new)
    assert manager.policy.order() == order
    assert not manager.advance_policy_change()
    play(manager, random_script(6, num_steps=100), audit)


def test_a_policy_without_an_order() -> None:
    class Unordered(NaiveLRU):
        def order(self) -> Any:
            return None

    for store in STORES:
        manager = manager_of(Unordered, 40, store=store)
        play(manager, random_script(5, num_steps=400, settle=True))
        change(manager, "arc")
        audit(manager)
        assert manager.policy.name == "arc"


def test_misuse() -> None:
    manager = manager_of("lru")
    manager.touch([b"12345678"])
    with pytest.raises(ConfigError, match="policy"):
        manager.prepare_policy_change("lur")
    first, second = manager.prepare_policy_change("arc"), manager.prepare_policy_change("fifo")
    manager.begin_policy_change(first)
    assert not manager.advance_policy_change()
    with pytest.raises(MisuseError, match="policy fifo"):
        manager.begin_policy_change(second)


def test_a_change_during_a_change_is_refused() -> None:
    manager = manager_of("lru")
    manager.complete_store(manager.prepare_store([b"12345678"]))
    first, second = manager.prepare_policy_change("arc"), manager.prepare_policy_change("fifo")
    manager.begin_policy_change(first)
    with pytest.raises(MisuseError, match="policy fifo"):
        manager.begin_policy_change(second)
    while manager.advance_policy_change():
        pass
    assert manager.policy.name == "arc"


@pytest.mark.parametrize("store", [ON_COMPUTE, ON_DEVICE_EVICTION])
@pytest.mark.parametrize("policies", [("lru", "arc", SmallHazard), ("s3fifo", "lru", "gdsf")])
def test_the_state_machine_with_changes(policies: tuple[Any, ...], store: str) -> None:
    machine = manager_machine(
        policies[0], store=store, key_bytes=8, max_examples=max(2, settings().max_examples // 5)
    )

    changing = with_policy_changes(machine, policies)
    run_state_machine_as_test(changing, settings=machine.TestCase.settings)


class MovesItsState(LRU):
    """LRU whose `reset` replaces its state, which the contract of compiled policies allows."""

    def reset(self) -> None:
        self.state = State(order=Lists(self.capacity_blocks, 1))


def test_a_reset_between_preparation_and_begin() -> None:
    manager = manager_of(MovesItsState)
    play(manager, random_script(4, num_steps=60, settle=True))
    prepared = manager.prepare_policy_change(MovesItsState)
    kept = [manager.policy.state]  # keeps the memory alive, so that a stale address does not crash
    manager.reset()
    play(manager, random_script(5, num_steps=60, settle=True))
    manager.begin_policy_change(prepared)
    play(manager, random_script(6, num_steps=60), audit)
    assert kept[0].order.size(0) > 0


def test_a_policy_in_python_that_fails_leaves_the_old_policy() -> None:
    class Fails(NaiveLRU):
        def insert(self, slot: int, key: bytes) -> None:
            raise RuntimeError("not this block")

    manager = manager_of("lru", 10)
    play(manager, random_script(5, num_steps=100, settle=True))
    order = manager.policy.order()
    with pytest.raises(RuntimeError, match="not this block"):
        change(manager, Fails)
    assert (manager.policy.name, manager.policy.order()) == ("lru", order)
    assert not manager.advance_policy_change()
    change(manager, "arc")
    while manager.advance_policy_change():
        pass
    assert manager.policy.order() == order
