"""``kvoffload simulate`` and ``kvoffload calibrate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.run_cli import kvoffload
from support.simulated_machine import machine

ON_MACHINE = ("--bytes-per-token", "128KiB", "--capacity", "16GiB", "--device-blocks", "16GiB", "--quiet")


def test_the_table_has_waits_savings_and_sources(chat: str) -> None:
    done = kvoffload("simulate", chat, *ON_MACHINE, "--store", "on-device-eviction", "--tiers", "1TiB")
    assert done.returncode == 0, done.stderr
    for words in (
        "TTFT, mean",
        "GPU-hours of prompts saved",
        "simulated write",
        "Loading from RAM beats computing ",
        "NVIDIA H100 data sheet",
    ):
        assert words in done.stdout


def test_json_is_the_report_of_the_library(chat: str, tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "report.json"
    file.write_bytes(
        machine(prefill_s_per_token=1e-5, load_bytes_per_s=1e10, store_bytes_per_s=1e10).to_json()
    )
    arguments = ("simulate", chat, *ON_MACHINE, "--machine", str(file), "--at-once", "4", "--format", "json")
    shown = json.loads(kvoffload(*arguments).stdout)
    assert shown["machine"]["name"] == "by hand"
    assert shown["at_once"] == 4
    assert shown["block_bytes"] == 512 * 128 * 1024
    assert shown["with_offload"]["requests"] == shown["without"]["requests"] > 50
    done = kvoffload(*arguments, "--output", str(out))
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(out.read_bytes()) == shown


def test_the_title_has_the_load(chat: str) -> None:
    assert " requests, 2 times as dense" in kvoffload("simulate", chat, *ON_MACHINE, "--load", "2x").stdout


def test_waits_in_a_growing_queue_are_not_printed(chat: str) -> None:
    """Regression: waits were the length of the recording: ``TTFT p50 107 s -> 107 s``."""
    shown = kvoffload("simulate", chat, *ON_MACHINE, "--load", "400x").stdout
    for name in ("TTFT, mean", "p50", "p90", "p99", "waiting, mean / p90"):
        (row,) = (line for line in shown.splitlines() if line.strip().startswith(f"{name}  "))
        assert row.count("grows without end") == 2, row
    summary = " ".join(shown.split())
    assert "TTFT without offloading and with offloading grows without end. Requests arrive" in summary
    assert " -> " not in shown
    with_few = kvoffload("simulate", chat, *ON_MACHINE, "--at-once", "4").stdout
    assert "grows without end" not in with_few


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "model: missing; copies need the bytes of a token"),
        ((*ON_MACHINE, "--machine", "h100"), "machine: 'h100' is invalid; allowed: a file from"),
        ((*ON_MACHINE, "--machine", "gone.json"), "machine: 'gone.json' is invalid; it cannot be read"),
        ((*ON_MACHINE, "--load", "dense"), "load: 'dense' is invalid"),
        ((*ON_MACHINE, "--load", "2", "--at-once", "3"), "set load or at_once"),
        ((*ON_MACHINE, "--device-blocks", "10"), "the longest request and its answer need"),
        ((*ON_MACHINE, "--max-running", "0"), "max-running: 0 is invalid"),
    ],
)
def test_a_mistake_is_one_line(chat: str, arguments: tuple[str, ...], words: str) -> None:
    done = kvoffload("simulate", chat, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def a_file(tmp_path: Path, **fields: object) -> Path:
    """Write a recording of 120 requests with 700 tokens each; 188 tokens are in no full block."""
    path = tmp_path / "kv.jsonl"
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 700,
            "output_length": 1,
            "hash_ids": [number % 9],
            **fields,
        }
        for number in range(120)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_tokens_outside_whole_blocks_are_reported(tmp_path: Path) -> None:
    done = kvoffload("simulate", a_file(tmp_path), "--bytes-per-token", "4096", "--capacity", "5")
    assert done.returncode == 0, done.stderr
    assert "26.9% of prompt tokens are in no whole block" in done.stdout
    assert "same session" not in done.stderr


OPTIONS_OF = {
    "replay": ("--no-data", "--capacity", "5"),
    "trace info": (),
    "sweep": ("--capacities", "5", "--policies", "lru", "--jobs", "1"),
    "plan": ("--gpus", "1", "--kv-per-gpu", "1MB", "--bytes-per-token", "128", "--policies", "lru",
             "--stores", "on-compute", "--admissions", "all", "--jobs", "1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "requests", "warns"),
    [("replay", 99, False), *((command, 120, True) for command in OPTIONS_OF)],
)
def test_a_constant_session_gives_one_warning(
    tmp_path: Path, command: str, requests: int, warns: bool
) -> None:
    path = a_file(tmp_path, session="default")
    path.write_text("\n".join(path.read_text().splitlines()[:requests]))
    done = kvoffload(*command.split(), path, *OPTIONS_OF[command])
    assert done.returncode == 0, done.stderr
    warning = "all 120 requests of kv name the same session: they count as one conversation."
    assert done.stderr.count(f"{warning} If the field is a constant, remove it") == warns
    assert "26.9% of prompt tokens are in no whole block" in " ".join(done.stdout.split())


def test_a_plan_needs_a_speed_above_zero(tmp_path: Path) -> None:
    done = kvoffload(
        "plan", a_file(tmp_path), "--gpus", "1", "--kv-per-gpu", "1GB", "--bytes-per-token", "4096",
        "--prefill-tokens-per-s", "0",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "prefill-tokens-per-s: 0 is invalid" in done.stderr or "prefill-tokens-per-s: 0.0" in done.stderr
