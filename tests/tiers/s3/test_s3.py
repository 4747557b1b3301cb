"""Real servers that speak S3 behind RAM: what comes back, what never does, how long anything takes at most.

Blocks have the bytes of their numbers. A deadline is tested against factors of ten, never against this
machine.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.tiers.contract import JobResult
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.shared.identity import HEADER_BYTES
from kvoffload.tiers.spec import TierOwner, parse_tier
from kvoffload.tiers.striped import StripedTier
from support.fault_proxy import FaultProxy
from support.s3_client import BLOCK_BYTES, PACK, PATH, STRIDE, Client, digests
from support.s3_server import BUCKET, KEY_ID, PATIENCE_S, SECRET, Moto, Rclone, S3Server, running
from support.shared_tier_contract import Rig, SharedTierContract
from support.sharing_client import CANARY, some_keys


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
    made: list[Client] = []

    def one(port: int, **options: Any) -> Client:
        made.append(Client(port, **options))
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


@pytest.fixture
def client(make: Callable[..., Client], rclone: Rclone) -> Client:
    return make(rclone.port)


class TestSharedTier(SharedTierContract):
    @pytest.fixture
    def rig(self, rclone: Rclone, proxy: FaultProxy, make: Callable[..., Client]) -> Rig:
        return Rig(rclone, proxy, partial(make, rclone.port), partial(make, proxy.port))


# ---- one machine, and another


@pytest.mark.parametrize("pack", [0, PACK])
def test_blocks_come_back_and_another_machine_finds_them(
    make: Callable[..., Client], any_server: S3Server, pack: int
) -> None:
    client = make(any_server.port, pack=pack, namespace=f"both/{pack}")
    other = make(any_server.port, pack=pack, namespace=f"both/{pack}")
    numbers = PATH[:8]
    assert client.believes(*numbers) == [None] * 8
    assert client.probe(*numbers) == []
    assert client.write(*numbers) == [*numbers]
    assert client.believes(*numbers, 9) == [True] * 8 + [None]
    assert client.read(*numbers) == [*numbers]
    assert client.write(*numbers) == [], "a hint says that they are there"
    assert other.write(*numbers) == [*numbers], "the server says so"
    stats = other.tier.stats()
    assert (stats.written, stats.skipped) == (0, 8)
    other.tier.presence.clear()
    assert other.probe(*numbers, 9) == [*numbers]
    assert other.read(*numbers) == [*numbers]
    assert (stats.failed, stats.mismatches) == (0, 0)


def test_an_object_has_a_group_and_nobody_else_names_it(
    make: Callable[..., Client], any_server: S3Server
) -> None:
    client = make(any_server.port, namespace="groups")
    assert client.tier.group_blocks == PACK
    assert client.write(*PATH[:7]) == [*PATH[:4]], "what is not whole is not written"
    assert client.write(5, 6, 8, 7) == [5, 6, 8, 7], "in whatever order it comes"
    assert client.write(9, 10, 12) == []
    assert client.write(*PATH[12:]) == [13, 14, 15, 16, 17, 18, 19, 20], "the tail of a path is in no group"
    assert client.tier.stats().puts == 2 + 4, "epoch, producer's text, and four objects"
    assert client.believes(21, 22, 23) == [False] * 3
    assert client.read(2, 3) == [2, 3], "a span of an object"
    assert client.read(1, 4, 6, 20, 13) == [1, 4, 6, 20, 13]
    # Another path in which the same blocks stand elsewhere: other groups, and none of them is there.
    other = make(any_server.port, namespace="groups")
    other.tier.groups.forget()
    other.tier.follow(other.tier.begin_request("shifted"), some_keys(*PATH[1:]))
    assert other.probe(*PATH[1:]) == []
    longer = make(any_server.port, namespace="groups")
    longer.tier.groups.forget()
    longer.tier.follow(longer.tier.begin_request("longer"), some_keys(*PATH[:10], 99, 98))
    assert longer.probe(*PATH[:10], 99, 98) == [*PATH[:8]], "two paths share what they begin with"
    assert longer.read(*PATH[:8]) == [*PATH[:8]]


def test_who_has_not_been_told_of_a_path_has_nothing(client: Client) -> None:
    assert client.believes(101, 102, 103, 104) == [False] * 4
    assert client.write(101, 102, 103, 104) == []
    path = some_keys(*range(101, 112))
    for length in (3, 5, 11):  # as it becomes known
        client.tier.follow(client.record, path[:length])
    assert client.believes(101, 108, 109) == [False, False, False], "a request has one path"
    request = client.tier.begin_request("other")
    for length in (3, 5, 11):
        client.tier.follow(request, path[:length])
    assert client.believes(101, 108, 109) == [None, None, False]


def test_places_are_bounded_and_told_again(client: Client) -> None:
    client.tier.groups.generation_blocks = 40
    for first in range(1000, 2000, 20):
        client.tier.follow(client.tier.begin_request("r"), some_keys(*range(first, first + 20)))
    assert len(client.tier.groups) <= 80
    assert client.believes(1) == [False], "forgotten"
    client.tier.follow(client.record, some_keys(*PATH))
    assert client.believes(1, 20) == [None, None]


def test_half_an_object_that_is_believed_to_be_there_is_written_all_the_same(client: Client) -> None:
    client.tier.presence.learn(digests(1, 2), np.ones(2, np.bool_))
    assert client.write(1, 2, 3, 4) == [1, 2, 3, 4]


def test_what_is_in_flight_is_bounded(client: Client) -> None:
    client.tier.jobs.in_flight_bytes = 6 * BLOCK_BYTES
    assert client.tier.queue_room == 6
    assert client.write(*PATH[:8]) == [1, 2, 3, 4], "two of the next object would have found room"
    assert client.tier.stats().dropped == 2
    assert client.tier.queue_room == 6
    client.tier.jobs.in_flight_bytes = 3 * BLOCK_BYTES
    assert client.read(1, 2, 3, 4) == [1, 2, 3]


def test_requests_are_counted_with_their_price(make: Callable[..., Client], rclone: Rclone) -> None:
    client = make(
        rclone.port, pack=0, price_per_1000_puts=5.0, price_per_1000_gets=0.5, price_per_gb_read=1e3
    )
    before = client.tier.stats()
    client.write(1, 2)
    written = client.tier.stats()
    assert written.puts - before.puts == 2
    assert written.gets - before.gets == 3, "the epoch, and whether they are there"
    received = client.tier.dialect.ledger.bytes_received
    client.read(1, 2)
    read = client.tier.stats()
    assert (read.puts - written.puts, read.gets - written.gets) == (0, 3)
    assert client.tier.dialect.ledger.bytes_received - received == 2 * STRIDE + 16
    gigabytes = client.tier.dialect.ledger.bytes_received / 1e9
    assert read.cost == pytest.approx(read.puts * 0.005 + read.gets * 0.0005 + gigabytes * 1e3)


# ---- resets


def test_a_bucket_that_has_lost_its_epoch_is_given_a_new_one(client: Client, rclone: Rclone) -> None:
    client.write(*PATH[:4])
    before = client.object(1)
    rclone.delete(client.tier.peer.keyspace.epoch_keys[0].decode())
    assert client.read(1) == []
    client.come_back()
    assert client.object(1) != before
    assert client.probe(1) == []
    assert rclone.file(before).exists()


@pytest.mark.slow
def test_of_several_that_find_no_epoch_one_makes_it(tmp_path: Path, make: Callable[..., Client]) -> None:
    """Moto takes the condition; a server that does not lets the last one win, and the others hear of it."""
    with running(Moto, tmp_path) as server:
        made: list[Client] = []
        threads = [threading.Thread(target=lambda: made.append(make(server.port))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({one.tier.peer.epoch.number for one in made if one.tier.peer.epoch is not None}) == 1


# ---- damage, by files


def damaged(kind: str, found: bytes, other: bytes) -> bytes:
    """An object of four blocks, the second of which is damaged."""
    at = STRIDE
    changes: dict[str, Callable[[], bytes]] = {
        "flip in a block": lambda: flipped(found, at + HEADER_BYTES + 100),
        "flip in a header": lambda: flipped(found, at + 20),
        "flip in a checksum": lambda: flipped(found, at + HEADER_BYTES - 1),
        "another version": lambda: flipped(found, at + 8),
        "another producer": lambda: found[: at + 24] + bytes(16) + found[at + 40 :],
        "another epoch": lambda: flipped(found, at + 40),
        "swapped with another object": lambda: other,
        "another's block in its place": lambda: found[:at] + other[at : 2 * at] + found[2 * at :],
        "two blocks exchanged": lambda: (
            found[:at] + found[2 * at : 3 * at] + found[at : 2 * at] + found[3 * at :]
        ),
        "zeros in a block": lambda: found[:at] + bytes(at) + found[2 * at :],
        "zeros": lambda: bytes(len(found)),
        "truncated by one": lambda: found[:-1],
        "truncated in the middle": lambda: found[: at + 50],
        "truncated to nothing": lambda: b"",
        "longer by one": lambda: found + b"\0",
        "much longer": lambda: found * 3,
        "shifted": lambda: found[1:] + found[:1],
    }
    return changes[kind]()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


IN_A_PART = {"flip in a block", "flip in a header", "flip in a checksum", "another version",
             "another producer", "another epoch", "another's block in its place",
             "zeros in a block"}  # fmt: skip
KINDS = [
    *sorted(IN_A_PART),
    *("swapped with another object", "two blocks exchanged", "zeros", "truncated by one"),
    *("truncated in the middle", "truncated to nothing", "longer by one", "much longer", "shifted"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_a_miss_and_what_comes_next_is_right(
    client: Client, rclone: Rclone, kind: str
) -> None:
    client.write(*PATH[:8])
    name = client.object(2)
    found = rclone.file(name).read_bytes()
    rclone.put(name, damaged(kind, found, rclone.file(client.object(6)).read_bytes()))
    served = client.read(1, 2, 3, 4, 5)
    assert 2 not in served
    assert served[-1:] == [5]
    if kind in IN_A_PART:
        assert served == [1, 3, 4, 5], "the others of the object are sound"
    assert client.tier.stats().mismatches > 0
    assert client.tier.stats().failed == 0
    assert not rclone.file(name).exists(), "nobody else meets it"
    assert client.believes(1, 2, 3, 4, 5) == [False] * 4 + [True]
    assert client.read(5, 6) == [5, 6]
    assert client.write(1, 2, 3, 4) == [1, 2, 3, 4]
    assert client.read(1, 2, 3, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("options", [{"namespace": "other"}, {"fingerprint": "other"}])
def test_an_object_that_was_copied_from_another_place_is_a_miss(
    client: Client, make: Callable[..., Client], rclone: Rclone, options: dict[str, str]
) -> None:
    """Byte by byte under a name where it does not belong."""
    other = make(rclone.port, **options)
    other.write(*PATH[:4])
    client.write(*PATH[4:8])
    rclone.put(client.object(1), rclone.file(other.object(1)).read_bytes())
    assert client.read(1, 2, 5) == [5]
    assert client.tier.stats().mismatches == 2


def test_an_object_of_an_older_epoch_is_a_miss(client: Client, rclone: Rclone) -> None:
    client.write(*PATH[:4])
    before = rclone.file(client.object(1)).read_bytes()
    client.tier.clear()
    client.tier.drain(PATIENCE_S)
    rclone.put(client.object(1), before)
    assert client.probe(1) == [1], "it is there, by its name"
    assert client.read(1) == []
    assert client.tier.stats().mismatches == 1


def test_a_span_of_an_object_that_was_cut(make: Callable[..., Client], tmp_path: Path) -> None:
    """Ranges are Moto's part: behind what is left, and over its end."""
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


