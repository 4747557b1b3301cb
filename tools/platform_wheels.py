"""Makes a platform wheel from the pure wheel: the same files, and compiled kernels for one Python.

Owns name and layout of a wheel with kernels. Knows nothing about kernels: tools/record_kernels.py compiles
and packs them, in an environment with the pure wheel.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

PLATFORM = "manylinux_2_17_x86_64"
"""The kernels need no C library; numba's wheels need a newer one than this tag."""
FOLDER = "kvoffload/structures/compiled"


def platform_wheel(pure: Path, kernels: Sequence[Path], version: str) -> Path:
    """Write the wheel for one Python beside the pure wheel; equal inputs give equal bytes.

    Args:
        pure: the wheel for every Python, ``kvoffload-0.1.0-py3-none-any.whl``.
        kernels: files of kernels to add.
        version: the Python, such as ``3.11``.
    """
    python = f"cp{version.replace('.', '')}"
    tag = f"{python}-{python}-{PLATFORM}"
    path = pure.with_name(pure.name.replace("py3-none-any", tag))
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        *entries, record = source.infolist()
        if not record.filename.endswith(".dist-info/RECORD"):
            raise ValueError(f"{pure.name}: the last file is {record.filename}, not RECORD")
        rows = []
        for entry in entries:
            data = source.read(entry)
            if entry.filename.endswith(".dist-info/WHEEL"):
                data = re.sub(rb"(?m)^Tag: .*$", f"Tag: {tag}".encode(), data)
                data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            rows.append(_add(target, entry, data))
        added = ((_beside(record, f"{FOLDER}/{file.name}"), file.read_bytes()) for file in sorted(kernels))
        rows += [_add(target, entry, data) for entry, data in added]
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
        target.writestr(record, lines.getvalue().encode(), zipfile.ZIP_DEFLATED)
    return path


def _add(target: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> tuple[str, str, str]:
    """Add a file; return its row of RECORD: name, digest, length."""
    target.writestr(entry, data, zipfile.ZIP_DEFLATED)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return entry.filename, f"sha256={digest}", str(len(data))


def _beside(other: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    """Make an entry with the time and mode of `other`."""
    entry = zipfile.ZipInfo(name, other.date_time)
    entry.external_attr = other.external_attr
    return entry
