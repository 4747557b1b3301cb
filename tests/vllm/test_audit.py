"""The audit in real engines: it finds equal blocks in a sound engine, and every planted fault."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
import numpy as np
import torch
from prometheus_client import REGISTRY
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvoffload.integrations.vllm.shared.pool import CLOSE, DIFFERENT, EQUAL, UNJUDGED, SharedPool
from kvoffload.integrations.vllm.worker_side import copies
from kvoffload.integrations.vllm.worker_side.auditor import Auditor
from kvoffload.integrations.vllm.worker_side.layout import Layout
from kvoffload.integrations.vllm.worker_side.slots_spec import SlotsSpec
from kvoffload.integrations.vllm.worker_side.worker import KVOffloadWorker
from kvoffload.transfer.difference import LIMITS, difference
from support.faulty_connectors import FAULT_FILE, FAULTS
from support.vllm_engine import Engine
from support.vllm_traffic import check_nothing_is_left, conversations, reset_engine

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

CHATS = conversations(2, documents=8, turns=4)
ALL = {"share": 1.0}
HALF = {"share": 0.5}
"""Options to audit half of the requests, chosen by their ids, equal in every run; the others load blocks."""


def serve(engine: Engine, rounds: int, seed: int = 5) -> None:
    """Serve all chats in random order, four at a time, and empty the device's cache after each round."""
    rng = random.Random(seed)
    for _ in range(rounds):
        order = rng.sample(CHATS, len(CHATS))
        for first in range(0, len(order), 4):
            engine.generate(order[first : first + 4], 8)
        engine.forget_device()


def audited() -> Counter[str]:
    """Audited blocks of all engines of this process so far, by result."""
    return Counter(
        {
            sample.labels["result"]: int(sample.value)
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "vllm:kvoffload_audited_blocks_total"
        }
    )


# ---- the comparison


def as_bytes(values: np.ndarray, value_type: str) -> np.ndarray:
    kind = getattr(torch, value_type)
    return torch.from_numpy(values.astype(np.float32)).to(kind).view(torch.uint8).numpy()


@pytest.mark.parametrize("value_type", LIMITS)
def test_rounding_is_small_and_other_values_are_large(value_type: str) -> None:
    """Only values change; keys are a hundred times as large, as in many models."""
    rng = np.random.default_rng(3)
    keys, values = rng.standard_normal(1024) * 100, rng.standard_normal(1024)
    block = as_bytes(np.concatenate([keys, values]), value_type)
    assert difference(block, block, value_type) == 0.0
    step = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}.get(value_type, 0.06)
    rounded = np.concatenate([keys, values]) * (1 + step * rng.standard_normal(2048))
    assert 0.0 < difference(block, as_bytes(rounded, value_type), value_type) < LIMITS[value_type]
    values[960:] = values[:64]  # the last of 16 heads has the values of the first
    wrong = as_bytes(np.concatenate([keys, values]), value_type)
    assert 1.0 < difference(block, wrong, value_type) < 2.0
    assert difference(block, np.zeros_like(block), value_type) == pytest.approx(1.0)


def test_values_that_are_not_finite_must_be_the_same() -> None:
    values = np.ones(70)
    values[3], values[69] = np.inf, np.nan
    block = as_bytes(values, "float32")
    assert difference(block, block.copy(), "float32") == 0.0
    assert difference(block, as_bytes(np.ones(70), "float32"), "float32") == np.inf
    assert (
        difference(as_bytes(np.zeros(70), "float32"), as_bytes(np.ones(70), "float32"), "float32") == np.inf
    )


