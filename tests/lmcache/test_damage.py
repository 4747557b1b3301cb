"""bench/integrity.py with LMCache: we serve no damage; AES-GCM misses moved blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.integrity_bench import IN_ONE_PROCESS, peers, play

ENCRYPTED = [
    ("a bit of the payload", False),
    ("block zero-filled", False),
    ("truncated in the middle", False),
    ("two blocks swapped", True),
    ("an older version in its place", True),
    ("another model's block in its place", True),
]


@pytest.fixture(scope="module")
def scenes() -> Iterator[ModuleType]:
    with peers() as module:
        yield module


@pytest.mark.parametrize("kind", IN_ONE_PROCESS)
def test_damage_is_missed_and_nothing_else(scenes: ModuleType, kind: str, tmp_path: Path) -> None:
    for row in play(scenes, kind, tmp_path, "kvoffload-lmcache"):
        assert row["damaged"] > 0, row
        assert (row["right"], row["wrong"], row["missed"]) == (0, 0, row["damaged"]), row
        assert (row["others_lost"], row["ended"]) == (0, ""), row


@pytest.mark.parametrize(("kind", "is_served"), ENCRYPTED)
def test_the_docs_description_of_lmcaches_encryption(
    scenes: ModuleType, kind: str, is_served: bool, tmp_path: Path
) -> None:
    for row in play(scenes, kind, tmp_path, "lmcache-aesgcm"):
        assert row["damaged"] > 0, row
        assert row["wrong"] == (row["damaged"] if is_served else 0), row
        assert (row["others_lost"], row["ended"]) == (0, ""), row
