"""The sample of requests: its blocks, their order, and its limits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.core.hints import Labels
from kvoffload.core.kernels.whole_requests import ASKED_END, END_ROW, ON_DEVICE
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.request import HASH, Path, RequestContext
from kvoffload.structures.keys import Keys
from kvoffload.whatif.sample import MOST_REQUESTS, MOST_ROOM, Sample

KEY_BYTES = 36


def keys_of(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(KEY_BYTES) for _ in range(count)]


def hashes_of(keys: Keys) -> list[int]:
    ctx = RequestContext("", keys.key_bytes)
    ctx.add(keys)
    hashes: list[int] = Path.over(ctx.memory).records[: len(keys), HASH].tolist()
    return hashes


class Taken:
    """Sample of one request."""

    def __init__(self, ctx: RequestContext, one_in: int, seed: int = 0, *looked_up: int) -> None:
        collected = Sample(one_in, seed)
        assert collected.take(ctx, Labels(), *looked_up)
        state = collected.state
        self.num_blocks, self.num_looked_up = state.num_keys, state.num_looked_up
        chosen = {*state.hashes[: state.num_keys].tolist()}
        records = Path.over(ctx.memory).records[: ctx.length, HASH].tolist()
        self.keys = [key for key, h in zip(ctx.keys(), records, strict=True) if h in chosen]
        assert [h for h in records if h in chosen] == state.hashes[: state.num_keys].tolist()
        assert hashes_of(collected.keys()) == state.hashes[: state.num_keys].tolist()
        assert (state.num_requests, len(collected.hints)) == ((1, 1) if self.keys else (0, 0))
        if self.keys:
            assert state.requests[0, END_ROW] == state.longest == len(self.keys)
            self.first, self.end = state.requests[0, [ON_DEVICE, ASKED_END]].tolist()


def sample(manager: OffloadingManager, keys: list[bytes], one_in: int, seed: int = 0) -> list[bytes]:
    return Taken(manager.begin_request("", keys), one_in, seed).keys


def test_a_sample_is_the_path_without_the_other_blocks() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(1), 4000)
    sampled = sample(manager, keys, 8)
    assert sampled == [key for key in keys if key in {*sampled}]
    assert 400 < len(sampled) < 600
    assert sample(manager, keys, 1) == keys


def test_requests_sample_equal_blocks_of_a_common_prefix() -> None:
    rng, manager = random.Random(2), OffloadingManager(64, key_bytes=KEY_BYTES)
    prefix = keys_of(rng, 200)
    first, second = (sample(manager, prefix + keys_of(rng, 50), 8) for _ in range(2))
    common = sample(manager, prefix, 8)
    assert common
    assert first[: len(common)] == second[: len(common)] == common


def test_seeds_choose_other_blocks() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(3), 4000)
    first, second = ({*sample(manager, keys, 8, seed)} for seed in (1, 2))
    assert len(first & second) < len(first) / 4


def test_every_block_is_sampled_by_one_seed_in_eight() -> None:
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
    sampled = Taken(ctx, 4)
    skipped = on_device if is_asked else 100
    assert sampled.num_looked_up == 100 - skipped
    assert sampled.first == len([key for key in sampled.keys if key in {*keys[:skipped]}])


def test_an_engine_can_set_the_looked_up_blocks() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(5), 100)
    ctx = manager.begin_request("", keys)
    sampled = Taken(ctx, 1, 0, 30)
    assert (sampled.first, sampled.num_looked_up, sampled.num_blocks) == (30, 70, 100)
    sampled = Taken(ctx, 1, 0, 101)
    assert (sampled.first, sampled.num_looked_up, sampled.num_blocks) == (100, 0, 100)


def test_requests_are_appended_and_memory_is_reused() -> None:
    rng, manager, collected = (
        random.Random(6),
        OffloadingManager(64, key_bytes=KEY_BYTES),
        Sample(2, 0),
    )
    for _ in range(2):
        expected, ends = list[int](), list[int]()
        for length in (5, 300, 0, 40, 7, 6000):
            keys = keys_of(rng, length)
            assert collected.take(manager.begin_request("", keys), Labels())
            if chosen := sample(manager, keys, 2):
                expected += hashes_of(Keys.pack(chosen, KEY_BYTES))
                ends.append(len(expected))
        state = collected.state
        assert state.hashes[: state.num_keys].tolist() == expected
        assert state.requests[: state.num_requests, END_ROW].tolist() == ends
        assert len(collected.hints) == len(ends)
        collected.clear()
        assert (state.num_keys, state.num_requests, state.num_looked_up, state.longest) == (0, 0, 0, 0)


def test_a_sample_has_room_for_one_long_request_or_a_bounded_number() -> None:
    manager, collected = OffloadingManager(64, key_bytes=KEY_BYTES), Sample(1, 0)
    rows = np.zeros((MOST_ROOM + 1, 5), np.uint64)
    rows[:, 0] = np.arange(len(rows))
    long = manager.begin_request("", Keys(rows, KEY_BYTES))
    short = manager.begin_request("", Keys(rows[:100], KEY_BYTES))
    assert collected.take(long, Labels())
    assert len(collected.state.hashes) == 2 * MOST_ROOM
    assert not collected.take(long, Labels())
    collected = Sample(1, 0)
    assert collected.take(short, Labels())
    assert not collected.take(long, Labels())
    assert collected.take(short, Labels())
    assert (collected.state.num_keys, len(collected.state.hashes)) == (200, MOST_ROOM)
    for _ in range(MOST_REQUESTS - 2):
        assert collected.state.num_keys + 100 > MOST_ROOM or collected.take(short, Labels())
    assert not collected.take(short, Labels())
    assert collected.state.num_requests == MOST_ROOM // 100


def test_blocks_that_are_only_stored_are_not_looked_up() -> None:
    manager, keys = OffloadingManager(64, key_bytes=KEY_BYTES), keys_of(random.Random(7), 100)
    ctx = manager.begin_request("", keys)
    sampled = Taken(ctx, 1, 0, 30, 50)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 50, 20, 100)
    sampled = Taken(ctx, 1, 0, 30, 101)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 100, 70, 100)
    sampled = Taken(ctx, 1, 0, 30, 20)
    assert (sampled.first, sampled.end, sampled.num_looked_up, sampled.num_blocks) == (30, 30, 0, 100)
    sampled = Taken(ctx, 4, 0, 30, 50)
    assert sampled.first == len([key for key in sampled.keys if key in {*keys[:30]}])
    assert sampled.end == len([key for key in sampled.keys if key in {*keys[:50]}])
    assert sampled.num_looked_up == 20
