"""`bench/independent.py`, which shares no code with kvoffload, computes the same hits, prices and waits."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.simulate.config import Timing
from kvoffload.simulate.timed import run_in_time
from kvoffload.traces.sources import load_trace
from support.run_cli import kvoffload
from support.simulated_machine import machine

PATH = Path(__file__).resolve().parents[2] / "bench" / "independent.py"


@pytest.fixture(scope="module")
def independent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("independent", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["independent"] = module
    spec.loader.exec_module(module)
    return module


def test_the_script_imports_only_the_standard_library() -> None:
    tree = ast.parse(PATH.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("name", "most_requests"),
    [
        ("made_up", None),
        ("conversation_first60", None),
        ("agentic_3h", 4_000),
        pytest.param("agentic_3h", None, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("store", [ON_COMPUTE, ON_DEVICE_EVICTION])
def test_hits_and_writes_are_equal(
    independent: ModuleType,
    recorded_trace_path: Callable[[str], Path],
    name: str,
    most_requests: int | None,
    store: str,
) -> None:
    path = recorded_trace_path(name)
    requests, trace = independent.read(path)[:most_requests], load_trace(path)
    trace = trace.of_requests(np.arange(len(requests)))
    for shares in ((0.01, 0.005), (0.02, 0.05), (0.001, 0.2)):
        device, ram = (max(1, round(share * trace.unique_blocks)) for share in shares)
        counts = independent.STORES[store](requests, device, ram)
        report = Replay(trace, ReplayConfig(ram, device_blocks=device, store=store)).run()
        replayed = report.block_refs, report.device_hit_blocks, report.offload_hit_blocks
        assert replayed == tuple(counts)[:3], shares
        # A victim tier keeps a loaded block until it needs the slot, and does not write it again.
        assert report.blocks_written <= counts.written
        assert store == ON_DEVICE_EVICTION or report.blocks_written == counts.written


@pytest.mark.slow
def test_the_rows_of_a_plan_are_equal(independent: ModuleType, chat: str) -> None:
    options = (
        "--bytes-per-token",
        "128KiB",
        "--gpus",
        "1",
        "--kv-per-gpu",
        "8GB",
        "--policies",
        "lru",
        "--admissions",
        "all",
        "--ssd-budget-admissions",
        "worth",
    )
    speed = ("--prefill-tokens-per-s", "30000", "--format", "json", "--jobs", "1")
    done = kvoffload("plan", chat, *options, *speed)
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    differences = independent.differences(plan, independent.read(Path(chat)), 2**26, 30_000)
    rows = {name: (error, count) for name, error, count in differences}
    assert min(count for _, count in rows.values()) >= 3
    assert set(rows) == {
        "saved", "by GPU", "written to RAM", "price", "GPUs", "GPU-hours a day", "drive writes a day",
    }  # fmt: skip
    assert max(error for error, _ in rows.values()) < 1e-9, rows


def test_waits_of_a_gpu_alone_are_close(independent: ModuleType, chat: str) -> None:
    gpu = machine(prefill_s_per_token=1e-4, step_s=0.0, decode_tokens_per_s=1e6)
    trace = load_trace(chat)
    timed = run_in_time(trace, Timing(gpu, 2**20, max_running=trace.requests), 5_000)
    seconds = independent.waits(independent.read(Path(chat)), 5_000, gpu.prefill_s)
    # Not equal: a step computes parts of several prompts, and answers occupy blocks.
    assert timed.ttft_s.mean == pytest.approx(np.mean(seconds), rel=0.15)
    assert timed.ttft_s.p90 == pytest.approx(np.percentile(seconds, 90), rel=0.15)


def test_a_wrong_plan_is_noticed(independent: ModuleType, chat: str) -> None:
    requests = independent.read(Path(chat))
    right = independent.on_compute(requests, 50, 100)
    seconds = requests[-1].at_s - requests[0].at_s
    row = {
        "saved": right.saved + 0.001, "by_gpus": right.by_gpu / right.refs, "price": 7, "ram_modules": 1,
        "ram_write_bytes_per_s": right.written / seconds, "policy": "lru", "admission": "all",
        "store": ON_COMPUTE, "device_blocks": 50, "ram_blocks": 100, "ssd_drives": 0, "servers": 0,
        "shared_ram": False,
    }  # fmt: skip
    prices = [{"name": "ram.price", "value": "5.0 USD"}, {"name": "ssd.price", "value": "600.0 USD"}]
    differences = independent.differences({"rows": [row], "assumptions": prices}, requests, 1)
    wrong = {name for name, error, _ in differences if error > 1e-9}
    assert wrong == {"saved", "price"}
