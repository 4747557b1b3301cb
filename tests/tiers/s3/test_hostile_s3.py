"""A hostile S3 server causes only misses: no wrong byte, exception, crash or memory growth.

Each test is a case that once failed. `python tests/support/hostile_s3.py` runs all attacks in random order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import kvoffload
from kvoffload.errors import ConfigError
from kvoffload.tiers.contract import JobResult
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.s3.bucket import Bucket, Ledger, Prices
from kvoffload.tiers.s3.bucket import ValueReceiver as Small
from kvoffload.tiers.s3.host import Host
from kvoffload.tiers.s3.http import HttpConnection, ResponseError
from kvoffload.tiers.s3.signing import Signed
from kvoffload.tiers.shared.addresses import Addresses, SocketAddress
from kvoffload.tiers.spec import TierOwner
from support.fault_proxy import FaultProxy
from support.hostile_s3 import ATTACKS, BUCKET, KEY_ID, SECRET, HangupError, HostileS3, Request, soak
from support.pauses import end_pauses
from support.refusals import refusal
from support.s3_client import BLOCK_BYTES, PACK, PATH, STRIDE, Client
from support.s3_server import PATIENCE_S
from support.sampling import sampled
from support.sharing_client import closed_at_the_end, some_keys
from support.valkey_server import self_signed


@pytest.fixture(autouse=True)
def keys_to_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def server() -> Iterator[HostileS3]:
    server = HostileS3()
    yield server
    server.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(partial(Client, most_at_once=16))


@pytest.fixture
def client(make: Callable[..., Client], server: HostileS3) -> Client:
    return make(server.port)


def epoch_object(server: HostileS3) -> str:
    (name,) = [name for name in server.objects if "/epochs/" in name and "measure" not in name]
    return name


# ---- bounds


ABORTING = [
    "10^15 in 200",
    "10^15 in 404",
    "10^15 in 500",
    "10^15 in DELETE",
    "10 GB as a part",
    "endless error",
]


@pytest.mark.parametrize("attack", sampled(ABORTING, 6))
@pytest.mark.slow
def test_false_lengths_neither_abort_the_process_nor_take_memory(attack: str) -> None:
    """Runs in another process, because obstore aborted its process for false lengths of bodies and errors."""
    total, _ = soak(seed=1, rounds=1, names=[attack])
    assert (total.attacks, total.aborts, total.escapes, total.wrong, total.not_back) == (1, 0, 0, 0, 0), total
    assert total.growth_mb < 64


@pytest.mark.slow
def test_sequence_of_attacks() -> None:
    names = sorted({*ATTACKS} - {"hangs", "hangs in the body", "drips"})
    total, _ = soak(seed=int(os.environ.get("SOAK_SEED", "3")), rounds=8, names=names)
    assert total.attacks == 8
    assert (total.aborts, total.escapes, total.wrong, total.not_back) == (0, 0, 0, 0), total
    assert total.growth_mb < 64


def test_too_large_object_is_damage_and_is_not_received(client: Client, server: HostileS3) -> None:
    client.write(*PATH[:8])
    name = client.object(1)
    server.objects[name] = bytes(64 << 20)
    before = client.tier.dialect.ledger.bytes_received
    assert client.read(1, 2, 5, 6) == [5, 6]
    assert client.tier.stats().mismatches == 2
    assert client.tier.stats().failed == 0
    assert name not in server.objects, "no other machine meets the damage"
    assert client.tier.dialect.ledger.bytes_received - before == 16 + 2 * STRIDE


@pytest.mark.parametrize("change", ["longer", "shorter", "empty"])
def test_object_of_another_size_is_absent_and_replaced(
    client: Client, make: Callable[..., Client], server: HostileS3, change: str
) -> None:
    client.write(*PATH[:8])
    name = client.object(1)
    sound = server.objects[name]
    server.objects[name] = {"longer": sound + b"\0", "shorter": sound[:-1], "empty": b""}[change]
    other = make(server.port)
    assert other.probe(*PATH[:8]) == [*PATH[4:8]]
    other.tier.presence.clear()
    assert other.write(*PATH[:4]) == [*PATH[:4]]
    assert server.objects[name] == sound
    assert other.tier.stats().skipped == 0


def test_every_read_asks_for_a_range(client: Client, server: HostileS3) -> None:
    ranges: list[str] = []
    honest = server.honest

    def listening(request: Any) -> Any:
        if request.method == "GET":
            ranges.append(request.headers["range"])
        return honest(request)

    server.honest = listening  # type: ignore[method-assign]
    client.write(*PATH[:4])
    assert client.read(*PATH[:4]) == [*PATH[:4]]
    assert client.read(2, 3) == [2, 3]
    client.reset()
    parts = {f"bytes=0-{PACK * STRIDE - 1}", f"bytes={STRIDE}-{3 * STRIDE - 1}"}
    assert {*ranges} == parts | {"bytes=0-15"}


@pytest.mark.parametrize(
    "attack",
    sampled(["chunks", "ranges ignored", "longer than its length", "answers twice", "closes silently"], 3),
)
def test_unusual_complete_responses_are_served(client: Client, server: HostileS3, attack: str) -> None:
    client.write(*PATH[:8])
    server.attack = attack
    for _ in range(4):
        assert client.read(*PATH[:8]) == [*PATH[:8]]
        assert client.read(2, 3, 6) == [2, 3, 6]
    assert client.tier.stats().failed == client.tier.stats().mismatches == 0


def test_blocks_that_arrived_before_a_cut_are_served(
    client: Client, server: HostileS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object is verified piece by piece."""

    def cut(server: HostileS3, connection: socket.socket, request: Request) -> None:
        reply = server.honest(request)
        if request.method == "GET" and "/blocks/" in request.name:
            connection.sendall(reply.head() + reply.body[: 3 * STRIDE + 5])
            raise HangupError
        server.send(connection, reply)

    client.write(*PATH[:4])
    monkeypatch.setitem(ATTACKS, "cut in the fourth block", cut)
    client.tier.dialect.window_bytes = STRIDE
    server.attack = "cut in the fourth block"
    assert client.read(*PATH[:4]) == [1, 2, 3]
    assert client.tier.stats().mismatches == 0


