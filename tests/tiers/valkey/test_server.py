"""A real Valkey or Redis server: the contract of shared tiers, and faults of a single server."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError, MisuseError, UnavailableError
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.identity import HEADER_BYTES, rest_names
from kvoffload.tiers.shared.write_log import WriteLog
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME
from kvoffload.tiers.valkey.resp import Login
from support.fault_proxy import FaultProxy
from support.pauses import end_pauses
from support.refusals import refusal
from support.shared_tier_contract import BLOCKS, GROUP, Damage, Rig
from support.sharing_client import closed_at_the_end, some_keys
from support.valkey_client import BLOCK_BYTES, Client
from support.valkey_contract import DAMAGES, HEAD_BYTES, READ_REPLY_BYTES, ValkeyContract
from support.valkey_server import PATIENCE_S, Server, redis, running, self_signed, valkey


@pytest.fixture(
    scope="module",
    params=[pytest.param(valkey, id="valkey"), pytest.param(redis, id="redis", marks=pytest.mark.slow)],
)
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), program=request.param()) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.execute("FLUSHALL")
    return shared_server


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def client(make: Callable[..., Client], server: Server) -> Client:
    return make(server)


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(Client)


class TestServer(ValkeyContract):
    rights = "+get +set +exists +del"
    flipped_at = (
        *range(0, 110, 3),
        *range(110, READ_REPLY_BYTES, 4999),
        *range(READ_REPLY_BYTES - 8, READ_REPLY_BYTES),
    )
    cut_at = (0, 1, 21, 22, 23, 30, 94, 95, *range(100, READ_REPLY_BYTES, 9973), READ_REPLY_BYTES - 1)

    @pytest.fixture
    def rig(self, server: Server, proxy: FaultProxy, make: Callable[..., Client]) -> Rig:
        return Rig(server, proxy, partial(make, server), partial(make, proxy))

    @pytest.fixture(params=DAMAGES, ids=lambda damage: damage.name)
    def damage(self, request: pytest.FixtureRequest) -> Damage:
        damage: Damage = request.param
        return damage

    def servers(self, rig: Rig) -> list[Server]:
        return [rig.server]

    @contextmanager
    def over_tls(self, rig: Rig, files: tuple[str, str], **tls: Any) -> Iterator[str]:
        with FaultProxy(rig.server.port, tls=files, **tls) as proxy:
            yield f"valkeys://127.0.0.1:{proxy.port}"

    def check_cut(self, cut_at: int, served: list[int]) -> None:
        """A block that had arrived is served."""
        assert served == GROUP[: len(served)] != GROUP
        assert len(served) >= (cut_at - 23) // (HEADER_BYTES + BLOCK_BYTES + 20)

    def test_tls_connection_closed_while_idle_causes_no_failure(
        self, server: Server, make: Callable[..., Client], tmp_path: Path
    ) -> None:
        """The request has several records, so that it is the client's `send` that fails."""
        pem, key = self_signed(tmp_path)
        with FaultProxy(server.port, tls=(pem, key)) as proxy:
            client = make(f"valkeys://127.0.0.1:{proxy.port}", ca=pem)
            client.write(*GROUP)
            for _ in range(5):
                proxy.drop_connections()
                time.sleep(0.1)  # for the client to notice it
                client.forget()
                assert client.probe(*range(1, 401)) == GROUP

    def test_renewed_certificates_are_read_while_an_engine_runs(
        self, server: Server, make: Callable[..., Client], tmp_path: Path
    ) -> None:
        """The server's certificate is its CA, and the client's certificate."""
        (pem, key), (new_pem, new_key) = self_signed(tmp_path), self_signed(tmp_path, "new")
        own, own_key = (tmp_path / name for name in ("own.pem", "own.key"))
        shutil.copy(pem, own)
        shutil.copy(key, own_key)
        with FaultProxy(server.port, tls=(pem, key), client_ca=new_pem) as proxy:
            url = f"valkeys://127.0.0.1:{proxy.port}"
            with pytest.raises(ConfigError, match="unknown ca"):
                make(url, ca=str(own), cert=str(own), cert_key=str(own_key))
            proxy.allow_client_ca(pem)
            client = make(url, ca=str(own), cert=str(own), cert_key=str(own_key))
            client.write(*GROUP)
            proxy.use_certificate(new_pem, new_key)
            own.write_text("in the middle of a change")
            proxy.drop_connections()
            client.read(*GROUP)
            shutil.copy(new_pem, own)
            shutil.copy(new_key, own_key)
            client.reconnect()
            client.assume_present(*GROUP)
            assert client.read(*GROUP) == GROUP


