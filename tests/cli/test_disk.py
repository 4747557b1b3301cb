"""`kvoffload disk`: output for people, and exit codes for scripts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.cli.disk import disk as command
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.disk.lock import LOCK_NAME
from kvoffload.tiers.disk.slab_directory import slabs_in
from kvoffload.tiers.disk.slab_layout import Layout
from support.disk_blocks import KEY_BYTES, Disk, slab_in
from support.recording_files import FailingFiles

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


def test_inspect_prints_the_ages_of_the_oldest_median_and_newest_block(
    tmp_path: Path,
) -> None:
    files = FailingFiles()
    disk = Disk(tmp_path, 16, files=files)
    for number, files.clock_s in enumerate((50, 10, 40, 20, 30)):
        disk.write([number])
    disk.tier.close()
    (report,) = json.loads(run("inspect", tmp_path, "--format", "json")[1])
    assert report["written_at_s"] == [10, 30, 50]


def test_slabs_are_sorted_by_last_use(tmp_path: Path) -> None:
    for number, producer in enumerate(["llama", "mistral", "qwen", "mistral"]):
        disk = Disk(tmp_path, 100, fingerprint=producer)
        assert disk.write([number]) == [number]
        disk.tier.close()
    (tmp_path / "kvoffload-0.slab").write_bytes(b"rubbish")
    os.utime(tmp_path / "kvoffload-0.slab", (0, 0))
    reports = json.loads(run("inspect", tmp_path, "--format", "json")[1])
    assert [(r["fingerprint"], r["num_blocks"]) for r in reports] == [
        ("mistral", 2),
        ("qwen", 1),
        ("llama", 1),
        ("", 0),
    ]
    assert reports[3]["problem"]
    assert "cannot be used" in run("inspect", tmp_path)[1]
    (alone,) = json.loads(run("inspect", tmp_path / reports[1]["name"], "--format", "json")[1])
    assert alone == reports[1]
    code, text = run("verify", tmp_path)
    assert code == 1, "one slab is unusable"
    assert text.count("blocks are sound") == 3
    (tmp_path / "kvoffload-0.slab").unlink()
    assert run("verify", tmp_path)[0] == 0
    (tmp_path / "kvoffload-0.slab").write_bytes(b"rubbish")
    order = [path.name for path in slabs_in(tmp_path)]
    code, text = run("compact", tmp_path)
    assert (code, text.count("the log is empty"), text.count("skipped")) == (1, 3, 1)
    assert [path.name for path in slabs_in(tmp_path)] == order, "the order of eviction is unchanged"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "letter").write_text("dear reader")
    assert run("verify", tmp_path / "elsewhere" / "letter")[0] == 1
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["letter"]


def test_verify_exits_with_0_if_all_blocks_are_sound_and_1_otherwise(filled: Path) -> None:
    code, text = run("verify", filled)
    assert (code, text) == (0, f"{slab_in(filled)}: 10 of 10 blocks are sound\n")
    layout = Layout.holding(4096, KEY_BYTES, 16)
    with slab_in(filled).open("r+b") as file:
        file.seek(layout.slot_offset(4) + 500)
        file.write(b"damage")
    code, text = run("verify", filled)
    assert code == 1
    assert "slot 4: block " in text
    assert "9 of 10 blocks are sound" in text
    code, text = run("verify", filled, "--format", "json")
    assert code == 1
    (report,) = json.loads(text)
    assert [problem["slot"] for problem in report["problems"]] == [4]


def test_verify_reports_a_damaged_journal_and_compact_repairs_it(filled: Path) -> None:
    layout = Layout.holding(4096, KEY_BYTES, 16)
    with slab_in(filled).open("r+b") as file:
        file.seek(layout.checkpoint_offset(0) + 40)
        file.write(b"x")
        file.seek(layout.checkpoint_offset(0) + layout.checkpoint_bytes - 4000)
        file.write(b"x")
    code, text = run("verify", filled)
    assert code == 1
    assert "1 parts of the journal cannot be read" in text
    assert run("compact", filled) == (
        0,
        f"{slab_in(filled)}: checkpoint of 10 blocks written, the log is empty\n",
    )
    assert run("verify", filled)[0] == 0
    disk = Disk(filled, 16, fingerprint="llama bf16 tp1")
    assert disk.here(NUMBERS) == NUMBERS
    disk.tier.close()


@pytest.fixture
def read_only(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a file system that refuses writes, as a snapshot or a backup would be mounted."""
    open_file, may_access = os.open, os.access

    def refusing_open(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and may_access(path, mode))
    return filled


