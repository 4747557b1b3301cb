"""Buckets of real S3 servers: the contract of shared tiers, objects with several blocks, and options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from kvoffload.errors import UnavailableError
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.shared.identity import HEADER_BYTES
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.striped import StripedTier
from support.fault_proxy import FaultProxy
from support.pauses import end_pauses
from support.refusals import refusal
from support.s3_client import BLOCK_BYTES, PACK, PATH, STRIDE, Client
from support.s3_server import KEY_ID, SECRET, Moto, Rclone, S3Server, running
from support.shared_tier_contract import FAULTS, Damage, Rig, SharedTierContract, check_blocks_return
from support.sharing_client import closed_at_the_end, some_keys


@pytest.fixture(scope="module", params=[Rclone, pytest.param(Moto, marks=pytest.mark.slow)])
def any_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    with running(request.param, tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with running(Rclone, tmp_path_factory.mktemp("rclone")) as server:
        assert isinstance(server, Rclone)
        yield server


@pytest.fixture
def rclone(shared_rclone: Rclone) -> Rclone:
    shared_rclone.empty()
    return shared_rclone


@pytest.fixture
def proxy(rclone: Rclone) -> Iterator[FaultProxy]:
    with FaultProxy(rclone.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def keys_to_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(Client)


@pytest.fixture
def client(make: Callable[..., Client], rclone: Rclone) -> Client:
    return make(rclone.port)


def damage(
    name: str, served: Sequence[int], change: Callable[[bytes, bytes], bytes | Sequence[bytes]]
) -> Damage:
    """Return a damage that changes the object with blocks 1 to 4, given that object and the next one."""

    def apply(server: Rclone, client: Client) -> None:
        value, other = (server.get(client.object(number)) for number in (2, 6))
        server.put(client.object(2), b"".join(change(value, other)))

    return Damage(name, apply, served)


def flip(value: bytes, at: int) -> list[bytes]:
    """Flip a bit of block 2 with its header."""
    at += STRIDE
    return [value[:at], bytes([value[at] ^ 4]), value[at + 1 :]]


def block(value: bytes, row: int) -> bytes:
    """Return a block of an object, with its header."""
    return value[row * STRIDE : (row + 1) * STRIDE]


OTHERS = (1, 3, 4, 5)
DAMAGES = [
    damage("flip in a block", OTHERS, lambda value, _: flip(value, HEADER_BYTES + 100)),
    damage("flip in a header", OTHERS, lambda value, _: flip(value, 20)),
    damage("flip in a checksum", OTHERS, lambda value, _: flip(value, HEADER_BYTES - 1)),
    damage("another version", OTHERS, lambda value, _: flip(value, 8)),
    damage(
        "another producer",
        OTHERS,
        lambda value, _: [value[: STRIDE + 24], bytes(16), value[STRIDE + 40 :]],
    ),
    damage("another epoch", OTHERS, lambda value, _: flip(value, 40)),
    damage(
        "a block of another object",
        OTHERS,
        lambda value, other: [block(value, 0), block(other, 1), value[2 * STRIDE :]],
    ),
    damage(
        "zeros in a block", OTHERS, lambda value, _: [block(value, 0), bytes(STRIDE), value[2 * STRIDE :]]
    ),
    damage("another object", [5], lambda _, other: [other]),
    damage("two blocks exchanged", [1, 4, 5], lambda value, _: [block(value, row) for row in (0, 2, 1, 3)]),
    damage("zeros", [5], lambda value, _: [bytes(len(value))]),
    damage("truncated by one", [5], lambda value, _: [value[:-1]]),
    damage("truncated in the middle", [5], lambda value, _: [value[: STRIDE + 50]]),
    damage("truncated to nothing", [5], lambda *_: []),
    damage("longer by one", [5], lambda value, _: [value, b"\0"]),
    damage("much longer", [5], lambda value, _: [value * 3]),
    damage("shifted", [5], lambda value, _: [value[1:], value[:1]]),
]


class TestBucket(SharedTierContract):
    window_blocks = (1, 7, 20)
    most_at_once = 1  # rclone may answer 500 to one of several PUTs at once
    many: ClassVar = [*PATH[:20]]
    timeout_s = 0.5
    probe_timeout_s = 0.3
    least_timeouts = 2  # a short reply may arrive
    faults: ClassVar = FAULTS | {"a hang in the middle of a block": {"bytes_per_s": 5000.0}}
    flip_timeout_s = 3.0  # with another length the end of a reply does not come
    flipped_at = (*range(0, 600, 41), *range(600, 4 * STRIDE, 9973))
    cut_at = (0, 1, 100, 300, *range(1000, 4 * STRIDE, 19997))

    @pytest.fixture
    def rig(self, rclone: Rclone, proxy: FaultProxy, make: Callable[..., Client]) -> Rig:
        return Rig(rclone, proxy, partial(make, rclone.port), partial(make, proxy.port))

    @pytest.fixture(params=DAMAGES, ids=lambda damage: damage.name)
    def damage(self, request: pytest.FixtureRequest) -> Damage:
        damage: Damage = request.param
        return damage

    def check_flipped(self, served: list[int]) -> None:
        """A flipped byte of an HTTP header may have no effect."""

    def check_cut(self, cut_at: int, served: list[int]) -> None:
        assert served == []


# ---- objects


@pytest.mark.parametrize("pack", [0, PACK])
def test_blocks_return_on_all_machines(make: Callable[..., Client], any_server: S3Server, pack: int) -> None:
    client, other = (make(any_server.port, pack=pack, namespace=f"both/{pack}") for _ in range(2))
    check_blocks_return(client, other)


def test_blocks_in_flight_are_bounded_in_whole_objects(client: Client) -> None:
    client.limit_in_flight(6)
    assert client.tier.queue_room == 6
    assert client.write(*PATH[:8]) == [1, 2, 3, 4], "there is room for half of the next object"
    assert client.tier.stats().dropped == 2
    assert client.tier.queue_room == 6
    assert client.write(*PATH[:8]) == [5, 6, 7, 8]
    assert client.read(*PATH[:8]) == [*PATH[:6]]
    client.limit_in_flight(3)
    assert client.tier.queue_room == PACK, "the limit always admits one object"


def test_object_has_a_whole_group_of_a_path(make: Callable[..., Client], any_server: S3Server) -> None:
    client = make(any_server.port, namespace="groups")
    assert client.tier.group_blocks == PACK
    assert client.write(*PATH[:7]) == [*PATH[:4]], "incomplete groups are not written"
    assert client.write(5, 6, 8, 7) == [5, 6, 8, 7], "in any order"
    assert client.write(9, 10, 12) == []
    assert client.write(*PATH[12:]) == [13, 14, 15, 16, 17, 18, 19, 20], "the tail of a path is in no group"
    assert client.tier.stats().puts == 2 + 4, "epoch, producer's text, and four objects"
    assert client.presence(21, 22, 23) == [False] * 3
    assert client.read(2, 3) == [2, 3], "a range of an object"
    assert client.read(1, 4, 6, 20, 13) == [1, 4, 6, 20, 13]
    # The same blocks at other positions of a path are in other groups.
    other = make(any_server.port, namespace="groups")
    other.tier.groups.forget()
    other.tier.extend_path(other.tier.begin_request("shifted"), some_keys(*PATH[1:]))
    assert other.probe(*PATH[1:]) == []
    longer = make(any_server.port, namespace="groups")
    longer.tier.groups.forget()
    longer.tier.extend_path(longer.tier.begin_request("longer"), some_keys(*PATH[:10], 99, 98))
    assert longer.probe(*PATH[:10], 99, 98) == [*PATH[:8]], "paths share the groups of a common prefix"
    assert longer.read(*PATH[:8]) == [*PATH[:8]]


def test_blocks_of_unknown_paths_are_absent(client: Client) -> None:
    assert client.presence(101, 102, 103, 104) == [False] * 4
    assert client.write(101, 102, 103, 104) == []
    path = some_keys(*range(101, 112))
    for length in (3, 5, 11):
        client.tier.extend_path(client.record, path[:length])
    assert client.presence(101, 108, 109) == [False, False, False], "a request has one path"
    request = client.tier.begin_request("other")
    for length in (3, 5, 11):
        client.tier.extend_path(request, path[:length])
    assert client.presence(101, 108, 109) == [None, None, False]


def test_known_paths_are_bounded(client: Client) -> None:
    client.tier.groups.generation_blocks = 40
    for first in range(1000, 2000, 20):
        client.tier.extend_path(client.tier.begin_request("r"), some_keys(*range(first, first + 20)))
    assert len(client.tier.groups) <= 80
    assert client.presence(1) == [False], "forgotten"
    client.tier.extend_path(client.record, some_keys(*PATH))
    assert client.presence(1, 20) == [None, None]


def test_object_is_written_although_half_is_cached_as_present(client: Client) -> None:
    client.assume_present(1, 2)
    assert client.write(1, 2, 3, 4) == [1, 2, 3, 4]


def test_requests_are_counted_with_their_price(make: Callable[..., Client], rclone: Rclone) -> None:
    client = make(
        rclone.port, pack=0, price_per_1000_puts=5.0, price_per_1000_gets=0.5, price_per_gb_read=1e3
    )
    before = client.tier.stats()
    client.write(1, 2)
    written = client.tier.stats()
    assert written.puts - before.puts == 2
    assert written.gets - before.gets == 3, "the epoch and two HEADs"
    received = client.tier.dialect.ledger.bytes_received
    client.read(1, 2)
    read = client.tier.stats()
    assert (read.puts - written.puts, read.gets - written.gets) == (0, 3)
    assert client.tier.dialect.ledger.bytes_received - received == 2 * STRIDE + 16
    gigabytes = client.tier.dialect.ledger.bytes_received / 1e9
    assert read.cost == pytest.approx(read.puts * 0.005 + read.gets * 0.0005 + gigabytes * 1e3)


# ---- resets


@pytest.mark.slow
def test_concurrent_starts_make_one_epoch(tmp_path: Path, make: Callable[..., Client]) -> None:
    """Moto supports conditional PUTs. On other servers the last epoch wins, and the other machines notice."""
    with running(Moto, tmp_path) as server:
        with ThreadPoolExecutor(4) as threads:
            clients = [*threads.map(lambda _: make(server.port), range(4))]
        assert len({client.tier.peer.epoch.number for client in clients}) == 1


# ---- damage


def test_range_of_a_truncated_object(make: Callable[..., Client], tmp_path: Path) -> None:
    """Moto serves ranges like S3. The ranges begin behind the end of the object, or extend over it."""
    with running(Moto, tmp_path) as server:
        assert isinstance(server, Moto)
        client = make(server.port)
        client.write(*PATH[:12])
        for number, length in ((1, 10), (5, 2 * STRIDE), (9, 3 * STRIDE + 7)):
            name = client.object(number)
            server.put(name, server.get(name)[:length])
        assert client.read(3, 4) == client.read(7, 8) == client.read(11, 12) == []
        assert client.tier.stats().mismatches == 6
        assert client.tier.stats().failed == 0


# ---- the network


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down", "404 Not Found", "200 OK"])
def test_unexpected_status_and_body(proxy: FaultProxy, make: Callable[..., Client], status: str) -> None:
    client = make(proxy.port, timeout=3.0, probe_timeout=3.0)
    client.write(*PATH[:4])
    proxy.drop_connections()
    proxy.set(answer=f"HTTP/1.1 {status}\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsorry\n".encode())
    for _ in range(3):
        assert client.read(1, 2) == []
        assert client.probe(9) == []
    proxy.set()
    client.reconnect()
    client.forget()
    client.write(*PATH[:4])
    assert client.read(1, 2) == [1, 2]


def test_writes_to_a_busy_server_are_dropped(
    proxy: FaultProxy, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make(proxy.port)
    epoch = client.tier.peer.epoch
    assert epoch is not None

    def busy(request: bytes) -> bytes | None:
        if not request.startswith(b"PUT"):
            return None
        return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    proxy.set(answer=busy)
    assert client.write(*PATH[:8]) == []
    stats = client.tier.stats()
    assert (stats.dropped, stats.failed, stats.circuit_open) == (8, 0, 0)
    assert client.write(*PATH[:8]) == [], "writes pause"
    proxy.set()
    end_pauses(client.tier)
    assert client.write(*PATH[:8]) == [*PATH[:8]]


def test_a_request_is_repeated_once_after_an_internal_error(
    proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    """Rclone may answer 500 to one of several PUTs that create a folder; S3 asks clients to repeat them."""
    client = make(proxy.port)
    failed = set[bytes]()

    def fails_first(request: bytes) -> bytes | None:
        method, _, rest = request.partition(b" ")
        if method in failed or not rest.startswith(b"/"):
            return None
        failed.add(method)
        return b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    proxy.drop_connections()
    proxy.set(answer=fails_first)
    assert client.write(*PATH[:8]) == [*PATH[:8]]
    assert client.read(*PATH[:8]) == [*PATH[:8]]
    assert client.tier.stats().failed == 0
    assert failed >= {b"PUT", b"GET"}


# ---- options, and messages


def test_secret_is_in_no_log_and_no_text(
    tmp_path: Path,
    make: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(Rclone, tmp_path) as server:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        file = tmp_path / "credentials"
        file.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
        with caplog.at_level(logging.DEBUG):
            client = make(server.port, credentials_file=str(file))
            assert client.write(*PATH[:4]) == [*PATH[:4]]
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter3")
            with refusal("SignatureDoesNotMatch") as refused:
                make(server.port)
            server.stop()
            for _ in range(4):
                client.read(1)
        text = f"{caplog.text} {client.tier.stats()} {client.tier.last_error!r} {vars(client.tier)}"
        text += str(refused.value)
        assert "an exchange with" in caplog.text
        for secret in (SECRET, "hunter3", KEY_ID):
            assert secret not in text


@pytest.mark.parametrize(
    "content", ["", "[other]\naws_access_key_id = a\n", "hunter2", "[default]\nregion = x\n", "\xff\xfe"]
)
def test_credentials_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "credentials"
    file.write_bytes(content.encode("latin-1"))
    options = S3Options(url="s3://kv-cache/ns", credentials_file=str(file))
    with refusal(r"^credentials_file: .*has no section") as refused:
        options.open(TierOwner(BLOCK_BYTES, 36, "m"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("pack", "block_bytes", "group_blocks"),
    [(16 << 20, 2 << 20, 8), (16 << 20, 4096, 32), (16 << 20, 32 << 20, 1), (0, 4096, 1), (10_000, 4096, 2)],
)
def test_blocks_of_an_object(pack: int, block_bytes: int, group_blocks: int) -> None:
    options = S3Options(url="s3://bucket/ns", pack=pack)
    assert options.group_blocks(TierOwner(block_bytes, 36, "m")) == group_blocks
    assert options.group_blocks(TierOwner(block_bytes, 36, "m", reports_paths=False)) == 1


def test_missing_obstore_is_named_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with refusal(r"pip install 'kvoffload\[s3\]'"):
        S3Options(url="s3://bucket/ns").open(TierOwner(BLOCK_BYTES, 36, "m"))


@pytest.mark.parametrize(
    ("endpoint", "is_warned"),
    [
        ("http://cache:9000", True),
        ("https://cache:9000", False),
        ("http://localhost:9000", False),
        ("", False),
    ],
)
def test_warns_about_an_endpoint_without_tls(
    endpoint: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    S3Options(url="s3://bucket/ns", endpoint=endpoint).warn_if_unencrypted()
    assert ("without TLS" in caplog.text) is is_warned


def test_bucket_cannot_be_striped(client: Client) -> None:
    with refusal("tiers that no other machine shares"):
        StripedTier([client.tier])


def test_missing_bucket_is_refused(any_server: S3Server) -> None:
    options = S3Options(url="s3://no-such-bucket/ns", endpoint=any_server.endpoint, region="us-east-1")
    with refusal("NoSuchBucket") as refused:
        options.open(TierOwner(BLOCK_BYTES, 36, "m"))
    assert not isinstance(refused.value, UnavailableError), "an engine must not start without its bucket"


@pytest.mark.slow
def test_bucket_that_is_deleted_and_made_again(make: Callable[..., Client], tmp_path: Path) -> None:
    with running(Moto, tmp_path) as server:
        assert isinstance(server, Moto)
        client = make(server.port)
        assert client.write(*PATH[:8]) == [*PATH[:8]]
        server.delete_bucket()
        assert client.read(*PATH[:8]) == client.write(*PATH[8:12]) == client.probe(13) == []
        assert "NoSuchBucket" in str(client.tier.last_error)
        server.empty()
        client.reconnect()
        assert client.read(*PATH[:8]) == []
        assert client.write(*PATH[:8]) == [*PATH[:8]]
        assert client.read(*PATH[:8]) == [*PATH[:8]]
