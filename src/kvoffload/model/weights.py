"""Identity of a model's weights, the same on every machine, for caches that machines share.

Byte-equal copies of a model have the same identity; different weights under one name have two. Reads only
files.
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
_HINT = "name the weights, with the same name on every machine: identity=NAME"


def weights_identity(model: str) -> str:
    """Return the identity of a model's weights: the commit of a hub, or a digest of the files.

    The digest is xxh3 of 128 bits over all files with weights, configuration or code. It detects accidents,
    not forgeries. ``$XDG_CACHE_HOME/kvoffload/weights.json`` caches it by path, size and times of each file.

    Args:
        model: a directory, or the name of a model in the local cache of Hugging Face.

    Cost: the first call reads every file.
    Raises: `ConfigError` if the weights are absent, or if the cache has several revisions: the choice of the
        engine is unknown here.
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
        raise ConfigError("model", model, f"the local cache of Hugging Face {why}; {_HINT}")
    return f"commit {commits[0]}"


def _content_digest(model: str, directory: Path) -> str:
    files = sorted({path for kind in FILES_OF_A_MODEL for path in directory.glob(kind) if path.is_file()})
    if not any(path.suffix not in (".json", ".py") for path in files):
        raise ConfigError("model", model, f"there are no weights in this directory; {_HINT}")
    remembered = _remembered()
    known: dict[str, str] = {}
    total = xxhash.xxh3_128()
    for path in files:
        status = path.stat()
        # Includes the inode change time: a copy may preserve the modification time.
        name = f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}"
        known[name] = remembered.get(name) or _digest_of(path)
        total.update(f"{path.name}\0{status.st_size}\0{known[name]}\n".encode())
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
    """Write the cache; a failure only means that files are read again."""
    with contextlib.suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        # Atomic, because several engines may start at once.
        with tempfile.NamedTemporaryFile(dir=_memory().parent, delete=False) as file:
            file.write(msgspec.json.encode(digests))
        os.replace(file.name, _memory())
