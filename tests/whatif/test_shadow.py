"""Shadows against managers that serve the same requests with single calls."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.core.hints import NO_HINTS, Hints, Labels
from kvoffload.core.kernels.whole_requests import ON_DEVICE
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.policy import POLICIES, BlockwisePolicy
from kvoffload.errors import ConfigError
from kvoffload.structures.keys import Keys
from kvoffload.whatif import Shadows, WhatIf
from kvoffload.whatif.sample import MOST_REQUESTS, Sample
from kvoffload.whatif.shadows import ENOUGH_BLOCKS, ENOUGH_REQUESTS

KEY_BYTES = 32
ENDS = (NO_HINTS, Hints(finish_reason="stop"), Hints(finish_reason="tool_calls", priority=1))


def traffic(seed: int, count: int) -> Iterator[tuple[list[bytes], int, Hints]]:
    """Yield requests of sessions that share prompts: keys, blocks on the device, hints at the end."""
    rng = random.Random(seed)
    prompts = [[rng.randbytes(KEY_BYTES) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    sessions = [[*rng.choice(prompts)] for _ in range(12)]
    for _ in range(count):
        session = rng.choice(sessions)
        session += [rng.randbytes(KEY_BYTES) for _ in range(rng.choice((0, 0, 3, 11)))]
        if len(session) > 150:
            session[:] = rng.choice(prompts)
        yield [*session], rng.choice((0, 0, 3)), rng.choice(ENDS)


def serve(manager: OffloadingManager, keys: list[bytes], on_device: int, hints: Hints) -> tuple[object, int]:
    """Serve a request; return its context and its hits."""
    ctx = manager.begin_request("", keys, hints=hints.at_begin)
    hits = manager.lookup(keys[on_device:], ctx).num_ready
    plan = manager.prepare_store(keys, ctx)
    if plan is not None:
        manager.complete_store(plan)
    manager.finish_request(ctx, hints=hints)
    return ctx, hits


def resident_hashes(manager: OffloadingManager) -> set[int]:
    """Return the hashes of the resident keys. Keys of 8 bytes are derived from the hashes of full keys."""
    collected = Sample(1, 0)
    ctx = OffloadingManager(1, key_bytes=manager.key_bytes).begin_request("", keys_of_ready(manager))
    assert collected.take(ctx, Labels())
    return {*collected.state.hashes[: collected.state.num_keys].tolist()}


def keys_of_ready(manager: OffloadingManager) -> Keys:
    return manager.index.keys_at(manager.slots.ready())


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("admission", ["all", "reuse:2"])
@pytest.mark.parametrize("capacity", [120, 3000])
def test_a_shadow_of_all_blocks_decides_as_the_serving_manager(
    policy: str, admission: str, capacity: int
) -> None:
    """Covers a small cache, and a cache that fills late, so that requests find free slots."""
    manager = OffloadingManager(capacity, policy=policy, admission=admission)
    shadows = Shadows([WhatIf(capacity=3)], capacity, policy=policy, admission=admission, one_in=1)
    looked_up = hit = 0
    for keys, on_device, hints in traffic(1, 400):
        ctx, hits = serve(manager, keys, on_device, hints)
        shadows.finished(ctx)
        looked_up, hit = looked_up + max(0, len(keys) - on_device), hit + hits
        if shadows.is_due:
            shadows.work()
    shadows.work()
    current, larger = shadows.estimates()
    assert shadows.num_looked_up == looked_up
    assert current.hit_ratio == pytest.approx(hit / looked_up)
    assert larger.hit_ratio >= current.hit_ratio
    assert shadows.members[0].is_compiled == (admission == "all")
    shadow = shadows.members[0].manager
    serving, of_shadow = manager.stats(), shadow.stats()
    for name in ("stored", "evicted", "refused", "dropped", "ready"):
        assert getattr(serving, name) == getattr(of_shadow, name), name
    assert resident_hashes(manager) == resident_hashes(shadow)
    assert serving.policy == of_shadow.policy


@pytest.mark.parametrize("policy", POLICIES.names())
def test_a_shadow_decides_as_a_manager_that_serves_the_sample(policy: str) -> None:
    manager = OffloadingManager(300, policy=policy)
    shadows, sample = Shadows([WhatIf(capacity=2)], 300, policy=policy, one_in=3), Sample(3, 0)
    naive, missed = [OffloadingManager(size, key_bytes=8, policy=policy) for size in (100, 200)], [0, 0]
    for number, (keys, on_device, hints) in enumerate(traffic(6, 500)):
        ctx, _ = serve(manager, keys, on_device, hints)
        shadows.finished(ctx)
        if number % 70 == 0:
            shadows.work()
        sample.clear()
        assert sample.take(ctx, Labels())
        if sample.state.num_requests:
            sampled, first = [*sample.keys()], int(sample.state.requests[0, ON_DEVICE])
            for which, each in enumerate(naive):
                missed[which] += len(sampled) - first - serve(each, sampled, first, hints)[1]
    shadows.work()
    assert missed == [shadow.missed.sum() for shadow in shadows.members]
    for shadow, each in zip(shadows.members, naive, strict=True):
        assert shadow.manager.stats() == each.stats()
        assert keys_of_ready(shadow.manager) == keys_of_ready(each)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("admission", ["all", "reuse:2"])
def test_blocks_that_are_only_stored_are_no_misses(policy: str, admission: str) -> None:
    """A shadow with an admission rule serves a request with calls, otherwise with a kernel."""
    manager = OffloadingManager(500, policy=policy, admission=admission)
    shadows = Shadows([WhatIf(capacity=2)], 500, policy=policy, admission=admission, one_in=1)
    looked_up = hit = 0
    for keys, on_device, hints in traffic(3, 200):
        candidates = keys[on_device : on_device + 10]
        ctx = manager.begin_request("", keys, hints=hints.at_begin)
        hit, looked_up = hit + manager.lookup(candidates, ctx).num_ready, looked_up + len(candidates)
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx, hints=hints)
        shadows.finished(ctx, on_device, on_device + 10)
    shadows.work()
    assert shadows.num_looked_up == looked_up
    assert shadows.estimates()[0].hit_ratio == pytest.approx(hit / looked_up)


class Newest(BlockwisePolicy):
    """Policy in Python that evicts the newest block."""

    name = "newest"

    def __init__(self, index: object) -> None:
        super().__init__(index)
        self._order: list[int] = []

    def insert(self, slot: int, key: bytes) -> None:
        self._order.append(slot)

    def hit(self, slot: int) -> None:
        pass

    def forget(self, slot: int) -> None:
        self._order.remove(slot)

    def victim(self, key: bytes, protected: object) -> int:
        newest = next(slot for slot in reversed(self._order) if slot not in protected)
        self._order.remove(newest)
        return newest

    def reset(self) -> None:
        self._order.clear()


class Failing(Newest):
    name = "failing"

    def hit(self, slot: int) -> None:
        raise RuntimeError("boom")


def run(shadows: Shadows, count: int = 200, *, serves: bool = True) -> None:
    """Report requests; with `serves` the shadows serve each at once."""
    manager = OffloadingManager(100)
    for keys, on_device, hints in traffic(2, count):
        shadows.finished(serve(manager, keys, on_device, hints)[0])
        if serves:
            shadows.work()


def test_policies_in_python_are_served_by_calls() -> None:
    shadows = Shadows([WhatIf(capacity=2)], 100, policy=Newest, one_in=2)
    run(shadows)
    current, larger = shadows.estimates()
    assert 0 < current.hit_ratio < larger.hit_ratio


def test_a_failing_setting_is_removed() -> None:
    failed = list[tuple[str, Exception]]()
    shadows = Shadows([WhatIf(capacity=2)], 100, one_in=2)
    shadows.on_failure = lambda *failure: failed.append(failure)
    broken = Shadows([WhatIf()], 100, policy=Failing, one_in=2).members[0]
    broken.setting = WhatIf(policy="failing")
    shadows.members.insert(1, broken)
    run(shadows)
    shadows.work()
    assert [(label, str(error)) for label, error in failed] == [("policy=failing", "boom")]
    assert [estimate.setting for estimate in shadows.estimates()] == ["current", "capacity=2"]


def test_without_the_current_setting_there_is_no_estimate() -> None:
    failed = list[str]()
    shadows = Shadows([WhatIf(policy="lru")], 100, policy=Failing, one_in=2)
    shadows.on_failure = lambda label, _: failed.append(label)
    run(shadows)
    assert (shadows.estimates(), failed) == ([], ["current"])


def test_errors_of_other_callers_are_raised() -> None:
    shadows = Shadows([WhatIf(policy="lru")], 100, policy=Failing, one_in=2)
    run(shadows, serves=False)
    with pytest.raises(RuntimeError, match="boom"):
        shadows.work()


def test_work_is_due_after_many_requests_or_blocks() -> None:
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=1), OffloadingManager(100)
    keys = [number.to_bytes(32, "little") for number in range(ENOUGH_BLOCKS // 2)]
    for number in range(2):
        assert (shadows.is_due, shadows.is_waiting) == (False, number > 0)
        shadows.finished(serve(manager, keys, 0, NO_HINTS)[0])
    assert shadows.is_due
    shadows.work()
    assert not shadows.is_due
    assert not shadows.is_waiting
    for number in range(ENOUGH_REQUESTS):
        assert not shadows.is_due
        shadows.finished(serve(manager, keys[number : number + 1], 0, NO_HINTS)[0])
    assert shadows.is_due
    shadows.reset()
    assert not shadows.is_due


def test_requests_are_served_equally_in_any_batches() -> None:
    """Batches of different sizes give equal counts."""
    first, second = (Shadows([WhatIf(policy="hazard")], 100, one_in=2) for _ in range(2))
    manager = OffloadingManager(100)
    for number, (keys, on_device, hints) in enumerate(traffic(5, 300)):
        ctx = serve(manager, keys, on_device, hints)[0]
        first.finished(ctx)
        second.finished(ctx)
        first.work()
        if number % 70 == 69:
            second.work()
    second.work()
    assert first.estimates() == second.estimates()
    for first_shadow, second_shadow in zip(first.members, second.members, strict=True):
        assert first_shadow.manager.stats() == second_shadow.manager.stats()


def test_estimates_and_rotations_serve_no_recorded_request() -> None:
    """Hits and looked-up blocks cover the same requests, with or without sampled blocks."""
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=2), OffloadingManager(100)
    for number in range(40):
        shadows.finished(serve(manager, [number.to_bytes(32, "little")], 0, NO_HINTS)[0])
    assert (shadows.estimates(), shadows.num_looked_up) == ([], 0)
    shadows.rotate()
    shadows.work()
    assert shadows.num_looked_up == 40


def test_waiting_requests_that_a_reset_forgets_are_not_counted() -> None:
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=1), OffloadingManager(100)
    shadows.finished(serve(manager, [bytes(32)], 0, NO_HINTS)[0])
    shadows.reset()
    shadows.work()
    assert (shadows.num_looked_up, shadows.estimates()) == (0, [])


@pytest.mark.parametrize(("policy", "refuses"), [("hazard", False), ("hazard,write_cost=1", True)])
def test_shadows_of_a_manager_with_tiers_refuse_only_with_a_write_cost(policy: str, refuses: bool) -> None:
    settings = [WhatIf(policy=policy), WhatIf(capacity=2)]
    shadows = Shadows(settings, 100, policy=policy, one_in=1, refuses_unasked=False)
    assert [shadow.manager.policy_may_refuse for shadow in shadows.members] == [refuses] * 3
    unlimited = Shadows(settings, 100, policy=policy, one_in=1)
    assert [shadow.manager.policy_may_refuse for shadow in unlimited.members] == [True] * 3


def test_refusals_equal_a_serving_manager_with_tiers() -> None:
    manager = OffloadingManager(60, policy="hazard")
    manager.refuse_only_if_asked()
    shadows = Shadows([WhatIf(capacity=2)], 60, policy="hazard", one_in=1, refuses_unasked=False)
    for keys, on_device, hints in traffic(4, 300):
        shadows.finished(serve(manager, keys, on_device, hints)[0])
    shadows.work()
    serving, of_shadow = manager.stats(), shadows.members[0].manager.stats()
    assert (serving.stored, serving.evicted, serving.refused) == (
        of_shadow.stored,
        of_shadow.evicted,
        of_shadow.refused,
    )
    assert serving.refused == 0


def test_requests_without_room_are_left_out() -> None:
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=1), OffloadingManager(100)
    key = bytes(32)
    for _ in range(MOST_REQUESTS + 3):
        shadows.finished(serve(manager, [key], 0, NO_HINTS)[0])
    assert shadows.num_left_out == 3
    shadows.work()
    current, _ = shadows.estimates()
    assert shadows.num_looked_up == MOST_REQUESTS
    assert current.hit_ratio == 1 - 1 / MOST_REQUESTS


def test_estimates_cover_the_last_two_periods() -> None:
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=1), OffloadingManager(100)
    first, second = bytes(32), bytes([1]) * 32
    shadows.finished(serve(manager, [first], 0, NO_HINTS)[0])
    shadows.work()
    shadows.rotate()
    shadows.finished(serve(manager, [first], 0, NO_HINTS)[0])
    shadows.work()
    assert [estimate.hit_ratio for estimate in shadows.estimates()] == [0.5, 0.5]
    shadows.rotate()
    shadows.finished(serve(manager, [second], 0, NO_HINTS)[0])
    shadows.work()
    assert [estimate.hit_ratio for estimate in shadows.estimates()] == [0.5, 0.5]
    shadows.rotate()
    assert [estimate.hit_ratio for estimate in shadows.estimates()] == [0.0, 0.0]


def test_a_reset_forgets_blocks_and_keeps_counts() -> None:
    shadows, manager = Shadows([WhatIf(capacity=2)], 100, one_in=1), OffloadingManager(100)
    for is_last in (False, True):
        shadows.finished(serve(manager, [bytes(32)], 0, NO_HINTS)[0])
        shadows.work()
        if not is_last:
            shadows.reset()
    assert shadows.num_looked_up == 2
    assert [estimate.hit_ratio for estimate in shadows.estimates()] == [0.0, 0.0]


def test_there_is_no_estimate_before_the_first_lookup() -> None:
    assert Shadows([WhatIf(capacity=2)], 100).estimates() == []


def test_shadows_are_smaller_managers() -> None:
    shadows = Shadows([WhatIf(capacity=2), WhatIf(admission="reuse:2")], 800, one_in=8)
    managers = [shadow.manager for shadow in shadows.members]
    assert [manager.capacity_blocks for manager in managers] == [100, 200, 100]
    assert managers[2].admission is not None
    assert managers[2].admission.max_tracker_size == 8000  # type: ignore[attr-defined]
    assert shadows.labels == ["current", "capacity=2", "admission=reuse:2"]


def test_a_setting_that_cannot_be_created_is_named() -> None:
    with pytest.raises(ConfigError, match=r"what_if\[0\]\.policy: 'nonsense'"):
        Shadows([WhatIf(policy="nonsense")], 100)
    with pytest.raises(ConfigError, match="what_if_sample: 0 is invalid; allowed: 1 to"):
        Shadows([], 100, one_in=0)


def test_groups_are_even() -> None:
    from kvoffload.core.kernels import whole_requests

    counts = np.zeros(64, np.int64)
    whole_requests.count_by_group(
        np.random.default_rng(1).integers(0, 1 << 63, (64_000, 4), np.uint64), counts
    )
    assert 800 < counts.min() <= counts.max() < 1200
