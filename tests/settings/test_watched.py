"""Settings in a file that changes while the process runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoffload.errors import CombinedConfigError, ConfigError
from kvoffload.settings.read import Count
from kvoffload.settings.watched import INTERVAL_S, WatchedFile


@dataclass(frozen=True)
class Options:
    size: Count = 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(path: Path) -> tuple[WatchedFile[Options], Clock]:
    clock = Clock()
    return WatchedFile(str(path), Options, clock), clock


def write(path: Path, text: str) -> None:
    """Replace the file, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.rename(new, path)


def test_each_version_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    file, clock = watched(path)
    assert file.poll() is None
    write(path, '{"size": 3}')
    assert file.poll() is None, "the file was checked a moment ago"
    clock.now += INTERVAL_S
    assert file.poll() == Options(3)
    clock.now += INTERVAL_S
    assert file.poll() is None
    write(path, '{"size": 4}')
    clock.now += INTERVAL_S
    assert file.poll() == Options(4)
    path.unlink()
    clock.now += INTERVAL_S
    assert file.poll() is None
    write(path, "{}")
    clock.now += INTERVAL_S
    assert file.poll() == Options(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "live.json"),
        ("[]", "live.json"),
        ('{"size": 0}', "size"),
        ('{"seize": 1}', "seize.*size"),
    ],
)
def test_a_wrong_version_is_an_error_once(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "live.json"
    file, clock = watched(path)
    write(path, text)
    with pytest.raises((ConfigError, CombinedConfigError), match=message):
        file.poll()
    clock.now += INTERVAL_S
    assert file.poll() is None


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    """It is reported once, until the file is back."""
    path = tmp_path / "live.json"
    path.mkdir()
    file, clock = watched(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        file.poll()
    for _ in range(3):
        clock.now += INTERVAL_S
        assert file.poll() is None
    path.rmdir()
    write(path, '{"size": 2}')
    clock.now += INTERVAL_S
    assert file.poll() == Options(2)


def test_a_file_that_cannot_be_reached_is_an_error_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file, clock = watched(tmp_path / "file" / "live.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        file.poll()
    for _ in range(3):
        clock.now += INTERVAL_S
        assert file.poll() is None
