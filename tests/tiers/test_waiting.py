"""Pauses between attempts, and waiting with a time limit."""

from __future__ import annotations

import pytest

from kvoffload.tiers.waiting import Backoff, wait_until


def test_pauses_double_up_to_the_longest_and_start_again_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


@pytest.mark.parametrize(("chance", "pause_s"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
def test_jitter_makes_a_pause_longer_or_shorter(chance: float, pause_s: float) -> None:
    assert Backoff(1.0, 5.0, jitter=0.5, chance=lambda: chance).next_s() == pause_s


def test_waiting_ends_with_the_condition_or_the_time_limit() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 10.0, poll_s=0.0)
    assert not wait_until(lambda: False, 0.0)
