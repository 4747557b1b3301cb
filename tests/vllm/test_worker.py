"""Layouts, copies and the worker without an engine, and vLLM's device copies compared with ours."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.worker_side.layout import Layout
from support.vllm_needs import DEVICES, needs

base = pytest.importorskip("vllm.v1.kv_offload.base")
torch = pytest.importorskip("torch")
worker = pytest.importorskip("kvoffload.integrations.vllm.worker_side.worker")
copies = pytest.importorskip("kvoffload.integrations.vllm.worker_side.copies")
specs = pytest.importorskip("kvoffload.integrations.vllm.worker_side.slots_spec")

PAGES = [96, 64, 96, 32]
GROUPS = [[(0, 96), (1, 60)], [(2, 96), (1, 64)], [(3, 32)]]
"""Three KV groups over four tensors; one tensor is shared, one is padded."""


def kv_caches(seed: int = 0, num_blocks: int = 20) -> Any:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 128, (num_blocks, size), generator=generator, dtype=torch.int8) for size in PAGES
    ]
    return base.CanonicalKVCaches(
        tensors=[base.CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        group_data_refs=[[base.CanonicalKVCacheRef(t, size) for t, size in group] for group in GROUPS],
    )


def make_pool(directory: Path, layout: Layout) -> SharedPool:
    return SharedPool.attach(
        "worker",
        member=0,
        num_members=2,
        num_parts=2,
        part_bytes=layout.part_bytes,
        capacity_bytes=16 * 4096,
        directory=directory,
    )


def taken(pool: SharedPool) -> list[int]:
    """Return the slots that the scheduler considers failed after all jobs have ended."""
    failed = pool.take_failed(np.arange(pool.num_slots, dtype=np.int32))
    return [] if failed is None else np.flatnonzero(failed).tolist()


def test_tensors_that_never_meet_share_a_place() -> None:
    layout = Layout.of(kv_caches(), 1)
    assert layout.starts == [0, 96, 0, 0]
    assert layout.part_bytes == 160, "the largest group, not the sum of all tensors"
    assert Layout(PAGES, [[(0, 96), (1, 64), (2, 96), (3, 32)]], 3).part_bytes == 3 * sum(PAGES)


# For each group: the engine's blocks, and the number of the first block in its request.
TRANSFERS = [
    ([3, 1, 0], [0, 0, 0]),
    ([3, 6, 3], [0, 3, 6]),
    ([0, 4, 0], [0, 2, 0]),
    ([1, 0, 5], [5, 0, 1]),
]


def spec_of(sizes: list[int], firsts: list[int], rng: np.random.Generator) -> Any:
    return base.GPULoadStoreSpec(rng.permutation(20)[: sum(sizes)].tolist(), sizes, firsts)


def slots_for(sizes: list[int], firsts: list[int], per_chunk: int, rng: np.random.Generator) -> Any:
    count = sum(-(-(s + f % per_chunk) // per_chunk) for s, f in zip(sizes, firsts, strict=True) if s)
    return specs.SlotsSpec(rng.permutation(16)[:count].astype(np.int32), np.arange(count, dtype=np.uint64))


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_stored_bytes_are_loaded(
    tmp_path: Path, per_chunk: int, transfer: tuple[list[int], list[int]]
) -> None:
    """Store some blocks, and load them into other blocks of another engine with the same layout."""
    rng, source, target = np.random.default_rng(1), kv_caches(1), kv_caches(2)
    layout = Layout.of(source, per_chunk)
    pool = make_pool(tmp_path, layout)
    from_blocks, to_blocks = spec_of(*transfer, rng), spec_of(*transfer, rng)
    slots = slots_for(*transfer, per_chunk, rng)
    storing = worker.KVOffloadWorker(
        pool, 1, copies.HostCopies(source, layout, pool.part(1)), blocks_per_chunk=per_chunk, seal=True
    )
    loading = copies.HostCopies(target, layout, pool.part(1))
    before = [tensor.tensor.clone() for tensor in target.tensors]
    assert storing.submit_store(7, from_blocks, slots)
    storing.wait({7})
    (result,) = storing.get_finished()
    assert (result.job_id, result.success) == (7, True)
    assert result.transfer_size == sum(
        size * sum(num_bytes for _, num_bytes in group)
        for size, group in zip(transfer[0], GROUPS, strict=True)
    )
    assert (pool.checksums[1, slots.block_ids] != 0).all()
    assert not pool.part(0).any(), "the other worker's part"
    loading.load(8, to_blocks, slots)
    loading.wait({8})
    (done,) = loading.finished()
    assert done.error is None
    start, touched = 0, set()
    for size, group in zip(transfer[0], GROUPS, strict=True):
        here = slice(start, start + size)
        pairs = zip(from_blocks.block_ids[here], to_blocks.block_ids[here], strict=True)
        for our_item, vllm_item in pairs:
            for tensor, num_bytes in group:
                stored = source.tensors[tensor].tensor[int(our_item), :num_bytes]
                assert torch.equal(target.tensors[tensor].tensor[int(vllm_item), :num_bytes], stored)
                touched.add((tensor, int(vllm_item)))
        start += size
    for number, tensor in enumerate(target.tensors):
        for block in range(20):
            if (number, block) not in touched:
                assert torch.equal(tensor.tensor[block], before[number][block]), "no other block has changed"
    loading.close()
    storing.shutdown()


@needs(*DEVICES)
@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_vllms_copies_use_the_same_places_as_ours(
    tmp_path: Path, per_chunk: int, transfer: tuple[list[int], list[int]]
) -> None:
    """Copies the addresses that vLLM's handler would pass to the device, for the views of `cuda`."""
    cuda = pytest.importorskip("kvoffload.integrations.vllm.worker_side.cuda")
    gpu_worker = pytest.importorskip("vllm.v1.kv_offload.cpu.gpu_worker")
    rng, source = np.random.default_rng(2), kv_caches(3)
    layout = Layout.of(source, per_chunk)
    pool = make_pool(tmp_path, layout)
    blocks, slots = spec_of(*transfer, rng), slots_for(*transfer, per_chunk, rng)

    handler = object.__new__(gpu_worker.SingleDirectionOffloadingHandler)
    handler.src_tensors = [tensor.tensor for tensor in source.tensors]
    handler.dst_tensors = cuda.views_of(pool, 1, layout, PAGES)
    handler.gpu_to_cpu, handler.layer_refs_per_group = True, source.group_data_refs
    handler.src_blocks_per_chunk, handler.dst_blocks_per_chunk = 1, per_chunk
    block_at = slot_at = 0
    for group, (size, first) in enumerate(zip(*transfer, strict=True)):
        if not size:
            continue
        skip = first % per_chunk
        chunks = -(-(size + skip) // per_chunk)
        arrays = [np.zeros(size * len(GROUPS[group]), kind) for kind in (np.int64, np.int64, np.int64)]
        handler._fill_direct_ops(
            group,
            group_src=blocks.block_ids[block_at : block_at + size],
            group_dst=slots.block_ids[slot_at : slot_at + chunks],
            group_size=size,
            src_skip_count=0,
            dst_skip_count=skip,
            all_src=arrays[0],
            all_dst=arrays[1],
            all_sizes=arrays[2],
            op_idx=0,
        )
        for src, dst, num_bytes in zip(*(array.tolist() for array in arrays), strict=True):
            ctypes.memmove(dst, src, num_bytes)
        block_at, slot_at = block_at + size, slot_at + chunks
    vllm_side = pool.part(1).copy()
    pool.slots[:] = 0
    our_side = copies.HostCopies(source, layout, pool.part(1))
    our_side.store(1, blocks, slots)
    our_side.wait({1})
    assert vllm_side.any()
    assert np.array_equal(vllm_side, pool.part(1))
    our_side.close()
    del handler
    pool.close()


def test_a_failed_job_is_marked_and_reported_as_done(tmp_path: Path) -> None:
    source = kv_caches(1)
    layout = Layout.of(source, 1)
    pool = make_pool(tmp_path, layout)
    rig = worker.KVOffloadWorker(
        pool, 0, copies.HostCopies(source, layout, pool.part(0)), blocks_per_chunk=1, seal=False
    )
    rig.failures_are_named = True
    good = specs.SlotsSpec(np.array([4], np.int32))
    absent, short = specs.SlotsSpec(np.array([-1], np.int32)), specs.SlotsSpec(np.array([4, 5], np.int32))
    block = base.GPULoadStoreSpec([3], [1, 0, 0], [0, 0, 0])
    beyond = base.GPULoadStoreSpec([99], [1, 0, 0], [0, 0, 0])
    without_groups = specs.SlotsSpec(np.array([6], np.int32), num_slots=[])
    for job, (submit, args) in enumerate(
        [
            (rig.submit_store, (block, good)),
            (rig.submit_store, (block, short)),
            (rig.submit_store, (beyond, good)),
            (rig.submit_load, (absent, block)),
            (rig.submit_load, (good, beyond)),
            (rig.submit_store, (block, without_groups)),
        ]
    ):
        assert submit(job, *args)
        rig.wait({job})
        (result,) = rig.get_finished()
        assert (result.job_id, result.success) == (job, True)
        assert taken(pool) == [[], [4, 5], [4], [], [4], [6]][job]
        assert rig.take_failed_loads() == ({job} if submit == rig.submit_load else set())
    rig.shutdown()


class HeldCopies:
    """Copies that a test ends, or whose `wait` fails."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.closed = False
        self.failing: Exception | None = None
        self.ends_on_wait = True

    def store(self, job: int, engine: Any, slots: Any) -> None:
        self.begun.append(job)

    load = store

    def finished(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return [copies.Copied(job, 8, 0.5) for job in ended]

    def end(self, *jobs: int) -> None:
        self.begun = [job for job in self.begun if job not in jobs]
        self.ended += jobs

    def wait(self, jobs: set[int]) -> None:
        if self.failing is not None:
            raise self.failing
        if self.ends_on_wait:
            self.end(*sorted(jobs & set(self.begun)))

    def close(self) -> None:
        self.closed = True
        if self.failing is not None:
            raise self.failing


def held(tmp_path: Path, *, seal: bool = False) -> tuple[Any, HeldCopies, SharedPool]:
    layout = Layout.of(kv_caches(1), 1)
    pool, moving = make_pool(tmp_path, layout), HeldCopies()
    rig = worker.KVOffloadWorker(pool, 0, moving, blocks_per_chunk=1, seal=seal)
    rig.failures_are_named = True
    return rig, moving, pool


def slots_of(*slots: int) -> Any:
    return specs.SlotsSpec(np.array(slots, np.int32), np.arange(len(slots), dtype=np.uint64))


ONE_BLOCK = base.GPULoadStoreSpec([3], [1, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("seal", [False, True])
def test_a_store_is_dropped_if_its_fence_comes_late(tmp_path: Path, seal: bool) -> None:
    """Only a store whose copy had ended before the fence has read valid bytes."""
    rig, moving, pool = held(tmp_path, seal=seal)
    rig.fences_come_late = True
    for job in (1, 2, 3):
        rig.submit_store(job, ONE_BLOCK, slots_of(job))
    rig.submit_load(4, slots_of(9), ONE_BLOCK)
    moving.end(1)
    assert {result.job_id for result in rig.get_finished()} <= {1}
    rig.wait({1, 2, 4})
    assert {result.job_id for result in rig.get_finished()} - {1} == {2, 4}
    assert taken(pool) == [2]
    assert (rig.num_overwritten, rig.num_failed) == (1, 0)
    assert rig.take_failed_loads() == set(), "a load writes to blocks that were zeroed before it began"
    moving.end(3)
    rig.wait({3})
    assert taken(pool) == [3], "the end of its copy is unknown"
    rig.shutdown()


def test_a_job_whose_wait_failed_is_a_failed_job(tmp_path: Path) -> None:
    """The engine may overwrite the blocks during the copy."""
    rig, moving, pool = held(tmp_path)
    rig.submit_store(1, ONE_BLOCK, slots_of(1))
    rig.submit_store(2, ONE_BLOCK, slots_of(2))
    rig.submit_load(3, slots_of(7), ONE_BLOCK)
    moving.end(2)
    moving.failing = RuntimeError("the event is gone")
    rig.wait({1, 2, 3})
    assert {(result.job_id, result.success) for result in rig.get_finished()} == {
        (1, True),
        (2, True),
        (3, True),
    }
    assert taken(pool) == [1, 7], "2 had ended in time"
    assert rig.take_failed_loads() == {3}
    assert rig.num_failed == 2
    moving.end(1, 3)
    assert rig.get_finished() == [], "late results are not reported again"
    moving.failing = None
    rig.shutdown()


def test_a_job_that_has_not_ended_after_the_wait_is_a_failed_job(tmp_path: Path) -> None:
    rig, moving, pool = held(tmp_path)
    moving.ends_on_wait = False
    rig.submit_store(1, ONE_BLOCK, slots_of(1))
    rig.wait({1})
    assert [result.job_id for result in rig.get_finished()] == [1]
    assert taken(pool) == [1]
    rig.shutdown()


def test_a_worker_closes_its_pool_also_when_its_copies_fail(tmp_path: Path) -> None:
    rig, moving, pool = held(tmp_path, seal=True)
    moving.failing = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        rig.shutdown()
    assert pool._map is None
    with pytest.raises(RuntimeError, match="after shutdown"):
        rig._sealer.submit(int)


def test_no_worker_erases_reports_of_another(tmp_path: Path) -> None:
    """With MLA under tensor parallelism all workers share a part: one stores, and all load."""
    source = kv_caches(1)
    layout = Layout.of(source, 1)
    sizes = {"num_members": 3, "num_parts": 1, "part_bytes": layout.part_bytes, "capacity_bytes": 16 * 4096}
    first, second = (
        worker.KVOffloadWorker(
            pool, 0, copies.HostCopies(source, layout, pool.part(0)), blocks_per_chunk=1, seal=False
        )
        for pool in (SharedPool.attach("mla", member=m, directory=tmp_path, **sizes) for m in (1, 2))
    )
    scheduler = SharedPool.attach("mla", member=0, directory=tmp_path, **sizes)
    slots = specs.SlotsSpec(np.array([4], np.int32))
    second.submit_load(1, slots, base.GPULoadStoreSpec([99], [1, 0, 0], [0, 0, 0]))
    second.wait({1})
    first.submit_store(2, base.GPULoadStoreSpec([3], [1, 0, 0], [0, 0, 0]), slots)
    first.wait({2})
    assert taken(scheduler) == [4]
    for item in (first, second):
        item.shutdown()
    scheduler.close()


# Transfers of vLLM 0.32 after a chunk of three blocks has lost some to the sliding window. For each group:
# the remaining blocks, and the place of the first; then the slots, of five, that must not be stored.
TORN = [
    ([6, 9], [0, 0], []),
    ([5, 9], [1, 0], [0, 1]),
    ([4, 9], [0, 0], [0, 1]),
    ([3, 9], [0, 0], [0, 1]),
    ([6, 8], [3, 3], [2, 3, 4]),
    ([1, 8], [2, 3], [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize("case", TORN)
def test_chunks_that_are_not_whole_are_not_stored(
    tmp_path: Path, case: tuple[list[int], list[int], list[int]]
) -> None:
    sizes, firsts, torn = case
    source = kv_caches(1)
    layout = Layout.of(source, 3)
    pool = make_pool(tmp_path, layout)
    rig = worker.KVOffloadWorker(
        pool, 0, copies.HostCopies(source, layout, pool.part(0)), blocks_per_chunk=3, seal=True
    )
    pool.slots[:] = 7
    blocks = base.GPULoadStoreSpec(list(range(sum(sizes))), [*sizes, 0], [*firsts, 0])
    slots = specs.SlotsSpec(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.uint64), [2, 3])
    rig.submit_store(1, blocks, slots)
    rig.wait({1})
    (result,) = rig.get_finished()
    assert result.success
    assert taken(pool) == torn
    assert [slot for slot in range(5) if (pool.part(0)[slot] == 7).all()] == torn
    start = 0
    for group, (size, slots_of_group) in enumerate(zip(sizes, ([0, 1], [2, 3, 4]), strict=True)):
        if slots_of_group[0] not in torn:
            for number in range(size):
                slot, inner = slots_of_group[number // 3], number % 3
                for tensor, num_bytes in GROUPS[group]:
                    at = layout.starts[tensor] + inner * PAGES[tensor]
                    stored = source.tensors[tensor].tensor[start + number, :num_bytes].numpy().view(np.uint8)
                    assert np.array_equal(pool.part(0)[slot, at : at + num_bytes], stored)
        start += size
    rig.submit_store(2, base.GPULoadStoreSpec(list(range(15)), [6, 9, 0], [3, 0, 0]), slots)
    rig.wait({2})
    assert taken(pool) == []
    slots.audited = np.arange(5) % 2 == 0
    rig.submit_store(3, blocks, slots)
    rig.wait({3})
    assert taken(pool) == [slot for slot in torn if slot % 2], "a store does not write audited blocks"
    rig.shutdown()
