"""Commands, options, files and links in the documents exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_link_targets_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_files_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = document.read_text()
    assert set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.M)) <= targets
    for name in re.findall(r"`((?:bench|tools|tests|docs|src)/[\w/.]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_every_option_in_the_documents_exists() -> None:
    known = "\n".join(path.read_text() for path in (ROOT / "src/kvoffload/cli").glob("*.py"))
    known += (ROOT / "src/kvoffload/traces/workloads.py").read_text()
    for document in DOCUMENTS:
        for line in re.findall(r"^kvoffload .*$", document.read_text(), re.M):
            for option in re.findall(r"--([a-z][a-z-]*)", line):
                assert f"--{option}" in known or option.replace("-", "_") in known, (
                    f"{document.name}: {option}"
                )
