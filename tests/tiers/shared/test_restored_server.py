"""A server that restores a snapshot from before a reset: the old epoch returns, and its blocks with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.s3.protocol import epoch_name
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import Persistence
from kvoffload.tiers.valkey.persistence import persistence_of
from support import s3_server
from support.s3_client import Client as BucketClient
from support.s3_server import KEY_ID, SECRET, Rclone
from support.sharing_client import some_keys
from support.valkey_client import Client
from support.valkey_server import PATIENCE_S, Server, clustered, redis, running

NUMBERS = [1, 2, 3, 4]


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def one(*place: Any, **options: Any) -> Client:
        made.append(Client(*place, **options))
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that saves."""
    with running(tmp_path, "--save", "3600 1", program=redis()) as server:
        yield server


def crash(server: Server) -> None:
    """``kill -9`` and a restart: the server has what it last saved."""
    server.stop()
    server.start()


def reset(client: Client) -> None:
    client.tier.clear()
    assert client.tier.drain(PATIENCE_S)


def read_until_reset(client: Client) -> list[int]:
    """Read while the tier notices, and resets; returns the blocks that were served."""
    served = client.read(*NUMBERS)
    until = time.monotonic() + PATIENCE_S
    while not client.tier.drain(0.01):
        client.try_again_now()
        assert time.monotonic() < until
    client.come_to_terms()
    return served + client.read(*NUMBERS)


@pytest.mark.parametrize("who", ["the engine that reset", "another engine"])
def test_an_epoch_that_returns_is_answered_with_a_reset(
    server: Server, make: Callable[..., Client], who: str
) -> None:
    client, other = make(server), make(server)
    assert client.write(*NUMBERS) == NUMBERS
    assert server.say("SAVE") == b"OK"
    reset(client)
    assert other.read(*NUMBERS) == []
    other.come_to_terms()  # it has seen the reset
    crash(server)
    first, second = (client, other) if who == "the engine that reset" else (other, client)
    assert read_until_reset(first) == []
    assert read_until_reset(second) == []
    assert make(server).read(*NUMBERS) == [], "also an engine that starts now"
    assert first.write(*NUMBERS) == NUMBERS
    assert first.read(*NUMBERS) == NUMBERS


def test_an_engine_that_starts_between_crash_and_reset_learns_of_it(
    server: Server, make: Callable[..., Client]
) -> None:
    """It cannot know that the epoch is old; it follows the reset of an engine that does."""
    client = make(server)
    client.write(*NUMBERS)
    assert server.say("SAVE") == b"OK"
    reset(client)
    crash(server)
    new = make(server)
    assert new.read(*NUMBERS) == NUMBERS, "nobody who knows has been here: docs/cluster.md says so"
    assert read_until_reset(client) == []
    assert new.read(*NUMBERS) == []
    new.come_to_terms()
    new.write(*NUMBERS)
    assert client.read(*NUMBERS) == NUMBERS, "both are in one epoch"


def test_an_epoch_that_was_lost_is_not_one_that_returned(server: Server, make: Callable[..., Client]) -> None:
    """After ``FLUSHALL`` a new epoch is made, and nobody resets it."""
    client, other = make(server), make(server)
    client.write(*NUMBERS)
    server.say("FLUSHALL")
    assert read_until_reset(client) == []
    client.write(*NUMBERS)
    epoch = client.tier.peer.epoch
    other.read(*NUMBERS)
    other.come_to_terms()
    assert other.read(*NUMBERS) == NUMBERS
    assert client.tier.peer.epoch == other.tier.peer.epoch == epoch
    assert client.read(*NUMBERS) == NUMBERS


def test_a_late_answer_from_before_a_reset_is_no_return(server: Server, make: Callable[..., Client]) -> None:
    """A handshake that was sent before this engine learned of a reset may bring the old epoch."""
    client, other = make(server), make(server)
    client.write(1)
    old = client.tier.peer.epoch.number
    late = client.tier.peer.new_handshake(time.monotonic() + PATIENCE_S)
    late.numbers = (old,)
    reset(other)
    client.read(1)
    client.come_to_terms()
    new = client.tier.peer.epoch.number
    assert new != old
    client.tier.peer.handshake = late
    client.tier.jobs.ended.append(late)
    client.tier.finished()
    assert client.tier.drain(PATIENCE_S)
    client.come_to_terms()
    assert client.tier.peer.epoch.number == new
    assert other.read(1) == []
    assert other.tier.peer.epoch.number == new, "nobody has reset it"


