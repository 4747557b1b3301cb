"""Copies on devices without a device: `cuda` on stand-ins with the signatures of each version of vLLM.

The stand-ins cannot show that vLLM's kernels and streams are correct.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.shared.versions import SINCE_DEVICES
from kvoffload.integrations.vllm.worker_side.layout import Layout
from support.vllm_forms import VERSIONS, versions_since
from support.vllm_stand_in import OURS, Device, standing_in

torch = pytest.importorskip("torch", reason="torch is not installed")
fake_cuda = pytest.importorskip("support.fake_cuda")

PAGES = [96, 64, 96, 32]
GROUPS = [[(0, 96), (1, 60)], [(2, 96), (1, 64)], [(3, 32)]]
"""Three KV groups over four tensors; one tensor is shared, one is padded."""
NUM_BLOCKS, NUM_SLOTS = 20, 16

# Engine blocks of each group, and the index of the first block in its request.
TRANSFERS = [([3, 1, 0], [0, 0, 0]), ([3, 6, 3], [0, 3, 6]), ([0, 4, 0], [0, 2, 0]), ([1, 0, 5], [5, 0, 1])]

with_devices = pytest.mark.parametrize("version", versions_since(SINCE_DEVICES))


def kv_caches(seed: int) -> Any:
    """Return a stand-in for vLLM's ``CanonicalKVCaches``."""
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        tensors=[
            SimpleNamespace(
                tensor=torch.randint(-128, 128, (NUM_BLOCKS, size), generator=generator, dtype=torch.int8),
                page_size_bytes=size,
            )
            for size in PAGES
        ],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=tensor, page_size_bytes=size) for tensor, size in group]
            for group in GROUPS
        ],
    )


class World:
    """A pool, one worker's tensors, and our copies between them, on the stand-ins for a version."""

    def __init__(self, directory: Path, version: str, per_chunk: int = 1, refused: int = -1) -> None:
        self.device, self.caches, self.per_chunk = Device(refused=refused), kv_caches(1), per_chunk
        self.layout = Layout.of(self.caches, per_chunk)
        self.pool = SharedPool.attach(
            "devices",
            member=0,
            num_members=2,
            num_parts=2,
            part_bytes=self.layout.part_bytes,
            capacity_bytes=NUM_SLOTS * 4096,
            directory=directory,
        )
        self._stand_in = ExitStack()
        self._stand_in.enter_context(standing_in(self.device, version))
        self.ours: Any = importlib.import_module(f"{OURS}.worker_side.cuda")
        self.slots_spec: Any = importlib.import_module(f"{OURS}.worker_side.slots_spec").SlotsSpec

    def make(self) -> Any:
        return self.ours.DeviceCopies(self.caches, self.layout, self.pool, 1)

    def slots(self, *slots: int) -> Any:
        return self.slots_spec(np.array(slots, np.int32))

    def host_copies(self, caches: Any) -> Any:
        return importlib.import_module(f"{OURS}.worker_side.copies").HostCopies(
            caches, self.layout, self.pool.part(1)
        )

    def close(self) -> None:
        self._stand_in.close()
        self.device.handlers.clear()
        self.pool.close()