# ---- one machine


def test_presence_changes_only_in_finished(client: Client) -> None:
    """A reply between `contains` and `unknown` would make a block neither present nor unknown."""
    client.write(1)
    client.forget()
    job = client.tier.submit_probe(some_keys(1, 2))
    until = time.monotonic() + PATIENCE_S
    while not client.tier.jobs.ended:
        assert time.monotonic() < until
        time.sleep(0.0005)
    assert client.presence(1, 2) == [None, None]
    client.wait(job)
    assert client.presence(1, 2) == [True, False]


def test_block_in_flight_is_not_written_twice(client: Client, server: Server) -> None:
    with server.stopped():
        job, taken = client.tier.submit_write(some_keys(1, 2), client.pool, np.arange(2))
        again, other = client.tier.submit_write(some_keys(2, 1, 3), client.pool, np.arange(3))
    assert taken.tolist() == [True, True]
    assert other.tolist() == [False, False, True]
    until, ended = time.monotonic() + PATIENCE_S, set[int]()
    while ended != {job, again}:
        ended |= {result.job for result in client.tier.finished() if result.ok.all()}
        assert time.monotonic() < until


def test_ttl_of_blocks(make: Callable[..., Client], server: Server) -> None:
    client = make(server, ttl=3600.0)
    client.write(1)
    assert 3000 < server.execute("TTL", client.name(1)) <= 3600
    other = make(server, namespace="other")
    other.write(1)
    assert server.execute("TTL", other.name(1)) == -1


def test_forked_child_cannot_use_the_tier(client: Client) -> None:
    client.write(1)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            client.tier.contains(some_keys(1))
        except MisuseError:
            os.write(write, b"refused")
        client.tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    os.close(write)
    assert client.read(1) == [1], "the parent's connections are as they were"


@pytest.mark.parametrize("block_bytes", [64 << 10, 512 << 10, 9 << 18])
def test_server_memory_per_block(tmp_path: Path, make: Callable[..., Client], block_bytes: int) -> None:
    """Jemalloc would need a quarter more for a value with a header and a block of 2^n bytes."""
    with running(tmp_path, program=redis()) as server:
        if b"mem_allocator:jemalloc" not in server.ask("INFO", "memory"):
            pytest.skip("this redis-server is not built with jemalloc")
        client, numbers = make(server, block_bytes=block_bytes), [*range(1, 61)]
        assert client.write(*numbers) == numbers
        used_bytes = sum(server.execute("MEMORY", "USAGE", name) for name in server.names())
        assert used_bytes <= 1.04 * 60 * block_bytes
        assert client.read(*numbers) == numbers


# ---- several machines


