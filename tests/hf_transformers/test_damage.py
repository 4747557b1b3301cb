"""bench/integrity.py with `PrefixCache.generate`: damaged KV changes no answer; a blind reader fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvoffload.cache.jobs import Jobs
from support.integrity_bench import IN_ONE_PROCESS, peers, play, read_blindly

PRODUCT, KILLED = "kvoffload-transformers", "writer killed (kill -9)"


@pytest.fixture(scope="module")
def scenes() -> Iterator[ModuleType]:
    with peers() as module:
        yield module


@pytest.mark.parametrize("kind", [*IN_ONE_PROCESS, KILLED])
def test_damaged_kv_changes_no_answer(scenes: ModuleType, kind: str, tmp_path: Path) -> None:
    for row in play(scenes, kind, tmp_path, PRODUCT, rounds=1):
        assert row["damaged"] > 0, row
        assert (row["wrong"], row["others_lost"], row["ended"]) == (0, 0, ""), row
        if kind == KILLED:
            assert row["acknowledged_and_lost"] == 0
        else:
            assert (row["right"], row["missed"]) == (0, row["damaged"]), row


def test_a_reader_that_does_not_verify_is_caught(
    scenes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = Jobs._copy_out

    def blind_copy(self: Jobs, keys: Any, slots: Any, parts: Any, rows: Any) -> Any:
        sound = copy_out(self, keys, slots, parts, rows)
        parts.load(self.ram.pool, slots, rows)
        sound[:] = True
        return sound

    read_blindly(monkeypatch)
    monkeypatch.setattr(Jobs, "_copy_out", blind_copy)
    rows = play(scenes, "two blocks swapped", tmp_path, PRODUCT, rounds=1)
    assert [row["wrong"] for row in rows] == [row["damaged"] for row in rows]
