"""The scenes of bench/integrity.py, and readers that do not verify."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvoffload.tiers.disk.slab import MISMATCH, SOUND, Outcomes, Slab

BENCH = Path(__file__).resolve().parents[2] / "bench"
SEED = 20261121
IN_ONE_PROCESS = (
    "a bit of the payload",
    "bits of journal or config file",
    "two blocks swapped",
    "block zero-filled",
    "truncated in the middle",
    "an older version in its place",
    "another model's block in its place",
    "unreadable",
    "opened for another model",
)
"""Kinds of damage that need neither a fork nor a mount."""


@contextmanager
def peers() -> Iterator[ModuleType]:
    """Make bench/peers importable, which is not in the package; yields its module `scenes`."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("peers.scenes")
    finally:
        sys.path.remove(str(BENCH))
        for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
            del sys.modules[name]


def play(
    scenes: ModuleType, kind: str, directory: Path, product: str, **options: Any
) -> list[dict[str, Any]]:
    """Play a scene with a product in this process."""
    module = importlib.import_module("integrity").MODULES[product]
    adapter = importlib.import_module(f"peers.{module}").ADAPTERS[product]
    rows: list[dict[str, Any]] = scenes.play(
        adapter, kind, directory / "scene", SEED, isolation=scenes.inline, **options
    )
    assert rows
    return rows


def read_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a disk tier serve damaged blocks."""
    honest = Slab.read_blocks

    def blind(self: Slab, *arguments: Any) -> Outcomes:
        outcomes = honest(self, *arguments)
        outcomes[outcomes == MISMATCH] = SOUND
        return outcomes

    monkeypatch.setattr(Slab, "read_blocks", blind)
