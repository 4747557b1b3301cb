"""The cache of compiled kernels, also for a read-only package, as in many containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload
from kvoffload.structures.kernel_cache import trusted_directory

PACKAGE = Path(kvoffload.__file__).parent
ONE_KERNEL = """
import logging

logging.basicConfig(level=logging.INFO)
from kvoffload.structures.index import Index
from kvoffload.structures.jit import compile_all

assert compile_all()
"""


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with kernels of `structures.index` in its `__pycache__` directories."""
    root = tmp_path_factory.mktemp("compiled")
    ignored = shutil.ignore_patterns("*.nb[ic]", "kernels.stamp", "compiled")
    package = Path(shutil.copytree(PACKAGE, root / "kvoffload", ignore=ignored))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(root), "HOME": str(root)}
    subprocess.run([sys.executable, "-c", ONE_KERNEL], env=environment, check=True, capture_output=True)
    assert list(package.rglob("*.nbi"))
    return package


@pytest.fixture
def package(tmp_path: Path, with_kernels: Path) -> Path:
    return Path(shutil.copytree(with_kernels, tmp_path / "read-only" / "kvoffload"))


def without_kernels(package: Path) -> None:
    for kernel in package.rglob("*.nb[ic]"):
        kernel.unlink()


def run_read_only(package: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package on a read-only file system."""
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


@pytest.mark.parametrize("home", [pytest.param("nowhere", marks=pytest.mark.slow), "home"])
@pytest.mark.slow
def test_kernels_of_a_read_only_package_are_used(tmp_path: Path, package: Path, home: str) -> None:
    environment = {"HOME": str(tmp_path / "home") if home == "home" else "/proc/none"}
    done = run_read_only(package, ONE_KERNEL, **environment)
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    kept = list((tmp_path / "home").rglob("*.nbc"))
    assert bool(kept) == (home == "home")


@pytest.mark.slow
def test_without_a_cache_directory_kernels_are_compiled_with_a_warning(tmp_path: Path, package: Path) -> None:
    without_kernels(package)
    done = run_read_only(package, ONE_KERNEL, HOME="/proc/none", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "kvoffload: compiling kernels, once for this installation" in done.stderr
    assert list(tmp_path.glob("kvoffload-kernels-*")) == [], "a directory of a process ends with it"


@pytest.mark.slow
def test_cached_kernels_are_not_compiled_again(tmp_path: Path, package: Path) -> None:
    without_kernels(package)
    home = str(tmp_path / "home")
    first, second = (run_read_only(package, ONE_KERNEL, HOME=home) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "compiling" in first.stderr
    assert "compiling" not in second.stderr


@pytest.mark.slow
def test_kernels_of_other_sources_are_not_used(tmp_path: Path, package: Path) -> None:
    kept = str(tmp_path / "given")
    run_read_only(package, ONE_KERNEL, NUMBA_CACHE_DIR=kept)
    with (package / "structures" / "lists.py").open("a") as source:
        source.write("# another version\n")
    run_read_only(package, ONE_KERNEL, NUMBA_CACHE_DIR=kept)
    assert len(list(Path(kept).glob("kvoffload-*"))) == 2


@pytest.mark.slow
def test_old_kernels_of_the_package_are_not_taken_for_new_sources(tmp_path: Path, package: Path) -> None:
    with (package / "structures" / "lists.py").open("a") as source:
        source.write("# another version\n")
    done = run_read_only(package, ONE_KERNEL, HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert "compiling" in done.stderr


DIGEST = "0123456789abcdef"


def test_a_directory_that_other_users_can_write_is_not_trusted(tmp_path: Path) -> None:
    directory = tmp_path / f"kvoffload-{DIGEST}"
    assert trusted_directory(tmp_path, DIGEST) == directory
    directory.chmod(0o777)
    assert trusted_directory(tmp_path, DIGEST) is None


def test_a_directory_that_another_user_has_made_unreadable_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / f"kvoffload-{DIGEST}").mkdir(mode=0o700)
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert trusted_directory(tmp_path, DIGEST) is None


def test_a_directory_with_a_subdirectory_that_a_group_can_write_is_not_trusted(tmp_path: Path) -> None:
    subdirectory = tmp_path / f"kvoffload-{DIGEST}" / "structures_0"
    subdirectory.mkdir(parents=True)
    subdirectory.chmod(0o770)
    assert trusted_directory(tmp_path, DIGEST) is None


def test_a_directory_that_other_users_can_replace_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert trusted_directory(tmp_path, DIGEST) is None
    tmp_path.chmod(0o1777)  # like /tmp
    assert trusted_directory(tmp_path, DIGEST) == tmp_path / f"kvoffload-{DIGEST}"


@pytest.mark.slow
def test_a_truncated_kernel_file_is_compiled_again(tmp_path: Path, package: Path) -> None:
    kept = tmp_path / "given"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(kept), "PYTHONPATH": str(package.parent)}
    run = [sys.executable, "-c", ONE_KERNEL]
    subprocess.run(run, env=environment, check=True, capture_output=True)
    indexes = list(kept.rglob("index.*.nbi"))
    assert indexes
    for index in indexes:
        index.write_bytes(index.read_bytes()[:10])
    subprocess.run(run, env=environment, check=True, capture_output=True)
    assert all(index.stat().st_size > 10 for index in indexes)