class Rig:
    """A worker with three KV groups over four tensors of float32, one of them padded, and its auditor.

    The third group has no single type of values.
    """

    PAGES = (512, 256, 512, 256)
    GROUPS = (((0, 512), (1, 192)), ((2, 512), (1, 256)), ((3, 256),))

    def __init__(self, directory: Path, per_chunk: int) -> None:
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn((20, size // 4), generator=generator) for size in self.PAGES]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, 4 * tensor.shape[1]) for tensor in tensors],
            group_data_refs=[[CanonicalKVCacheRef(t, size) for t, size in group] for group in self.GROUPS],
        )
        self.tensors, layout = tensors, Layout.of(caches, per_chunk)
        self.pool = SharedPool.attach(
            "audit", member=0, num_members=2, num_parts=2, part_bytes=layout.part_bytes,
            capacity_bytes=16 * 8192, directory=directory,
        )  # fmt: skip
        self.pool.findings[0] = np.array((EQUAL, 0, 0, 0.0), self.pool.findings.dtype)  # of the other worker
        self.auditor = Auditor(caches, layout, self.pool, 1, ["float32", "float32", None])
        self.worker = KVOffloadWorker(
            self.pool,
            1,
            copies.HostCopies(caches, layout, self.pool.part(1)),
            blocks_per_chunk=per_chunk,
            seal=True,
            auditor=self.auditor,
        )
        self.sizes = [2 * per_chunk, per_chunk, per_chunk]
        self.engine = GPULoadStoreSpec(list(range(sum(self.sizes))), self.sizes, [0, 0, 0])
        self.slots = np.array([3, 1, 7, 4], np.int32)
        self.num_slots = [2, 1, 1] if per_chunk > 1 else None

    def store(self, audited: list[bool] | None) -> bytes:
        mask = None if audited is None else np.array(audited)
        spec = SlotsSpec(self.slots, np.arange(4, dtype=np.uint64), self.num_slots, mask)
        assert self.worker.submit_store(1, self.engine, spec)
        self.worker.wait({1})
        (result,) = self.worker.get_finished()
        assert result.success
        return bytes(self.pool.part(1))

    def results(self) -> list[int]:
        values: list[int] = self.pool.take_findings(self.slots)["result"].tolist()
        return values


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_audited_blocks_are_compared_and_not_written(tmp_path: Path, per_chunk: int) -> None:
    rig = Rig(tmp_path, per_chunk)
    assert rig.store(None).count(0) < 4 * 8192
    rig.store([True] * 4)
    assert rig.results() == [EQUAL] * 4
    assert rig.results() == [0] * 4, "taken once"
    before = bytes(rig.pool.part(1))
    last = sum(rig.sizes) - 1
    rig.tensors[0][per_chunk] *= 1.001  # a block of the first group's second chunk
    rig.tensors[2][2 * per_chunk, 100:] = 3.0  # the second group
    rig.tensors[3][last, 0] = 9.0  # the third group
    rig.pool.findings[0] = np.array((EQUAL, 0, 0, 0.0), rig.pool.findings.dtype)
    assert rig.store([True] * 4) == before
    findings = rig.pool.take_findings(rig.slots)
    assert findings["result"].tolist() == [EQUAL, CLOSE, DIFFERENT, UNJUDGED]
    assert findings["group"].tolist()[1:3] == [0, 1]
    assert findings["tensor"].tolist()[1:3] == [0, 2]
    assert 0.0005 < findings["difference"][1] < 0.002 < 0.9 < findings["difference"][2]
    # One job may write some blocks and compare others.
    rig.pool.findings[0] = np.array((EQUAL, 0, 0, 0.0), rig.pool.findings.dtype)
    assert rig.store([False, True, False, True]) != before
    assert rig.results() == [0, CLOSE, 0, UNJUDGED]
    rig.store([True] * 4)
    assert [int(row["result"]) for row in rig.pool.findings[1, rig.slots]] == [EQUAL, CLOSE, EQUAL, UNJUDGED]
    rig.worker.shutdown()


def test_a_comparison_that_the_engine_may_have_overtaken_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With late fences, the engine waits for a job whose comparison has not ended."""
    rig, hold = Rig(tmp_path, 1), threading.Event()
    rig.store(None)
    read = rig.auditor._read

    def slow_read(*arguments: Any) -> Any:
        assert hold.wait(60)
        return read(*arguments)

    monkeypatch.setattr(rig.auditor, "_read", slow_read)
    rig.worker.fences_come_late = True
    rig.tensors[0][0] = 5.0
    threading.Timer(0.05, hold.set).start()
    rig.store([True] * 4)
    assert rig.results() == [0] * 4
    rig.pool.findings[0] = np.array((EQUAL, 0, 0, 0.0), rig.pool.findings.dtype)
    rig.worker.fences_come_late = False
    rig.store([True] * 4)
    assert rig.results()[0] == DIFFERENT
    monkeypatch.setattr(rig.auditor, "_read", lambda *_: 1 / 0)
    rig.store([True] * 4)
    assert rig.results() == [0] * 4, "an error in a comparison has no effect"
    rig.worker.shutdown()


# ---- in engines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "connector", "options", "settings"),
    [
        ("llama", False, {}, {}),
        ("llama", True, {"verify": "always"}, {"max_num_batched_tokens": 96}),
        ("hybrid", True, {"store": "on-device-eviction"}, {"max_num_batched_tokens": 96}),
        ("hybrid", False, {"blocks_per_chunk": 2}, {}),
    ],
)
def test_blocks_of_a_sound_engine_are_equal(
    start_engine: Callable[..., Engine],
    request: pytest.FixtureRequest,
    model: str,
    dtype: str,
    connector: bool,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """All requests with hits are audited; the CPU computes a block equally in every batch."""
    engine = start_engine(
        request.getfixturevalue(model),
        {"ram": "64MiB", "audit": ALL, **options},
        connector=connector,
        dtype=dtype,
        num_gpu_blocks_override=44,
        **settings,
    )
    serve(engine, rounds=3)
    results = audited()
    assert results["equal"] > 200
    assert results["different"] == results["unjudged"] == 0
    # A comparison may come too late for a chunk that has partly left the sliding window.
    assert results["not_compared"] <= (results["equal"] // 20 if "blocks_per_chunk" in options else 0)
    check_nothing_is_left(engine)


@pytest.fixture(scope="module")
def faulty(
    start_engine: Callable[..., Engine], hybrid: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    """An engine whose loads have the fault named in a file, and this file. Without a fault it is sound."""
    fault_file = tmp_path_factory.mktemp("fault") / "fault"
    fault_file.write_text("none")
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm"}
    transfer = {
        "kv_connector": "FaultyKVOffloadConnector",
        "kv_connector_module_path": "support.faulty_connectors",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "ram": "64MiB", "audit": {**HALF, "on_difference": "count"}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT_FILE, str(fault_file))
        engine = start_engine(hybrid, None, kv_transfer_config=transfer, num_gpu_blocks_override=44)
        serve(engine, rounds=3)
        sound = audited()
        assert sound["equal"] > 0
        assert sound["different"] == 0
        yield engine, fault_file


@pytest.mark.parametrize("fault", FAULTS)
def test_blocks_computed_after_a_damaged_load_are_found(faulty: tuple[Engine, Path], fault: str) -> None:
    """A faulty load damages no stored block, but the blocks that are computed and stored after the load."""
    engine, fault_file = faulty
    fault_file.write_text(fault)
    assert reset_engine(engine)
    engine.drain()
    before = audited()["different"]
    # The number of audited blocks that follow a damaged load depends on the order of transfers.
    for seed in range(60):
        serve(engine, rounds=1, seed=seed)
        if audited()["different"] > before:
            break
    assert audited()["different"] > before


@pytest.mark.parametrize(
    ("reaction", "is_dropped", "stops"),
    [("count", False, False), ("drop", True, False), ("stop", False, True)],
)
def test_a_store_that_copies_too_early_is_found(
    start_engine: Callable[..., Engine],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    reaction: str,
    is_dropped: bool,
    stops: bool,
) -> None:
    """A layer stored before it is computed has a valid checksum, so that only the audit can find it."""
    (sound_store, layers) = copies._store, Counter[int]()

    def early_store(tensor: Any, blocks: Any, layout_part: Any, slots: Any) -> None:
        layers[id(tensor)] += 1
        last = next(reversed(layers)) == id(tensor) and len(layers) > 1
        sound_store(np.zeros_like(tensor) if last else tensor, blocks, layout_part, slots)

    audit = {"first": 1000, "on_difference": reaction}
    engine = start_engine(llama, {"ram": "64MiB", "audit": audit, "verify": "always"})
    prompt = CHATS[0] + CHATS[5]
    with monkeypatch.context() as patch:
        patch.setattr(copies, "_store", early_store)
        engine.generate([prompt], 8)
        engine.forget_device()
    stored = engine.manager.core.stats().ready
    assert stored > 1
    lines: list[logging.LogRecord] = []
    (handler := logging.Handler()).emit = lines.append  # type: ignore[method-assign]
    logging.getLogger("vllm.kvoffload").addHandler(handler)
    engine.generate([prompt], 8)
    engine.drain()
    logging.getLogger("vllm.kvoffload").removeHandler(handler)
    assert audited()["different"] >= 1
    assert "differs from the computed one" in lines[0].getMessage()
    assert engine.manager.broken is stops
    assert (engine.manager.core.stats().ready < stored) is is_dropped
