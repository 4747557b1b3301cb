"""Changes of policy and size in a serving engine leave the tokens equal."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.integrations.vllm.scheduler_side import live_settings
from kvoffload.settings import watched
from kvoffload.testing.audit import audit
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import PATIENCE_S, Expected, drive

# vLLM's warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]


class Served:
    """An engine with live settings that serves a chat."""

    def __init__(self, engine: Any, path: Path, expected: Expected) -> None:
        self.core, self._engine, self._path = engine.manager.core, engine, path
        self._prompts, self._answers = expected.chats, expected.chat_answers
        self._seeds, self._deadline = itertools.count(), time.monotonic() + PATIENCE_S

    def serve(self) -> None:
        assert not drive(self._engine, self._prompts, self._answers, next(self._seeds), 30).wrong

    def change(self, setting: str, value: str, has_changed: Callable[[], bool]) -> None:
        """Write the setting, serve requests until it has changed, and serve once more."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({setting: value}))
        os.rename(new, self._path)
        while not has_changed():
            assert time.monotonic() < self._deadline
            self.serve()
        audit(self.core)
        self.serve()

    def check(self) -> None:
        assert self.core.stats().loaded > 0
        assert not self._engine.manager.broken


@pytest.fixture
def served(
    start_engine: Callable[..., Any], llama: Path, on_llama: Expected, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Served:  # fmt: skip
    monkeypatch.setattr(watched, "INTERVAL_S", 0.0)
    monkeypatch.setattr(live_settings, "NUM_BLOCKS", 4)
    path = tmp_path / "live.json"
    options = {"ram": "6MiB", "policy": "lru", "live_settings": str(path), "prompt_only": False}
    return Served(start_engine(llama, options, connector=True), path, on_llama)


def test_the_policy_changes_in_a_serving_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    core, steps_during = served.core, 0
    step = live_settings.LiveSettings.step

    def counted(live: Any) -> bool:
        nonlocal steps_during
        has_changed: bool = step(live)
        steps_during += core.advance_policy_change(0)
        return has_changed

    def has_policy(name: str) -> bool:
        return bool(core.policy.name == name and not core.advance_policy_change(0))

    monkeypatch.setattr(live_settings.LiveSettings, "step", counted)
    for policy in ("hazard", "arc"):
        served.change("policy", policy, partial(has_policy, policy))
    assert steps_during > 10, "the engine served while its policy changed"
    served.check()


def test_the_used_part_of_ram_changes_in_a_serving_engine(served: Served) -> None:
    core, capacity = served.core, served.core.capacity_blocks

    def uses(num_blocks: int) -> bool:
        return bool(core.usable_blocks == num_blocks)

    served.serve()
    for size, share in (("1MiB", 6), ("6MiB", 1), ("3MiB", 2)):
        served.change("ram", size, partial(uses, capacity // share))
        assert core.stats().ready <= capacity // share
    assert core.stats().evicted > 0
    served.check()
