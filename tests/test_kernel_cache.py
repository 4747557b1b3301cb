"""Compiled kernels are found again: also where the package cannot be written, as in many containers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload
from kvoffload.core.manager import OffloadingManager

PACKAGE = Path(kvoffload.__file__).parent
REPLAY = """
import sys

sys.argv = ["kvoffload", "replay", "agent", "--no-data", "--quiet", "--format", "json"]
from kvoffload.cli.main import main

main()
"""
ONE_KERNEL = """
import logging

logging.basicConfig(level=logging.INFO)
from kvoffload.structures.index import Index
from kvoffload.structures.jit import compile_all

assert compile_all()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, with its kernels."""
    OffloadingManager(1)
    return Path(shutil.copytree(PACKAGE, tmp_path / "read-only" / "kvoffload"))


def without_kernels(package: Path) -> None:
    for kernel in package.rglob("*.nb[ic]"):
        kernel.unlink()


def run_read_only(package: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the package is on a read-only file system."""
    place = package.parent
    command = (
        f"mount --bind '{place}' '{place}' && mount -o remount,ro,bind '{place}' && "
        f'! touch "{place}/x" 2>/dev/null && exec "{sys.executable}" -B -c "$CODE"'
    )
    path = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPATH": str(place), "CODE": code}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env=path | environment,
        capture_output=True,
        text=True,
        cwd=place.parent,
        timeout=300,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    return done


@pytest.mark.parametrize("home", ["nowhere", "home"])
def test_kernels_of_a_read_only_package_are_used(tmp_path: Path, package: Path, home: str) -> None:
    environment = {"HOME": str(tmp_path / "home") if home == "home" else "/proc/none"}
    done = run_read_only(package, REPLAY, **environment)
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    assert '"block_refs"' in done.stdout
    kept = list((tmp_path / "home").rglob("*.nbc"))
    assert bool(kept) == (home == "home")


def test_without_any_home_they_are_compiled_and_it_is_said(tmp_path: Path, package: Path) -> None:
    without_kernels(package)
    done = run_read_only(package, ONE_KERNEL, HOME="/proc/none", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "kvoffload: compiling kernels, once for this installation" in done.stderr
    assert list(tmp_path.glob("kvoffload-kernels-*")) == [], "a directory of a process ends with it"


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path, package: Path) -> None:
    without_kernels(package)
    home = str(tmp_path / "home")
    first, second = (run_read_only(package, ONE_KERNEL, HOME=home) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "compiling" in first.stderr
    assert "compiling" not in second.stderr


def test_kernels_of_other_sources_are_not_used(tmp_path: Path, package: Path) -> None:
    kept = str(tmp_path / "given")
    run_read_only(package, ONE_KERNEL, NUMBA_CACHE_DIR=kept)
    (package / "structures" / "lists.py").touch()
    run_read_only(package, ONE_KERNEL, NUMBA_CACHE_DIR=kept)
    assert len(list(Path(kept).glob("kvoffload-*"))) == 2
