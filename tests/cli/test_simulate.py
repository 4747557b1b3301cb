"""``kvoffload simulate`` and ``kvoffload calibrate`` as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.run_cli import kvoffload
from support.simulated_machine import machine

ON_CHAT = (
    *("simulate", "chat", "--bytes-per-token", "128KiB", "--capacity", "128GiB", "--device-blocks", "64GiB"),
    "--quiet",
)


def test_it_says_who_waits_and_what_it_rests_on() -> None:
    done = kvoffload(*ON_CHAT, "--store", "on-device-eviction", "--tiers", "1TiB")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in (
        "TTFT, mean",
        "GPU-hours of prompts saved",
        "simulated write",
        "Loading from RAM is faster than computing from",
        "NVIDIA H100 data sheet",
    ):
        assert words in done.stdout


def test_json_is_what_the_library_reports(tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "report.json"
    file.write_bytes(
        machine(prefill_s_per_token=1e-5, load_bytes_per_s=1e10, store_bytes_per_s=1e10).to_json()
    )
    arguments = (*ON_CHAT, "--machine", str(file), "--at-once", "4", "--format", "json")
    shown = json.loads(kvoffload(*arguments).stdout)
    assert shown["machine"]["name"] == "by hand"
    assert shown["at_once"] == 4
    assert shown["block_bytes"] == 512 * 128 * 1024
    assert shown["with_offload"]["requests"] == shown["without"]["requests"] > 1000
    done = kvoffload(*arguments, "--output", str(out))
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(out.read_bytes()) == shown


def test_denser_sessions_are_said() -> None:
    assert "1,992 requests, 2 times as dense" in kvoffload(*ON_CHAT, "--load", "2x").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "chat"), "model: None is not possible; copies need the bytes of a token"),
        ((*ON_CHAT, "--machine", "h100"), "machine: 'h100' is not possible; allowed: a file of"),
        ((*ON_CHAT, "--machine", "gone.json"), "machine: 'gone.json' is not possible; it cannot be read"),
        ((*ON_CHAT, "--load", "dense"), "load: 'dense' is not possible"),
        ((*ON_CHAT, "--load", "2", "--at-once", "3"), "give one of the two"),
        ((*ON_CHAT, "--device-blocks", "10"), "the longest request takes"),
        ((*ON_CHAT, "--max-running", "0"), "max-running: 0 is not possible"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = kvoffload(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