# ---- epochs


def test_damaged_epoch_is_named_with_the_remedy(client: Client, server: HostileS3) -> None:
    client.write(*PATH[:4])
    name = epoch_object(server)
    sound = server.objects[name]
    for value in (b"", b"0" * 17, b"-00000000000001f", b"0x0000000000001f", b"0000_0000_0000_f", b"A" * 16):
        server.objects[name] = value
        assert client.read(1) == []
        until = time.monotonic() + PATIENCE_S
        while "reset the cache" not in str(client.tier.last_error):
            end_pauses(client.tier)
            assert not client.tier.is_open()
            assert time.monotonic() < until
            time.sleep(0.001)
        assert "16 hexadecimal digits" in str(client.tier.last_error)
        server.objects[name] = sound
        client.reconnect()
        client.tier.peer.last_error = TimeoutError()
    client.reset()


def test_acknowledged_reset_that_was_not_stored_is_not_confirmed(client: Client, server: HostileS3) -> None:
    client.write(*PATH[:4])
    server.attack = "PUT of an epoch not stored"
    client.tier.clear()
    assert not client.tier.drain(0.3)
    assert client.read(1) == []
    server.attack = ""
    end_pauses(client.tier)
    assert client.tier.drain(PATIENCE_S)
    assert client.read(1) == []


# ---- keys, and hosts of requests


@pytest.mark.parametrize("attack", ["307", "307 to another host", "redirect loop"])
def test_redirections_are_not_followed(client: Client, server: HostileS3, attack: str) -> None:
    client.write(*PATH[:4])
    before = sum(server.counts.values())
    server.attack = attack
    assert client.read(1, 2) == []
    assert client.write(*PATH[4:8]) == []
    assert sum(server.counts.values()) - before < 60, "no loop"
    assert server.counts["other host"] == server.counts["other host, with a login"] == 0
    server.attack = ""
    client.reconnect()


