"""How a class is found by what was typed: names, modules, files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.core.policy import POLICIES
from kvoffload.errors import ConfigError
from kvoffload.policies.lru import LRU

POLICY = """
from kvoffload.testing.naive.lru import NaiveLRU

class Mine(NaiveLRU):
    name = "mine"

class Another:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(POLICY)
    return path


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        POLICIES.find(name)
    message = str(caught.value)
    assert message.startswith(f"policy: {name!r} is not possible; ")
    return message.split("; ", 1)[1]


def test_names_modules_and_classes() -> None:
    assert POLICIES.find("lru") is POLICIES.find("kvoffload.policies.lru:LRU") is POLICIES.find(LRU) is LRU


def test_a_class_in_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = POLICIES.find(f"{file}:Mine")
    assert found.name == "mine"
    monkeypatch.chdir(file.parent)
    assert POLICIES.find("mine.py:Mine") is POLICIES.find("./mine.py:Mine") is found
    assert pickle.loads(pickle.dumps(found)) is found


def test_another_process_finds_it_by_the_same_text(file: Path) -> None:
    """The module is called the same there, so what one process pickled the other one can read."""
    pickled = pickle.dumps(POLICIES.find(f"{file}:Mine")).hex()
    code = (
        "import pickle\n"
        "from kvoffload.core.policy import POLICIES\n"
        f"found = POLICIES.find({f'{file}:Mine'!r})\n"
        f"assert pickle.loads(bytes.fromhex({pickled!r})) is found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_files_of_one_name_are_two_modules(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(POLICY)
    assert POLICIES.find(f"{other}:Mine") is not POLICIES.find(f"{file}:Mine")


def test_what_is_wrong_is_said(file: Path, tmp_path: Path) -> None:
    assert refused(f"{file}x.py:Mine") == f"there is no file {file}x.py"
    assert refused(f"{file}:Yours") == f"{file} has no Yours; it has Mine"
    assert refused(f"{file}:Another") == "it must be a subclass of EvictionPolicy"
    assert refused(f"{tmp_path}:Mine").startswith("it cannot be imported: No module")
    assert refused("kvoffload.policies.lru:LRUU") == "kvoffload.policies.lru has no LRUU; it has LRU"
    assert refused("no.such.module:Mine").startswith("it cannot be imported: No module")
    assert refused("lruu").endswith("module:Class, or path/to/file.py:Class (did you mean lru?)")
    assert "path/to/file.py:Class" in refused(f"{file}")
    assert "path/to/file.py:Class" in refused(f"{file}:")
    assert "path/to/file.py:Class" in refused(":Mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine:\n  def f(:\n", "it cannot be imported: invalid syntax .*broken.py, line 2"),
        ("import nowhere", "it cannot be imported: No module named 'nowhere'"),
        ("1 / 0", "it cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_run_is_forgotten(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        POLICIES.find(f"{path}:Mine")
    path.write_text(POLICY)  # mended: the failure is not remembered
    assert POLICIES.find(f"{path}:Mine").name == "mine"
