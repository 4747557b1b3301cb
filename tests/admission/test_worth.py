"""The rule `worth`: expected uses, spent budget, and saved blocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from kvoffload.admission.worth import MOST_COUNTED, WorthAdmission
from kvoffload.core.admission import Admission, create_admission
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.structures.keys import Keys
from kvoffload.testing.admission_conformance import AdmissionConformance
from kvoffload.tiers.kinds.simulated import SimulatedOptions
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin

KEY_BYTES = 20


def keys_of(numbers: Iterable[int]) -> Keys:
    return Keys.pack([number.to_bytes(KEY_BYTES, "big") for number in numbers], KEY_BYTES)


class TestWorth(AdmissionConformance):
    max_examples = 4

    def make(self) -> Admission:
        return WorthAdmission(KEY_BYTES, 40)


def test_without_a_budget_every_block_enters() -> None:
    rule = WorthAdmission(KEY_BYTES, 40)
    assert rule.admit(keys_of(range(3))).all()


def test_expected_uses_by_hand() -> None:
    """Block 0 is used three times and its second use misses RAM; blocks 1 and 2 are used once."""
    rule = WorthAdmission(KEY_BYTES, 4_000, 0)
    rule.count(keys_of([0, 1, 2]))
    rule.missed(keys_of([0]))
    rule.missed(keys_of([0]))  # looked up twice
    rule.count(keys_of([0]))
    rule.count(keys_of([0]))
    rule.count(keys_of(range(100, 2_100)))  # sets the price
    expected = rule._expected.copy()
    # One miss among 2,003 blocks with one request; no miss among blocks with two requests.
    assert expected[1] == pytest.approx(1 / (2_003 + 2), rel=1e-3)
    assert (expected[2:] == expected[1]).all(), "at least the value of a block with fewer requests"


def test_a_use_that_ram_has_is_worth_nothing() -> None:
    rule = WorthAdmission(KEY_BYTES, 40, 0)
    for _ in range(400):
        rule.count(keys_of(range(8)))
    assert (rule._expected == 0).all()
    for _ in range(400):
        rule.missed(keys_of(range(8)))
        rule.count(keys_of(range(8)))
    assert rule._expected[MOST_COUNTED] > 100


def test_only_the_best_blocks_enter_when_the_budget_is_small() -> None:
    """In each round 20 blocks come and never return, and 5 of 50 blocks return."""
    rule = WorthAdmission(KEY_BYTES, 4_000, 0)
    chance, written, ever = np.random.default_rng(5), {True: 0, False: 0}, set[int]()
    for step in range(3_000):
        numbers = [
            *chance.choice(50, 5, replace=False).tolist(),
            *range(1_000 * step + 1_000, 1_000 * step + 1_020),
        ]
        keys = keys_of(numbers)
        rule.missed(keys)
        rule.count(keys)
        offered = [number for number in numbers if number not in ever]
        allowed = rule.admit(keys_of(offered))
        rule.settle(keys_of(offered), int(allowed.sum()), 0.02, 1_000.0)
        for number, enters in zip(offered, allowed.tolist(), strict=True):
            if enters:
                ever.add(number)
                written[number < 50] += 1
    assert written[True] >= 40
    assert written[True] + written[False] <= 0.02 * 3_000 + 25, "at most a batch above the earnings"


def test_the_parent_of_an_admitted_block_is_admitted() -> None:
    rule = WorthAdmission(KEY_BYTES, 4_000, 0)
    chance = np.random.default_rng(6)
    for _ in range(2_000):
        # Paths of a tree: a root, one of 8 children, and a leaf.
        child = int(chance.integers(8))
        keys = keys_of([0, 1 + child, 10 + 100 * child + int(chance.integers(80))])
        rule.missed(keys)
        rule.count(keys)
        allowed = rule.admit(keys).tolist()
        assert allowed == sorted(allowed, reverse=True)
        rule.settle(keys, sum(allowed), 0.5, 1_000.0)


@pytest.mark.parametrize(
    ("store", "advantage"),
    [pytest.param("on-compute", 0.001, marks=pytest.mark.slow), ("on-device-eviction", 0.02)],
)
def test_it_saves_more_than_first_come_with_the_same_budget(store: str, advantage: float) -> None:
    trace = generate(builtin("chat"))
    a_day = 3_000 / (np.ptp(trace.timestamps_ms) / 86_400_000)
    saved = {}
    for rule in ("all", "worth"):
        tier = SimulatedOptions(
            capacity=str(trace.unique_blocks), admission=rule, max_write_blocks_per_day=a_day
        )
        report = Replay(trace, ReplayConfig(1_024, "hazard", "all", 950, store, (tier,))).run()
        assert report.tiers[1].blocks_written <= 3_000
        saved[rule] = report.prefix_hit_ratio
    assert saved["worth"] > saved["all"] + advantage


def test_its_parameter_is_an_option() -> None:
    rule = create_admission("worth,warm_up=5", KEY_BYTES, 100_000)
    assert isinstance(rule, WorthAdmission)
    assert rule.warm_up == 5
    assert create_admission("worth", KEY_BYTES, 10).warm_up == 5_000  # type: ignore[union-attr]
