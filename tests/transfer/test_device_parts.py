"""`DeviceParts` on a fake CUDA runtime (`fake_cuda`), compared with `HostParts`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from kvoffload.transfer.device_parts import DeviceParts
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.parts import HostParts, parts_of
from support.fake_cuda import EARLY, LATE, FakeCuda, installed

NUM_BLOCKS, NUM_SLOTS = 6, 5
SHAPES = {"words": [(3, 8), (3, 8)], "odd bytes": [(3, 5), (7, 1)]}
"""Shapes of a block in each view. The parts of the second kind cannot be copied in words of 8 bytes."""
WAYS = ["mapped", "not mapped", "not pinned"]


@contextmanager
def parts_and_pins(
    way: str, order: str | int, shapes: list[tuple[int, ...]]
) -> Iterator[tuple[FakeCuda, Any, list[Any], DevicePins]]:
    """Yield the runtime, device parts, their tensors on the host, and the pins."""
    runtime = FakeCuda(order, can_map=way != "not mapped", pin_limit=64 if way == "not pinned" else 1 << 40)
    rng = np.random.default_rng(1)
    host = [torch.from_numpy(rng.integers(-9, 9, (NUM_BLOCKS, *shape)).astype(np.int16)) for shape in shapes]
    pins = DevicePins()
    with installed(runtime):
        yield runtime, parts_of([runtime.tensor(view, 3) for view in host], pins), host, pins


def pool_of(block_bytes: int) -> Any:
    """Create a pool in pages of its own."""
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE * 4), np.uint8)
    return memory[: NUM_SLOTS * 128].reshape(NUM_SLOTS, 128)[:, :block_bytes]


@pytest.mark.parametrize("order", [EARLY, LATE, 1, 2])
@pytest.mark.parametrize("shapes", [*SHAPES])
@pytest.mark.parametrize("way", WAYS)
def test_device_parts_copy_the_same_bytes_as_host_parts(way: str, shapes: str, order: str | int) -> None:
    with parts_and_pins(way, order, SHAPES[shapes]) as (runtime, parts, host, pins):
        assert isinstance(parts, DeviceParts)
        block_bytes = sum(2 * int(np.prod(shape)) for shape in SHAPES[shapes])
        pool, expected = pool_of(block_bytes), np.zeros((NUM_SLOTS, block_bytes), np.uint8)
        blocks, slots, back = np.array([4, 0, 3]), np.array([2, 4, 1]), np.array([1, 5, 0])
        on_host = HostParts(host)
        parts.store(blocks, pool, slots)
        on_host.store(blocks, expected, slots)
        assert np.array_equal(pool, expected)
        parts.load(pool, slots, back)
        on_host.load(expected, slots, back)
        for view, wanted in zip(parts._views, host, strict=True):
            assert torch.equal(runtime.bytes_of(view), wanted)
        assert bool(runtime.registered) == (way in ("mapped", "not mapped"))
        pins.close()
        pins.close()
        assert not runtime.registered


@pytest.mark.parametrize("way", WAYS)
def test_copies_follow_the_work_of_the_callers_stream(way: str) -> None:
    with parts_and_pins(way, LATE, SHAPES["words"]) as (runtime, parts, _, _):
        raw = [runtime.bytes_of(view) for view in parts._views]
        runtime.current_stream("cuda:3").submit(lambda: [view.fill_(7) for view in raw])
        pool, rows = pool_of(96), np.array([2, 0])
        parts.store(rows, pool, rows)
        assert (pool[rows].view(np.int16) == 7).all()
        pool[rows] = 1
        parts.load(pool, rows, rows)
        assert all((view[rows] == 0x101).all() for view in raw)


def test_slots_out_of_range_are_refused() -> None:
    with parts_and_pins("mapped", LATE, SHAPES["words"]) as (_, parts, _, _):
        pool = pool_of(96)
        with pytest.raises(IndexError, match=r"slots\[1\] is 5"):
            parts.store(np.array([0, 1]), pool, np.array([0, 5]))
        with pytest.raises(IndexError, match=r"slots\[0\] is -1"):
            parts.load(pool, np.array([-1]), np.array([0]))


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize("way", WAYS)
def test_after_an_error_no_copy_is_in_flight(way: str, verb: str) -> None:
    """The owner of the slots reuses them at once."""
    with parts_and_pins(way, LATE, SHAPES["words"]) as (runtime, parts, _, _):
        pool, rows = pool_of(96), np.array([2, 0])
        parts._views[1] = None  # the second part fails
        with pytest.raises((AttributeError, TypeError)):
            parts.store(rows, pool, rows) if verb == "store" else parts.load(pool, rows, rows)
        assert not any(stream.queue for stream in runtime.streams)


@pytest.mark.parametrize("way", WAYS)
def test_a_pool_of_another_width_and_other_counts_are_refused(way: str) -> None:
    with parts_and_pins(way, LATE, SHAPES["words"]) as (runtime, parts, _, _):
        rows = np.array([0, 1])
        with pytest.raises(ValueError, match="the pool has blocks of 64 bytes, the parts of 96"):
            parts.store(rows, pool_of(64), rows)
        with pytest.raises(ValueError, match="the pool has blocks of 64 bytes, the parts of 96"):
            parts.load(pool_of(64), rows, rows)
        with pytest.raises(ValueError, match="2 rows but 1 slots"):
            parts.store(rows, pool_of(96), rows[:1])
        with pytest.raises(ValueError, match="2 rows but 1 slots"):
            parts.load(pool_of(96), rows[:1], rows)
        assert not any(stream.queue for stream in runtime.streams)


@pytest.mark.parametrize("copies_foreign", [False, True], ids=["torch 2.11", "older torch"])
def test_two_devices_use_one_pool(copies_foreign: bool) -> None:
    """The pool is pinned for all devices. With older versions of torch, the second device uses a buffer."""
    runtime, pins = FakeCuda(LATE, copies_foreign=copies_foreign), DevicePins()
    with installed(runtime):
        host = [torch.arange(NUM_BLOCKS * 48, dtype=torch.int16).view(NUM_BLOCKS, 48) for _ in range(2)]
        first, second = (
            parts_of([runtime.tensor(view + number, number)], pins) for number, view in enumerate(host)
        )
        pool, rows = pool_of(96), np.array([4, 0])
        first.store(rows, pool, np.array([0, 1]))
        second.store(rows, pool, np.array([2, 3]))
        assert np.array_equal(pool[:2].view(np.int16), host[0].numpy()[rows])
        assert np.array_equal(pool[2:4].view(np.int16), host[1].numpy()[rows] + 1)
        second.load(pool, np.array([0, 1]), rows)
        assert np.array_equal(runtime.bytes_of(second._views[0]).numpy()[rows], host[0].numpy()[rows])
        pins.close()
        assert not runtime.registered


@pytest.mark.parametrize("way", WAYS)
def test_no_blocks_are_copied_without_pinning(way: str) -> None:
    with parts_and_pins(way, LATE, SHAPES["words"]) as (runtime, parts, _, _):
        none = np.zeros(0, np.int64)
        parts.store(none, pool_of(96), none)
        parts.load(pool_of(96), none, none)
        assert not runtime.registered
