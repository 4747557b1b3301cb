"""The promise of `hazard`, at most 1 point below LRU, on 40 kinds of traffic.

The traffic is random and unlike any recording: think times, lengths and documents of sessions are mixed, so
that the policy's statistics may be useless. A run has about 100,000 references. In much shorter runs a single
request changes the result by more than the promise. ``bench/guard.py --synthetic 40`` prints the leads.
"""

from __future__ import annotations

import pytest

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.policies.hazard.policy import Hazard, promised
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from support.mixed import mixed

SEEDS = 40
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SIDES = ((ON_COMPUTE, False), (ON_COMPUTE, True), (ON_DEVICE_EVICTION, True))


def check(seed: int, shares: tuple[float, ...]) -> None:
    trace = mixed(seed)
    for share in shares:
        capacity = max(4, round(share * trace.unique_blocks))
        for store, has_device in SIDES:
            device = capacity if has_device else 0
            hit_ratio, lru = (
                Replay(trace, ReplayConfig(capacity, policy, "all", device, store)).run().prefix_hit_ratio
                for policy in ("hazard", "lru")
            )
            assert hit_ratio >= lru - promised(Hazard.promise, Hazard.write_cost), (
                f"seed {seed}, {share:.1%}, device {device}, {store}"
            )


@pytest.mark.parametrize("seed", range(0, SEEDS, 20))
def test_the_promise_is_kept(seed: int) -> None:
    check(seed, (SHARES[seed // 10 % len(SHARES)],))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_promise_is_kept_everywhere(seed: int) -> None:
    check(seed, (SHARES[seed % len(SHARES)],))
