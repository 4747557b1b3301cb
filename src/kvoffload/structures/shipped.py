"""Compiled kernels in the wheel, so that the first start compiles nothing.

A wheel has one file with all kernels, compiled for one version of Python, one version of numba, and all
processors from a baseline on. The file is used only if Python, numba, llvmlite, numba's settings and this
package's sources are the same as when the wheel was built. Otherwise, and in a checkout, kernels are compiled
and cached (`kernel_cache`).

Machine code runs unchecked, so the file is read only from the package itself. This adds no risk, because a
user who can write this file could also change the package's Python files.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from llvmlite import binding
from numba.core import caching, compiler, serialize

from kvoffload.structures.kernel_cache import COMPILING

BASELINE = "x86-64-v3"
"""Processor level that the shipped kernels need: any x86-64 server with AVX2 (psABI, section 3.1.1)."""
_FEATURES = (
    *("sse3", "ssse3", "sse4.1", "sse4.2", "cx16", "popcnt", "sahf"),
    *("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
)
"""LLVM's names of the features that the baseline has, but not every x86-64 processor."""
_SETTINGS = ("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "LOOP_VECTORIZE", "OPT", "SLP_VECTORIZE")
"""Names of the settings of numba (`numba.config`) that change machine code."""
_PACKAGE = Path(__file__).resolve().parent.parent
FOLDER = _PACKAGE / "structures" / "compiled"
_SUFFIX = ".kernels"
_config: Any = numba.config


class _Entry(NamedTuple):
    """Location of a kernel in the file (offset and length in bytes), and the kernel's SHA-256."""

    start: int
    length: int
    sha256: str


class Shipped:
    """The kernels in a wheel's file. If the file cannot be used, there are no kernels.

    Attributes:
        path: path of the file.
        why_not: the reason why the file cannot be used, as a clause for a message. Empty if it can be used,
            and also in a checkout, where no file is expected.
    """

    def __init__(self, path: Path, entries: Mapping[str, _Entry], why_not: str = "") -> None:
        self.path, self.why_not, self._entries = path, why_not, entries

    @property
    def is_usable(self) -> bool:
        return bool(self._entries)

    def load(self, function: Callable[..., Any], signature: Any, target_context: Any) -> Any:
        """Load a kernel from the file; returns numba's compilation result.

        If the file does not contain the kernel, returns None. If the file is damaged, logs a warning and
        returns None, for all kernels from now on. Cost: 5 ms.
        """
        entry = self._entries.get(name_of(function, signature)) if self._entries else None
        if entry is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                data = file.read(entry.length)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise ValueError("a checksum differs")
            rebuild: Any = compiler.CompileResult._rebuild
            return rebuild(target_context, *pickle.loads(data))
        except Exception as problem:
            # Damage must not end an engine. The file's other kernels are not used either.
            COMPILING.warning(
                "kvoffload: compiling kernels, because %s; install kvoffload again",
                _damaged(self.path, problem),
            )
            self._entries = {}
            return None


class KernelCache(caching.NullCache):
    """numba's cache for one kernel: looks first in the wheel's kernels, then in numba's on-disk cache.

    Args:
        function: the kernel.
        shipped: the wheel's kernels.
        has_files: False if there is no on-disk cache (`kernel_cache.prepare`).
    """

    recorded: dict[str, bytes] | None = None
    """While a release is built, a dict that collects the compiled kernels by name; otherwise None."""

    def __init__(self, function: Callable[..., Any], shipped: Shipped, has_files: bool) -> None:
        self._function, self._shipped, self._has_files = function, shipped, has_files
        self._files: Any = None

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        found = self._shipped.load(self._function, signature, target_context)
        return found if found is not None else self._behind().load_overload(signature, target_context)

    def save_overload(self, signature: Any, result: Any) -> None:
        if self.recorded is not None:
            self.recorded[name_of(self._function, signature)] = _reduced(result)
        self._behind().save_overload(signature, result)

    def _behind(self) -> Any:
        if self._files is None:
            make: Any = caching.FunctionCache if self._has_files else lambda function: caching.NullCache()
            self._files = make(self._function)
        return self._files


def find(sources: str) -> Shipped:
    """Find the wheel's kernels that this process can use. Raises nothing.

    `sources` is the digest of the package's sources (`kernel_cache.digest_of_sources`).
    """
    path = FOLDER / _file_name()
    if not FOLDER.is_dir():
        return Shipped(path, {})
    if not path.is_file():
        held = ", ".join(sorted(each.name.removesuffix(_SUFFIX) for each in FOLDER.glob(f"*{_SUFFIX}")))
        return Shipped(
            path, {}, f"this package has kernels for {held}, not {path.name.removesuffix(_SUFFIX)}"
        )
    if not host_suffices():
        return Shipped(
            path,
            {},
            f"this package has kernels for {BASELINE}, which this processor or NUMBA_CPU_NAME is not",
        )
    try:
        identity, entries = _header(path)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return Shipped(path, {}, _damaged(path, problem))
    own = _identity(sources)
    other = [field for field in own if identity.get(field) != own[field]]
    if other:
        return Shipped(path, {}, f"the kernels of this package are for other {' and '.join(other)}")
    return Shipped(path, entries)


def write(folder: Path, sources: str, kernels: Mapping[str, bytes]) -> Path:
    """Write a file with the kernels that this process has compiled for the baseline; returns its path.

    The file begins with two lines of text. Line 2 is JSON with the file's identity and an `_Entry` for each
    kernel. Line 1 is the SHA-256 of line 2, in hexadecimal digits. The kernels follow; the offsets of entries
    count from the end of line 2.
    """
    if _config.CPU_NAME != BASELINE or _config.CPU_FEATURES:
        raise ValueError(f"kernels for a wheel need NUMBA_CPU_NAME={BASELINE} and NUMBA_CPU_FEATURES=''")
    entries, start = {}, 0
    for name, data in sorted(kernels.items()):
        entries[name] = _Entry(start, len(data), hashlib.sha256(data).hexdigest())
        start += len(data)
    header = json.dumps({"identity": _identity(sources), "kernels": entries}).encode()
    body = b"".join(kernels[name] for name in entries)
    path = folder / _file_name()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join((hashlib.sha256(header).hexdigest().encode(), header, body)))
    return path


