"""What a tier may be written in a day: of any 24 hours, in this life or an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.testing.scripted_tier import ScriptedTier
from kvoffload.tiers.budgeted import BudgetedTier
from kvoffload.tiers.disk.inspection import compact, opened
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.striped import StripedTier
from support.disk_blocks import KEY_BYTES, Disk, Driver, keys_of

BLOCK_BYTES, HOUR_S = 8, 3600


class Clock:
    """Seconds that pass when told."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def budgeted(max_blocks: int, clock: Clock | None = None) -> tuple[Driver, ScriptedTier]:
    """A tier that may be written so many blocks a day, and what stands behind it."""
    tier = ScriptedTier(BLOCK_BYTES, immediate=True)
    return Driver(BudgetedTier(tier, max_blocks * BLOCK_BYTES, clock or Clock())), tier


def left(driver: Driver) -> Any:
    return driver.tier.stats().write_budget_bytes


def test_the_budget_of_a_day() -> None:
    clock = Clock()
    driver, _ = budgeted(6, clock)
    assert driver.write([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert left(driver) == 2 * BLOCK_BYTES
    assert driver.write([5, 6, 7, 8]) == [5, 6]
    stats = driver.tier.stats()
    assert (stats.written, stats.dropped, stats.write_budget_bytes) == (6, 2, 0)
    clock.now += 23.9 * HOUR_S
    assert driver.write([7]) == [], "no 24 hours may see more than the budget"
    clock.now += 2 * HOUR_S
    assert driver.write([7, 8]) == [7, 8]


def test_blocks_that_are_here_need_no_budget() -> None:
    driver, tier = budgeted(5)
    assert driver.write([1, 3]) == [1, 3]
    assert driver.write([1, 2, 3, 4, 5, 6]) == [2, 4, 5]
    assert (len(tier.blocks), driver.tier.stats().dropped) == (5, 1)
    assert driver.write([1, 2, 3]) == []
    assert driver.write([3, 9, 1]) == []
    assert driver.tier.stats().dropped == 2
    assert driver.read([1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


def test_what_the_tier_does_not_take_costs_nothing() -> None:
    driver, tier = budgeted(3)
    tier.takes = False
    assert driver.write([1, 2]) == []
    assert left(driver) == 3 * BLOCK_BYTES


def test_a_write_that_fails_has_worn_the_medium_all_the_same() -> None:
    tier = ScriptedTier(BLOCK_BYTES)
    driver = Driver(BudgetedTier(tier, 3 * BLOCK_BYTES, Clock()))
    driver.tier.submit_write(keys_of([1, 2]), driver.pool, np.arange(2))
    tier.jobs[0].fail = set(keys_of([1, 2]))
    tier.end(tier.jobs[0])
    (result,) = driver.tier.finished()
    assert not result.ok.any()
    assert left(driver) == BLOCK_BYTES


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 7)), max_size=40),
)
def test_no_24_hours_see_more_than_the_budget(max_blocks: int, steps: list[tuple[float, int]]) -> None:
    clock, number = Clock(), 0
    driver, _ = budgeted(max_blocks, clock)
    written: list[tuple[float, int]] = []
    for hours, count in steps:
        clock.now += hours * HOUR_S
        numbers = list(range(number, number + count))
        number += count
        stored = driver.write(numbers)
        assert stored == numbers[: len(stored)], "the head"
        written.append((clock.now, len(stored)))
        for end, _ in written:
            assert sum(n for at, n in written if end - 24 * HOUR_S < at <= end) <= max_blocks
        # And as much as it may: nothing older than the hour that is only partly in the day counts.
        recent = sum(n for at, n in written if clock.now - 25 * HOUR_S < at)
        assert len(stored) == count or recent >= max_blocks


@pytest.mark.parametrize("hours", [1, 2, 1000])
def test_a_clock_that_is_set_back_neither_renews_the_budget_nor_stops_writing_for_ever(hours: int) -> None:
    clock = Clock(4_000_000.0)
    driver, _ = budgeted(2, clock)
    assert driver.write([1, 2]) == [1, 2]
    clock.now -= hours * HOUR_S
    assert driver.write([3]) == [], "they may have been written a moment ago"
    assert left(driver) == 0
    clock.now += 26 * HOUR_S
    assert driver.write([3]) == [3]