@pytest.mark.parametrize("has_lock_file", [True, False])
def test_verify_reads_a_read_only_directory(read_only: Path, has_lock_file: bool) -> None:
    if not has_lock_file:
        (read_only / LOCK_NAME).unlink()
    code, text = run("verify", read_only)
    assert (code, text) == (0, f"{slab_in(read_only)}: 10 of 10 blocks are sound\n")
    for verb in ("compact", "rm"):
        with pytest.raises(UnavailableError, match="Read-only file system"):
            run(verb, read_only, *(["--yes"] if verb == "rm" else []))
    assert len(slabs_in(read_only)) == 1


@pytest.mark.parametrize("locked", [LOCK_NAME, "slab"])
def test_verify_of_a_read_only_directory_notices_a_writer(read_only: Path, locked: str) -> None:
    """The directory may be writable at another place where the file system is mounted."""
    path = slab_in(read_only) if locked == "slab" else read_only / locked
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match=r"has it open|is open under another name"):
            run("verify", read_only)
    assert run("verify", read_only)[0] == 0


def test_compact_names_a_failed_write(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvoffload.tiers.disk.journal.write_checkpoint", full)
    with pytest.raises(UnavailableError, match=r"it cannot be written .No space left on device"):
        run("compact", filled)


def test_commands_on_an_open_slab(filled: Path) -> None:
    disk = Disk(filled, 16, fingerprint="llama bf16 tp1")
    for verb in ("verify", "compact"):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} has it open"):
            run(verb, filled)
    code, text = run("inspect", filled)
    assert code == 0
    assert f"by process {os.getpid()}" in text
    disk.tier.close()
    assert "by process" not in run("inspect", filled)[1]


def test_a_foreign_directory(tmp_path: Path) -> None:
    for verb in ("inspect", "verify", "compact"):
        with pytest.raises(ConfigError, match="path"):
            run(verb, tmp_path)
        with pytest.raises(ConfigError, match="path"):
            run(verb, tmp_path / "nonesuch")


def test_rm_deletes_slabs_and_leaves_the_lock(filled: Path) -> None:
    code, text = run("rm", filled, "--yes")
    assert code == 0
    assert text.startswith("1 slab of ")
    assert text.endswith(f" in {filled}: deleted\n")
    assert [path.name for path in filled.iterdir()] == ["kvoffload.lock"], (
        "another process may wait for the lock"
    )


@pytest.mark.parametrize(("answer", "is_deleted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_rm_asks(filled: Path, answer: str, is_deleted: bool) -> None:
    result = CliRunner().invoke(command, ["rm", str(filled)], input=answer)
    assert result.exit_code == (0 if is_deleted else 1)
    assert result.output.startswith("Delete 1 slab of ")
    assert result.output.endswith(": deleted\n" if is_deleted else "\nnothing was deleted\n")
    assert (slabs_in(filled) == []) == is_deleted


def test_rm_without_an_answer_names_the_option(filled: Path) -> None:
    with pytest.raises(ConfigError, match="yes: missing; there is no answer on standard input; give --yes"):
        run("rm", filled)
    assert len(slabs_in(filled)) == 1


def test_rm_leaves_foreign_files(filled: Path) -> None:
    both = filled / "both"
    for producer in ("one", "another"):
        disk = Disk(both, 100, fingerprint=producer)
        disk.write([1])
        disk.tier.close()
    (both / "notes.txt").write_text("mine")
    first, second = slabs_in(both)
    assert run("rm", first, "--yes")[0] == 0
    assert slabs_in(both) == [second]
    assert run("rm", both, "--yes")[0] == 0
    assert sorted(path.name for path in both.iterdir()) == ["kvoffload.lock", "notes.txt"]


def test_rm_deletes_nothing_but_slabs(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years")
    link = tmp_path / "kvoffload-1.slab"
    link.symlink_to(thesis)
    for path in (thesis, link):
        with pytest.raises(ConfigError, match="allowed: a file kvoffload"):
            run("rm", path, "--yes")
    assert thesis.read_text() == "years"
    assert not (tmp_path / "kvoffload.lock").exists()


def test_rm_asks_and_does_not_delete_open_slabs(filled: Path) -> None:
    result = CliRunner().invoke(command, ["rm", str(filled)], input="n\n")
    assert (result.exit_code, len(slabs_in(filled))) == (1, 1)
    disk = Disk(filled, 16, fingerprint="llama bf16 tp1")
    with pytest.raises(ConfigError, match=str(os.getpid())):
        run("rm", filled, "--yes")
    disk.tier.close()
    assert len(slabs_in(filled)) == 1
    with pytest.raises(ConfigError, match="directory of a disk tier"):
        run("rm", filled / "elsewhere", "--yes")
