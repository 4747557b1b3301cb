"""Estimates from counts: worked examples of the components of an error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvoffload.whatif.estimate import BIAS, GROUPS, Counted, estimates


def even(misses: int, setting: str = "current", num_slots: int = 10**9) -> Counted:
    return Counted(setting, np.full(GROUPS, misses, np.int64), num_slots)


def test_a_hit_ratio_follows_from_the_sampled_misses() -> None:
    (estimate,) = estimates([even(10)], 8 * GROUPS * 40, 8)
    assert estimate.hit_ratio == 0.75
    assert (estimate.gain, estimate.gain_error) == (0.0, 0.0)


def test_with_even_misses_and_a_huge_shadow_only_the_bias_remains() -> None:
    (estimate,) = estimates([even(10)], 8 * GROUPS * 40, 8)
    assert estimate.error == pytest.approx(1.96 * BIAS * 0.25, rel=1e-3)


def test_the_spread_over_groups_is_the_error_of_the_misses() -> None:
    rng = np.random.default_rng(1)
    missed = rng.poisson(100, GROUPS).astype(np.int64)
    num_looked_up = 8 * 100 * GROUPS * 10
    (estimate,) = estimates([Counted("current", missed, 10**9)], num_looked_up, 8)
    poisson = math.sqrt(missed.sum() * 7 / 8) * 8 / num_looked_up
    bias = BIAS * (1 - estimate.hit_ratio)
    assert estimate.error == pytest.approx(1.96 * math.hypot(poisson, bias), rel=0.15)


def test_a_small_shadow_is_uncertain_where_the_curve_is_steep() -> None:
    (estimate,) = estimates([even(10, num_slots=100)], 8 * GROUPS * 40, 8)
    of_capacity = 0.25 * math.log(4) * math.sqrt(7 / 8 / 100)
    assert estimate.error == pytest.approx(1.96 * math.hypot(of_capacity, BIAS * 0.25), rel=1e-6)


def test_a_gain_is_more_certain_than_both_ratios() -> None:
    rng = np.random.default_rng(2)
    missed = rng.poisson(30, GROUPS).astype(np.int64)
    current, better = estimates(
        [Counted("current", missed, 10**6), Counted("capacity=2", missed - 2, 2 * 10**6)],
        8 * GROUPS * 100,
        8,
    )
    assert better.gain == pytest.approx(0.02)
    assert better.gain_error < min(current.error, better.error)
    assert better.is_better
    assert not current.is_better


def test_equal_shadows_have_no_gain() -> None:
    _, other = estimates([even(10), even(10, "policy=arc")], 8 * GROUPS * 40, 8)
    assert other.gain == 0
    assert not other.is_better


@pytest.mark.parametrize("misses", [0, 40, 41])
def test_extreme_counts_give_ratios_between_0_and_1(misses: int) -> None:
    (estimate,) = estimates([even(misses)], 8 * GROUPS * 40, 8)
    assert 0 <= estimate.hit_ratio <= 1
    assert math.isfinite(estimate.error)
