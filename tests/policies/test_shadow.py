"""The simulated LRU: counts worked by hand, and contents compared with the policy `lru`."""

from __future__ import annotations

import random

import pytest

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.policies.hazard import Hazard
from kvoffload.policies.hazard.shadow import ShadowLRU
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.structures.index import Index
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.hazard_kernels import compare, insert_dropped


class Unforgetting(Hazard):
    """A Hazard policy whose lead neither fades nor is limited, and that decides only while it leads."""

    promise = 0.0

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.state.recent = 1e30


def use(cache: ShadowLRU, letters: str, held: int = 0, on_device: int = 0) -> float:
    """Observe a request whose first `held` blocks the policy holds; return the lead after it."""
    positions = [ord(letter) - ord("a") for letter in letters]
    compare(cache, positions, [row < held for row in range(len(positions))], on_device)
    return cache.lead


def members(cache: ShadowLRU) -> str:
    return "".join(chr(position + ord("a")) for position in cache.blocks.members(0))


def test_it_counts_blocks_that_only_lru_serves() -> None:
    cache = ShadowLRU(9, 3)
    assert use(cache, "abc") == 0
    assert use(cache, "abc", held=1) == 2
    # A path is evicted from its tail: c is evicted for d.
    assert use(cache, "d") == 2
    assert use(cache, "abc", held=3) == 1
    assert members(cache) == "abc"


def test_the_head_of_a_request_longer_than_the_cache_is_kept() -> None:
    cache = ShadowLRU(9, 2)
    use(cache, "abcd")
    assert members(cache) == "ab"


def test_only_hits_along_the_prefix_count() -> None:
    cache = ShadowLRU(9, 4)
    use(cache, "b")
    assert use(cache, "ab") == 0


def test_blocks_of_the_device_are_no_hits() -> None:
    cache = ShadowLRU(9, 4)
    use(cache, "abcd")
    assert use(cache, "abcd", held=2, on_device=2) == 2
    assert use(cache, "abcd", held=4, on_device=4) == 2


def test_a_victim_tier_stores_the_blocks_that_the_device_drops() -> None:
    cache = ShadowLRU(9, 3)
    compare(cache, [0, 1], [False, False], is_victim_tier=True)
    assert members(cache) == ""
    insert_dropped(cache, [2, 3])
    insert_dropped(cache, [0, 1])
    assert members(cache) == "abc"
    compare(cache, [0], [False], is_victim_tier=True)
    assert (members(cache), cache.lead) == ("bc", 1)


@pytest.mark.parametrize(
    ("store", "device_share"),
    [(ON_COMPUTE, 0), (ON_COMPUTE, 1), (ON_DEVICE_EVICTION, 1), (ON_DEVICE_EVICTION, 2)],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_serves_the_same_blocks_as_lru(store: str, device_share: int, seed: int) -> None:
    """The simulation serves each request like the policy `lru`, independent of its owner."""
    capacity = random.Random(seed).choice([15, 60, 250])
    trace = generate(builtin("chat", sessions=120, seed=seed))
    hits = []
    for policy in (Unforgetting, "lru"):
        run = Replay(trace, ReplayConfig(capacity, policy, "all", device_share * capacity, store))
        run.run()
        hits.append(run)
    own, lru = hits
    led: float = own.manager.policy.state.history.shadow.lead  # type: ignore[attr-defined]
    assert led == int(lru.hits_per_request.sum() - own.hits_per_request.sum())