def _file_name() -> str:
    return f"{sysconfig.get_config_var('SOABI')}.numba-{numba.__version__}{_SUFFIX}"


def name_of(function: Callable[..., Any], signature: Any) -> str:
    """Return a name for a kernel, made of its file, line, name and types.

    For functions of other packages, returns "".
    """
    try:
        place = Path(function.__code__.co_filename).resolve().relative_to(_PACKAGE)
    except ValueError:
        return ""
    return f"{place.as_posix()}:{function.__code__.co_firstlineno}:{function.__qualname__}:{signature}"


def _reduced(result: Any) -> bytes:
    """Serialize a compiled kernel as numba does, but without the annotated source, which contains paths."""
    library, fndesc, environment, signature, objectmode, lifted, _, *rest = result._reduce()
    dumps: Any = serialize.dumps
    data: bytes = dumps((library, fndesc, environment, signature, objectmode, lifted, "", *rest))
    return data


def _identity(sources: str) -> dict[str, Any]:
    """Return a dict of everything that the compiled kernels depend on."""
    return {
        "Python": sysconfig.get_config_var("SOABI"),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "processor": BASELINE,
        "settings of numba": [str(getattr(_config, name, None)) for name in _SETTINGS],
        "sources": sources,
    }


def host_suffices() -> bool:
    """Return True if this processor has all features of the baseline.

    If numba is set to compile for another processor, the result is False.
    """
    if _config.CPU_NAME not in (None, BASELINE) or _config.CPU_FEATURES:
        return False
    try:
        found: Mapping[str, bool] = binding.get_host_cpu_features()
    except RuntimeError:
        return False
    return all(found.get(feature, False) for feature in _FEATURES)


def _header(path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    with path.open("rb") as file:
        digest, header = file.readline().rstrip(b"\n"), file.readline().rstrip(b"\n")
        start = file.tell()
    if hashlib.sha256(header).hexdigest().encode() != digest:
        raise ValueError("the checksum of its header differs")
    held = json.loads(header)
    places = {name: _Entry(*place) for name, place in held["kernels"].items()}
    return held["identity"], {
        name: place._replace(start=place.start + start) for name, place in places.items()
    }


def _damaged(path: Path, problem: Exception) -> str:
    return f"{path} is damaged ({problem})"
