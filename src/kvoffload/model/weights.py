"""Identity of a model's weights for shared caches: equal weights have the same identity on every machine.

Byte-equal copies of a model have the same identity, even under different names. Different weights have
different identities, even under the same name. Reads local files only.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import msgspec
import xxhash

from kvoffload.errors import ConfigError
from kvoffload.model.kv_bytes import snapshots

FILES_OF_A_MODEL = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.json", "*.py")
"""Patterns of files with weights, configuration, and code for `trust_remote_code`."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_BYTES = 8 << 20
_HINT = "give the weights a name, the same on every machine: identity=NAME"


def files_of(model: str) -> list[tuple[str, int, int]]:
    """Return (name, size, modification time) of each file of a local model; empty for a model of the hub."""
    path = Path(model)
    if not model or not path.exists():
        return []
    files = _files_in(path) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _files_in(directory: Path) -> list[Path]:
    return sorted({path for kind in FILES_OF_A_MODEL for path in directory.glob(kind) if path.is_file()})


def weights_identity(model: str, download_dir: str = "") -> str:
    """Return the identity of a model's weights: the Hugging Face commit, or a digest of the files.

    The digest is 128-bit xxh3 over all files with weights, configuration or code. It detects accidental
    changes, not forgeries. ``$XDG_CACHE_HOME/kvoffload/weights.json`` caches the digest of each file by path,
    size and times.

    Args:
        model: a directory, or the name of a model in the local Hugging Face cache.
        download_dir: a second cache, in which the engine stores weights; empty for none.

    Cost: the first call reads every file.
    Raises: `ConfigError` if the weights are absent, or if the cache has several revisions: the engine could
    use any of them.
    """
    directory = Path(model)
    if model and directory.is_dir():
        directory = directory.resolve()
        if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
            return f"commit {directory.name}"
        return f"content {_content_digest(model, directory)}"
    names = {place.name for place in snapshots(model, download_dir)} if model else set[str]()
    commits = [name for name in names if _COMMIT.fullmatch(name)]
    if len(commits) != 1:
        why = "has several revisions of it" if commits else "does not have it"
        raise ConfigError("model", model, f"the local cache of Hugging Face {why}; {_HINT}")
    return f"commit {commits[0]}"


def _content_digest(model: str, directory: Path) -> str:
    files = _files_in(directory)
    if not any(path.suffix not in (".json", ".py") for path in files):
        raise ConfigError("model", model, f"there are no weights in this directory; {_HINT}")
    remembered = _remembered()
    known: dict[str, str] = {}
    total = xxhash.xxh3_128()
    for path in files:
        status = path.stat()
        # Includes the inode's change time (ctime), because a copy may preserve the modification time.
        name = f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"
        known[name] = remembered.get(name) or digest_of(path)
        total.update(os.fsencode(path.name) + f"\0{status.st_size}\0{known[name]}\n".encode())
    if known.items() - remembered.items():
        _remember(remembered | known)
    return total.hexdigest()


def digest_of(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kvoffload/weights.json"


def _remembered() -> dict[str, str]:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(_memory().read_bytes(), type=dict[str, str])
    return {}


def _remember(digests: dict[str, str]) -> None:
    """Write the cache of digests. Ignores failures, because the next call can read the files again."""
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a path may have bytes that are not UTF-8
        content = msgspec.json.encode(digests)
        _memory().parent.mkdir(parents=True, exist_ok=True)
        # Written to another file and renamed, because several engines may start at once.
        with tempfile.TemporaryDirectory(dir=_memory().parent) as folder:
            file = Path(folder, "digests")
            file.touch(mode=0o600)
            file.write_bytes(content)
            os.replace(file, _memory())
