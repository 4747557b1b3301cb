"""bench/integrity.py with `PrefixCache.generate`: damaged KV changes no answer; a blind reader is caught."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvoffload.cache.jobs import Jobs
from kvoffload.tiers.disk.slab import MISMATCH, SOUND, Outcomes, Slab

BENCH = Path(__file__).resolve().parents[2] / "bench"
SEED = 20261121
KINDS = (
    "a bit of the payload",
    "bits of journal or config file",
    "two blocks swapped",
    "block zero-filled",
    "truncated in the middle",
    "an older version in its place",
    "another model's block in its place",
    "unreadable",
    "opened for another model",
    "writer killed (kill -9)",
)


@pytest.fixture(scope="module")
def scenes() -> Iterator[ModuleType]:
    """bench/peers, which is no part of the package."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("peers.scenes")
    finally:
        sys.path.remove(str(BENCH))
        for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
            del sys.modules[name]


def play(scenes: ModuleType, kind: str, directory: Path) -> list[dict[str, Any]]:
    adapter = importlib.import_module("peers.kvoffload_transformers").ADAPTERS["kvoffload-transformers"]
    rows: list[dict[str, Any]] = scenes.play(
        adapter, kind, directory / "scene", SEED, rounds=1, isolation=scenes.inline
    )
    assert rows
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_kv_changes_no_answer(scenes: ModuleType, kind: str, tmp_path: Path) -> None:
    for row in play(scenes, kind, tmp_path):
        assert row["damaged"] > 0, row
        assert (row["wrong"], row["others_lost"], row["ended"]) == (0, 0, ""), row
        if kind.startswith("writer killed"):
            assert row["acknowledged_and_lost"] == 0
        else:
            assert (row["right"], row["missed"]) == (0, row["damaged"]), row


def test_a_reader_that_does_not_verify_is_caught(
    scenes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, copy_out = Slab.read_blocks, Jobs._copy_out

    def blind(self: Slab, *arguments: Any) -> Outcomes:
        outcomes = honest(self, *arguments)
        outcomes[outcomes == MISMATCH] = SOUND
        return outcomes

    def blind_copy(self: Jobs, keys: Any, slots: Any, parts: Any, rows: Any) -> Any:
        sound = copy_out(self, keys, slots, parts, rows)
        parts.load(self._ram.pool, slots, rows)
        sound[:] = True
        return sound

    monkeypatch.setattr(Slab, "read_blocks", blind)
    monkeypatch.setattr(Jobs, "_copy_out", blind_copy)
    rows = play(scenes, "two blocks swapped", tmp_path)
    assert [row["wrong"] for row in rows] == [row["damaged"] for row in rows]
