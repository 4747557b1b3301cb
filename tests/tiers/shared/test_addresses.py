"""Lookups of hosts and connections to their addresses, within one deadline."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared import addresses as room
from kvoffload.tiers.shared.addresses import Addresses, SocketAddress, race
from kvoffload.tiers.shared.remote_errors import ServerError
from kvoffload.tiers.shared.server import RemoteOptions
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.valkey import login
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.cluster_map import Address
from kvoffload.tiers.valkey.login import PASSWORD, Connector
from kvoffload.tiers.valkey.resp import Connection, Login
from support.hostile_resp import FakeServer, Moment, encoded
from support.pauses import end_pauses
from support.sharing_client import some_keys


def soon() -> float:
    return time.monotonic() + 0.05


def later() -> float:
    return time.monotonic() + 60.0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer(1)
    yield server
    server.stop()


class NameServer:
    """A resolver that answers when `answers` is set, with `addresses`, and counts lookups."""

    def __init__(self, *addresses: SocketAddress) -> None:
        self.addresses = [*addresses]
        self.answers = threading.Event()
        self.num_lookups = 0

    def __call__(self, host: str, port: int) -> list[SocketAddress]:
        self.num_lookups += 1
        assert self.answers.wait(60.0)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def there(port: int) -> SocketAddress:
    return socket.AF_INET, ("127.0.0.1", port)


@pytest.fixture
def silent() -> Iterator[SocketAddress]:
    """An address that neither accepts nor refuses connections."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = there(listening.getsockname()[1])
        for _ in range(64):
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(address[1])
            except TimeoutError:
                yield address
                return
        pytest.skip("this system accepts connections for a program that does not")


# ---- names


def test_lookup_ends_at_the_deadline_of_a_connection(server: FakeServer) -> None:
    """Regression: a name server that took 8 s delayed a probe with a deadline of 50 ms by 8 s."""
    names = NameServer(there(server.port))
    addresses = Addresses(names)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no answer from the name server"):
            Connection("cache", server.port, Login(), soon(), addresses)
    assert names.num_lookups == 1, "one lookup at a time"
    names.answers.set()
    for _ in range(3):
        Connection("cache", server.port, Login(), later(), addresses).close()
    assert names.num_lookups == 1


def test_kept_addresses_are_used_while_they_are_renewed(server: FakeServer) -> None:
    names, clock = NameServer(there(server.port)), Clock()
    names.answers.set()
    addresses = Addresses(names, clock)
    addresses.connected("cache", 1, later()).close()
    names.answers.clear()
    clock.now += 31.0
    for _ in range(3):
        addresses.connected("cache", 1, later()).close()
    assert names.num_lookups == 2
    names.addresses = []
    names.answers.set()
    wait_for_lookups(addresses)
    addresses.connected("cache", 1, later()).close()  # a failed lookup keeps the known addresses


