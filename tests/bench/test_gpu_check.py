"""`bench/gpu_check.py` reports parts that ran, failed, or could not run. CI runs the whole script."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", BENCH / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(parts: list[dict[str, Any]] | None, code: int) -> Any:
    """Return a stand-in for `subprocess.run`: a process that writes these parts, and exits with this code."""

    def run(command: list[str], **settings: Any) -> Any:
        if parts is not None:
            Path(command[command.index("--out") + 1]).write_text(json.dumps(parts))
        return SimpleNamespace(returncode=code, stdout="what it said\n", stderr="")

    return run


def test_without_vllm_the_rest_is_run(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (only,) = check.vllm_parts(is_gpu=True)
    assert only["status"] == "not run"
    assert sys.executable in only["why"]


def test_on_a_gpu_every_engine_is_tried(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(check, "parts_of", lambda script, arguments: tried.append(arguments) or [])
    check.vllm_parts(is_gpu=True)
    assert tried[0] == ["copies", "--device", "cuda"]
    engines = [" ".join(arguments[3:]) for arguments in tried[1:]]
    assert len(engines) == len(set(engines)) == 7
    for needed in ("V1 --graphs off", "V2 --graphs on", "V2 --graphs on --zeroing", "--tp 2"):
        assert any(needed in engine for engine in engines), needed


def test_without_a_gpu_the_table_lists_parts_that_were_not_run(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    passed = {"part": "x", "status": "passed", "why": ""}
    monkeypatch.setattr(check, "parts_of", lambda script, arguments: [dict(passed)])
    parts = check.vllm_parts(is_gpu=False)
    assert [part_report["status"] for part_report in parts] == ["passed"] * 2 + ["not run"] * 7
    text = check.table(parts)
    assert text.count("no GPU here") == 7


@pytest.mark.parametrize(
    ("parts", "code", "statuses"),
    [
        ([{"part": "a", "status": "passed", "why": ""}], 0, ["passed"]),
        ([{"part": "a", "status": "not run", "why": "one GPU"}], 0, ["not run"]),
        ([{"part": "a", "status": "failed", "why": "wrong answers"}], 1, ["failed"]),
        # A lost device kills the process.
        ([{"part": "a", "status": "passed", "why": ""}], -6, ["passed", "failed"]),
        (None, -11, ["failed"]),
    ],
)
def test_a_process_that_dies_is_a_part_that_failed(
    check: Any, monkeypatch: pytest.MonkeyPatch, parts: Any, code: int, statuses: list[str]
) -> None:
    monkeypatch.setattr(check.subprocess, "run", ran(parts, code))
    reports = check.parts_of("gpu_check_vllm.py", ["engine", "--device", "cuda"])
    assert [report["status"] for report in reports] == statuses
    for report in reports:
        assert ("output" in report) == (report["status"] == "failed")
    assert "output" not in check.table(reports)
