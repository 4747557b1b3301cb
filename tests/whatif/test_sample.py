"""The sample: which blocks, in which order, and how many."""

from __future__ import annotations

import random

import pytest

from kvoffload.core.manager import OffloadingManager
from kvoffload.whatif.sample import Sampled

KEY_BYTES = 36


def keys_of(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(KEY_BYTES) for _ in range(count)]


def sample(manager: OffloadingManager, keys: list[bytes], one_in: int, seed: int = 0) -> list[bytes]:
    ctx = manager.begin_request("", keys)
    sampled = Sampled(KEY_BYTES)
    sampled.take(ctx, one_in, seed)
    assert sampled.num_blocks == len(sampled.request.keys())
    return [*sampled.request.keys()]


def test_a_sample_is_the_path_without_the_other_blocks() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(1), 4000)
    found = sample(manager, keys, 8)
    assert found == [key for key in keys if key in {*found}]
    assert 400 < len(found) < 600
    assert sample(manager, keys, 1) == keys


def test_requests_agree_about_their_common_prefix() -> None:
    rng, manager = random.Random(2), OffloadingManager(64, key_bytes=KEY_BYTES)
    prefix = keys_of(rng, 200)
    one, other = (sample(manager, prefix + keys_of(rng, 50), 8) for _ in range(2))
    common = sample(manager, prefix, 8)
    assert common
    assert one[: len(common)] == other[: len(common)] == common


def test_seeds_choose_other_blocks() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(3), 4000)
    one, other = ({*sample(manager, keys, 8, seed)} for seed in (1, 2))
    assert len(one & other) < len(one) / 4


def test_every_block_is_in_the_sample_of_one_seed_in_eight() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(4), 50)
    times = dict.fromkeys(keys, 0)
    for seed in range(800):
        for key in sample(manager, keys, 8, seed * 7919 + 1):
            times[key] += 1
    assert 60 < min(times.values()) <= max(times.values()) < 145  # 100 on average, a deviation of 9.4


@pytest.mark.parametrize(("on_device", "is_asked"), [(0, True), (30, True), (100, True), (0, False)])
def test_blocks_on_the_device_are_not_looked_up(on_device: int, is_asked: bool) -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(5), 100)
    ctx = manager.begin_request("", keys)
    if is_asked:
        manager.lookup(keys[on_device:], ctx)
    sampled = Sampled(KEY_BYTES)
    sampled.take(ctx, 4, 0)
    skipped = on_device if is_asked else 100
    assert sampled.num_looked_up == 100 - skipped
    chosen = sampled.request.keys()
    assert sampled.first == len([key for key in chosen if key in {*keys[:skipped]}])


def test_an_engine_may_know_better_what_was_looked_up() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(5), 100)
    ctx, sampled = manager.begin_request("", keys), Sampled(KEY_BYTES)
    sampled.take(ctx, 1, 0, 30)
    assert (sampled.first, sampled.num_looked_up, sampled.num_blocks) == (30, 70, 100)
    sampled.take(ctx, 1, 0, 101)
    assert (sampled.first, sampled.num_looked_up, sampled.num_blocks) == (100, 0, 100)


def test_memory_is_used_again() -> None:
    rng, manager, sampled = random.Random(6), OffloadingManager(64, key_bytes=KEY_BYTES), Sampled(KEY_BYTES)
    for length in (5, 300, 0, 40, 7):
        keys = keys_of(rng, length)
        sampled.take(manager.begin_request("", keys), 2, 0)
        assert [*sampled.request.keys()] == sample(manager, keys, 2)


def test_blocks_that_are_only_stored_are_not_looked_up() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(7), 100)
    ctx, sampled = manager.begin_request("", keys), Sampled(KEY_BYTES)
    sampled.take(ctx, 1, 0, 30, 50)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 50, 20, 100)
    sampled.take(ctx, 1, 0, 30, 101)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 100, 70, 100)
    sampled.take(ctx, 1, 0, 30, 20)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 30, 0, 100)
    sampled.take(ctx, 4, 0, 30, 50)
    chosen = sampled.request.keys()
    assert sampled.first == len([key for key in chosen if key in {*keys[:30]}])
    assert sampled.end == len([key for key in chosen if key in {*keys[:50]}])
    assert sampled.num_looked_up == 20
