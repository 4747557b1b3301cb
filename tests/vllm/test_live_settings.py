"""Policy and size of a serving engine change, and the tokens stay equal."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.integrations.vllm.scheduler_side import live_settings
from kvoffload.settings import watched
from kvoffload.testing.audit import audit
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import PATIENCE_S, certain_answers, conversations, drive

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]


def test_the_policy_changes_in_a_serving_engine(
    start_engine: Callable[..., Any],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "INTERVAL_S", 0.0)
    monkeypatch.setattr(live_settings, "NUM_BLOCKS", 4)
    path = tmp_path / "live.json"
    options = {"ram": "6MiB", "policy": "lru", "live_settings": str(path), "prompt_only": False}
    engine = start_engine(llama, options, connector=True)
    core, chats = engine.manager.core, conversations(2, documents=8, turns=3)
    prompts, answers = certain_answers(engine, chats, 8)
    steps_during = 0
    step = live_settings.LiveSettings.step

    def counted(live: Any) -> bool:
        nonlocal steps_during
        has_changed: bool = step(live)
        steps_during += core.advance_policy_change(0)
        return has_changed

    monkeypatch.setattr(live_settings.LiveSettings, "step", counted)
    seeds, deadline = itertools.count(), time.monotonic() + PATIENCE_S
    for policy in ("hazard", "arc"):
        new = path.with_suffix(".new")
        new.write_text(f'{{"policy": "{policy}"}}')
        os.rename(new, path)
        while core.policy.name != policy or core.advance_policy_change(0):
            assert time.monotonic() < deadline
            assert not drive(engine, prompts, answers, next(seeds), 30).wrong
        audit(core)
        assert not drive(engine, prompts, answers, next(seeds), 30).wrong
    assert steps_during > 10, "the engine served while its policy changed"
    assert core.stats().loaded > 0
    assert not engine.manager.broken


def test_the_used_part_of_ram_changes_in_a_serving_engine(
    start_engine: Callable[..., Any],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched, "INTERVAL_S", 0.0)
    monkeypatch.setattr(live_settings, "NUM_BLOCKS", 4)
    path = tmp_path / "live.json"
    options = {"ram": "6MiB", "policy": "lru", "live_settings": str(path), "prompt_only": False}
    engine = start_engine(llama, options, connector=True)
    core, chats = engine.manager.core, conversations(2, documents=8, turns=3)
    prompts, answers = certain_answers(engine, chats, 8)
    seeds, deadline, capacity = itertools.count(), time.monotonic() + PATIENCE_S, core.capacity_blocks
    assert not drive(engine, prompts, answers, next(seeds), 30).wrong
    for size, share in (("1MiB", 6), ("6MiB", 1), ("3MiB", 2)):
        new = path.with_suffix(".new")
        new.write_text(f'{{"ram": "{size}"}}')
        os.rename(new, path)
        while core.usable_blocks != capacity // share:
            assert time.monotonic() < deadline
            assert not drive(engine, prompts, answers, next(seeds), 30).wrong
        audit(core)
        assert not drive(engine, prompts, answers, next(seeds), 30).wrong
        assert core.stats().ready <= capacity // share
    assert core.stats().loaded > 0
    assert core.stats().evicted > 0
    assert not engine.manager.broken