def test_what_earlier_lives_wrote_counts_by_its_hour() -> None:
    clock, tier = Clock(), ScriptedTier(BLOCK_BYTES, immediate=True)
    hour = int(clock.now) // HOUR_S
    tier.written_before = {hour - 25: 100, hour - 24: 2, hour: 1}
    driver = Driver(BudgetedTier(tier, 6 * BLOCK_BYTES, clock))
    assert left(driver) == 3 * BLOCK_BYTES
    clock.now += HOUR_S
    assert left(driver) == 5 * BLOCK_BYTES
    clock.now += 24 * HOUR_S
    assert left(driver) == 6 * BLOCK_BYTES
    assert tier.written_before == {hour - 25: 100, hour - 24: 2, hour: 1}, "the tier's, and not touched"


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_the_budget_outlives_the_process(tmp_path: Path, checkpoints: int) -> None:
    """Also what blocks have cost that are not here any more; small blocks cost whole pages."""

    def life(max_blocks: int) -> Driver:
        return Driver(BudgetedTier(Disk(tmp_path, 2, 512).tier, max_blocks * 4096))

    driver = life(5)
    for number in range(6):
        assert driver.write([number]) == ([number] if number < 5 else [])
    driver.tier.delete(keys_of([4]))
    driver.tier.close()
    for _ in range(checkpoints):
        with opened(tmp_path) as (slab, found):
            compact(slab, found)
    driver = life(6)
    assert left(driver) == 4096
    assert driver.write([7, 8]) == [7]
    driver.tier.close()


def test_one_budget_for_several_disks(tmp_path: Path) -> None:
    def life(max_blocks: int) -> Driver:
        parts = [Disk(tmp_path / name, 40).tier for name in "ab"]
        return Driver(BudgetedTier(StripedTier(parts), max_blocks * 4096))

    driver = life(10)
    assert len(driver.write(list(range(12)))) == 10
    driver.tier.close()
    driver = life(12)
    assert left(driver) == 2 * 4096
    assert driver.write(list(range(13))) == [10, 11]
    assert driver.tier.stats().dropped == 1
    driver.tier.close()


def test_the_smaller_of_two_budgets_is_what_is_left() -> None:
    tier = ScriptedTier(BLOCK_BYTES, immediate=True)
    driver = Driver(BudgetedTier(BudgetedTier(tier, 24, Clock()), 40, Clock()))
    assert left(driver) == 24
    assert driver.write([1, 2, 3, 4]) == [1, 2, 3]
    assert (left(driver), driver.tier.stats().dropped) == (0, 1)


def test_a_tier_whose_blocks_cost_nothing() -> None:
    tier = BudgetedTier(SimulatedTier(20, key_bytes=KEY_BYTES), 0)
    _, taken = tier.submit_write(keys_of(range(5)), np.zeros((5, 0), np.uint8), np.arange(5))
    assert taken.all()


def test_in_all_else_it_is_the_tier() -> None:
    driver, tier = budgeted(10)
    budget = driver.tier
    named = ("name", "identity", "block_bytes", "stored_bytes", "written_before")
    assert [getattr(budget, name) for name in named] == [getattr(tier, name) for name in named]
    request, path = budget.begin_request("r"), keys_of([1, 2, 3])
    assert driver.write([1, 2, 3], request=request) == [1, 2, 3]
    assert budget.contains(path, request).all()
    budget.finish_request(request, path)
    assert (tier.used, tier.open_requests) == ([list(path)], [])
    assert budget.delete(keys_of([1, 9])) == 1
    assert budget.drain(0.0)
    assert tier.durable == tier.blocks
    budget.clear()
    assert not tier.blocks
    budget.close()
    assert tier.closed


def test_a_budget_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_write_bytes_per_day: -1"):
        BudgetedTier(ScriptedTier(BLOCK_BYTES), -1)
