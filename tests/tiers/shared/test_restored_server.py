"""A server that restores a snapshot from before a reset, and warnings about servers that save.

The restored server has the old epoch and blocks again. `SharedTierContract` does the same without a crash.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import Persistence
from kvoffload.tiers.valkey.persistence import persistence_of
from support.pauses import end_pauses
from support.sharing_client import closed_at_the_end
from support.valkey_client import Client
from support.valkey_server import PATIENCE_S, Server, redis, running

NUMBERS = [1, 2, 3, 4]


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(Client)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that saves."""
    with running(tmp_path, "--save", "3600 1", program=redis()) as server:
        yield server


def crash(server: Server) -> None:
    """Kill the server and start it again, with the last snapshot."""
    server.stop()
    server.start()


def read_until_reset(client: Client) -> list[int]:
    """Read until the tier has noticed the old epoch and reset it; returns the served blocks."""
    served = client.read(*NUMBERS)
    until = time.monotonic() + PATIENCE_S
    while not client.tier.drain(0.01):
        end_pauses(client.tier)
        assert time.monotonic() < until
    client.wait_until_open()
    return served + client.read(*NUMBERS)


@pytest.mark.parametrize("first_reader", ["the engine that reset", "another engine"])
def test_restored_epoch_is_reset_again(
    server: Server, make: Callable[..., Client], first_reader: str
) -> None:
    client, other = make(server), make(server)
    assert client.write(*NUMBERS) == NUMBERS
    assert server.execute("SAVE") == b"OK"
    client.reset()
    assert other.read(*NUMBERS) == []
    other.wait_until_open()  # the other engine has seen the reset
    crash(server)
    first, second = (client, other) if first_reader == "the engine that reset" else (other, client)
    assert read_until_reset(first) == []
    assert read_until_reset(second) == []
    assert make(server).read(*NUMBERS) == [], "an engine that starts now finds no block either"
    assert first.write(*NUMBERS) == NUMBERS
    assert first.read(*NUMBERS) == NUMBERS


def test_engine_started_after_the_crash_follows_the_reset(
    server: Server, make: Callable[..., Client]
) -> None:
    """The new engine cannot know that the epoch is old. It follows the reset of an engine that knows."""
    client = make(server)
    client.write(*NUMBERS)
    assert server.execute("SAVE") == b"OK"
    client.reset()
    crash(server)
    new = make(server)
    assert new.read(*NUMBERS) == NUMBERS, "no engine has noticed the old epoch yet, as docs/cluster.md says"
    assert read_until_reset(client) == []
    assert new.read(*NUMBERS) == []
    new.wait_until_open()
    new.write(*NUMBERS)
    assert client.read(*NUMBERS) == NUMBERS, "both engines are in one epoch"


def test_lost_epoch_is_not_taken_for_a_restored_epoch(server: Server, make: Callable[..., Client]) -> None:
    """After ``FLUSHALL`` an engine makes a new epoch, and no engine resets the new epoch."""
    client, other = make(server), make(server)
    client.write(*NUMBERS)
    server.execute("FLUSHALL")
    assert read_until_reset(client) == []
    client.write(*NUMBERS)
    epoch = client.tier.peer.epoch
    other.read(*NUMBERS)
    other.wait_until_open()
    assert other.read(*NUMBERS) == NUMBERS
    assert client.tier.peer.epoch == other.tier.peer.epoch == epoch
    assert client.read(*NUMBERS) == NUMBERS


def test_late_handshake_is_not_taken_for_a_restored_epoch(
    server: Server, make: Callable[..., Client]
) -> None:
    """A handshake from before another engine's reset may return the old epoch."""
    client, other = make(server), make(server)
    client.write(1)
    old = client.tier.peer.epoch.number
    late = client.tier.peer.new_handshake(time.monotonic() + PATIENCE_S)
    late.numbers = (old,)
    other.reset()
    client.read(1)
    client.wait_until_open()
    new = client.tier.peer.epoch.number
    assert new != old
    client.tier.peer.handshake = late
    client.tier.jobs.ended.append(late)
    client.tier.finished()
    assert client.tier.drain(PATIENCE_S)
    client.wait_until_open()
    assert client.tier.peer.epoch.number == new
    assert other.read(1) == []
    assert other.tier.peer.epoch.number == new, "the epoch was not reset"


def test_restored_epoch_is_logged(
    server: Server, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make(server)
    client.write(*NUMBERS)
    assert server.execute("SAVE") == b"OK"
    client.reset()
    crash(server)
    read_until_reset(client)
    assert any("is reset once more" in record.getMessage() for record in caplog.records)


# ---- history of epochs


def test_replaced_or_reset_epoch_has_ended() -> None:
    history = EpochHistory()
    history.record([b"a", b"b"], [1, 2], now=10.0)
    assert not history.has_ended(1, since=20.0)
    history.record([b"a", b"b"], [1, 3], now=30.0)
    assert [history.has_ended(number, since=40.0) for number in (1, 2, 3)] == [False, True, False]
    history.end([b"a", b"c"], now=50.0)
    assert history.has_ended(1, since=60.0)
    history.record([b"a"], [4], now=70.0)
    assert not history.has_ended(4, since=80.0)


def test_observation_from_before_the_end_is_outdated() -> None:
    history = EpochHistory()
    history.record([b"a"], [1], now=10.0)
    history.record([b"a"], [2], now=20.0)
    assert history.is_outdated(1, since=15.0)
    assert not history.has_ended(1, since=15.0)
    assert history.has_ended(1, since=20.0)
    assert not history.is_outdated(1, since=20.0)


def test_epoch_history_is_bounded() -> None:
    history = EpochHistory(most_ended=3)
    for number in range(6):
        history.record([b"a"], [number], now=float(number))
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
def test_persistence_by_settings(facts: Any, settings: Any, expected: Persistence) -> None:
    assert persistence_of(facts, settings)[0] is expected


def test_warns_about_a_server_that_saves(
    server: Server, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvoffload.remote"):
        make(server)
    (warning,) = [record.getMessage() for record in caplog.records if "saves" in record.getMessage()]
    assert 'save "3600 1"' in warning


@pytest.mark.parametrize("may_ask", [True, False])
def test_no_warning_without_saves_or_without_rights(
    tmp_path: Path,
    make: Callable[..., Client],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    may_ask: bool,
) -> None:
    with running(tmp_path, *([] if may_ask else ["--save", "3600 1"]), program=redis()) as server:
        if not may_ask:
            user = ["on", "nopass", "~*", "+get", "+set", "+exists", "+del"]
            assert server.execute("ACL", "SETUSER", "engine", *user) == b"OK"
            monkeypatch.setenv("KVOFFLOAD_VALKEY_USERNAME", "engine")
            monkeypatch.setenv("KVOFFLOAD_VALKEY_PASSWORD", "any")
        client = make(server)
        assert client.write(1) == [1]
        assert client.read(1) == [1], "a refused question has no effect"
    assert not [record for record in caplog.records if "saves" in record.getMessage()]
