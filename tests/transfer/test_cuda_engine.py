"""The CUDA engine on a fake runtime (`fake_cuda`) whose copies run early, late, or at random times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from kvoffload.transfer import cuda, pinned
from kvoffload.transfer.cuda import CudaEngine
from support.fake_cuda import EARLY, LATE, PAGE, FakeCuda, installed

ORDERS = [EARLY, LATE, 1, 2, 3]
SMALL, RUNS = 24, cuda.RUN_BYTES
"""Block sizes: kernels copy scattered blocks of the first size; the second size is copied in runs."""


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeCuda]]:
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(installed(FakeCuda(*args, **settings)))


def numbered(num_blocks: int, block_bytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 256, (num_blocks, block_bytes), np.uint8)


def paged(num_blocks: int, block_bytes: int) -> Any:
    """Create a zeroed pool that shares no page with another pool."""
    memory = np.zeros(num_blocks * block_bytes + 2 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + num_blocks * block_bytes].reshape(num_blocks, block_bytes)


def engine_on(runtime: FakeCuda, blocks: Any, index: int = 3) -> tuple[CudaEngine, Any]:
    device = runtime.tensor(torch.from_numpy(blocks), index)
    return CudaEngine(device), device


def there_and_back(runtime: FakeCuda, pool: Any, blocks: Any) -> None:
    """Store some blocks, load them into others, compare with a loop; then close."""
    engine, device = engine_on(runtime, blocks)
    rows, slots, back = np.array([4, 0, 1, 2]), np.array([6, 1, 2, 7]), np.array([3, 5, 0, 1])
    stored = engine.store(rows, pool, slots)
    stored.wait()
    assert stored.done()
    assert np.array_equal(pool[slots], blocks[rows])
    assert not pool[[0, 3, 4, 5]].any()
    loaded = engine.load(pool, slots, back)
    loaded.wait()
    assert loaded.done()
    expected = blocks.copy()
    expected[back] = blocks[rows]
    assert np.array_equal(runtime.bytes_of(device).numpy(), expected)
    engine.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_blocks_are_stored_and_loaded(fake: Any, order: str | int, block_bytes: int) -> None:
    runtime = fake(order)
    there_and_back(runtime, paged(8, block_bytes), numbered(6, block_bytes))
    assert runtime.spins == 0, "waits must sleep"


@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_all_calls_use_the_tensors_device(fake: Any, block_bytes: int) -> None:
    """Another device is current: a call there would create a context of 0.5 GiB."""
    runtime = fake()
    there_and_back(runtime, paged(8, block_bytes), numbered(6, block_bytes))
    assert runtime.contexts == {3}
    assert runtime.current == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_a_store_sees_what_the_callers_stream_computed_before(
    fake: Any, order: str | int, block_bytes: int
) -> None:
    runtime = fake(order)
    engine, device = engine_on(runtime, numbered(4, block_bytes))
    pool, rows = paged(4, block_bytes), np.array([2, 0, 3])
    raw = runtime.bytes_of(device)
    runtime.current_stream("cuda:3").submit(lambda: raw.fill_(7))
    transfer = engine.store(rows, pool, rows)
    assert runtime.host_waits == 0, "indices and buffers are pinned: the host continues"
    transfer.wait()
    assert (pool[rows] == 7).all()
    runtime.current_stream("cuda:3").submit(lambda: raw.fill_(9))
    pool[:] = 5
    engine.load(pool, rows, rows).wait()
    assert (raw[rows] == 5).all(), "a load follows earlier writes of the caller's stream"
    assert runtime.host_waits == 0
    engine.close()


def test_a_store_to_unpinned_memory_ends_once_when_its_bytes_have_arrived(fake: Any) -> None:
    runtime = fake(LATE, pin_limit=64)  # enough for buffers, not for a pool
    engine, _ = engine_on(runtime, numbered(4, SMALL))
    pool = paged(4, SMALL)
    transfer = engine.store(np.array([2, 0]), pool, np.array([1, 3]))
    assert not transfer.done()
    assert not pool.any()
    runtime.order = EARLY
    assert transfer.done()
    assert np.array_equal(pool[[1, 3]], numbered(4, SMALL)[[2, 0]])
    pool[:] = 0
    transfer.wait()
    assert transfer.done()
    assert not pool.any()
    engine.close()


@pytest.mark.parametrize("order", ORDERS)
def test_kernels_copy_small_blocks_of_a_pinned_pool(fake: Any, order: str | int) -> None:
    """Nothing is copied by the host, and no buffer is needed."""
    runtime, pool = fake(order), paged(8, SMALL)
    there_and_back(runtime, pool, numbered(6, SMALL))
    indices = 8 * 4
    assert all(end - start == indices for start, end in runtime.pinned.items())
    assert runtime.host_waits == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_that_cannot_access_pinned_memory_copies_through_a_buffer(
    fake: Any, order: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    pinned.warn_once.cache_clear()
    runtime = fake(order, can_map=False)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        there_and_back(runtime, paged(8, SMALL), numbered(6, SMALL))
    assert len([line for line in caplog.messages if "cannot access pinned memory" in line]) == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_a_large_pool_is_pinned_in_pieces(
    fake: Any, block_bytes: int, order: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers refuse large pieces. A copy command across the border of two pieces would be an error."""
    monkeypatch.setattr(pinned, "PIN_AT_ONCE_BYTES", PAGE)
    runtime, pool, blocks = (
        fake(order),
        paged(500 if block_bytes == SMALL else 8, block_bytes),
        numbered(6, block_bytes),
    )
    engine, device = engine_on(runtime, blocks)
    rows, slots = np.arange(6), np.arange(6) + (len(pool) - 6) // 2
    engine.store(rows, pool, slots).wait()
    assert list(runtime.registered) == [*range(pool.ctypes.data, pool.ctypes.data + pool.nbytes, PAGE)]
    assert np.array_equal(pool[slots], blocks)
    engine.load(pool, slots, rows[::-1].copy()).wait()
    assert np.array_equal(runtime.bytes_of(device).numpy(), blocks[::-1])
    engine.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_two_engines_use_a_pool_in_pieces(
    fake: Any, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PIN_AT_ONCE_BYTES", PAGE)
    runtime, pool = fake(LATE), paged(500 if block_bytes == SMALL else 8, block_bytes)
    rows = np.arange(6)
    engines = [engine_on(runtime, numbered(6, block_bytes, seed))[0] for seed in (1, 2)]
    for seed, engine in enumerate(engines, 1):
        engine.store(rows, pool, rows + seed).wait()
        assert np.array_equal(pool[rows + seed], numbered(6, block_bytes, seed))
    for engine in reversed(engines):
        engine.close()
    assert runtime.registered == {}


def test_an_interrupt_while_a_pool_is_pinned_leaves_nothing_pinned(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PIN_AT_ONCE_BYTES", PAGE)
    runtime, pool, rows = fake(LATE), paged(500, SMALL), np.array([2, 0])
    engine, _ = engine_on(runtime, numbered(6, SMALL))
    register, calls = runtime.runtime.cudaHostRegister, []

    def interrupted(*arguments: int) -> int:
        calls.append(arguments)
        error: int = register(*arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return error

    runtime.runtime.cudaHostRegister = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.store(rows, pool, rows)
    assert runtime.registered == {}
    engine.store(rows, pool, rows).wait()
    assert np.array_equal(pool[rows], numbered(6, SMALL)[rows])
    engine.close()
    assert runtime.registered == {}


def test_a_pool_is_pinned_whole_or_not_at_all(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PIN_AT_ONCE_BYTES", PAGE)
    runtime = fake(LATE, pin_limit=2 * PAGE)
    engine, _ = engine_on(runtime, numbered(6, SMALL))
    pool, rows = paged(500, SMALL), np.array([2, 0])
    engine.store(rows, pool, rows).wait()
    assert runtime.registered == {}
    assert np.array_equal(pool[rows], numbered(6, SMALL)[rows])
    runtime.launch()
    engine.close()


def test_memory_that_cuda_fails_to_unpin_is_never_reused(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    runtime, pool = fake(LATE), paged(8, SMALL)
    engine, _ = engine_on(runtime, numbered(6, SMALL))
    engine.store(np.array([2, 0]), pool, np.array([2, 0])).wait()
    runtime.runtime.cudaHostUnregister = lambda address: runtime._failed(2)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        engine.close()
    assert "stays pinned and allocated" in caplog.text
    runtime.launch()
    other, _ = engine_on(runtime, numbered(6, SMALL, seed=2))
    other.store(np.array([1, 3]), pool, np.array([1, 3])).wait()
    assert np.array_equal(pool[[1, 3]], numbered(6, SMALL, seed=2)[[1, 3]])
    assert "it was not unpinned after an error" in caplog.text
    other.close()
    assert pinned.ABANDONED.pop() is pool
    assert not pinned.ABANDONED


@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_rows_and_slots_may_change_after_the_call(fake: Any, block_bytes: int) -> None:
    blocks = numbered(4, block_bytes)
    runtime = fake(LATE)
    engine, device = engine_on(runtime, blocks.copy())
    pool = paged(4, block_bytes)
    rows, slots = np.array([2, 0]), np.array([1, 3])
    transfer = engine.store(rows, pool, slots)
    rows[:], slots[:] = [1, 1], [0, 2]
    transfer.wait()
    assert np.array_equal(pool[[1, 3]], blocks[[2, 0]])
    assert not pool[[0, 2]].any()
    rows, slots = np.array([3, 1]), np.array([1, 3])
    transfer = engine.load(pool, slots, rows)
    rows[:], slots[:] = [0, 0], [0, 2]
    transfer.wait()
    blocks[[3, 1]] = pool[[1, 3]]
    assert np.array_equal(runtime.bytes_of(device).numpy(), blocks)
    engine.close()


def test_a_pool_is_pinned_once_and_unpinned(fake: Any) -> None:
    runtime = fake()
    engine, _ = engine_on(runtime, numbered(4, 24))
    rows, whole, gaps = np.arange(4), paged(4, 24), paged(4, 32)[:, :24]
    for pool in (whole, gaps, whole, gaps):
        engine.store(rows, pool, rows).wait()
    assert runtime.registered == {
        whole.ctypes.data: whole.ctypes.data + 96,
        gaps.ctypes.data: gaps.ctypes.data + 120,
    }
    engine.close()
    assert runtime.registered == {}
    engine.close()
    engine.store(rows, whole, rows).wait()
    assert list(runtime.registered) == [whole.ctypes.data], "a pool that is used again is pinned again"
    engine.close()


def test_invalid_arguments_raise_before_any_copy(fake: Any) -> None:
    runtime = fake()
    engine, _ = engine_on(runtime, numbered(4, 64))
    row, pool = np.array([0]), paged(4, 64)
    with pytest.raises(IndexError, match=r"device_rows\[0\] is 4"):
        engine.store(np.array([4]), pool, row)
    with pytest.raises(IndexError, match=r"slots\[0\] is -1"):
        engine.load(pool, np.array([-1]), row)
    with pytest.raises(ValueError, match="pool has blocks of 32 bytes"):
        engine.store(row, paged(4, 32), row)
    with pytest.raises(ValueError, match="2 device_rows but 1 slots"):
        engine.store(np.array([0, 1]), pool, row)
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="pool is read-only"):
        engine.store(row, pool, row)
    assert not any(stream.queue for stream in runtime.streams)
    assert runtime.registered == {}


# Memory that cannot be pinned


def ways_to_clear(runtime: FakeCuda, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the runtime one of the three ways to clear an error."""
    assert hasattr(runtime.runtime, "cudaGetLastError") == (way == "torch")
    library = SimpleNamespace(
        cudaGetLastError=runtime.take_last_error, cudaHostGetDevicePointer=runtime.device_pointer
    )
    monkeypatch.setattr(pinned, "runtime_library", lambda: library if way == "library" else None)


@pytest.mark.parametrize("way", ["torch", "library", "launch"])
def test_an_error_of_pinning_is_not_left_for_the_next_kernel(
    fake: Any, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = fake(LATE, has_last_error=way == "torch", pin_limit=1000)
    ways_to_clear(runtime, way, monkeypatch)
    engine, _ = engine_on(runtime, numbered(4, 64))
    pool, rows = paged(32, 64), np.array([2, 0])
    with caplog.at_level(logging.WARNING, "kvoffload"):
        for _ in range(3):
            engine.store(rows, pool, rows).wait()
            runtime.launch()
    assert np.array_equal(pool[rows], numbered(4, 64)[rows])
    lines = [line for line in caplog.messages if "not pinned" in line]
    assert len(lines) == 1, "one line for a pool"
    assert "2048 bytes" in lines[0]
    assert "error 2" in lines[0]
    engine.close()
    runtime.launch()


def test_the_fake_runtime_keeps_an_uncleared_error(fake: Any, monkeypatch: Any) -> None:
    """Negative control of the test above."""
    runtime = fake(LATE, pin_limit=1000)
    monkeypatch.setattr(pinned, "clear_error", lambda: None)
    engine, _ = engine_on(runtime, numbered(4, 64))
    with pytest.raises(RuntimeError, match="CUDA error: 2"):
        engine.store(np.array([2, 0]), paged(32, 64), np.array([2, 0])).wait()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_a_pool_that_is_not_pinned_goes_through_a_pinned_buffer(
    fake: Any, order: str | int, block_bytes: int
) -> None:
    runtime, pool = fake(order), paged(8, block_bytes)
    runtime.registered[pool.ctypes.data - 8] = (
        pool.ctypes.data + 8
    )  # another owner's range, over the first page
    there_and_back_beside(runtime, pool, numbered(6, block_bytes))
    assert runtime.host_waits == 0


def there_and_back_beside(runtime: FakeCuda, pool: Any, blocks: Any) -> None:
    """Run `there_and_back` beside memory that another owner has pinned and keeps."""
    registered_before = dict(runtime.registered)
    engine, device = engine_on(runtime, blocks)
    rows, back = np.array([4, 0, 1, 2]), np.array([3, 5, 0, 1])
    slots = np.array([6, 1, 2, 7])
    engine.store(rows, pool, slots).wait()
    assert np.array_equal(pool[slots], blocks[rows])
    engine.load(pool, slots, back).wait()
    assert np.array_equal(runtime.bytes_of(device).numpy()[back], blocks[rows])
    engine.close()
    assert runtime.registered == registered_before


@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_without_any_pinned_memory_copies_wait_on_the_host(
    fake: Any, block_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    pinned.warn_once.cache_clear()
    runtime = fake(LATE, pin_limit=0)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        there_and_back(runtime, paged(8, block_bytes), numbered(6, block_bytes))
    assert runtime.host_waits > 0
    assert len([line for line in caplog.messages if "no pinned memory" in line]) == 1
    runtime.launch()


@pytest.mark.parametrize("first", ["part", "whole"])
@pytest.mark.parametrize("block_bytes", [SMALL, RUNS], ids=["small", "runs"])
def test_views_of_one_pool_may_overlap(fake: Any, first: str, block_bytes: int) -> None:
    """A copy across the end of a pinned range would be an error."""
    runtime, whole, blocks = fake(LATE), paged(8, block_bytes), numbered(8, block_bytes)
    engine, device = engine_on(runtime, blocks)
    views = [whole[:3], whole] if first == "part" else [whole, whole[:3]]
    for pool in (*views, whole[2:6], whole[::2]):
        rows = np.arange(len(pool))
        pool[:] = 0
        engine.store(rows, pool, rows).wait()
        assert np.array_equal(pool, blocks[rows])
        engine.load(pool, rows, rows[::-1].copy()).wait()
        assert np.array_equal(runtime.bytes_of(device).numpy()[rows[::-1]], blocks[rows])
        runtime.bytes_of(device).copy_(torch.from_numpy(blocks))
    engine.close()
    assert runtime.registered == {}


def test_small_pools_may_share_a_page(fake: Any) -> None:
    runtime, memory, blocks = fake(LATE), paged(8, 24), numbered(4, 24)
    engine, _ = engine_on(runtime, blocks)
    rows = np.arange(4)
    for pool in (memory[:4], memory[4:]):
        engine.store(rows, pool, rows).wait()
        assert np.array_equal(pool, blocks)
    runtime.launch()
    engine.close()


def test_memory_pinned_by_another_owner_is_used_and_stays_pinned(fake: Any) -> None:
    runtime, pool, blocks = fake(LATE), paged(8, RUNS), numbered(6, RUNS)
    runtime.registered[pool.ctypes.data] = pool.ctypes.data + pool.nbytes
    there_and_back_beside(runtime, pool, blocks)
    assert not runtime.pinned, "no buffer: copied directly"


def test_a_read_only_pool_is_loaded_from(fake: Any) -> None:
    runtime, pool = fake(LATE), paged(4, RUNS)
    pool[:] = numbered(4, RUNS, seed=2)
    pool.flags.writeable = False
    engine, device = engine_on(runtime, numbered(4, RUNS))
    rows = np.arange(4)
    engine.load(pool, rows, rows).wait()
    assert np.array_equal(runtime.bytes_of(device).numpy(), pool)
    assert runtime.registered == {}
    engine.close()


# Errors of the device


def test_closing_after_a_permanent_error_keeps_the_memory(
    fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that the device may still write is neither unpinned nor freed."""
    runtime, pool = fake(LATE), paged(4, 64)
    engine, _ = engine_on(runtime, numbered(4, 64))
    engine.store(np.arange(4), pool, np.arange(4))
    runtime.break_device()
    with caplog.at_level(logging.ERROR, "kvoffload"), pytest.raises(RuntimeError, match="CUDA error: 700"):
        engine.close()
    assert list(runtime.registered) == [pool.ctypes.data]
    assert pinned.ABANDONED.pop() is pool
    assert "stay pinned" in caplog.text


def test_closing_unpins_if_the_device_can_be_synchronized(fake: Any) -> None:
    runtime, pool = fake(LATE), paged(4, 64)
    engine, _ = engine_on(runtime, numbered(4, 64))
    storing, _ = runtime.streams[-2:]  # the engine's streams
    engine.store(np.arange(4), pool, np.arange(4))
    assert storing.queue

    def fail() -> None:
        raise RuntimeError("this stream is gone")

    storing.synchronize = fail
    storing.queue.clear()
    runtime.streams.remove(storing)
    with pytest.raises(RuntimeError, match="this stream is gone"):
        engine.close()
    assert runtime.registered == {}
    del storing.synchronize
    engine.close()


def test_an_empty_pool_is_not_pinned(fake: Any) -> None:
    runtime = fake()
    engine, _ = engine_on(runtime, numbered(4, 64))
    none = np.zeros(0, np.int64)
    engine.store(none, np.zeros((0, 64), np.uint8), none).wait()
    engine.load(np.zeros((0, 64), np.uint8), none, none).wait()
    assert runtime.registered == {}
    engine.close()