def test_reset_between_two_windows_of_a_read(
    server: Server, proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    slow, other = make(proxy), make(server)
    slow.tier.dialect.window_bytes = BLOCK_BYTES
    slow.write(1, 2, 3, 4)
    resets = iter([other.reset])

    def reset_once(replies: list[bytes]) -> list[bytes]:
        if any(len(reply) > BLOCK_BYTES // 2 for reply in replies):
            next(resets, lambda: None)()
        return replies

    proxy.set(replies=reset_once)
    assert slow.read(1, 2, 3, 4) == [], "not even the blocks that had arrived"
    slow.wait_until_open()
    assert slow.presence(1) == [None]


def test_jobs_from_before_a_reset_have_no_results(client: Client, server: Server) -> None:
    client.write(1)
    with server.stopped():
        job = client.begin_read(1)
        probe = client.tier.submit_probe(some_keys(1))
        client.tier.clear()
    assert client.tier.drain(PATIENCE_S)
    results = {result.job: result for result in client.tier.finished()}
    assert not results[job].ok.any()
    assert not results[probe].ok.any()
    assert client.presence(1) == [None]
    assert client.probe(1) == []


def test_reset_replaces_a_damaged_epoch(client: Client, server: Server) -> None:
    client.write(1)
    server.put(client.epoch_key(1), b"nonsense")
    assert client.read(1) == []
    assert client.presence(1) == [False]
    client.reset()
    assert client.write(1) == [1]


def test_restarted_server_is_used_again(tmp_path: Path, make: Callable[..., Client]) -> None:
    with running(tmp_path) as server:
        client = make(server)
        client.write(1)
        server.stop()
        assert client.read(1) == []
        server.start()
        until = time.monotonic() + PATIENCE_S
        while client.write(1) != [1]:
            end_pauses(client.tier)
            assert time.monotonic() < until
        assert client.read(1) == [1]


# ---- reported changes


def test_blocks_of_a_silent_server_are_not_reported_lost(
    proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    client = make(proxy, timeout=0.3, probe_timeout=0.2)
    client.changes()
    client.write(1, 2)
    assert client.changes() == [({1, 2}, False)]
    proxy.set(hang=True)
    assert client.read(1, 2) == client.probe(1, 2) == client.read(1) == []
    assert client.tier.stats().circuit_open == 1
    assert client.changes() == [], "the server did not answer"


def test_write_log_is_bounded() -> None:
    log = WriteLog(most_keys=2)
    log.stored(some_keys(9))
    assert log.take() == [], "reports have not begun"
    log.stored(some_keys(1, 2))
    log.stored(some_keys(2, 3))
    log.lost(some_keys(1, 9))
    log.lost_all()
    first, second, third = some_keys(1, 2, 3)
    assert log.take() == [
        ([first, second], False),
        ([third], False),
        ([first], True),
        ([second, third], True),
    ]
    log.lost_all()
    assert log.take() == []


# ---- damage


def test_block_has_two_values(client: Client, server: Server) -> None:
    client.write(1)
    name = client.name(1)
    assert server.names() == [name, *rest_names([name])]
    assert [len(server.get(name)) for name in server.names()] == [HEAD_BYTES, BLOCK_BYTES - 64]
    assert HEAD_BYTES == 128


@pytest.mark.parametrize("value", [0, 1])
def test_block_with_one_of_two_values_is_absent(
    client: Client, server: Server, make: Callable[..., Client], value: int
) -> None:
    """The server may evict one value of a block."""
    client.write(1, 2)
    server.execute("DEL", client.names(1)[value])
    result = client.wait(client.begin_read(1, 2))
    assert result.ok.tolist() == [False, True]
    assert result.stale is not None
    assert result.stale.tolist() == [True, False]
    other = make(server)
    assert other.probe(1, 2) == [2]
    assert other.write(1) == [1]
    assert other.tier.stats().skipped == 0
    assert client.read(1, 2) == [1, 2]
    assert client.tier.stats().mismatches == 0


@pytest.mark.parametrize("value", ["list", "number"])
def test_value_of_another_type_is_a_miss(client: Client, server: Server, value: str) -> None:
    client.write(1, 2)
    server.execute("DEL", client.name(1))
    server.execute("LPUSH", client.name(1), "x") if value == "list" else server.execute(
        "SET", client.name(1), "12"
    )
    assert client.read(1, 2) == [2]
    assert client.read(2) == [2]


# ---- the network


def test_interrupted_write_counts_confirmed_blocks(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client, numbers = make(proxy), [*range(1, 11)]
    client.tier.dialect.window_bytes = BLOCK_BYTES
    epoch_and_absent_blocks = len(b"$16\r\n%016x\r\n" % 0) + 10 * len(b":0\r\n")
    block = 2 * len(b"+OK\r\n")
    proxy.set(cut_after=epoch_and_absent_blocks + 3 * block + block // 2)
    assert client.write(*numbers) == [1, 2, 3]
    stats = client.tier.stats()
    assert (stats.written, stats.failed) == (3, 7)
    assert client.presence(3) == [True]
    proxy.set()
    client.reconnect()
    client.forget()
    assert client.write(*numbers) == numbers, "also the blocks whose replies were lost"
    assert client.read(*numbers) == numbers


@pytest.mark.parametrize("fault", ["swapped", "repeated", "left out", "all the same"])
def test_replies_in_the_wrong_order_or_number(
    proxy: FaultProxy, make: Callable[..., Client], fault: str
) -> None:
    client = make(proxy, timeout=1.0)
    client.write(1, 2, 3)
    changes: dict[str, Callable[[list[bytes]], list[bytes]]] = {
        "swapped": lambda replies: replies[::-1],
        "repeated": lambda replies: [reply for reply in replies for _ in range(2)],
        "left out": lambda replies: replies[1:],
        "all the same": lambda replies: replies[-1:] * len(replies),
    }
    proxy.set(replies=changes[fault])
    for _ in range(3):
        assert client.read(1, 2, 3) != [1, 2, 3]
    proxy.set()
    proxy.drop_connections()
    client.use_long_deadlines()
    client.reconnect()
    client.forget()
    client.write(1, 2, 3)
    assert client.read(1, 2, 3) == [1, 2, 3]


def test_connection_is_closed_after_damage(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client = make(proxy)
    client.write(1, 2)
    connections = proxy.num_connections
    proxy.set(flip_at=12_000)
    assert client.read(1) == []
    assert client.read(2) == client.read(2) == [2]
    assert proxy.num_connections > connections


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_server_that_stops_during_a_read(
    tmp_path: Path, make: Callable[..., Client], number: signal.Signals
) -> None:
    with running(tmp_path) as server:
        client = make(server, timeout=0.3, probe_timeout=0.2)
        writer = make(server)
        numbers = list(range(1, 61))
        writer.write(*numbers)
        begun = time.monotonic()
        job = client.begin_read(*numbers)
        server.signal(number)
        client.check(client.wait(job), *numbers)
        assert client.probe(70) == []
        for _ in range(5):
            client.read(*numbers)
        assert time.monotonic() - begun < 30.0
        assert not client.tier.is_open()
        if number is signal.SIGSTOP:
            server.signal(signal.SIGCONT)
        else:
            server.stop()
            server.start()
        client.reconnect()
        client.forget()
        client.use_long_deadlines()
        assert client.read(1, 2) == ([1, 2] if number is signal.SIGSTOP else [])


# ---- a server that refuses


@pytest.mark.parametrize("window_bytes", [BLOCK_BYTES, 4 << 20])
def test_writes_to_a_full_server_are_dropped(
    tmp_path: Path,
    make: Callable[..., Client],
    caplog: pytest.LogCaptureFixture,
    window_bytes: int,
) -> None:
    with running(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        client = make(server)
        client.tier.dialect.window_bytes = window_bytes
        written = [number for first in (1, 61, 121) for number in client.write(*range(first, first + 60))]
        assert 0 < len(written) < 180
        stats = client.tier.stats()
        assert stats.dropped == 180 - len(written)
        assert (stats.failed, stats.circuit_open) == (0, 0)
        assert "is full and evicts nothing" in caplog.text
        assert client.read(*written[:10]) == written[:10]
        assert client.write(500) == [], "writes pause"
        end_pauses(client.tier)
        for name in server.names():
            server.execute("DEL", name)
        assert client.write(500) == [500]


def test_blocks_of_a_full_server_are_served_to_new_machines(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with running(tmp_path, "--maxmemory-policy", "noeviction") as server:
        make(server).write(*GROUP)
        server.execute("CONFIG", "SET", "maxmemory", "100kb")
        client = make(server)
        assert client.read(*GROUP) == client.probe(*GROUP) == GROUP
        assert client.write(9) == []
        with pytest.raises(UnavailableError, match="OOM"):
            make(server, namespace="new")
        client.tier.clear()
        assert client.presence(1) == [False]
        while client.tier.peer.handshake is not None:
            assert not client.tier.drain(0.01), "a full server cannot confirm a reset"
        server.execute("CONFIG", "SET", "maxmemory", "0")
        client.reconnect()
        assert client.tier.drain(PATIENCE_S)
        assert client.probe(*GROUP) == []


def test_demoted_master_is_left(tmp_path: Path, make: Callable[..., Client]) -> None:
    """A failover moves the address to another server, and connections to the old master stay open.

    The old master has become a replica. If it cannot reach its new master, it misses later resets.
    """
    (tmp_path / "old").mkdir()
    with (
        running(tmp_path / "old") as old,
        running(tmp_path) as new,
        FaultProxy(old.port) as address,
    ):
        client, other = make(address), make(new)
        client.write(*GROUP)
        client.read(*GROUP)
        other.write(*BLOCKS)
        address.redirect(new.port)
        assert client.read(*GROUP) == GROUP
        old.execute("REPLICAOF", "127.0.0.1", "1")
        assert client.write(9) == []
        client.reconnect()
        assert client.probe(*GROUP) == client.read(*GROUP) == GROUP, "of the new master"
        assert client.write(9) == [9]
        assert new.has(client.name(9))
        other.reset()
        assert client.read(*GROUP) == []


def test_connections_to_two_servers_meet_after_a_reset(tmp_path: Path, make: Callable[..., Client]) -> None:
    """The address moves while the old server keeps running, and one connection alone fails."""
    (tmp_path / "old").mkdir()
    with (
        running(tmp_path / "old") as old,
        running(tmp_path) as new,
        FaultProxy(old.port) as address,
    ):
        client = make(address)
        client.write(*GROUP)
        client.read(*GROUP)
        new.restore(old.snapshot())
        address.redirect(new.port)
        for thread in client.tier.jobs._threads["probe"]:
            thread.reconnect()
        make(new).reset()
        assert client.probe(*GROUP) == []
        client.reconnect()
        assert client.write(*BLOCKS) == client.read(*BLOCKS) == BLOCKS
        assert new.has(client.name(1))


@pytest.mark.parametrize("code", ["OOM", "MISCONF", "READONLY", "LOADING"])
def test_handshake_with_a_server_that_refuses_writes(
    proxy: FaultProxy, make: Callable[..., Client], code: str
) -> None:
    """A replica is not used, because it may not have the last reset."""
    make(proxy).write(*GROUP)
    error = b"-%b the server refuses\r\n" % code.encode()
    proxy.set(replies=lambda replies: [error if reply == b"$-1\r\n" else reply for reply in replies])
    if code in ("OOM", "MISCONF"):
        assert make(proxy).read(*GROUP) == GROUP
    else:
        with pytest.raises(UnavailableError, match=code):
            make(proxy)


@pytest.mark.parametrize(("policy", "ttl"), [("volatile-lru", 3600.0), ("allkeys-lru", None)])
def test_server_that_evicts(
    tmp_path: Path, make: Callable[..., Client], policy: str, ttl: float | None
) -> None:
    """With volatile-lru the server keeps the epoch, which has no TTL. With allkeys-lru all blocks are lost if
    the server evicts the epoch."""
    with running(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", policy) as server:
        client = make(server, ttl=ttl)
        batches = [range(first, first + 60) for first in range(1, 601, 60)]
        written = [number for batch in batches for number in client.write(*batch)]
        served = [number for batch in batches for number in client.read(*batch)]
        assert len(served) < 600
        stats = client.tier.stats()
        assert stats.mismatches == 0
        if ttl is not None:
            assert len(written) == 600
            assert served
            assert stats.stale == 600 - len(served)


def test_node_of_a_cluster_is_refused(tmp_path: Path, make: Callable[..., Client]) -> None:
    with (
        running(tmp_path, "--cluster-enabled", "yes") as server,
        refusal(r"use valkey\+cluster://.*CLUSTERDOWN"),
    ):
        make(server)


def test_node_with_the_slot_of_the_epoch_is_refused(tmp_path: Path, make: Callable[..., Client]) -> None:
    """Otherwise a node of a cluster is accepted by chance, and refuses most blocks later."""
    with running(tmp_path, "--cluster-enabled", "yes") as server:
        assert server.execute("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"OK"
        while b"cluster_state:ok" not in server.execute("CLUSTER", "INFO"):
            time.sleep(0.01)
        with refusal(r"use valkey\+cluster://.*CROSSSLOT"):
            make(server)


@pytest.mark.parametrize(
    ("username", "password", "message"),
    [("", "wrong", "WRONGPASS"), ("nobody", "hunter2", "WRONGPASS"), ("", "", "NOAUTH")],
)
def test_wrong_password_is_refused(
    tmp_path: Path,
    make: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    username: str,
    password: str,
    message: str,
) -> None:
    with running(tmp_path, "--requirepass", "hunter2", login=Login("", "hunter2")) as server:
        monkeypatch.setenv(USERNAME, username)
        monkeypatch.setenv(PASSWORD, password)
        with refusal(message):
            make(server)


def test_password_is_in_no_log_and_no_text(
    tmp_path: Path,
    make: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(tmp_path, "--requirepass", "hunter2", login=Login("", "hunter2")) as server:
        (tmp_path / "password").write_text("hunter2\n")
        monkeypatch.delenv(PASSWORD, raising=False)
        with caplog.at_level(logging.DEBUG):
            client = make(server, password_file=str(tmp_path / "password"))
            assert client.write(1) == [1]
            server.stop()
            for _ in range(4):
                client.read(1)
        text = f"{caplog.text} {client.tier.stats()} {client.tier.last_error!r} {vars(client.tier)}"
        assert "an exchange with" in caplog.text
        assert "hunter2" not in text


OWNER = TierOwner(BLOCK_BYTES, 36, "model")


def test_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    """OpenSSL would ask for the pass phrase on the terminal, and the engine would wait for it."""
    pem, key = self_signed(tmp_path)
    encrypted = str(tmp_path / "encrypted.key")
    words = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:hunter2", "-out", encrypted]
    subprocess.run(words, check=True, capture_output=True)
    with refusal() as refused:
        ValkeyOptions(url="valkeys://localhost/ns", cert=pem, cert_key=encrypted).connector()
    assert "the key is encrypted; give a key without a pass phrase" in str(refused.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    missing, (pem, key) = str(tmp_path / "missing"), self_signed(tmp_path)
    for options, field in [
        ({"password_file": missing}, "password_file"),
        ({"ca": missing}, "ca"),
        ({"ca": missing, "cert": missing}, "ca"),
        ({"cert": missing}, "cert"),
        ({"cert_key": missing}, "cert: missing; allowed"),
        ({"cert": missing, "cert_key": key}, f"cert: '{missing}' is invalid; .*No such file"),
        ({"cert": pem, "cert_key": missing}, f"cert_key: '{missing}' is invalid; .*No such file"),
        ({"cert": key, "cert_key": key}, f"cert: '{key}' is invalid; .*(?i:no.certificate)"),
        ({"cert": pem}, f"cert: '{pem}' is invalid; .*give its key in cert_key"),
        ({"cert": pem, "cert_key": pem}, f"cert_key: '{pem}' is invalid; .*give the key of cert"),
    ]:
        with refusal(f"^{field}"):
            ValkeyOptions(url="valkeys://127.0.0.1:1/ns", **options).open(OWNER)
    with refusal("for valkeys://"):
        ValkeyOptions(url="valkey://127.0.0.1:1/ns", ca=missing).open(OWNER)


@pytest.mark.parametrize("password", ["", "hunter2"])
def test_a_server_with_too_many_clients_is_unavailable_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_VALKEY_PASSWORD", password)
    errors: list[UnavailableError] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"-ERR max number of clients reached\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        url = f"valkey://127.0.0.1:{listening.getsockname()[1]}/ns"
        with pytest.raises(UnavailableError):
            ValkeyOptions(url=url).open(OWNER)
        ValkeyOptions(url=url).open(replace(OWNER, on_unavailable=errors.append)).close()
        listening.shutdown(socket.SHUT_RDWR)


def test_warns_about_a_server_without_tls_and_password(caplog: pytest.LogCaptureFixture) -> None:
    owner = TierOwner(BLOCK_BYTES, 36, "model", on_unavailable=lambda error: None)
    for host, warned in [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("192.0.2.1", True)]:
        caplog.clear()
        ValkeyOptions(url=f"valkey://{host}:1/ns").open(owner).close()
        assert ("without TLS and a password" in caplog.text) == warned