def wait_for_lookups(addresses: Addresses) -> None:
    until = later()
    while addresses._looking_up:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_moved_host_is_looked_up_at_once(server: FakeServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = there(free.getsockname()[1])
    names = NameServer(nobody)
    names.answers.set()
    addresses = Addresses(names)
    with pytest.raises(ConnectionRefusedError):
        addresses.connected("cache", 1, later())
    names.addresses = [there(server.port)]
    until = later()
    while True:
        try:
            addresses.connected("cache", 1, later()).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until


def test_unknown_name_is_an_error_each_time() -> None:
    names = NameServer()
    names.answers.set()
    addresses = Addresses(names)
    for _ in range(2):
        with pytest.raises(socket.gaierror, match="not known"):
            addresses.connected("cache", 1, later())
    assert names.num_lookups == 2
    with pytest.raises(OSError, match="not a name"):
        Addresses().connected("a..b", 1, later())


def test_literal_addresses_are_not_looked_up(server: FakeServer) -> None:
    names = NameServer()
    Addresses(names).connected("127.0.0.1", server.port, later()).close()
    assert names.num_lookups == 0


def test_lookup_without_a_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(OSError, match="can't start new thread"):
        Addresses(NameServer()).connected("cache", 1, later())


# ---- addresses


def test_all_addresses_share_one_deadline(silent: SocketAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: eight silent addresses took eight deadlines."""
    tried = []
    begin = room._begin
    monkeypatch.setattr(
        room, "_begin", lambda address, *arguments: (tried.append(address), begin(address, *arguments))
    )
    for seconds in (1.0, 4.0, 16.0):  # longer on a busy machine
        tried.clear()
        deadline = time.monotonic() + seconds
        with pytest.raises(TimeoutError):
            race(8 * [silent], deadline)
        assert time.monotonic() >= deadline
        if len(tried) == 8:
            break
    assert len(tried) == 8, "every address was tried before the deadline"


def test_other_addresses_answer_beside_a_silent_address(silent: SocketAddress, server: FakeServer) -> None:
    names = NameServer(silent, there(server.port))
    names.answers.set()
    addresses = Addresses(names)
    Connection("cache", 1, Login(), later(), addresses).close()
    assert addresses._kept["cache", 1][0][0] == there(server.port), "the address that answered is tried first"


def test_next_address_is_tried_at_once_after_a_refusal(server: FakeServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = there(free.getsockname()[1])
    connected, address = race([nobody, nobody, there(server.port)], later())
    assert address == there(server.port)
    connected.close()
    with pytest.raises(ConnectionRefusedError):
        race([nobody, nobody], later())


# ---- closing


def test_close_of_a_cluster_waits_once_for_all_threads() -> None:
    """Regression: the close took 30 s with ten nodes whose connections hung."""
    server, over, ports = FakeServer(1), threading.Event(), range(1, 11)
    server.slots = lambda: encoded(
        [[n * 1600, n * 1600 + 1599, [b"127.0.0.1", port, b"id"]] for n, port in enumerate(ports)]
    )

    def connect(address: Address, deadline: float) -> Connection:
        if address[1] in ports:
            over.wait()
            raise TimeoutError
        return Connection(*address, Login(), deadline)

    options = RemoteOptions(namespace="ns", fingerprint="model", block_bytes=4096)
    seeds = [("127.0.0.1", server.port)]
    tier = ClusterTier("valkey", "there", seeds, connect, options)
    until = later()
    while sum(node.peer.has_begun for node in tier.nodes.values()) < 10:
        assert time.monotonic() < until
        end_pauses(tier)
        tier.finished()
    begun = time.monotonic()
    tier.close()
    assert time.monotonic() - begun < 10.0
    over.set()
    server.stop()


# ---- passwords


def test_changed_password_file_is_read_for_the_next_connection(server: FakeServer, tmp_path: Path) -> None:
    """Regression: the tier was unavailable until the engine was restarted."""
    passwords: list[bytes] = []
    accepted = [b"old"]

    def attack(moment: Moment) -> Any:
        if moment.verb == b"AUTH":
            passwords.append(moment.words[1])
            return [moment.correct if moment.words[1] == accepted[0] else b"-WRONGPASS invalid\r\n"]
        return [moment.correct]

    server.attack = attack
    path = tmp_path / "password"
    path.write_text("old\n")
    url, patient = f"valkey://127.0.0.1:{server.port}/ns", {"timeout": 60.0, "probe_timeout": 60.0}
    tier = ValkeyOptions(url=url, password_file=str(path), **patient).open(TierOwner(4096, 36, "model"))
    keys, pool, rows = some_keys(1), np.ones((1, 4096), np.uint8), np.arange(1)
    assert tier.submit_write(keys, pool, rows)[1].all()
    accepted[0] = b"new"
    server.disconnect()
    path.write_text("")  # the file is being replaced
    until = later()
    while not isinstance(tier.peer.last_error, ServerError):
        step(tier, keys)
        assert time.monotonic() < until
    assert passwords[-1] == b"old"
    path.write_text("new\n")
    while b"new" not in passwords or not tier.is_open():  # a connection made before may ask with "old" last
        step(tier, keys)
        assert time.monotonic() < until
    tier.close()


def step(tier: Any, keys: Any) -> None:
    end_pauses(tier)
    tier.presence.clear()
    job, until = tier.submit_probe(keys), later()
    while not any(result.job == job for result in tier.finished()):
        assert time.monotonic() < until
        time.sleep(0.001)  # a loop that never sleeps starves the handshake's threads
        if job == NO_JOB:
            return


def test_connector_without_a_file_keeps_the_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PASSWORD, "from the environment")
    connector = ValkeyOptions(url="valkey://127.0.0.1:1/ns").connector()
    assert isinstance(connector, Connector)
    monkeypatch.setenv(PASSWORD, "other")
    with pytest.raises(ConnectionRefusedError):
        connector(("127.0.0.1", 1), later())
    assert connector.login.password == "from the environment"
    connector = Connector(Login("", "kept"), str(tmp_path / "missing"))
    with pytest.raises(ConnectionRefusedError):
        connector(("127.0.0.1", 1), later())
    assert connector.login.password == "kept"


class WatchedLock:
    """A lock that reports each attempt to acquire it."""

    def __init__(self, attempted: threading.Event) -> None:
        self._lock, self._attempted = threading.Lock(), attempted

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._attempted.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_password_and_certificates_that_change_at_once_are_both_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread that had read the old certificates put them back together with the new password."""
    password, pem, old = tmp_path / "password", tmp_path / "ca.pem", ssl.create_default_context()
    password.write_text("old")
    pem.write_text("old")
    connector = Connector(Login("", "old", old), str(password), tls_files=(str(pem), "", ""))
    other_moved = threading.Event()  # it has ended, or waits for this thread
    connector._renewing = WatchedLock(other_moved)  # type: ignore[assignment]

    def connect() -> None:
        with suppress(ConnectionRefusedError):
            connector(("127.0.0.1", 1), later())

    def connect_and_tell() -> None:
        connect()
        other_moved.set()

    other = threading.Thread(target=connect_and_tell)

    def slow_replace(login: Login, **changes: Any) -> Login:
        if "password" in changes and threading.current_thread() is not other and not other.ident:
            other.start()
            other_moved.wait()
        return replace(login, **changes)

    monkeypatch.setattr(login, "replace", slow_replace)
    monkeypatch.setattr(login, "tls_context", lambda *files: ssl.create_default_context())
    password.write_text("new")
    pem.write_text("renewed")
    connect()
    other.join()
    assert connector.login.password == "new"
    assert connector.login.tls is not old
    connect()
    assert connector.login.tls is not old
