"""Events and expected keys of a pool: of all and of dead members, after an overflow, for late listeners."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.core.plans import OffloadingEvent
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.structures.keys import Keys
from kvoffload.testing.audit import audit

CAPACITY = 16
KEYS = [number.to_bytes(4, "little") * 8 for number in range(1, 60)]


pytestmark = pytest.mark.usefixtures("fast_burials")


class Member:
    """A member, and the blocks that its events name as readable."""

    def __init__(self, root: Path, name: str, *, enable_events: bool = True) -> None:
        self.directory = PoolDirectory.join({"test": 1}, name, keep_s=60.0, root=root, has_keeper=False)
        self.manager = NodeManager(
            CAPACITY, directory=self.directory, policy="lru", enable_events=enable_events
        )
        self.known: set[bytes] = set()

    def store(self, first: int, count: int = 4) -> None:
        plan = self.manager.prepare_store(KEYS[first : first + count])
        assert plan is not None
        self.manager.complete_store(plan)

    def read(self) -> list[OffloadingEvent]:
        events = self.manager.take_events()
        for event in events:
            if event.is_reset:
                self.known.clear()
            elif event.removed:
                assert self.known.issuperset(event.keys), "removed, but never stored"
                self.known.difference_update(event.keys)
            else:
                assert self.known.isdisjoint(event.keys), "stored twice"
                self.known.update(event.keys)
        return events

    def contents(self) -> set[bytes]:
        present = self.manager.contains(KEYS)
        return {key for key, is_there in zip(KEYS, present, strict=True) if is_there}

    def check(self) -> list[OffloadingEvent]:
        events = self.read()
        assert self.known == self.contents()
        return events


def test_every_member_gets_the_events_of_all(root: Path) -> None:
    members = [Member(root, name) for name in "abc"]
    for step in range(30):
        members[step % 3].store(step)
        members[step % 2].manager.discard([KEYS[step]])
        if step % 4 == 0:
            for member in members:
                member.check()
    members[0].manager.reset()
    assert all(member.check() for member in members)
    assert members[0].known == set()


def test_an_overflow_gives_a_reset_and_the_contents(root: Path) -> None:
    slow, busy = Member(root, "slow"), Member(root, "busy")
    busy.store(0)
    slow.check()
    numbers, ring = slow.manager._numbers, len(slow.manager._file.events)
    num_taken = numbers.num_events
    while numbers.num_events <= num_taken + ring:
        busy.store(1 + numbers.num_events % 50)
        busy.read()
    events = slow.check()
    assert [event.is_reset for event in events] == [True, False]
    busy.store(20)
    assert not any(event.is_reset for event in slow.check())


def test_a_full_ring_loses_nothing(root: Path) -> None:
    """The number of events equals the number of places in the ring."""
    slow, busy = Member(root, "slow"), Member(root, "busy")
    ring = len(slow.manager._file.events)
    while slow.manager._numbers.num_events < ring:
        busy.store(slow.manager._numbers.num_events % 50, 1)
        busy.manager.discard([KEYS[slow.manager._numbers.num_events % 50]])
    surplus = slow.manager._numbers.num_events - ring
    events = slow.check()
    assert any(event.is_reset for event in events) == bool(surplus)


def test_a_late_listener_begins_with_the_contents(root: Path) -> None:
    """A listener that follows the events must know the blocks that were already in the pool."""
    first = Member(root, "first", enable_events=False)
    first.store(0)
    assert first.manager.take_events() == []
    late = Member(root, "late")
    first.store(10)
    late.check()
    assert late.known >= {*KEYS[:4]}
    first.store(20)
    assert not any(event.is_reset for event in late.check())


def test_a_first_listener_begins_without_a_reset(root: Path) -> None:
    member = Member(root, "a")
    assert member.manager.take_events() == []


def test_expected_keys_of_a_dead_member_disappear(root: Path) -> None:
    dead, living = Member(root, "dead"), Member(root, "living")
    living.store(0, CAPACITY)
    own = living.manager.begin_request("own", KEYS[4:8])
    living.manager.expect(own)
    dead.manager.expect(dead.manager.begin_request("lost", KEYS[:4]))

    def expected() -> set[bytes]:
        return set(living.manager._state.expected.keys.members(0))

    assert expected() == {*KEYS[:8]}
    dead.directory.close()
    for _ in range(40):
        living.manager.contains([])
    assert expected() == {*KEYS[4:8]}
    audit(living.manager)
    living.store(30, 12)
    assert living.contents() >= {*KEYS[4:8]}, "an expected block was evicted"
    assert not living.contents() & {*KEYS[:4]}
    living.manager.withdraw(own)
    assert expected() == set()


def test_a_dead_listener_no_longer_counts(root: Path) -> None:
    """Without listeners no member writes events."""
    dead, living = Member(root, "dead"), Member(root, "living", enable_events=False)
    dead.directory.close()
    for _ in range(40):
        living.manager.contains([])
    before = living.manager._numbers.num_events
    living.store(0)
    assert living.manager._numbers.num_events == before


def test_keys_are_packed(root: Path) -> None:
    member = Member(root, "a")
    member.store(0)
    [event] = member.manager.take_events()
    assert isinstance(event.keys, Keys)
    assert list(event.keys) == KEYS[:4]
