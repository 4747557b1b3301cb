"""Shares of a pool's engines: owners of victims, and ends of engines. See also `share_machine`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.node.keeper import MAX_MEMBERS
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import PoolDirectory
from kvoffload.node.shares import MAX_OWNERS
from kvoffload.node.state import StateFile
from kvoffload.testing.audit import audit

CAPACITY = 8
KEYS = [number.to_bytes(4, "little") * 8 for number in range(1, 60)]


pytestmark = pytest.mark.usefixtures("fast_burials")


class Member:
    """A member that stores blocks by number."""

    def __init__(self, root: Path, name: str, share: int = 0) -> None:
        self.directory = PoolDirectory.join({"test": 1}, name, keep_s=60.0, root=root, has_keeper=False)
        try:
            self.manager = NodeManager(CAPACITY, directory=self.directory, share_blocks=share, policy="lru")
        except BaseException:
            self.directory.close()
            raise

    def store(self, *numbers: int) -> list[int]:
        """Store blocks, one for each request; return the evicted blocks."""
        evicted = []
        for number in numbers:
            plan = self.manager.prepare_store([KEYS[number]])
            if plan is not None:
                evicted += [KEYS.index(key) for key in plan.evicted]
                self.manager.complete_store(plan)
        audit(self.manager)
        return evicted

    def load(self, *numbers: int) -> None:
        keys = [KEYS[number] for number in numbers]
        self.manager.complete_load(self.manager.prepare_load(keys))
        audit(self.manager)

    def held(self) -> tuple[int, int, int]:
        """Return the blocks of this engine, of the other engines, and of engines that have ended."""
        tenants = self.manager.stats().tenants
        return tenants["own"].held, tenants["others"].held, tenants["ended"].held

    def look_around(self) -> None:
        for _ in range(20):
            self.manager.contains([])

    def kill(self) -> None:
        """End without leaving."""
        self.directory.close()

    def close(self) -> None:
        self.manager.close()
        self.directory.close()


def test_a_scan_leaves_the_share_of_another_engine(root: Path) -> None:
    chat, scan = Member(root, "chat", 4), Member(root, "scan", 2)
    chat.store(0, 1, 2, 3)
    scan.store(*range(10, 40))
    assert chat.held() == (4, 4, 0)
    assert chat.manager.contains(KEYS[:4]).all()


def test_without_shares_the_same_scan_evicts_the_blocks(root: Path) -> None:
    chat, scan = Member(root, "chat"), Member(root, "scan")
    chat.store(0, 1, 2, 3)
    scan.store(*range(10, 40))
    assert not chat.manager.contains(KEYS[:4]).any()
    assert chat.manager.stats().tenants == {}


def test_unused_memory_is_lent_and_returned(root: Path) -> None:
    idle, busy = Member(root, "idle", 6), Member(root, "busy", 2)
    busy.store(*range(10, 30))
    assert busy.held() == (8, 0, 0)
    assert idle.store(*range(6)) == [22, 23, 24, 25, 26, 27]
    assert idle.held() == (6, 2, 0)
    assert idle.store(6) == [0], "both engines hold their shares"


def test_blocks_of_an_ended_engine_leave_first(root: Path) -> None:
    living, dead = Member(root, "living", 4), Member(root, "dead", 4)
    living.store(0, 1, 2, 3)
    dead.store(10, 11, 12, 13)
    living.load(0, 1, 2, 3)
    dead.kill()
    living.look_around()
    assert living.held() == (4, 0, 4)
    assert living.store(20, 21) == [10, 11]
    living.load(12)
    assert living.held() == (7, 0, 1), "a loaded block belongs to its reader"
    assert living.store(22) == [13]
    assert living.store(23) == [0], "block 12 is like the engine's other blocks"


def test_an_engine_that_leaves_gives_its_share_back(root: Path) -> None:
    first, second = Member(root, "first", 6), Member(root, "second", 2)
    second.store(10, 11)
    first.store(0, 1, 2, 3, 4, 5)
    first.close()
    assert second.held() == (2, 0, 6)
    third = Member(root, "third", 6)
    assert third.held() == (6, 2, 0), "it reuses the number of the engine that has left"
    third.store(20)
    assert third.held() == (6, 2, 0)


def test_a_restarted_engine_is_not_refused_before_its_burial(root: Path) -> None:
    living, dead = Member(root, "living", 4), Member(root, "dead", 4)
    dead.store(10, 11)
    dead.kill()
    again = Member(root, "dead", 4)
    living.look_around()
    assert again.held() == (0, 0, 2)
    again.load(10)
    assert again.held() == (1, 0, 1)


def test_shares_beyond_the_pool_are_refused(root: Path) -> None:
    first = Member(root, "one", 5)
    first.store(0, 1, 2)
    for share in (4, -1):
        with pytest.raises(ConfigError, match=r"share: '-?\d blocks' .*8 blocks.* 5; allowed: 0 to 3 blocks"):
            Member(root, "two", share)
    for wrong in (1.5, float("nan"), "1"):
        with pytest.raises(ConfigError, match=r"share: .* allowed: 0 to 3 blocks"):
            Member(root, "two", wrong)
    assert first.manager.contains(KEYS[:3]).all(), "a refused engine has emptied the pool"
    first.look_around()
    assert first.held() == (3, 0, 0)
    second = Member(root, "two", 3)
    second.store(10)
    assert second.held() == (1, 3, 0)


def test_blocks_stored_before_the_first_share_leave_first(root: Path) -> None:
    """Their owners were not counted."""
    early = Member(root, "early")
    early.store(0, 1, 2, 3)
    load = early.manager.prepare_load([KEYS[3]])
    late = Member(root, "late", 2)
    audit(late.manager)
    early.manager.complete_load(load)
    assert late.held() == (0, 0, 4)
    early.store(*range(10, 18))
    assert early.held() == (8, 0, 0)
    late.store(20, 21, 22)
    assert late.held() == (3, 5, 0)


def test_pins_and_writes_of_a_dead_engine_are_counted(root: Path) -> None:
    living, dead = Member(root, "living", 2), Member(root, "dead", 2)
    living.store(0, 1)
    dead.store(10, 11)
    dead.manager.prepare_load([KEYS[0], KEYS[10]])
    dead.manager.prepare_store([KEYS[12], KEYS[13]])
    assert living.held() == (2, 4, 0)
    dead.kill()
    living.look_around()
    audit(living.manager)
    assert living.held() == (2, 0, 2)


def test_a_reset_forgets_owners(root: Path) -> None:
    first, second = Member(root, "one", 2), Member(root, "two", 2)
    first.store(0, 1)
    load = second.manager.prepare_load([KEYS[0]])
    first.manager.reset()
    audit(second.manager)
    assert first.held() == (0, 0, 0)
    second.manager.complete_load(load)
    audit(second.manager)
    second.store(5)
    assert first.held() == (0, 1, 0)


def test_damaged_blocks_count_as_no_loads(root: Path) -> None:
    member = Member(root, "one", 2)
    member.store(0, 1)
    member.manager.complete_load(member.manager.prepare_load(KEYS[:2]), damaged=[1])
    assert member.manager.stats().tenants["own"].loaded == 1


def test_more_engines_than_owners(root: Path) -> None:
    """The last engines own no blocks, and can have no share."""
    members = [Member(root, f"m{number}", number == 0) for number in range(MAX_OWNERS + 1)]
    first, last = members[0], members[-1]
    assert last.directory.number == MAX_OWNERS < MAX_MEMBERS
    last.store(0, 1)
    first.store(10, 11)
    assert last.held() == (0, 2, 2)
    assert first.held() == (2, 0, 2)
    assert first.store(*range(20, 25)) == [0], "blocks without an owner are evicted first"
    with pytest.raises(ConfigError, match="allowed: 0 to 0 blocks"):
        Member(root, "one-more", 1)
    for member in members:
        member.close()


def test_a_join_without_memory_changes_no_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no engine stored blocks afterwards, because counts of evictable blocks were incomplete."""
    first = Member(root, "first")

    def no_room(self: StateFile, start: int, num_bytes: int) -> None:
        raise UnavailableError("ram", "shared", "no room")

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "_allocate", no_room)
        with pytest.raises(UnavailableError):
            Member(root, "second", 2)
    first.store(*range(CAPACITY))
    third = Member(root, "third", 2)
    third.store(20)
    first.store(21)
    assert third.held() == (1, 1, CAPACITY - 2), "blocks before the first share belong to no engine"
