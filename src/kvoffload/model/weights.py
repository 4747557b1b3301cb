"""Which weights a model has, in words that are the same on every machine: for caches that machines share.

Two byte-equal copies of a model have one identity wherever they are, different weights under one name two.
Knows no engine, and reads nothing but files.
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
"""Weights, configuration, and code that `trust_remote_code` runs."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_BYTES = 8 << 20
_SAY = "say which weights these are, the same on every machine: identity=NAME"


def weights_identity(model: str) -> str:
    """The identity of a model's weights: the commit of a hub, or a digest of the files' contents.

    A digest is of 128 bits of xxh3 of each file with weights, configuration or code: it tells accidents
    apart, not forgeries. It is remembered beside each file's path, size and times, in
    ``$XDG_CACHE_HOME/kvoffload/weights.json``, so that files are read once.

    Args:
        model: a directory, or a name of a hub whose files are in the local cache of Hugging Face.

    Cost: the first time reads every file, at the speed of the disk.
    Raises: `ConfigError` for a model whose weights are not here, or of which the cache has several revisions:
        which of them the engine loads is not known here.
    """
    directory = Path(model)
    if model and directory.is_dir():
        directory = directory.resolve()
        if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
            return f"commit {directory.name}"
        return f"content {_content_digest(model, directory)}"
    commits = [place.name for place in snapshots(model) if _COMMIT.fullmatch(place.name)] if model else []
    if len(commits) != 1:
        why = "has several revisions of it" if commits else "does not have it"
        raise ConfigError("model", model, f"the local cache of Hugging Face {why}; {_SAY}")
    return f"commit {commits[0]}"


def _content_digest(model: str, directory: Path) -> str:
    files = sorted({path for kind in FILES_OF_A_MODEL for path in directory.glob(kind) if path.is_file()})
    if not any(path.suffix not in (".json", ".py") for path in files):
        raise ConfigError("model", model, f"there are no weights in this directory; {_SAY}")
    remembered = _remembered()
    known: dict[str, str] = {}
    total = xxhash.xxh3_128()
    for path in files:
        found = path.stat()
        # With the time of the last change of the inode: a copy may keep that of the contents.
        name = f"{path}|{found.st_size}|{found.st_mtime_ns}|{found.st_ctime_ns}"
        known[name] = remembered.get(name) or _digest_of(path)
        total.update(f"{path.name}\0{found.st_size}\0{known[name]}\n".encode())
    if known.items() - remembered.items():
        _remember(remembered | known)
    return total.hexdigest()


def _digest_of(path: Path) -> str:
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
    """Where it cannot be written files are read again next time."""
    with contextlib.suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: several engines start at once.
        with tempfile.NamedTemporaryFile(dir=_memory().parent, delete=False) as file:
            file.write(msgspec.json.encode(digests))
        os.replace(file.name, _memory())
