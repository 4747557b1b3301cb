"""The conformance suite of policies: every built-in policy and the example pass, planted faults are found."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from kvoffload.core.hints import Hints
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES
from kvoffload.core.protection import Protected
from kvoffload.core.slots import SlotArray
from kvoffload.policies.lru import LRU
from kvoffload.structures.index import Index
from kvoffload.structures.keys import Keys
from kvoffload.testing import shrink_limit
from kvoffload.testing.call_limit import EndlessLoopError
from kvoffload.testing.conformance import PolicyConformance, check_elsewhere
from kvoffload.testing.first_steps import first_failure
from support.kernels import ref_cnt_of
from support.naive.arc import NaiveARC
from support.naive.lru import NaiveLRU
from support.small_hazard import HazardOfFewKeys

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "my_policy.py") + ":MyPolicy"
FEW = settings().max_examples // 10
NUM_CHECKS = sum(name.startswith("test_") for name in vars(PolicyConformance))


class TestExample(PolicyConformance):
    policy = EXAMPLE
    max_examples = 2 * FEW


class TestARC(PolicyConformance):
    """The suite on one built-in policy, with its twin and the state machine."""

    policy = "arc"
    twin = NaiveARC
    max_examples = FEW
    test_it_decides_the_same_elsewhere: Any = None  # below, in one process for all policies


class TestNaiveARC(PolicyConformance):
    policy = NaiveARC
    max_examples = FEW
    test_it_decides_the_same_elsewhere: Any = None


class BuiltIn(PolicyConformance):
    """The checks that no other file runs for the built-in policies; test_twins.py compares their twins."""

    max_examples = FEW
    test_life_cycle: Any = None  # in test_machine.py
    test_it_decides_the_same_elsewhere: Any = None  # below, in one process for all policies


for _name in (name for name in POLICIES.names() if name != TestARC.policy):
    _policy = HazardOfFewKeys if _name == "hazard" else _name
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (BuiltIn,), {"policy": _policy})


@pytest.mark.slow
def test_every_built_in_policy_decides_the_same_elsewhere() -> None:
    check_elsewhere(POLICIES.names())


# ---- faults, each with the check that must detect it


class EvictsAnyone(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        return self.slots.pop(0)


class EvictsItsOwnRequest(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        idle = [s for s in self.slots if ref_cnt_of(protected.cache, s) == 0 and s not in protected.entering]
        self.slots.remove(idle[0])
        return idle[0]


class EvictsWritingBlocks(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        for slot in self.slots:
            if slot not in protected or ref_cnt_of(protected.cache, slot) == -1:
                self.slots.remove(slot)
                return slot
        raise AssertionError


class NamesASlotTwice(LRU):
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        super().replace(keys, slots, num_free, protected)
        slots[num_free:] = slots[num_free : num_free + 1]


class NamesAbsentSlots(LRU):
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        super().replace(keys, slots, num_free, protected)
        slots[num_free:] = self.capacity_blocks


class NamesNoSlot(LRU):
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        chosen = slots.copy()
        super().replace(keys, chosen, num_free, protected)


class ChangesFreeSlots(LRU):
    def replace(self, keys: Keys, slots: SlotArray, num_free: int, protected: Protected) -> None:
        super().replace(keys, slots, num_free, protected)
        slots[:num_free] = slots[:num_free][::-1].copy()


class KeepsRemovedBlocks(NaiveLRU):
    def forget(self, slot: int) -> None:
        pass


class HidesRemovedBlocks(KeepsRemovedBlocks):
    def order(self) -> Any:
        return None


class ReportsHalf(NaiveLRU):
    def order(self) -> list[int]:
        return self.slots[: (len(self.slots) + 1) // 2]


class RemembersInItsClass(NaiveLRU):
    history: dict[bytes, int] = {}  # noqa: RUF012

    def insert(self, slot: int, key: bytes) -> None:
        self.history[key] = slot
        super().insert(slot, key)


class LosesTheHottest(NaiveLRU):
    """A policy that loses blocks when it moves them to the front."""

    def hit(self, slot: int) -> None:
        if self.slots[-1] == slot and len(self.slots) > 4:
            self.slots.remove(slot)
        elif slot in self.slots:
            super().hit(slot)

    def forget(self, slot: int) -> None:
        if slot in self.slots:
            super().forget(slot)

    def order(self) -> Any:
        return None


class NeedsRoomForTwo(NaiveLRU):
    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.share = 10 // (self.capacity_blocks // 2)


class HasAFixedSize(NaiveLRU):
    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.counts = np.zeros(64, np.int64)

    def insert(self, slot: int, key: bytes) -> None:
        self.counts[slot] = 1
        super().insert(slot, key)


class CountsAcrossReset(NaiveLRU):
    """LFU with counts of keys that are never cleared."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.counts: dict[bytes, int] = {}

    def insert(self, slot: int, key: bytes) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1
        super().insert(slot, key)

    def victim(self, key: bytes, protected: Protected) -> int:
        idle = [s for s in self.slots if s not in protected]
        slot = min(idle, key=lambda s: self.counts[self.index.key_at(s)])
        self.slots.remove(slot)
        return slot


