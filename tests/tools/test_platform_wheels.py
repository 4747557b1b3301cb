"""A wheel with kernels has the files of the pure wheel, its own tag, and a correct RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
INFO = "kvoffload-0.1.0.dist-info"
WHEEL = "Wheel-Version: 1.0\nGenerator: hatchling\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    where = importlib.util.spec_from_file_location("platform_wheels", ROOT / "tools" / "platform_wheels.py")
    assert where is not None
    assert where.loader is not None
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@pytest.fixture
def pure(tmp_path: Path) -> Path:
    path = tmp_path / "kvoffload-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kvoffload/__init__.py", "'the package'\n")
        archive.writestr(f"{INFO}/WHEEL", WHEEL)
        archive.writestr(f"{INFO}/RECORD", "")
    return path


@pytest.fixture
def kernels(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "b.numba-2.kernels", tmp_path / "a.numba-1.kernels"]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    return paths


def test_the_wheel_is_for_one_python_on_one_platform(
    tool: ModuleType, pure: Path, kernels: list[Path]
) -> None:
    made = tool.platform_wheel(pure, kernels, "3.11")
    assert made == pure.parent / "kvoffload-0.1.0-cp311-cp311-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(made) as archive:
        assert archive.read(f"{INFO}/WHEEL").decode().splitlines()[2:] == [
            "Root-Is-Purelib: false",
            "Tag: cp311-cp311-manylinux_2_17_x86_64",
        ]


def test_the_record_names_every_file_with_its_digest(
    tool: ModuleType, pure: Path, kernels: list[Path]
) -> None:
    with zipfile.ZipFile(tool.platform_wheel(pure, kernels, "3.12")) as archive:
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
        names = archive.namelist()
        assert [row[0] for row in rows] == names
        assert names[-1] == f"{INFO}/RECORD"
        assert {f"{tool.FOLDER}/{path.name}" for path in kernels} < set(names)
        for name, digest, length in rows[:-1]:
            data = archive.read(name)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(length)) == (f"sha256={sha256}", len(data))


def test_equal_inputs_give_equal_bytes(tool: ModuleType, pure: Path, kernels: list[Path]) -> None:
    first = tool.platform_wheel(pure, kernels, "3.11").read_bytes()
    assert tool.platform_wheel(pure, kernels[::-1], "3.11").read_bytes() == first
