"""Copies of blocks, compared with a naive loop, on every available kind of device."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.transfer import HostEngine, as_blocks, copy_blocks, copy_engine_for
from kvoffload.transfer.copies import STREAM_FROM_BYTES, coalesce

if importlib.util.find_spec("torch"):
    import torch
else:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
needs_cuda = pytest.mark.skipif(
    torch is None or not torch.cuda.is_available(), reason="needs torch and a CUDA device"
)


def numbered(num_blocks: int, block_bytes: int, seed: int = 0) -> np.ndarray:
    """Create different blocks of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def unaligned(num_blocks: int, block_bytes: int, offset: int, gap: int) -> np.ndarray:
    """Create zeroed blocks that start `offset` bytes after a cache line, `gap` bytes apart."""
    memory = np.zeros(num_blocks * (block_bytes + gap) + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    stride = block_bytes + gap
    return memory[start : start + num_blocks * stride].reshape(num_blocks, stride)[:, :block_bytes]


# copy_blocks


@given(data=st.data())
def test_copy_equals_a_loop_for_any_rows_sizes_and_alignments(data):
    block_bytes = data.draw(st.sampled_from([1, 7, 64, 65, 200, 4096, 5000, 16384, 20000]))
    num_src, num_dst = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    rows = st.lists(st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1)), max_size=12)
    pairs = data.draw(rows)
    offsets = st.sampled_from([0, 1, 8, 33, 63])
    src = unaligned(num_src, block_bytes, data.draw(offsets), data.draw(offsets))
    src[:] = numbered(num_src, block_bytes)
    dst = unaligned(num_dst, block_bytes, data.draw(offsets), data.draw(offsets))
    around = dst.base
    expected = dst.copy()
    for source, destination in pairs:
        expected[destination] = src[source]
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    src_rows = np.array([source for source, _ in pairs], dtype)
    dst_rows = np.array([destination for _, destination in pairs], dtype)
    copy_blocks(src, src_rows, dst, dst_rows)
    assert np.array_equal(dst, expected)
    # No byte between the blocks has changed.
    dst[:] = 0
    assert not around.any()