def test_changed_credentials_file_is_read_again(
    make: Callable[..., Client], server: HostileS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"

    def keys(name: str) -> None:
        text = f"[default]\naws_access_key_id = {name}\naws_secret_access_key = {SECRET}\n"
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    keys(KEY_ID)
    client = make(server.port, credentials_file=str(file))
    assert client.write(*PATH[:4]) == [*PATH[:4]]
    server.key_id = "AKIASECOND"
    keys("AKIASECOND")
    assert client.read(*PATH[:4]) == [*PATH[:4]], "a new file causes no failure"
    file.write_text("half a fi")
    assert client.read(*PATH[:4]) == [*PATH[:4]], "a file that is being written changes nothing"
    file.unlink()
    assert client.read(*PATH[:4]) == [*PATH[:4]]
    assert client.tier.stats().failed == 0


def test_refused_keys_are_read_again_from_an_unchanged_file(
    make: Callable[..., Client], server: HostileS3, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"

    def keys(name: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = {SECRET}\n")
        os.utime(file, ns=(10**18, 10**18))

    keys(KEY_ID)
    client = make(server.port, credentials_file=str(file))
    client.write(*PATH[:4])
    server.key_id = "AKIAOTHER"
    keys("AKIAOTHER")
    assert client.read(*PATH[:4]) == [*PATH[:4]]
    server.key_id = "AKIATHIRD"
    assert client.read(*PATH[:4]) == []
    keys("AKIATHIRD")
    client.reconnect()
    assert client.read(*PATH[:4]) == [*PATH[:4]]


class Metadata(BaseHTTPRequestHandler):
    """The metadata service of EC2, which gives a machine the keys of its role."""

    paths: ClassVar[list[str]] = []

    def _answer(self) -> None:
        self.paths.append(self.path)
        keys = {"AccessKeyId": "AKIAROLE", "SecretAccessKey": SECRET, "Token": "t", "Code": "Success"}
        texts = {"token": "t", "": "role", "role": json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"})}
        body = texts[self.path.rpartition("/")[2]].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = _answer  # noqa: N815

    def log_message(self, *given: object) -> None:
        pass


def test_keys_of_a_role_are_requested_once(
    make: Callable[..., Client], server: HostileS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server.key_id = "AKIAROLE"
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as metadata:
        thread = threading.Thread(target=metadata.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{metadata.server_address[1]}")
        try:
            client = make(server.port)
            assert client.write(*PATH[:8]) == [*PATH[:8]]
            assert client.read(*PATH[:8]) == [*PATH[:8]]
            assert len(Metadata.paths) == 3, "a token, the role, and its keys"
        finally:
            metadata.shutdown()
            thread.join()


def test_obstore_makes_no_request_to_a_bucket() -> None:
    """Obstore trusts lengths in replies, so it is used only for signatures."""
    package = Path(kvoffload.__file__).parent
    importing = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "import obstore" in path.read_text()
    }
    assert importing == {"tiers/s3/signing.py"}
    used = re.findall(r"_library\.(\w+)", (package / "tiers/s3/signing.py").read_text())
    assert {*used} == {"sign"}
    assert "from obstore.store import S3Store" in (package / "tiers/s3/credentials.py").read_text()


def test_lasting_refusal_of_keys_is_a_miss_with_its_code(
    client: Client, server: HostileS3, caplog: pytest.LogCaptureFixture
) -> None:
    client.write(*PATH[:4])
    server.attack = "clock skew"
    with caplog.at_level(logging.DEBUG):
        for _ in range(4):
            assert client.read(1) == []
    assert "RequestTimeTooSkewed" in str(client.tier.last_error)
    assert not client.tier.is_open()
    for secret in (SECRET, KEY_ID, "X-Amz"):
        assert secret not in caplog.text + repr(client.tier.last_error)
    server.attack = ""
    client.reconnect()
    assert client.read(1) == [1]


def test_deleted_bucket_is_a_miss_until_it_returns(client: Client, server: HostileS3) -> None:
    client.write(*PATH[:4])
    kept = dict(server.objects)
    server.objects.clear()
    server.attack = "NoSuchBucket"
    assert client.read(1) == []
    assert client.write(*PATH[4:8]) == []
    assert client.probe(9) == []
    assert "NoSuchBucket" in str(client.tier.last_error)
    server.attack = ""
    client.reconnect()
    assert client.read(1) == [], "the new bucket is empty"
    server.objects |= {name: data for name, data in kept.items() if "/blocks/" in name}
    client.assume_present(1)
    assert client.read(1) == [], "blocks of the lost epoch are not found again"


# ---- TLS


def test_blocks_return_over_tls_with_the_right_certificate(
    server: HostileS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, (other, _) = self_signed(tmp_path), self_signed(tmp_path, "other")
    with FaultProxy(server.port, tls=own) as proxy:
        endpoint = f"https://127.0.0.1:{proxy.port}"
        options = S3Options(
            url=f"s3://{BUCKET}/tls", endpoint=endpoint, region="us-east-1", pack=0, timeout=30.0
        )
        owner = TierOwner(BLOCK_BYTES, 36, "m")
        monkeypatch.setenv("SSL_CERT_FILE", own[0])
        tier = options.open(owner)
        pool = np.full((64, BLOCK_BYTES), 7, np.uint8)
        keys, rows = some_keys(*range(64)), np.arange(64)
        job, _ = tier.submit_write(keys, pool, rows)
        assert result_of(tier, job).ok.all()
        pool[:] = 0
        assert result_of(tier, tier.submit_read(keys, pool, rows)).ok.all()
        assert (pool == 7).all()
        server.attack = "10^15 in 206"
        assert not result_of(tier, tier.submit_read(keys, pool, rows)).ok.any()
        tier.close()
        monkeypatch.setenv("SSL_CERT_FILE", other)
        for handle_unavailable in (None, lambda error: pytest.fail(f"an outage: {error}")):
            with refusal() as refused:
                options.open(replace(owner, on_unavailable=handle_unavailable))
            assert type(refused.value) is ConfigError
            assert str(refused.value).endswith("; give the certificate of its CA in the file of the "
                                               "environment variable SSL_CERT_FILE")  # fmt: skip
        monkeypatch.setenv("SSL_CERT_FILE", own[0])
        elsewhere = replace(options, endpoint=f"https://localhost:{proxy.port}")
        with refusal(r"give a name of the certificate in endpoint$"):
            elsewhere.open(owner)


def result_of(tier: Any, job: int) -> JobResult:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for result in tier.finished():
            assert result.job == job
            return result
        time.sleep(0.001)
    raise AssertionError("the job does not end")


# ---- names, addresses and framing


class Unsigned:
    """A signer of requests to a host."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def sign(self, method: str, name: str) -> Signed:
        return Signed(self.host, f"/{BUCKET}/{name}?X-Amz-Credential={KEY_ID}/", 0)

    def refresh(self, refused: int | None = None) -> bool:
        return False


def test_slow_name_server_costs_no_more_than_the_deadline(server: HostileS3) -> None:
    may_answer, lookups = threading.Event(), []

    def slow(host: str, port: int) -> list[SocketAddress]:
        lookups.append(host)
        assert may_answer.wait(PATIENCE_S)
        return [(socket.AF_INET, ("127.0.0.1", port))]

    server.objects["x"] = b"12345"
    sizes: list[int | None] = []

    async def size() -> None:
        sizes.append(await bucket.size("x"))

    host = Host("http", f"kv.test:{server.port}", Addresses(slow))
    bucket = Bucket(Unsigned(host), Ledger(Prices(0, 0, 0)))  # type: ignore[arg-type]
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            bucket.run([size()], time.monotonic() + 0.05)
    assert time.monotonic() - begun < 5.0
    assert len(lookups) == 1, "one thread makes the lookup"
    may_answer.set()
    bucket.run([size()], time.monotonic() + PATIENCE_S)
    server.drop_connections()
    bucket.run([size()], time.monotonic() + PATIENCE_S)
    assert (sizes, len(lookups)) == ([5, 5], 1), "the address is kept"
    bucket.close()
    bucket.close()


def test_address_that_refuses_is_skipped(server: HostileS3) -> None:
    def at(*hosts: str) -> Host:
        addresses = Addresses(lambda _, port: [(socket.AF_INET, (host, port)) for host in hosts])
        return Host("http", f"kv.test:{server.port}", addresses)

    async def connect(host: Host) -> None:
        connection = await host.connect(PATIENCE_S)
        assert connection.is_quiet
        connection.close()

    asyncio.run(connect(at("127.0.0.2", "127.0.0.1")))
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(connect(at("127.0.0.2", "127.0.0.3")))


class Wire(asyncio.Transport):
    """A transport that records the sent bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.is_aborted = b"", False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True


BODY = bytes(range(256)) * 3
CHUNKED = b"".join(
    b"%X;x=1\r\n%b\r\n" % (len(BODY[at : at + 100]), BODY[at : at + 100]) for at in range(0, 768, 100)
)
RESPONSES = {
    "a length": b"Content-Length: 768\r\n\r\n" + BODY,
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED + b"0\r\nTrailer: 1\r\n\r\n",
    "the end": b"\r\n" + BODY,
}


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_response_may_arrive_in_any_pieces(kind: str, size: int) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nServer: x\r\n" + RESPONSES[kind]

    async def exchange() -> tuple[bytes, HttpConnection]:
        connection, wire, into = HttpConnection(), Wire(), Small(2000)
        connection.connection_made(wire)
        task = asyncio.ensure_future(connection.request(b"GET", (), lambda head: into))
        await asyncio.sleep(0)
        at = 0
        while at < len(data):
            room = connection.get_buffer(-1)
            piece = data[at : at + min(size, len(room))]
            room[: len(piece)] = piece
            connection.buffer_updated(len(piece))
            at += len(piece)
        if kind == "the end":
            connection.connection_lost(None)
        await task
        return bytes(into.data), connection

    body, connection = asyncio.run(exchange())
    assert body == BODY
    assert connection.is_usable == (kind != "the end")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"3\r\nabcd\r\n0\r\n\r\n", "a chunk is longer than its size"),
        (b"xyz\r\nabc\r\n", "a chunk without a size"),
        (b"-3\r\nabc\r\n0\r\n\r\n", "a chunk without a size"),
    ],
)
def test_wrong_chunk_is_an_error(body: bytes, problem: str) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body

    async def exchange() -> None:
        connection, into = HttpConnection(), Small(2000)
        connection.connection_made(Wire())
        task = asyncio.ensure_future(connection.request(b"GET", (), lambda head: into))
        await asyncio.sleep(0)
        for number in data:
            connection.get_buffer(-1)[:1] = bytes([number])
            connection.buffer_updated(1)
        connection.connection_lost(None)
        with pytest.raises(ResponseError, match=problem):
            await task
        assert not connection.is_usable

    asyncio.run(exchange())


@pytest.mark.parametrize("at", [0, 10, 40, 60, 100, 800])
def test_incomplete_response_is_an_error(at: int) -> None:
    data = b"HTTP/1.1 200 OK\r\nServer: x\r\n" + RESPONSES["a length"]

    async def exchange() -> None:
        connection, into = HttpConnection(), Small(2000)
        connection.connection_made(Wire())
        task = asyncio.ensure_future(connection.request(b"GET", (), lambda head: into))
        await asyncio.sleep(0)
        for number in data[:at]:
            connection.get_buffer(-1)[:1] = bytes([number])
            connection.buffer_updated(1)
        connection.connection_lost(None)
        with pytest.raises(ResponseError, match="before the end"):
            await task
        assert not connection.is_usable

    asyncio.run(exchange())


def test_connection_that_is_closed_at_once_is_an_error() -> None:
    """A proxy without its server accepts connections, and closes them before a request is sent."""

    async def exchange() -> None:
        connection, wire = HttpConnection(), Wire()
        connection.connection_made(wire)
        connection.connection_lost(None)
        with pytest.raises(ResponseError, match="closed before the request"):
            await connection.request(b"GET", (), lambda head: Small(2000))
        assert wire.sent == b""

    asyncio.run(exchange())
