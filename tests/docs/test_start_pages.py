"""Start pages: their code runs, and their commands print the numbers that the pages show."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvoffload as package
from kvoffload.node.pool_directory import SHARED_MEMORY
from support.run_cli import kvoffload

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("start-planner.md", "start-policy.md", "explain.md")
_SHOWN = re.compile(r"```\n\$ kvoffload (.*)\n((?:.*\n)*?)```")


def numbers(text: str) -> str:
    """Return the numbers of a text in their order; layout and wording may change."""
    return " ".join(["", *re.findall(r"\d[\d.,]*\d|\d", text), ""])


def commands() -> list[tuple[str, str]]:
    return [shown for page in PAGES for shown in _SHOWN.findall((ROOT / "docs" / page).read_text())]


def printed(document: str, *others: int) -> tuple[str, str]:
    """Run the first example of a document; return its output, and the document.

    `others`: numbers of further examples to run afterwards, in the namespace of the first.
    """
    text, names = (ROOT / document).read_text(), dict[str, object]()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for number in (0, *others):
            exec(examples[number], names)
    return out.getvalue(), text


def test_there_are_commands_to_try() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        # Plans, sweeps and simulations replay a whole trace many times.
        pytest.param(
            command,
            shown,
            id=command,
            marks=[pytest.mark.slow] if command.startswith(("plan", "sweep", "simulate", "explain")) else [],
        )
        for command, shown in commands()
    ],
)
def test_a_command_prints_these_numbers(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = kvoffload(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert len(numbers(shown).split()) > 5
    missing = [line for line in shown.splitlines() if numbers(line) not in numbers(done.stdout)]
    assert not missing, done.stdout


def test_the_code_for_engine_authors_has_hits() -> None:
    out, page = printed("docs/start-engine.md")
    assert out == "0 of 8 blocks from RAM\n8 of 8 blocks from RAM\n"
    assert f"```\n{out}```" in page


def test_the_code_with_tiers_has_hits_from_the_disk_of_an_earlier_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        runpy.run_path(str(ROOT / "examples" / "tiered_engine.py"))
    out, page = stdout.getvalue(), (ROOT / "docs" / "start-engine.md").read_text()
    assert out == (
        "first life: 0 blocks from RAM, 0 from the disk\nsecond life: 0 blocks from RAM, 8 from the disk\n"
    )
    assert f"```\n{out}```" in page
    assert not caplog.messages


def test_the_code_of_the_readme_has_hits() -> None:
    out, readme = printed("README.md")
    assert out == "0 of 64 tokens loaded\n63 of 64 tokens loaded\n"
    assert "# 0, then 63" in readme


def test_the_code_for_embedding_finds_the_disk_of_an_earlier_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out, page = printed("docs/embedding.md")
    assert out == "first life: 0 of 100 tokens loaded\nsecond life: 96 of 100 tokens loaded\n"
    assert f"```\n{out}```" in page


@pytest.fixture
def own_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory for shared pools, without keepers."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-test-", dir=SHARED_MEMORY) as root:
        monkeypatch.setattr("kvoffload.cache.shared_ram.SHARED_MEMORY", Path(root))
        monkeypatch.setattr("kvoffload.node.keeper.start", lambda *_: None)
        yield


def test_the_code_for_a_shared_pool_loads_in_the_second_run(own_pools: None) -> None:
    out, page = printed("docs/node-pool.md", 0)
    assert out == "0 of 100 tokens loaded\n96 of 100 tokens loaded\n"
    assert f"```\n{out}```" in page


def test_the_smallest_engine_finds_its_blocks_again(tmp_path: Path) -> None:
    example = ROOT / "examples" / "embed_minimal.py"
    done = subprocess.run(
        [sys.executable, str(example), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "first life: 312 of 600 tokens computed, loaded {'ram': 288, 'disk': 0}\n"
        "second life: 24 of 600 tokens computed, loaded {'ram': 288, 'disk': 288}\n"
    )
    assert len(example.read_text().splitlines()) <= 60


def test_the_readme_shows_what_a_replay_prints() -> None:
    (shown,) = re.findall(r"It prints:\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    done = kvoffload("replay", "--quiet")
    assert done.returncode == 0, done.stderr
    # Times differ from machine to machine.
    lines = [line for line in shown.splitlines() if numbers(line) and "CPU time" not in line]
    assert len(lines) >= 12
    assert not [line for line in lines if numbers(line) not in numbers(done.stdout)], done.stdout
    assert lines[-1] in done.stdout, "the digest of the decisions"


def test_every_public_name_has_its_place_in_the_reference() -> None:
    entries = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: kvoffload\.(\w+)$", page.read_text(), re.M)
    ]
    assert sorted(entries) == package.__all__


def test_the_citation_cites_this_version() -> None:
    assert f"\nversion: {package.__version__}\n" in (ROOT / "CITATION.cff").read_text()