@pytest.mark.parametrize("num_rows", [1, STREAM_FROM_BYTES // 4096 - 1, STREAM_FROM_BYTES // 4096, 64])
def test_neighbouring_rows_on_both_sides_of_the_streaming_threshold(num_rows):
    src, dst = numbered(70, 4096), np.zeros((80, 4096), np.uint8)
    copy_blocks(src, np.arange(2, 2 + num_rows), dst, np.arange(9, 9 + num_rows))
    assert np.array_equal(dst[9 : 9 + num_rows], src[2 : 2 + num_rows])
    assert not dst[:9].any()
    assert not dst[9 + num_rows :].any()


def test_many_blocks_smaller_than_a_line_at_odd_addresses():
    src, dst = numbered(5000, 7), unaligned(5000, 7, offset=33, gap=2)
    order = np.random.default_rng(1).permutation(5000)
    copy_blocks(src, np.arange(5000), dst, order)
    assert np.array_equal(dst[order], src)
    assert np.count_nonzero(dst.base) == np.count_nonzero(src)


def test_a_destination_named_twice_gets_the_later_block():
    src, dst = numbered(3, 100), np.zeros((2, 100), np.uint8)
    copy_blocks(src, np.array([0, 1, 2]), dst, np.array([1, 0, 1]))
    assert np.array_equal(dst, src[[1, 2]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("side", ["src_rows", "dst_rows"])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_a_row_out_of_range_is_named_and_nothing_moves(dtype, side, bad):
    src, dst = numbered(4, 64), np.zeros((4, 64), np.uint8)
    rows = {"src_rows": np.array([0, 1], dtype), "dst_rows": np.array([0, 1], dtype)}
    rows[side] = np.array([0, bad], dtype)
    with pytest.raises(IndexError, match=rf"{side}\[1\] is {bad}; there are 4 rows"):
        copy_blocks(src, rows["src_rows"], dst, rows["dst_rows"])
    assert not dst.any()


def test_arrays_that_do_not_fit_together_are_refused():
    src, dst, row = numbered(4, 64), np.zeros((4, 64), np.uint8), np.array([0])
    with pytest.raises(ValueError, match="src has blocks of 64 bytes and dst of 32"):
        copy_blocks(src, row, dst[:, :32], row)
    with pytest.raises(ValueError, match="2 src_rows but 1 dst_rows"):
        copy_blocks(src, np.array([0, 1]), dst, row)
    with pytest.raises(ValueError, match="contiguous rows"):
        copy_blocks(src[:, ::2], row, dst[:, :32], row)
    with pytest.raises(ValueError, match="uint8"):
        copy_blocks(src.view(np.int8), row, dst, row)
    with pytest.raises(ValueError, match="integers, not float64"):
        copy_blocks(src, np.array([0.0]), dst, row)
    dst.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_blocks(src, row, dst, row)


def test_no_rows_are_no_copy():
    dst = np.zeros((2, 64), np.uint8)
    copy_blocks(numbered(2, 64), np.array([], np.int64), dst, np.array([], np.int64))
    assert not dst.any()


def test_threads_copy_different_rows_at_the_same_time():
    src, dst = numbered(256, 16384), np.zeros((256, 16384), np.uint8)
    order = np.random.default_rng(1).permutation(256)
    threads = [
        threading.Thread(target=copy_blocks, args=(src, order[offset::4], dst, order[offset::4]))
        for offset in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(dst, src)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_coalesced_runs_describe_the_same_copies(pairs):
    src_rows = np.array([a for a, _ in pairs], np.int64)
    dst_rows = np.array([b for _, b in pairs], np.int64)
    starts = coalesce(src_rows, dst_rows).tolist()
    described = [
        (src_rows[start] + i, dst_rows[start] + i)
        for start, end in itertools.pairwise(starts)
        for i in range(end - start)
    ]
    assert described == pairs
    # No two runs could have been merged.
    assert all(
        (b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in ((pairs[s - 1], pairs[s]) for s in starts[1:-1])
    )


# Devices


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64, np.complex128, np.bool_])
@pytest.mark.parametrize("shape", [(6,), (6, 32), (6, 2, 4, 8)])
def test_arrays_are_viewed_as_blocks_in_place(dtype, shape):
    array = np.zeros(shape, dtype)
    blocks = as_blocks(array, array.nbytes // 6)
    assert blocks.shape == (6, array.nbytes // 6)
    assert blocks.dtype == np.uint8
    blocks[3] = 1
    assert array[3].all()
    assert np.count_nonzero(array) == array.size // 6


def test_blocks_may_lie_apart_but_not_be_split():
    array = np.zeros((6, 2, 8), np.int32)
    apart = as_blocks(array[1::2])
    apart[:] = 255
    assert (array[1::2] == -1).all()
    assert not array[::2].any()
    for split in (array[:, :, :4], array.swapaxes(1, 2), np.zeros((0, 4)), np.array(1)):
        with pytest.raises(ValueError, match="not an array of blocks"):
            as_blocks(split)
    with pytest.raises(ValueError, match="has 64 bytes, not 60"):
        as_blocks(array, 60)
    with pytest.raises(TypeError, match="not list"):
        as_blocks([1, 2])


def round_trip(engine, block_bytes: int) -> None:
    """Store scattered and consecutive rows, load them to other rows, compare with a loop."""
    pool = np.zeros((8, block_bytes), np.uint8)
    rows, slots, back = np.array([4, 0, 1, 2]), np.array([6, 1, 2, 7]), np.array([3, 5, 0, 1])
    transfer = engine.store(rows, pool, slots)
    transfer.wait()
    assert transfer.done()
    assert pool[slots].any(axis=1).all()
    assert not pool[[0, 3, 4, 5]].any()
    transfer = engine.load(pool, slots, back)
    transfer.wait()
    assert transfer.done()
    again = np.zeros_like(pool)
    engine.store(back, again, slots).wait()
    assert np.array_equal(again, pool)


def test_the_engine_of_an_array_stores_and_loads():
    device = np.arange(6 * 40, dtype=np.float32).reshape(6, 2, 20) + 1
    original = device.copy()
    engine = copy_engine_for(device)
    assert (engine.num_blocks, engine.block_bytes) == (6, 160)
    round_trip(engine, 160)
    assert np.array_equal(device[[3, 5, 0, 1]], original[[4, 0, 1, 2]])
    assert copy_engine_for(engine) is engine
    with pytest.raises(IndexError, match=r"src_rows\[0\] is 6"):
        engine.store(np.array([6]), np.zeros((1, 160), np.uint8), np.array([0]))
    with pytest.raises(TypeError, match="not str"):
        copy_engine_for("cuda:0")
    engine.close()


def test_transfer_does_not_import_torch():
    code = "import sys, kvoffload.transfer, kvoffload.tiers.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# torch on the CPU


@needs_torch
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "uint8", "bool"]
)
def test_cpu_tensors_are_viewed_as_blocks_in_place(dtype):
    tensor = torch.zeros((6, 2, 4, 16), dtype=torch.uint8).view(getattr(torch, dtype))
    blocks = as_blocks(tensor, 128)
    blocks[2] = 1
    assert np.array_equal(tensor.view(torch.uint8).numpy().reshape(6, 128), blocks)
    assert blocks.sum() == 128


@needs_torch
def test_cpu_tensors_apart_split_and_with_gradients():
    tensor = torch.zeros((6, 2, 8), dtype=torch.bfloat16, requires_grad=True)
    as_blocks(tensor[1::2])[:] = 1
    assert (tensor.view(torch.uint8)[1::2] == 1).all()
    assert not tensor.view(torch.uint8)[::2].any()
    for split in (tensor[:, :, :4], tensor.transpose(1, 2), torch.zeros(0, 4), torch.tensor(1)):
        with pytest.raises(ValueError, match="not an array of blocks"):
            as_blocks(split)
    with pytest.raises(TypeError, match="tensor on meta"):
        as_blocks(torch.empty((2, 2), device="meta"))


@needs_torch
def test_the_engine_of_a_cpu_tensor_stores_and_loads():
    device = (torch.arange(6 * 64) + 1).to(torch.bfloat16).reshape(6, 2, 32)
    original = device.clone()
    engine = copy_engine_for(device)
    assert isinstance(engine, HostEngine)
    round_trip(engine, 128)
    assert torch.equal(device[[3, 5, 0, 1]], original[[4, 0, 1, 2]])


# Parts of the CUDA engine that need no device


@needs_torch
def test_only_long_runs_are_copied_as_runs():
    from kvoffload.transfer.cuda import RUN_BYTES, runs_of

    scattered, slots = np.array([5, 3, 1]), np.array([0, 1, 2])
    assert runs_of(scattered, slots, 4096) is None
    assert runs_of(scattered, slots, RUN_BYTES).tolist() == [0, 1, 2, 3]
    assert runs_of(slots + 7, slots, 4096).tolist() == [0, 3]
    # With gaps between the blocks, a run is one block.
    assert runs_of(slots + 7, slots, 4096, packed=False) is None
    assert runs_of(slots + 7, slots, RUN_BYTES, packed=False).tolist() == [0, 1, 2, 3]
    assert runs_of(slots[:0], slots[:0], 4096).tolist() == [0]


@needs_torch
@given(data=st.data())
def test_all_ways_of_the_cuda_engine_equal_a_loop_on_cpu_tensors(data):
    from kvoffload.transfer.cuda import copy_by_kernels, copy_runs, gather, scatter

    block_bytes = data.draw(st.sampled_from([8, 24, 30]))
    device = numbered(9, block_bytes)
    count = data.draw(st.integers(0, 9))
    rows = np.array(data.draw(st.permutations(range(9)))[:count], np.int64)
    slots = np.array(data.draw(st.permutations(range(9)))[:count], np.int64)
    pool, expected = np.zeros_like(device), np.zeros_like(device)
    for row, slot in zip(rows, slots, strict=True):
        expected[slot] = device[row]
    tensor = torch.from_numpy(device)
    copy_runs(tensor, rows, torch.from_numpy(pool), slots, coalesce(rows, slots))
    assert np.array_equal(pool, expected)
    pool[:] = 0
    copy_by_kernels(tensor, rows, torch.from_numpy(pool), slots)
    assert np.array_equal(pool, expected)
    bounce = torch.zeros((count, block_bytes), dtype=torch.uint8)
    gather(tensor, rows, bounce)
    assert np.array_equal(bounce.numpy(), device[rows])
    back = torch.zeros_like(tensor)
    scatter(bounce, back, rows)
    assert np.array_equal(back.numpy()[rows], device[rows])
    assert back.any(dim=1).sum() == count


# CUDA


@needs_cuda
@pytest.mark.parametrize("block_items", [256, 1 << 20], ids=["gathered", "runs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_the_engine_of_a_cuda_tensor_stores_and_loads(block_items, dtype):
    device = torch.randint(1, 100, (6, block_items), device="cuda").to(getattr(torch, dtype))
    original = device.clone()
    engine = copy_engine_for(device)
    round_trip(engine, engine.block_bytes)
    assert torch.equal(device[[3, 5, 0, 1]], original[[4, 0, 1, 2]])
    engine.close()


@needs_cuda
def test_a_cuda_store_sees_what_the_callers_stream_computed_before():
    device = torch.zeros((4, 1 << 20), dtype=torch.uint8, device="cuda")
    engine = copy_engine_for(device)
    pool, rows = np.zeros((4, 1 << 20), np.uint8), np.arange(4)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        device.fill_(7)
        engine.store(rows, pool, rows).wait()
    assert (pool == 7).all()
    engine.close()