class RemembersEveryKey(NaiveLRU):
    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.seen: set[bytes] = set()

    def insert(self, slot: int, key: bytes) -> None:
        self.seen.add(key)
        super().insert(slot, key)


class EvictsAtRandom(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        slot = random.choice([s for s in self.slots if s not in protected])
        self.slots.remove(slot)
        return slot


class SharesItsState(NaiveLRU):
    age: dict[int, int] = {}  # noqa: RUF012  (that is the fault)

    def victim(self, key: bytes, protected: Protected) -> int:
        slot = min((s for s in self.slots if s not in protected), key=lambda s: self.age.get(s, 0))
        self.age[slot] = self.age.get(slot, 0) + 1
        self.slots.remove(slot)
        return slot


class OrdersByHashes(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        by_key = {self.index.key_at(s): s for s in self.slots if s not in protected}
        slot = by_key[next(iter(set(by_key)))]
        self.slots.remove(slot)
        return slot


class AgesInStats(NaiveLRU):
    num_calls = 0

    def stats(self) -> dict[str, float]:
        self.num_calls += 1
        return {}


class SortsInOrder(NaiveLRU):
    def order(self) -> list[int]:
        self.slots.sort()
        return self.slots


class CountsItsOwnStore(NaiveARC):
    def refresh(self, slot: int) -> None:
        self.hit(slot)


class HasNoName(NaiveLRU):
    name = ""


class StoresEveryHint(NaiveLRU):
    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        if hints.finish_reason:
            self.worth = {"stop": 0, "length": 0, "abort": 0, "tool_calls": 1}[hints.finish_reason]


class ForgetsThatABlockMayBeAbsent(NaiveLRU):
    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        for slot in slots.tolist():
            self.hit(slot)


class CountsTenants(NaiveLRU):
    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.requests_of: dict[str, int] = {}

    def finished(self, path: Keys, slots: SlotArray, hints: Hints) -> None:
        self.requests_of[hints.tenant] = self.requests_of.get(hints.tenant, 0) + 1


FAULTS: list[tuple[type[Any], str, str]] = [
    (EvictsAnyone, "test_protection", "named slot .* are \\["),
    (EvictsItsOwnRequest, "test_protection", "named slot .*'of the storing request'"),
    (EvictsWritingBlocks, "test_protection", "named slot .*'in flight'"),
    (NamesASlotTwice, "test_protection", "already named"),
    (NamesAbsentSlots, "test_protection", "named slot \\d+ as the victim"),
    (NamesNoSlot, "test_protection", "named slot -\\d as the victim"),
    (RemembersInItsClass, "test_memory_is_bounded", "the state grows without limit"),
    (ChangesFreeSlots, "test_life_cycle", "changed the free slots that it received"),
    (KeepsRemovedBlocks, "test_life_cycle", "disagree about the slots"),
    (HidesRemovedBlocks, "test_memory_is_bounded", "grows without limit"),
    (ReportsHalf, "test_life_cycle", "disagree about the slots"),
    (NeedsRoomForTwo, "test_life_cycle", "division"),
    (LosesTheHottest, "test_every_block_can_leave", "not in list"),
    (HasAFixedSize, "test_it_is_never_above_the_optimum", "out of bounds"),
    (CountsAcrossReset, "test_reset_forgets_everything", "after reset: step"),
    (RemembersEveryKey, "test_memory_is_bounded", "grows without limit"),
    (EvictsAtRandom, "test_it_decides_the_same_again", "had other decisions"),
    (SharesItsState, "test_it_decides_the_same_again", "had other decisions"),
    (OrdersByHashes, "test_it_decides_the_same_elsewhere", "decided differently in another process"),
    (AgesInStats, "test_asking_changes_nothing", r"stats\(\) changed the policy"),
    (SortsInOrder, "test_asking_changes_nothing", r"order\(\) changed the policy"),
    (CountsItsOwnStore, "test_it_decides_as_its_twin", "the twin: step"),
    (StoresEveryHint, "test_it_takes_any_hints", "^'"),
    (ForgetsThatABlockMayBeAbsent, "test_it_takes_any_hints", "not in list"),
    (CountsTenants, "test_memory_is_bounded", "grows without limit"),
    (HasNoName, "test_it_is_found_and_says_its_name", "needs a class attribute name"),
]


# ---- the worst faults, as a user sees them: the suite in a file, and plain `pytest`

USERS_POLICY = """
from kvoffload import BlockwisePolicy


class Mine(BlockwisePolicy):
    name = "mine"

    def __init__(self, index):
        super().__init__(index)
        self.reset()

    def reset(self):
        self.slots = []

    def hit(self, slot):
        self.slots.remove(slot)
        self.slots.append(slot)

    refresh = hit

    def insert(self, slot, key):
        self.slots.append(slot)

    def victim(self, key, protected):
        slot = next(slot for slot in self.slots if slot not in protected)
        self.slots.remove(slot)
        return slot

    def forget(self, slot):
        self.slots.remove(slot)

    def order(self):
        return list(self.slots)
"""
USERS_TEST = """
from kvoffload.testing.conformance import PolicyConformance


class TestMine(PolicyConformance):
    policy = "mine.py:Mine"
"""
WORST_FAULTS = {
    "a victim that is protected": (
        "slot = next(slot for slot in self.slots if slot not in protected)",
        "slot = self.slots[0]",
        ["PolicyError: policy 'mine' named slot 0 as the victim", "1. store blocks ["],
    ),
    "a leaked slot": (
        "    def forget(self, slot):\n        self.slots.remove(slot)",
        "    def forget(self, slot):\n        pass",
        ["policy mine and the manager disagree about the slots {0}", "2. the store fails"],
    ),
    "hit raises": (
        "    def hit(self, slot):\n        self.slots.remove(slot)",
        "    def hit(self, slot):\n        raise KeyError(slot)",
        ["KeyError: 0, in Mine.hit, line 16 of mine.py", "and these steps:"],
    ),
}


@pytest.mark.slow
def test_the_worst_faults_end_the_suite_at_once(tmp_path: Path) -> None:
    """A fatal fault ends only the checks of the faulty policy: three policies in one run of pytest."""
    for number, (sound_code, faulty_code, _) in enumerate(WORST_FAULTS.values()):
        assert sound_code in USERS_POLICY
        (tmp_path / f"mine{number}.py").write_text(USERS_POLICY.replace(sound_code, faulty_code))
        (tmp_path / f"test_mine{number}.py").write_text(USERS_TEST.replace("mine.py", f"mine{number}.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--color=no"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"3 failed, 3 passed, {3 * (NUM_CHECKS - 2)} skipped" in done.stdout, done.stdout + done.stderr
    for number, (*_, shown) in enumerate(WORST_FAULTS.values()):
        for text in shown:
            assert text.replace("mine.py", f"mine{number}.py") in done.stdout, done.stdout
    assert done.stdout.count("earlier fatal fault: test_first_steps failed") >= 3, done.stdout


def test_the_first_steps_of_a_failure_are_few() -> None:
    failure = first_failure(
        lambda capacity, store: OffloadingManager(
            capacity, key_bytes=20, policy=KeepsRemovedBlocks, store=store
        )
    )
    assert failure is not None
    assert len(failure.script) == 2
    assert str(failure).count("\n") == 3


@pytest.mark.parametrize("seed", [None, 0])
def test_shrinking_is_bounded(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    """Without time to shrink, the report has the steps and the error of the first failure.

    Also with --hypothesis-seed, with which Hypothesis has no database.
    """
    monkeypatch.setattr("hypothesis.core.global_force_seed", seed)
    monkeypatch.setattr(shrink_limit, "SHRINK_CPU_S", 0.0)
    suite = type("Suite", (PolicyConformance,), {"policy": KeepsRemovedBlocks})()
    with pytest.raises(AssertionError, match="policy naive-lru") as failure:
        suite.test_life_cycle()
    assert "state." in str(failure.value)
    with pytest.raises(AssertionError, match="policy naive-lru"):
        suite.test_it_takes_any_hints()


def test_start_policy_shows_the_number_of_checks() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "start-policy.md").read_text()
    assert f"\n{NUM_CHECKS} passed in " in page
    assert f"test class, which runs {NUM_CHECKS} checks" in page


@pytest.fixture
def _without_shrinking() -> Iterator[None]:
    before = settings.get_current_profile_name()
    # Without `report_multiple_bugs=False` Hypothesis continues to search for other failures.
    settings.register_profile(
        "find", parent=settings.default, phases=[Phase.generate], database=None, report_multiple_bugs=False
    )
    settings.load_profile("find")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("_without_shrinking")
@pytest.mark.parametrize(("fault", "check", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
@pytest.mark.slow
def test_a_planted_fault_is_detected(fault: type[Any], check: str, message: str) -> None:
    twin = NaiveARC if issubclass(fault, NaiveARC) else NaiveLRU
    # Any number of examples: Hypothesis stops at the first failure.
    suite = type("Suite", (PolicyConformance,), {"policy": fault, "twin": twin, "max_examples": 160})
    with pytest.raises(Exception, match=message):
        getattr(suite(), check)()


class NeverReturns(NaiveLRU):
    def victim(self, key: bytes, protected: Protected) -> int:
        while True:
            pass


@pytest.mark.usefixtures("_without_shrinking")
def test_an_endless_loop_is_reported() -> None:
    suite = type("Suite", (PolicyConformance,), {"policy": NeverReturns, "call_cpu_s": 0.2})()
    suite.setup_method()
    try:
        with pytest.raises(
            EndlessLoopError,
            match=r"'naive-lru' does not return from victim\(\): .* in line \d+ of .*test_conf",
        ):
            suite.test_life_cycle()
    finally:
        suite.teardown_method()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.usefixtures("_without_shrinking")
def test_a_failure_ends_with_the_error() -> None:
    suite = type("Suite", (PolicyConformance,), {"policy": ChangesFreeSlots, "max_examples": 160})()
    with pytest.raises(AssertionError) as failure:
        suite.test_life_cycle()
    lines = str(failure.value).splitlines()
    assert "changed the free slots that it received" in lines[-1]
    assert any(line.strip().startswith("state.") for line in lines), "the steps"
    assert not any("sound_inside" in line for line in lines), "the checks after each step are omitted"
