"""Calls recorded in a real engine under stress are replayed with equal decisions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.calls import parts as parts_module
from kvoffload.calls.parts import parts_of
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.series import replay_series
from kvoffload.core.manager import OffloadingManager
from kvoffload.integrations.vllm.scheduler_side import recording
from kvoffload.tiering.tiered_manager import TieredManager
from support.recorded_calls import CutHere, replayed
from support.run_cli import kvoffload
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import (
    PATIENCE_S,
    TOKENS_THAT_PREEMPT,
    conversations,
    drive,
)

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]

SMALL_STEPS = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 48}


def recorded_run(
    start_engine: Callable[..., Any], model: Path, folder: Path, options: dict[str, Any], **settings: Any
) -> Path:
    """Drive an engine with preemption, aborts and resets, and return its recording of calls."""
    record = {"path": str(folder / "kv.jsonl"), "calls": True}
    engine = start_engine(model, {"ram": "6MiB", "record": record, **options}, connector=True, **settings)
    chats = conversations(2, documents=8, turns=4)
    outcome = drive(
        engine,
        chats,
        [[] for _ in chats],
        seed=5,
        requests=80,
        tokens=TOKENS_THAT_PREEMPT,
        aborts=0.2,
        resets=0.01,
    )
    manager = engine.manager
    ram = manager.core.ram_manager if isinstance(manager.core, TieredManager) else manager.core
    assert isinstance(ram, RecordedManager)
    assert ram.recorder.ended is None
    assert min(outcome.preempted, outcome.aborted, outcome.resets) > 0, outcome
    assert ram.stats().evicted > 0 or "admission" in options
    assert not manager.broken
    engine.close()
    assert ram.recorder.ended == "closed", "an engine that is shut down closes its recording"
    return ram.recorder.path


@pytest.mark.parametrize(
    ("options", "settings", "calls"),
    [
        ({"policy": "hazard", "prompt_only": False}, {}, {"lookup", "expect", "withdraw"}),
        ({"policy": "arc", "admission": "reuse:2", "verify": "always"}, {}, {"prepare_load", "unpin"}),
        ({"store": "on-device-eviction", "ram": "3MiB", "policy": "wtinylfu"}, SMALL_STEPS, {"keep"}),
    ],
    ids=["hazard", "arc behind a rule", "victim tier"],
)
def test_an_engine_is_replayed(
    start_engine: Callable[..., Any],
    llama: Path,
    tmp_path: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
    calls: set[str],
) -> None:
    path = recorded_run(start_engine, llama, tmp_path, options, **settings)
    assert path == tmp_path / "kv.calls"
    outcome = replayed(path)
    assert outcome.difference is None, outcome.difference
    assert (outcome.end, outcome.num_cut) == ("closed", 0)
    assert {"prepare_store", "complete_store", "finish", "reset", *calls} <= set(outcome.calls)
    another = OffloadingManager(
        outcome.header.capacity_blocks, key_bytes=8, policy="fifo", store=outcome.header.store
    )
    difference = replayed(path, another).difference
    assert difference is not None, "another policy decides differently"
    done = kvoffload("replay", path, "--as-recorded")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"policy": "hazard", "prompt_only": False}, {}),
        ({"store": "on-device-eviction", "ram": "3MiB", "policy": "wtinylfu"}, SMALL_STEPS),
    ],
    ids=["hazard", "victim tier"],
)
def test_an_engine_is_replayed_from_each_part(
    start_engine: Callable[..., Any],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """The recorder's thread begins parts while the scheduler has running requests and copies in flight."""
    monkeypatch.setattr(parts_module, "PARTS", 1 << 20)  # parts of 1 KiB
    monkeypatch.setattr(recording, "CallRecorder", partial(CallRecorder, start_cut=CutHere))
    parts = parts_of(recorded_run(start_engine, llama, tmp_path, options, **settings))
    assert len(parts) > 2
    alone = parts[:-1]  # the recording may have been closed before the state of the last part was written
    assert [replayed(part).difference for part in alone] == [None] * len(alone)
    total = replay_series(parts)
    assert (total.difference, total.end, total.num_cut) == (None, "closed", 0)
    assert {"prepare_store", "complete_store", "finish", "reset"} <= set(total.calls)


def test_an_engine_with_a_disk_is_replayed_without_the_disk(
    start_engine: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    """The recorded calls of RAM's manager suffice: they include the disk's reads and writes in order."""
    tier = {"type": "disk", "path": str(tmp_path / "slab"), "capacity": "32MiB"}
    options = {"policy": "s3fifo", "tiers": [tier], "tier_deadline_s": PATIENCE_S}
    path = recorded_run(start_engine, llama, tmp_path, options)
    outcome = replayed(path)
    assert outcome.difference is None, outcome.difference
    assert {"pin", "unpin", "prepare_store", "prepare_load"} <= set(outcome.calls)
