"""Compiled kernels in a wheel are used if they match exactly; otherwise they are never loaded."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvoffload
from kvoffload.structures import index, shipped

RECORD = """
import sys
from pathlib import Path

from kvoffload.structures import index, kernel_cache, shipped
from kvoffload.structures.jit import compile_all

shipped.KernelCache.recorded = {}
compile_all()
folder = Path(sys.argv[1])
print(shipped.write(folder, kernel_cache.digest_of_sources(), shipped.KernelCache.recorded))
"""
START = """
import logging

logging.basicConfig(level=logging.INFO)
from numba.core import event

passes = event.RecordingListener()
event.register("numba:run_pass", passes)
from kvoffload.structures.index import Index
from kvoffload.structures.jit import compile_all

compile_all()
held = Index(8, 4)
held.put(b"0000", 5)
assert (held.position_of(b"0000"), held.position_of(b"1111")) == (5, -1)
print("passes", len(passes.buffer))
"""
"""Prints the number of passes of numba's compiler."""
WITHOUT_AVX2 = """
from llvmlite import binding

real = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: type(real())({**real(), "avx2": False})
"""
OTHER_LLVMLITE = "import llvmlite\nllvmlite.__version__ = '0.1'\n"
OTHER_PYTHON = """
import sysconfig

real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: "cpython-399-x86_64" if name == "SOABI" else real(name)
"""
OTHER_NUMBA = "import numba\nnumba.__version__ = '0.1'\n"
PURE = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}

needs_baseline = pytest.mark.skipif(not shipped.host_suffices(), reason="kernels are for x86-64-v3")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with shipped kernels of `structures.index` only."""
    root = tmp_path_factory.mktemp("released")
    ignored = shutil.ignore_patterns("*.nb[ic]", "kernels.stamp", "compiled")
    package = Path(shutil.copytree(Path(kvoffload.__file__).parent, root / "kvoffload", ignore=ignored))
    environment = PURE | {"NUMBA_CPU_NAME": shipped.BASELINE, "NUMBA_CPU_FEATURES": ""}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": str(root)}
    folder = str(package / "structures" / "compiled")
    subprocess.run([sys.executable, "-c", RECORD, folder], env=environment, check=True, capture_output=True)
    return package


@pytest.fixture
def package(tmp_path: Path, released: Path) -> Path:
    return Path(shutil.copytree(released, tmp_path / "site" / "kvoffload"))


def start(package: Path, before: str = "", **environment: str) -> tuple[int, str]:
    """Use an index in a new process; return the number of compiler passes, and the log."""
    run = [sys.executable, "-c", before + START]
    inside = PURE | {"PYTHONPATH": str(package.parent), "HOME": str(package.parent / "home")} | environment
    done = subprocess.run(run, env=inside, capture_output=True, text=True, cwd=package.parent)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("passes ")[1]), done.stderr


def kernels_of(package: Path) -> Path:
    (path,) = (package / "structures" / "compiled").iterdir()
    return path


@needs_baseline
@pytest.mark.slow
def test_shipped_kernels_are_used_wherever_the_package_lies(package: Path) -> None:
    for source in package.rglob("*.py"):
        os.utime(source, (1e9, 1e9))  # an installer sets other times
    assert start(package) == (0, "")
    assert not list(package.parent.rglob("*.nb[ic]"))


@needs_baseline
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "environment", "reason"),
    [
        (OTHER_PYTHON, {}, "not cpython-399-x86_64"),
        (OTHER_NUMBA, {}, "numba-0.1"),
        (OTHER_LLVMLITE, {}, "for other llvmlite"),
        (WITHOUT_AVX2, {}, "which this processor"),
        ("", {"NUMBA_CPU_NAME": "x86-64"}, "which this processor or NUMBA_CPU_NAME is not"),
        ("", {"NUMBA_BOUNDSCHECK": "1"}, "for other settings of numba"),
    ],
    ids=["python", "numba", "llvmlite", "processor", "cpu-name", "bounds-checks"],
)
def test_kernels_for_another_environment_are_compiled(
    package: Path, before: str, environment: dict[str, str], reason: str
) -> None:
    passes, log = start(package, before, **environment)
    assert passes
    assert "compiling kernels, once for this installation" in log
    assert reason in log
    assert list(package.parent.rglob("*.nbi")), "the next start compiles nothing"
    assert start(package, before, **environment)[0] == 0


@needs_baseline
@pytest.mark.slow
def test_kernels_of_other_sources_are_compiled(package: Path) -> None:
    with (package / "structures" / "lists.py").open("a") as source:
        source.write("# another version\n")
    passes, log = start(package)
    assert passes
    assert "for other sources" in log


def flip_a_kernel(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def flip_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"numba"', b'"nunba"'))


@needs_baseline
@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        flip_a_kernel,
        flip_the_header,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path: path.write_bytes(os.urandom(10_000)),
    ],
    ids=["kernel", "header", "empty", "truncated", "noise"],
)
def test_damaged_kernels_are_compiled(package: Path, damage: Callable[[Path], object]) -> None:
    damage(kernels_of(package))
    passes, log = start(package)
    assert passes
    assert f"{kernels_of(package)} is damaged" in log


@needs_baseline
@pytest.mark.slow
def test_a_renamed_file_of_another_numba_is_not_loaded(package: Path) -> None:
    path = kernels_of(package)
    path.rename(path.with_name(path.name.partition(".numba-")[0] + ".numba-0.1.kernels"))
    passes, log = start(package, OTHER_NUMBA)
    assert passes
    assert "for other numba" in log


@needs_baseline
@pytest.mark.slow
def test_the_baseline_by_name_uses_shipped_kernels(package: Path) -> None:
    assert start(package, NUMBA_CPU_NAME=shipped.BASELINE, NUMBA_CPU_FEATURES="")[0] == 0


def test_a_checkout_has_no_shipped_kernels_and_gives_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "compiled")  # CI compiles kernels for its checkout
    kernels = shipped.find("digest of the sources")
    assert (kernels.is_usable, kernels.why_not) == (False, "")


def test_kernels_of_other_packages_are_not_looked_up() -> None:
    assert shipped.name_of(function_of_another_package, "()") == ""
    assert shipped.name_of(index.Index.put, "()").startswith("structures/index.py:")


def function_of_another_package() -> None:
    """A function outside the package."""


def test_data_that_numba_cannot_read_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, data = tmp_path / "some.kernels", pickle.dumps(("something", "else"))
    path.write_bytes(data)
    function, digest = index.Index.put, hashlib.sha256(data).hexdigest()
    entry = shipped._Entry(0, len(data), digest)
    held = shipped.Shipped(path, {shipped.name_of(function, "()"): entry})
    assert held.is_usable
    assert held.load(function, "()", None) is None
    assert "is damaged" in caplog.text
    assert not held.is_usable


def test_only_code_for_the_baseline_is_packed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NUMBA_CPU_NAME=x86-64-v3"):
        shipped.write(tmp_path, "digest", {})
