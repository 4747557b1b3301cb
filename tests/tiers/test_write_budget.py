"""The write budget: bytes in any 24 hours, in this life and earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.tiers.disk.inspection import compact, opened
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.striped import StripedTier
from kvoffload.tiers.write_budget import DAY_S, HOUR_S, WriteBudget, budget_of_recording
from support.disk_blocks import KEY_BYTES, Disk, Driver, keys_of
from support.refusals import refusal
from support.tiering_rig import Clock

PAGE_BYTES = 4096


def test_the_budget_is_for_any_24_hours() -> None:
    clock = Clock()
    budget = WriteBudget(60, clock)
    budget.spend(40)
    assert budget.left_bytes == 20
    budget.spend(20)
    assert budget.left_bytes == 0
    clock.now += 23.9 * HOUR_S
    assert budget.left_bytes == 0
    clock.now += 2 * HOUR_S
    assert budget.left_bytes == 60


@given(st.integers(0, 12), st.lists(st.tuples(st.floats(0, 10), st.integers(0, 7)), max_size=40))
def test_no_24_hours_exceed_the_budget(max_bytes: int, steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    budget = WriteBudget(max_bytes, clock)
    writes: list[tuple[float, int]] = []
    for hours, wanted in steps:
        clock.now += hours * HOUR_S
        num_bytes = min(wanted, budget.left_bytes)
        budget.spend(num_bytes)
        writes.append((clock.now, num_bytes))
        for end, _ in writes:
            assert sum(n for at, n in writes if end - 24 * HOUR_S < at <= end) <= max_bytes
        # The budget is used: only writes of the last 25 hours count.
        recent = sum(n for at, n in writes if clock.now - 25 * HOUR_S < at)
        assert num_bytes == wanted or recent >= max_bytes


@pytest.mark.parametrize("hours", [1, 2, 1000])
def test_a_clock_set_back_neither_renews_nor_blocks_the_budget(hours: int) -> None:
    clock = Clock()
    clock.now = 4_000_000.0
    budget = WriteBudget(2, clock)
    budget.spend(2)
    clock.now -= hours * HOUR_S
    assert budget.left_bytes == 0, "the writes may be recent"
    clock.now += 26 * HOUR_S
    assert budget.left_bytes == 2


def test_writes_of_earlier_lives_count_by_their_hour() -> None:
    clock = Clock()
    hour = int(clock.now) // HOUR_S
    budget = WriteBudget(48, clock)
    budget.add_tier(8, {hour - 25: 100, hour - 24: 2, hour: 1})
    assert budget.left_bytes == 24
    clock.now += HOUR_S
    assert budget.left_bytes == 40
    clock.now += 24 * HOUR_S
    assert budget.left_bytes == 48


def test_tiers_that_share_a_budget_report_equal_parts() -> None:
    budget = WriteBudget(101)
    budget.add_tier(8, {})
    budget.add_tier(8, {})
    assert (budget.left_bytes, budget.left_bytes_each) == (101, 50)


# ---- budgets of recordings


@given(
    st.floats(0, 1000),
    st.floats(1, 400 * HOUR_S),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 300)), max_size=40),
)
def test_a_recording_never_has_more_than_the_mean_rate_has_paid(
    max_per_day: float, duration_s: float, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    clock.now = 0.0
    budget = budget_of_recording(max_per_day, clock)
    written = 0
    for share, wanted in sorted(steps):
        clock.now = share * duration_s
        num_blocks = min(wanted, budget.left_bytes)
        budget.spend(num_blocks)
        written += num_blocks
        assert written <= max_per_day * clock.now / DAY_S


def test_a_recording_of_minutes_may_not_use_the_budget_of_a_day() -> None:
    clock = Clock()
    budget = budget_of_recording(2400, clock)
    bytes_left = []
    for _ in range(3):
        bytes_left.append(budget.left_bytes)
        clock.now += HOUR_S
    assert bytes_left == [0, 100, 200]
    budget.spend(150)
    assert budget.left_bytes == 150
    clock.now += 48 * HOUR_S
    assert budget.left_bytes == 2400, "never more than the budget of a day"


@pytest.mark.parametrize("admission", ["all", "reuse:2"])
def test_a_simulated_tier_keeps_a_budget_as_a_disk_does(tmp_path: Path, admission: str) -> None:
    disk = Driver(Disk(tmp_path, 40, admission=admission, write_budget=WriteBudget(9 * PAGE_BYTES)).tier)
    simulated = Driver(
        SimulatedTier(
            disk.tier.stats().capacity,
            key_bytes=KEY_BYTES,
            block_bytes=disk.block_bytes,
            admission=admission,
            write_budget=WriteBudget(9),
        )
    )
    chance = np.random.default_rng(7)
    for _ in range(40):
        path = chance.choice(30, 5, replace=False).tolist()
        use_request = bool(chance.integers(2))
        written = []
        for driver in (disk, simulated):
            record = driver.tier.begin_request("r")
            written.append(driver.write(path, request=record if use_request else None))
            driver.tier.finish_request(record, keys_of(path))
        assert written[0] == written[1]
    disk_stats, simulated_stats = disk.tier.stats(), simulated.tier.stats()
    assert disk_stats.written == simulated_stats.written == 9
    assert (disk_stats.dropped, disk_stats.refused) == (simulated_stats.dropped, simulated_stats.refused)
    disk.tier.close()


def test_a_disk_with_worth_spends_its_budget_evenly(tmp_path: Path) -> None:
    """Each hour pays one block of 24 a day, whatever is offered."""
    clock = Clock()
    budget = WriteBudget(24 * PAGE_BYTES, clock)
    driver = Driver(Disk(tmp_path, 40, admission="worth,warm_up=0", write_budget=budget).tier)
    num_written = []
    for hour in range(6):
        record = driver.tier.begin_request("r")
        driver.tier.finish_request(record, keys_of([100 * hour]))
        num_written.append(len(driver.write([100 * hour])))
        clock.now += HOUR_S
    assert num_written[0] == 0, "nothing has been earned"
    assert 1 <= sum(num_written) <= 5
    driver.tier.close()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_an_offer_without_a_request_is_no_reference(policy: str) -> None:
    """Blocks of a victim tier are offered when the device drops them, after their request has finished."""
    tier = SimulatedTier(20, key_bytes=KEY_BYTES, admission="reuse:2", policy=policy)
    driver = Driver(tier)
    for path in ([1, 2, 3], [2, 4]):
        tier.finish_request(tier.begin_request("r"), keys_of(path))
    assert driver.write([1, 2, 3, 4]) == [2], "only block 2, alone: block 1 is not its parent"
    assert driver.write([1, 2, 3, 4]) == []
    assert tier.stats().refused == 6


def test_a_negative_budget_is_refused() -> None:
    with refusal("max_write_bytes_per_day: -1"):
        WriteBudget(-1)


# ---- budgets of disks


def test_a_disk_drops_blocks_beyond_the_budget_and_present_blocks_are_free(tmp_path: Path) -> None:
    driver = Driver(Disk(tmp_path, 40, write_budget=WriteBudget(5 * PAGE_BYTES)).tier)
    assert driver.write([1, 3]) == [1, 3]
    assert driver.write([1, 2, 3, 4, 5, 6]) == [2, 4, 5]
    assert driver.write([3, 9, 1]) == []
    stats = driver.tier.stats()
    assert (stats.written, stats.dropped, stats.write_budget_bytes) == (5, 2, 0)
    assert driver.read([1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    driver.tier.close()


def test_refused_blocks_cost_nothing(tmp_path: Path) -> None:
    budget = WriteBudget(2 * PAGE_BYTES)
    driver = Driver(Disk(tmp_path, 40, admission="reuse:2", write_budget=budget).tier)
    assert driver.write([1, 2]) == []
    assert budget.left_bytes == 2 * PAGE_BYTES
    driver.tier.close()


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_the_budget_outlives_the_process(tmp_path: Path, checkpoints: int) -> None:
    """Evicted blocks count too, and small blocks cost whole pages."""

    def life(max_blocks: int) -> Driver:
        return Driver(Disk(tmp_path, 2, 512, write_budget=WriteBudget(max_blocks * PAGE_BYTES)).tier)

    driver = life(5)
    for number in range(6):
        assert driver.write([number]) == ([number] if number < 5 else [])
    driver.tier.delete(keys_of([4]))
    driver.tier.close()
    for _ in range(checkpoints):
        with opened(tmp_path) as (slab, recovered):
            compact(slab, recovered)
    driver = life(6)
    assert driver.tier.stats().write_budget_bytes == PAGE_BYTES
    assert driver.write([7, 8]) == [7]
    driver.tier.close()


def test_several_disks_share_a_budget(tmp_path: Path) -> None:
    def life(max_blocks: int) -> Driver:
        budget = WriteBudget(max_blocks * PAGE_BYTES)
        return Driver(StripedTier([Disk(tmp_path / name, 40, write_budget=budget).tier for name in "ab"]))

    driver = life(10)
    assert len(driver.write(list(range(12)))) == 10
    driver.tier.close()
    driver = life(12)
    assert driver.tier.stats().write_budget_bytes == 2 * PAGE_BYTES
    assert len(driver.write(list(range(20, 33)))) == 2
    assert driver.tier.stats().dropped == 11
    driver.tier.close()


def test_a_failed_write_counts(tmp_path: Path) -> None:
    """A failed write may have worn the medium too."""
    budget = WriteBudget(3 * PAGE_BYTES)
    driver = Driver(Disk(tmp_path, 40, write_budget=budget).tier)
    driver.tier.submit_write(keys_of([1, 2]), driver.pool, np.arange(2))
    assert budget.left_bytes == PAGE_BYTES, "counted when the write begins, with any result"
    driver.tier.close()


@pytest.mark.parametrize("limit", [-1, float("nan"), float("inf"), "7", None, True])
def test_a_limit_must_be_a_number_of_bytes(limit: Any) -> None:
    with refusal("max_write_bytes_per_day"):
        WriteBudget(limit)
