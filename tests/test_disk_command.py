"""`kvoffload disk`: what people see of a slab, and the exit codes that scripts go by."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from disk_blocks import KEY_BYTES, Disk
from kvoffload.cli.disk import disk as command
from kvoffload.errors import ConfigError
from kvoffload.tiers.disk import pipeline
from kvoffload.tiers.disk.layout import Layout
from kvoffload.tiers.disk.slab import SLAB_NAME

NUMBERS = list(range(10))


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    disk = Disk(tmp_path, 16, fingerprint="llama bf16 tp1")
    disk.write(NUMBERS)
    disk.tier.close()
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_inspect(filled: Path) -> None:
    code, text = run("inspect", filled)
    assert code == 0
    assert "llama bf16 tp1" in text
    assert "10 of 16, 4 KiB each" in text
    (report,) = json.loads(run("inspect", filled, "--format", "json")[1])
    assert (report["num_blocks"], report["capacity_blocks"], report["problem"]) == (10, 16, "")


def test_inspect_tells_the_age_of_the_oldest_the_middle_and_the_newest_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, 16)
    for number, now_s in enumerate((50, 10, 40, 20, 30)):
        monkeypatch.setattr(pipeline, "now_s", lambda now_s=now_s: now_s)
        disk.write([number])
    disk.tier.close()
    (report,) = json.loads(run("inspect", tmp_path, "--format", "json")[1])
    assert report["written_at_s"] == [10, 30, 50]


def test_inspect_lists_what_was_set_aside(filled: Path) -> None:
    Disk(filled, 16, fingerprint="mistral").tier.close()
    (filled / f"{SLAB_NAME}.set-aside-2").write_bytes(b"rubbish")
    reports = json.loads(run("inspect", filled, "--format", "json")[1])
    assert [report["fingerprint"] for report in reports] == ["mistral", "llama bf16 tp1", ""]
    assert reports[2]["problem"]
    assert "cannot be used" in run("inspect", filled)[1]


def test_verify_is_0_when_all_is_sound_and_1_with_a_list_when_not(filled: Path) -> None:
    code, text = run("verify", filled)
    assert (code, text) == (0, f"{filled}: 10 of 10 blocks are sound\n")
    layout = Layout.holding(4096, KEY_BYTES, 16)
    with (filled / SLAB_NAME).open("r+b") as file:
        file.seek(layout.slot_offset(4) + 500)
        file.write(b"damage")
    code, text = run("verify", filled)
    assert code == 1
    assert "slot 4: block " in text
    assert "9 of 10 blocks are sound" in text
    code, text = run("verify", filled, "--format", "json")
    assert code == 1
    assert [problem["slot"] for problem in json.loads(text)["problems"]] == [4]


def test_verify_tells_of_a_damaged_journal_and_compact_mends_it(filled: Path) -> None:
    layout = Layout.holding(4096, KEY_BYTES, 16)
    with (filled / SLAB_NAME).open("r+b") as file:
        file.seek(layout.checkpoint_offset(0) + 40)
        file.write(b"x")
        file.seek(layout.checkpoint_offset(0) + layout.checkpoint_bytes - 4000)
        file.write(b"x")
    code, text = run("verify", filled)
    assert code == 1
    assert "1 parts of the journal cannot be read" in text
    assert run("compact", filled) == (0, f"{filled}: checkpoint of 10 blocks written, the log is empty\n")
    assert run("verify", filled)[0] == 0
    disk = Disk(filled, 16, fingerprint="llama bf16 tp1")
    assert disk.here(NUMBERS) == NUMBERS
    disk.tier.close()


def test_while_somebody_has_it_open(filled: Path) -> None:
    disk = Disk(filled, 16, fingerprint="llama bf16 tp1")
    for verb in ("verify", "compact"):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} has it open"):
            run(verb, filled)
    code, text = run("inspect", filled)
    assert code == 0
    assert f"by process {os.getpid()}" in text
    disk.tier.close()
    assert "by process" not in run("inspect", filled)[1]


def test_a_directory_that_is_none_of_ours(tmp_path: Path) -> None:
    for verb in ("inspect", "verify", "compact"):
        with pytest.raises(ConfigError, match="path"):
            run(verb, tmp_path)
        with pytest.raises(ConfigError, match="path"):
            run(verb, tmp_path / "nonesuch")