@pytest.fixture(autouse=True)
def _restore_log_handlers() -> Iterator[None]:
    """Restore log handlers: a specification forwards the library's log to vLLM's log permanently."""
    library = logging.getLogger("kvoffload")
    before = [*library.handlers]
    yield
    library.handlers[:] = before


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **settings: Any) -> World:
        made.append(World(tmp_path, *args, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def engine_blocks(*blocks: int, sizes: list[int] | None = None, firsts: list[int] | None = None) -> Any:
    """Return a stand-in for vLLM's ``GPULoadStoreSpec``."""
    return SimpleNamespace(
        block_ids=np.array(blocks),
        group_sizes=sizes or [len(blocks), 0, 0],
        block_indices=firsts or [0, 0, 0],
    )


@with_devices
@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_stored_bytes_are_loaded(
    world: Callable[..., World], version: str, per_chunk: int, transfer: tuple[list[int], list[int]]
) -> None:
    """The pool holds the same bytes as after copies in host memory, and a load restores them."""
    rig, (sizes, firsts) = world(version, per_chunk), transfer
    rng, count = np.random.default_rng(1), sum(transfer[0])
    stored = engine_blocks(*rng.permutation(NUM_BLOCKS)[:count], sizes=sizes, firsts=firsts)
    chunks = [
        -(-(size + first % per_chunk) // per_chunk) for size, first in zip(*transfer, strict=True) if size
    ]
    slots = rig.slots(*rng.permutation(NUM_SLOTS)[: sum(chunks)])
    copies = rig.make()
    copies.store(7, stored, slots)
    assert not rig.pool.part(1).any(), "the device has not begun"
    copies.wait({7})
    (result,) = copies.finished()
    num_bytes = sum(size * sum(n for _, n in group) for size, group in zip(sizes, GROUPS, strict=True))
    assert result == (7, num_bytes, 0.5, None)
    assert copies.finished() == []
    on_device = rig.pool.part(1).copy()
    assert on_device.any()
    assert not rig.pool.part(0).any(), "the other worker's part"
    rig.pool.part(1)[:] = 0
    host = rig.host_copies(rig.caches)
    host.store(1, stored, slots)
    host.wait({1})
    host.close()
    assert np.array_equal(on_device, rig.pool.part(1))

    before = [tensor.tensor.clone() for tensor in rig.caches.tensors]
    for tensor in rig.caches.tensors:
        tensor.tensor.zero_()
    copies.load(8, stored, slots)
    copies.wait({8})
    assert [result.job for result in copies.finished()] == [8]
    at, touched = 0, 0
    for size, group in zip(sizes, GROUPS, strict=True):
        for block in stored.block_ids[at : at + size].tolist():
            for number, size_of in group:
                here = rig.caches.tensors[number].tensor[block, :size_of]
                assert torch.equal(here, before[number][block, :size_of])
                touched += 1
        at += size
    assert touched == sum(size * len(group) for size, group in zip(sizes, GROUPS, strict=True))
    copies.close()


@with_devices
def test_each_direction_is_in_order_and_has_its_own_results(
    world: Callable[..., World], version: str
) -> None:
    rig = world(version)
    copies = rig.make()
    storing, loading = rig.device.handlers
    assert (storing.given.gpu_to_cpu, loading.given.gpu_to_cpu) == (True, False)
    copies.store(1, engine_blocks(3, 4), rig.slots(0, 1))
    copies.store(2, engine_blocks(5), rig.slots(0))
    copies.load(3, engine_blocks(6), rig.slots(0))
    copies.wait({1})
    assert [job for job, _, _ in storing.waiting] == [2], "a wait ends with its own jobs"
    assert [job for job, _, _ in loading.waiting] == [3]
    assert [result.job for result in copies.finished()] == [1]
    copies.wait({2, 3})
    assert {result.job for result in copies.finished()} == {2, 3}
    tensor = rig.caches.tensors[0].tensor
    assert torch.equal(tensor[6], tensor[5]), "slot 0 holds the block of the second store"
    copies.close()


@with_devices
@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 2**30])
def test_slots_outside_the_pool_begin_nothing(world: Callable[..., World], version: str, slot: int) -> None:
    rig = world(version)
    copies = rig.make()
    for begin in (copies.store, copies.load):
        with pytest.raises(ValueError, match=f"must lie in 0 to {NUM_SLOTS - 1}"):
            begin(1, engine_blocks(3, 4), rig.slots(2, slot))
    assert copies.finished() == []
    assert not rig.pool.part(1).any()
    copies.store(2, engine_blocks(3, 4), rig.slots(2, NUM_SLOTS - 1))
    copies.wait({2})
    assert [result.job for result in copies.finished()] == [2]
    copies.close()


@with_devices
def test_the_pool_is_pinned_in_pieces_that_end_with_slots(
    world: Callable[..., World], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = world(version)
    stride = rig.pool.slot_stride
    monkeypatch.setattr(rig.ours, "PIN_AT_ONCE_BYTES", 5 * stride + 1)
    copies = rig.make()
    pieces = rig.device.pinned
    assert [num_bytes // stride for _, num_bytes in pieces] == [5, 5, 5, 1]
    assert [address - rig.pool.address for address, _ in pieces] == [0, 5 * stride, 10 * stride, 15 * stride]
    assert sum(num_bytes for _, num_bytes in pieces) == NUM_SLOTS * stride
    assert all(handler.given.host_memory_is_pinned for handler in rig.device.handlers)
    assert not rig.device.times("unpin")
    copies.close()
    assert rig.device.log[-6:] == [
        *[("shutdown", "store"), ("shutdown", "load")],
        *[("unpin", address) for address, _ in pieces],
    ]


@with_devices
@pytest.mark.parametrize("refused", [0, 2])
def test_a_pool_that_cannot_be_pinned_is_used_as_it_is(
    world: Callable[..., World],
    version: str,
    refused: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = world(version, refused=refused)
    monkeypatch.setattr(rig.ours, "PIN_AT_ONCE_BYTES", 5 * rig.pool.slot_stride)
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        copies = rig.make()
    assert "cannot be pinned" in caplog.text
    assert len(rig.device.pinned) == refused + 1, "no piece after the refused one"
    assert rig.device.times("unpin") == [("unpin", address) for address, _ in rig.device.pinned[:refused]]
    assert not any(handler.given.host_memory_is_pinned for handler in rig.device.handlers)
    copies.store(1, engine_blocks(3), rig.slots(2))
    copies.wait({1})
    assert [result.error for result in copies.finished()] == [None]
    assert rig.pool.part(1)[2].any()
    copies.close()
    assert len(rig.device.times("unpin")) == refused, "each piece once"


@with_devices
@pytest.mark.parametrize("can_wait", [True, False])
@pytest.mark.parametrize("failing", ["store", "load"])
def test_closing_continues_when_a_direction_fails(
    world: Callable[..., World], version: str, failing: str, can_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is unpinned if no transfer can run any longer, and otherwise stays pinned."""
    rig, waited = world(version), list[Any]()
    copies = rig.make()
    rig.device.failing = failing
    monkeypatch.setattr(rig.ours, "synchronized", lambda device: waited.append(device) or can_wait)
    with pytest.raises(RuntimeError, match="the device is gone"):
        copies.close()
    assert not any(handler.is_open for handler in rig.device.handlers)
    assert waited == [torch.device("cpu")]
    assert len(rig.device.times("unpin")) == (len(rig.device.pinned) if can_wait else 0)
    copies.close()
    assert len(rig.device.times("shutdown")) == 2, "each direction once"


@with_devices
def test_the_pool_is_pinned_and_unpinned_on_the_tensors_device(
    world: Callable[..., World], version: str
) -> None:
    rig, runtime, where = world(version), fake_cuda.FakeCuda(), list[int]()
    rig.device.on_pinning = lambda: where.append(runtime.current)
    with fake_cuda.installed(runtime):
        for tensor in rig.caches.tensors:
            tensor.tensor = runtime.tensor(tensor.tensor, 3)
        copies = rig.make()
        copies.close()
    assert where == [3, 3]
    assert runtime.current == 0


@with_devices
@pytest.mark.parametrize("stuck", ["store", "load"])
def test_a_wait_that_fails_waits_for_the_device_before_it_raises(
    world: Callable[..., World], version: str, stuck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may overwrite the blocks after a wait, even after a failed one."""
    rig, waited = world(version), list[Any]()
    copies = rig.make()
    copies.store(1, engine_blocks(3), rig.slots(2))
    rig.device.stuck = stuck
    monkeypatch.setattr(rig.ours, "synchronized", lambda device: waited.append(device) or True)
    with pytest.raises(RuntimeError, match="the event is gone"):
        copies.wait({1})
    assert waited == [torch.device("cpu")]
    rig.device.stuck = ""
    copies.wait({1})
    assert waited == [torch.device("cpu")]
    copies.close()


@with_devices
def test_a_refused_transfer_raises_and_a_failed_one_is_an_error(
    world: Callable[..., World], version: str
) -> None:
    """No version reports a failed transfer today; if one does, the missing bytes must not count as loaded."""
    rig = world(version)
    copies = rig.make()
    rig.device.refusing = "at once"
    for begin in (copies.store, copies.load):
        with pytest.raises(OSError, match="refused"):
            begin(1, engine_blocks(3), rig.slots(2))
    rig.device.refusing = "later"
    copies.store(2, engine_blocks(3), rig.slots(2))
    copies.wait({2})
    (result,) = copies.finished()
    assert result.job == 2
    assert isinstance(result.error, OSError)
    copies.close()


@with_devices
def test_a_worker_waits_longer_for_a_larger_pool(version: str) -> None:
    with standing_in(Device(), version):
        wait_s = importlib.import_module(f"{OURS}.spec").workers_wait_s
    assert [wait_s(gib * 2**30) for gib in (1, 300, 512)] == [600, 600, 1024]


@with_devices
def test_the_time_for_pinning_is_logged(
    world: Callable[..., World], version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvoffload"):
        world(version).make().close()
    assert " of RAM pinned by this worker in " in caplog.text


@with_devices
def test_an_engine_with_a_gpu_is_not_refused(version: str) -> None:
    with standing_in(Device(), version):
        spec = importlib.import_module(f"{OURS}.spec")
        with pytest.raises(AttributeError):  # the stand-in has no configuration to read
            spec.KVOffloadSpec()


@pytest.mark.parametrize("version", VERSIONS[: VERSIONS.index(versions_since(SINCE_DEVICES)[0])])
def test_an_engine_with_a_gpu_is_refused_on_older_vllm(version: str) -> None:
    """The engine reports one line at its start instead of import errors in its workers."""
    with standing_in(Device(), version):
        with pytest.raises(ImportError):
            importlib.import_module(f"{OURS}.worker_side.cuda")
        spec = importlib.import_module(f"{OURS}.spec")
        with pytest.raises(ConfigError) as refused:
            spec.KVOffloadSpec()
    assert str(refused.value) == (
        f"vllm: '{version}.0' is invalid; allowed: kvoffload with a GPU needs vLLM 0.32 to 0.33"
    )
    with standing_in(Device(), version, is_cpu=True), pytest.raises(AttributeError):
        importlib.import_module(f"{OURS}.spec").KVOffloadSpec()