def test_a_return_is_logged(
    server: Server, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make(server)
    client.write(*NUMBERS)
    assert server.say("SAVE") == b"OK"
    reset(client)
    crash(server)
    read_until_reset(client)
    assert any("is reset once more" in record.getMessage() for record in caplog.records)


def test_a_node_of_a_cluster_that_restores_old_epochs(tmp_path: Path, make: Callable[..., Client]) -> None:
    with clustered(tmp_path) as cluster:
        client = make(cluster)
        numbers = list(range(1, 60))
        assert client.write(*numbers) == numbers
        master = cluster.masters[0]
        names = [name for name in master.ask("KEYS", "*") if b":epoch:" in name]
        old = {name: master.say("GET", name) for name in names}
        blocks = {name: master.value(name) for name in master.names()}
        reset(client)
        assert client.read(*numbers) == []
        for name, value in (old | blocks).items():
            assert master.say("SET", name, value) == b"OK"
        new = make(cluster)
        assert new.read(*numbers) != [], "as a new engine finds it"
        until = time.monotonic() + PATIENCE_S
        while any(master.say("GET", name) == value for name, value in old.items()):
            assert client.read(*numbers) == []
            assert time.monotonic() < until
        assert client.read(*numbers) == new.read(*numbers) == []


def test_a_bucket_whose_old_epoch_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with s3_server.running(Rclone, tmp_path) as rclone:
        client = BucketClient(rclone.port)
        assert client.write(*NUMBERS) == NUMBERS
        place = epoch_name("ns", client.tier.peer.keyspace.producer).decode()
        old = rclone.get(place)
        client.tier.clear()
        assert client.tier.drain(PATIENCE_S)
        rclone.put(place, old)
        client.tier.presence.clear()
        assert client.probe(*NUMBERS) == []
        client.come_back()
        assert client.read(*NUMBERS) == []
        assert rclone.get(place) != old
        client.tier.close()


# ---- the memory of epochs


def test_an_epoch_that_was_replaced_or_reset_has_ended() -> None:
    history = EpochHistory()
    history.enter([b"a", b"b"], [1, 2], now=10.0)
    assert not history.has_ended(1, since=20.0)
    history.enter([b"a", b"b"], [1, 3], now=30.0)
    assert [history.has_ended(number, since=40.0) for number in (1, 2, 3)] == [False, True, False]
    history.end([b"a", b"c"], now=50.0)
    assert history.has_ended(1, since=60.0)
    history.enter([b"a"], [4], now=70.0)
    assert not history.has_ended(4, since=80.0)


def test_an_observation_from_before_the_end_proves_nothing() -> None:
    history = EpochHistory()
    history.enter([b"a"], [1], now=10.0)
    history.enter([b"a"], [2], now=20.0)
    assert history.is_outdated(1, since=15.0)
    assert not history.has_ended(1, since=15.0)
    assert history.has_ended(1, since=20.0)
    assert not history.is_outdated(1, since=20.0)


def test_the_memory_of_epochs_is_bounded() -> None:
    history = EpochHistory(most_ended=3)
    for number in range(6):
        history.enter([b"a"], [number], now=float(number))
    assert [history.has_ended(number, since=10.0) for number in range(6)] == [False] * 2 + [True] * 3 + [
        False
    ]


# ---- a server that saves


@pytest.mark.parametrize(
    ("facts", "settings", "expected"),
    [
        ({"aof_enabled": "0"}, {"save": "", "appendonly": "no"}, Persistence.OFF),
        ({"aof_enabled": "0"}, {"save": "3600 1", "appendonly": "no"}, Persistence.ON),
        ({"aof_enabled": "1"}, {"save": "", "appendonly": "yes"}, Persistence.ON),
        ({}, {"save": "", "appendonly": "yes"}, Persistence.ON),
        ({"aof_enabled": "1"}, {}, Persistence.ON),
        ({"aof_enabled": "0", "rdb_saves": "2"}, {}, Persistence.ON),
        ({"aof_enabled": "0", "rdb_saves": "0"}, {}, Persistence.UNKNOWN),
        ({}, {}, Persistence.UNKNOWN),
        ({}, {"save": ""}, Persistence.UNKNOWN),
    ],
)
def test_what_settings_say_of_persistence(facts: Any, settings: Any, expected: Persistence) -> None:
    assert persistence_of(facts, settings)[0] is expected


def wait_for_the_question(client: Client) -> None:
    until = time.monotonic() + PATIENCE_S
    while client.tier.peer.persistence_question is not None:
        client.tier.finished()
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_server_that_saves_is_named_at_the_start(
    server: Server, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvoffload.remote"):
        wait_for_the_question(make(server))
    (said,) = [record.getMessage() for record in caplog.records if "saves" in record.getMessage()]
    assert 'save "3600 1"' in said


@pytest.mark.parametrize("may_ask", [True, False])
def test_nothing_is_said_of_one_that_does_not_save_or_does_not_tell(
    tmp_path: Path,
    make: Callable[..., Client],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    may_ask: bool,
) -> None:
    with running(tmp_path, *([] if may_ask else ["--save", "3600 1"]), program=redis()) as server:
        if not may_ask:
            user = ["on", "nopass", "~*", "+get", "+set", "+exists", "+del"]
            assert server.say("ACL", "SETUSER", "engine", *user) == b"OK"
            monkeypatch.setenv("KVOFFLOAD_VALKEY_USERNAME", "engine")
            monkeypatch.setenv("KVOFFLOAD_VALKEY_PASSWORD", "any")
        client = make(server)
        wait_for_the_question(client)
        assert client.write(1) == [1]
        assert client.read(1) == [1], "a refused question costs nothing"
    assert not [record for record in caplog.records if "saves" in record.getMessage()]


def test_a_cluster_warns_once(
    tmp_path: Path, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    with clustered(tmp_path) as cluster:
        for master in cluster.masters:
            assert master.say("CONFIG", "SET", "save", "3600 1") == b"OK"
        client = make(cluster)
        until = time.monotonic() + PATIENCE_S
        while any(node.peer.persistence_question is not None for node in client.tier.nodes.values()):
            client.tier.finished()
            client.tier.contains(some_keys(*range(99)))
            assert time.monotonic() < until
            time.sleep(0.001)
    assert sum("saves" in record.getMessage() for record in caplog.records) == 1