def test_only_what_it_wrote_itself_is_told_and_what_of_that_is_gone(
    client: Client, make: Callable[..., Client], rclone: Rclone
) -> None:
    other = make(rclone.port)
    assert client.changes() == []
    assert other.write(*range(1, 5)) == [*range(1, 5)]
    client.write(*range(1, 13))
    assert client.changes() == [({*range(5, 13)}, False)], "the first object is another's"
    rclone.put(client.object(5), b"damage")
    rclone.delete(client.object(9))
    assert client.read(1, 5, 6) == [1]
    assert client.changes() == [({5, 6}, True)]
    client.tier.presence.clear()
    assert client.probe(1, 9, 10) == [1]
    assert client.changes() == [({9, 10}, True)]


def test_a_wrong_hint_is_a_stale_miss_and_learnt_at_once(client: Client, rclone: Rclone) -> None:
    client.write(*PATH[:8])
    rclone.delete(client.object(1))
    result = client.wait(client.begin_read(1, 5))
    assert result.ok.tolist() == [False, True]
    assert result.stale is not None
    assert result.stale.tolist() == [True, False]
    assert client.believes(1, 5) == [False, True]
    assert client.tier.stats().stale == 1


# ---- the network


def test_a_flipped_byte_anywhere_in_the_answer(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client = make(proxy.port, timeout=3.0)
    client.write(*PATH[:4])
    for flip_at in [*range(0, 600, 41), *range(600, 4 * STRIDE, 9973)]:
        proxy.set(flip_at=flip_at)
        client.read(1, 2, 3, 4)  # whatever is served has its bytes
        proxy.set()
        client.come_back()
        client.tier.presence.clear()
        client.write(*PATH[:4])
        client.tier.presence.learn(digests(1, 2, 3, 4), np.ones(4, np.bool_))
        assert client.read(1, 2, 3, 4) == [1, 2, 3, 4]


def test_a_connection_that_is_cut_anywhere(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client = make(proxy.port)
    client.write(*PATH[:4])
    for cut_after in [0, 1, 100, 300, *range(1000, 4 * STRIDE, 19997)]:
        proxy.set(cut_after=cut_after)
        assert client.read(1, 2, 3, 4) == []
        proxy.set()
        client.come_back()
        client.tier.presence.learn(digests(1, 2, 3, 4), np.ones(4, np.bool_))
        assert client.read(1, 2, 3, 4) == [1, 2, 3, 4]


FAULTS: dict[str, dict[str, Any]] = {
    "hangs": {"hang": True},
    "one byte a second": {"bytes_per_s": 1.0},
    "hangs in the middle of a block": {"bytes_per_s": 5000.0},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_takes_longer_than_its_deadline(
    proxy: FaultProxy, make: Callable[..., Client], fault: str
) -> None:
    """A read may take 0.5 s and a probe 0.3; ten times that is far from what a fault takes: for ever."""
    client, writer = make(proxy.port, timeout=0.5, probe_timeout=0.3), make(proxy.port)
    writer.write(*PATH[:4])
    proxy.set(**FAULTS[fault])
    begun = time.monotonic()
    job = client.begin_read(1, 2)
    probe = client.tier.submit_probe(some_keys(5, 6))
    results: dict[int, JobResult] = {}
    while {job, probe} - {*results}:
        before = time.thread_time()
        results |= {result.job: result for result in client.tier.finished()}
        client.believes(1)
        assert time.thread_time() - before < 0.1, "the scheduler's thread does not wait"
        assert time.monotonic() - begun < 5.0
    assert client.check(results[job], 1, 2) == []
    assert not results[probe].ok.any()
    assert client.believes(1, 5) == [False, False], "not asked for again at once"
    assert 2 <= client.tier.stats().timeouts <= 4, "a short answer may come"
    proxy.set()
    client.come_back()
    client.probe(9)
    assert (client.pool == CANARY).all(), "what comes late is written nowhere"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down", "404 Not Found", "200 OK"])
def test_a_server_that_answers_something_else(
    proxy: FaultProxy, make: Callable[..., Client], status: str
) -> None:
    client = make(proxy.port, timeout=3.0, probe_timeout=3.0)
    client.write(*PATH[:4])
    proxy.drop_connections()
    proxy.set(answer=f"HTTP/1.1 {status}\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsorry\n".encode())
    for _ in range(3):
        assert client.read(1, 2) == []
        assert client.probe(9) == []
    proxy.set()
    client.come_back()
    client.tier.presence.clear()
    client.write(*PATH[:4])
    assert client.read(1, 2) == [1, 2]


def test_a_server_that_has_no_time_for_writes_is_a_dropped_write(
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
    assert client.write(*PATH[:8]) == [], "it pauses"
    proxy.set()
    client.try_again_now()
    assert client.write(*PATH[:8]) == [*PATH[:8]]


# ---- how it is described, and what is said of it


def test_a_secret_is_in_no_log_and_no_text(
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
            with pytest.raises(ConfigError, match="SignatureDoesNotMatch") as refused:
                make(server.port)
            server.stop()
            for _ in range(4):
                client.read(1)
        text = f"{caplog.text} {client.tier.stats()} {client.tier.last_error!r} {vars(client.tier)}"
        text += str(refused.value)
        assert "does not answer as it should" in caplog.text
        for secret in (SECRET, "hunter3", KEY_ID):
            assert secret not in text


@pytest.mark.parametrize(
    "content", ["", "[other]\naws_access_key_id = a\n", "hunter2", "[default]\nregion = x\n", "\xff\xfe"]
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "credentials"
    file.write_bytes(content.encode("latin-1"))
    options = S3Options(url="s3://kv-cache/ns", credentials_file=str(file))
    with pytest.raises(ConfigError, match=r"^credentials_file: .*has no section") as refused:
        options.open(TierOwner(BLOCK_BYTES, 36, "m"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://me:hunter2@bucket/ns", "tier.url: 's3://***@bucket/ns' is invalid; allowed: s3://BUCKET"),
        ("s3://bucket", "tier.url: 's3://bucket' is invalid"),
        ("s3://Bucket/ns", "tier.url: "),
        ("s3://bucket/a//b", "tier.url: "),
        ("s3://bucket/ns?endpoint=host:9000", "tier.endpoint: 'host:9000' is invalid"),
        ("s3://bucket/ns?endpoint=http://me:hunter2@host", "tier.endpoint: 'http://***@host' is invalid"),
        ("s3://bucket/ns?secret_access_key=hunter2", "a secret belongs in the environment or in a file"),
        ("s3://bucket/ns?pack=some", "tier.pack: 'some' is invalid"),
        ("s3://bucket/ns?price_per_1000_puts=-1", "tier.price_per_1000_puts: '-1' is invalid"),
        ("s3://bucket/ns?timeout=0", "tier.timeout: '0' is invalid"),
        ("s3://bucket/ns?capacity=5GiB", "there is no such option"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tier("tier", text)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_as_users_type_it() -> None:
    found = parse_tier(
        "tier", "s3://bucket/team/a?endpoint=https://minio:9000&region=eu-1&pack=8MiB&admission=reuse:2"
    )
    assert found == S3Options(
        url="s3://bucket/team/a",
        endpoint="https://minio:9000",
        region="eu-1",
        pack=8 << 20,
        admission="reuse:2",
    )
    assert parse_tier("tier", str(found)) == found


@pytest.mark.parametrize(
    ("pack", "block_bytes", "group_blocks"),
    [(16 << 20, 2 << 20, 8), (16 << 20, 4096, 32), (16 << 20, 32 << 20, 1), (0, 4096, 1), (10_000, 4096, 2)],
)
def test_how_many_blocks_an_object_has(pack: int, block_bytes: int, group_blocks: int) -> None:
    options = S3Options(url="s3://bucket/ns", pack=pack)
    assert options.group_blocks(TierOwner(block_bytes, 36, "m")) == group_blocks
    assert options.group_blocks(TierOwner(block_bytes, 36, "m", tells_paths=False)) == 1


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvoffload\[s3\]'"):
        S3Options(url="s3://bucket/ns").open(TierOwner(BLOCK_BYTES, 36, "m"))


@pytest.mark.parametrize(
    ("endpoint", "is_said"),
    [
        ("http://cache:9000", True),
        ("https://cache:9000", False),
        ("http://localhost:9000", False),
        ("", False),
    ],
)
def test_a_way_without_tls_is_said(endpoint: str, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    S3Options(url="s3://bucket/ns", endpoint=endpoint).warn_if_unencrypted()
    assert ("without TLS" in caplog.text) is is_said


def test_it_does_not_stand_beside_others(client: Client) -> None:
    with pytest.raises(ConfigError, match="tiers that no other machine shares"):
        StripedTier([client.tier])


def test_a_bucket_that_is_not_there_is_refused(any_server: S3Server) -> None:
    options = S3Options(url="s3://no-such-bucket/ns", endpoint=any_server.endpoint, region="us-east-1")
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        options.open(TierOwner(BLOCK_BYTES, 36, "m"))


@pytest.mark.slow
def test_a_bucket_that_is_deleted_while_it_is_used_and_made_again(
    make: Callable[..., Client], tmp_path: Path
) -> None:
    with running(Moto, tmp_path) as server:
        assert isinstance(server, Moto)
        client = make(server.port)
        assert client.write(*PATH[:8]) == [*PATH[:8]]
        server.delete_bucket()
        assert client.read(*PATH[:8]) == client.write(*PATH[8:12]) == client.probe(13) == []
        assert "NoSuchBucket" in str(client.tier.last_error)
        server.empty()
        client.come_back()
        assert client.read(*PATH[:8]) == []
        assert client.write(*PATH[:8]) == [*PATH[:8]]
        assert client.read(*PATH[:8]) == [*PATH[:8]]


def test_a_server_that_is_not_there_costs_a_command_its_start_and_an_engine_nothing(
    rclone: Rclone, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(rclone.port) as proxy:
        proxy.set(refuse=True)
        options = S3Options(
            url=f"s3://{BUCKET}/ns",
            endpoint=f"http://127.0.0.1:{proxy.port}",
            region="us-east-1",
            timeout=PATIENCE_S,
        )
        with pytest.raises(UnavailableError, match="cannot be used now"):
            options.open(TierOwner(BLOCK_BYTES, 36, "m"))
        tier = options.open(TierOwner(BLOCK_BYTES, 36, "m", go_on_without=lambda _: None))
        assert "does not answer yet" in caplog.text
        proxy.set()
        until = time.monotonic() + PATIENCE_S
        while not tier.is_open():
            tier.end_pauses()
            assert time.monotonic() < until
        tier.close()
