"""Hostile servers and clusters: a few steps of every attack of `hostile_resp`.

A soak run takes more steps: ``python tests/support/hostile_resp.py --seed 1 --rounds 10``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.tiers.shared.remote_errors import ProtocolError, ServerError
from kvoffload.tiers.shared.server import RemoteOptions
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.cluster_map import MOST_MASTERS, Address, MapQuestion
from kvoffload.tiers.valkey.resp import Connection, Login
from support.hostile_resp import MAPS, REPLIES, FakeServer, Outcome, attack_map, attack_replies, encoded
from support.pauses import end_pauses
from support.sampling import sampled
from support.sharing_client import some_keys

STEPS = 8


def check(outcome: Outcome) -> None:
    assert outcome.wrong == 0, outcome
    assert outcome.escapes == 0, outcome.first
    assert outcome.leaks == 0, outcome
    assert outcome.recovered, outcome


@pytest.mark.parametrize("name", sampled(REPLIES, 8))
def test_hostile_server_costs_only_misses(name: str) -> None:
    outcome = attack_replies(name, seed=1, steps=STEPS)
    check(outcome)
    assert outcome.attacks or isinstance(REPLIES[name], tuple), "the attack did not take place"


@pytest.mark.parametrize("name", sampled(MAPS, 8))
def test_cluster_with_a_wrong_map_costs_only_misses(name: str) -> None:
    check(attack_map(name, seed=1, steps=STEPS))


# ---- maps


class MapConnection:
    """A connection to a node that answers with this state and map."""

    host = "asked"

    def __init__(self, slots: Any, state: Any = b"cluster_state:ok\r\ncluster_size:3\r\n") -> None:
        self._answers = [state, slots]

    def send(self, *_: Any) -> None: ...

    def answer(self, *_: Any) -> Any:
        return self._answers.pop(0)


def map_in(ranges: Any) -> MapQuestion:
    question = MapQuestion(deadline=0.0)
    question.run(MapConnection(ranges))  # type: ignore[arg-type]
    return question


def divisions_in(*ranges: Any) -> dict[Address, tuple[int, ...]]:
    return map_in([*ranges]).divisions


def node(host: Any = b"h", port: Any = 7) -> list[Any]:
    return [host, port, b"id"]


def test_map_with_replicas_and_unknown_hosts_is_read() -> None:
    replica = [b"1.2.3.4", 8, b"id", []]
    question = map_in(
        [
            [0, 127, [*node(), [b"hostname", b"x"]], replica, replica],
            [128, 128, node(None, 9), replica],
            [129, 191, node(b"", 9)],
            [192, 192, node(b"?", 9)],
            [256, 256, node(), replica, replica],
        ]
    )
    assert question.divisions == {("h", 7): (0, 1, 4), ("asked", 9): (2,)}
    assert question.num_replicas["h", 7] == 2


@pytest.mark.parametrize(
    "ranges", [b"OK", None, [1], [[0, 1]], [[0, 1, [b"h"]]], [[0, b"x", [b"h", 1]]], [[0, 1, 5]]]
)
def test_reply_that_is_no_map_is_refused(ranges: Any) -> None:
    with pytest.raises(ProtocolError):
        map_in(ranges)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"cluster_state:fail\r\n", "CLUSTERDOWN"),
        (ServerError("NOPERM"), "NOPERM"),
        (None, "CLUSTER INFO"),
    ],
)
def test_map_of_a_node_that_is_not_well_is_refused(state: Any, message: str) -> None:
    question = MapQuestion(deadline=0.0)
    with pytest.raises((ServerError, ProtocolError), match=message):
        question.run(MapConnection([[0, 127, node()]], state))  # type: ignore[arg-type]
    assert not question.divisions


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([[0, 16384, node()]], "outside of slots 0 to 16383"),
        ([[16384, 16384, node()]], "outside of slots"),
        ([[0, 10**9, node()]], "outside of slots"),
        ([[-1, 5, node()]], "outside of slots"),
        ([[5, 4, node()]], "outside of slots"),
        ([[b"0", b"5", node()]], "outside of slots"),
        ([[0]], "outside of slots"),
        ([[0, 5, node()], [5, 6, node()]], "a slot in two ranges"),
        (2 * [[0, 16383, node()]], "a slot in two ranges"),
        ([[0, 5, node(port=0)]], "a port from 1 to 65535"),
        ([[0, 5, node(port=65536)]], "a port from 1 to 65535"),
        ([[0, 5, node(port=b"7")]], "a port from 1 to 65535"),
        ([[0, 5, node(b"h\n2026 forged")]], "neither a name nor an address"),
        ([[0, 5, node(b"\x1b[31m")]], "neither a name nor an address"),
        ([[0, 5, node(b"h" * 300)]], "neither a name nor an address"),
        ([[0, 5, node(b"[/foo]")]], "neither a name nor an address"),
        ([[0, 5, node(b"a..b")]], "neither a name nor an address"),
        ([[n * 64, n * 64, node(port=n + 1)] for n in range(MOST_MASTERS + 1)], "more than 128 masters"),
    ],
)
def test_impossible_map_is_refused(ranges: list[Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        divisions_in(*ranges)


@pytest.mark.parametrize("host", [b"10.0.0.7", b"::1", b"fe80::1%eth0", b"cache-1.team_a.svc.", b"c"])
def test_names_and_addresses_are_hosts(host: bytes) -> None:
    assert divisions_in([0, 16383, node(host)]) == {(host.decode(), 7): tuple(range(256))}


def test_the_largest_map_is_read() -> None:
    divisions = divisions_in(*[[slot, slot, node(port=1 + slot // 128)] for slot in range(16384)])
    assert len(divisions) == MOST_MASTERS
    assert divisions["h", 1] == (0, 1)


# ---- the tier and its maps


@pytest.fixture
def server() -> Any:
    server = FakeServer(1)
    server.slots = lambda: encoded([[0, 16383, [b"127.0.0.1", server.port, b"id"]]])
    yield server
    server.stop()


@pytest.fixture
def tier(server: FakeServer) -> Any:
    def connect(address: Address, deadline: float) -> Connection:
        return Connection(*address, Login(), deadline)

    options = RemoteOptions(
        namespace="ns", fingerprint="model", block_bytes=4096, timeout_s=60.0, probe_timeout_s=60.0
    )
    seeds = [("127.0.0.1", server.port)]
    tier = ClusterTier("valkey", "there", seeds, connect, options)
    yield tier
    tier.close()


def wait(tier: ClusterTier, until: Callable[[], bool]) -> None:
    last = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < last
        end_pauses(tier)
        tier.finished()
        time.sleep(0.001)


def a_map(*addresses: Address) -> MapQuestion:
    question = MapQuestion(deadline=0.0)
    size = 256 // len(addresses)
    question.divisions = {
        address: tuple(range(number * size, (number + 1) * size)) for number, address in enumerate(addresses)
    }
    question.num_replicas = dict.fromkeys(addresses, 0)
    return question


def test_map_whose_nodes_cannot_be_made_is_dropped(
    tier: ClusterTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(tier, tier.is_whole)
    nodes, homes, numbers = {**tier.nodes}, tier.homes.copy(), {**tier.numbers}
    made = []

    class FailsError(Exception):
        pass

    def new_node(address: Address, divisions: tuple[int, ...]) -> Any:
        made.append(address)
        if len(made) == 3:
            raise FailsError
        return original(address, divisions)

    original = tier.new_node
    monkeypatch.setattr(tier, "new_node", new_node)
    with pytest.raises(FailsError):
        tier.use_map(a_map(*[("127.0.0.1", port) for port in range(1, 9)]))
    assert (tier.nodes, tier.numbers) == (nodes, numbers)
    assert (tier.homes == homes).all()
    monkeypatch.undo()
    tier.finished()
    assert tier.is_whole()
    assert tier.unknown(some_keys(1, 2)).all(), "the tier is open"


def test_large_map_takes_effect_over_several_calls(tier: ClusterTier) -> None:
    wait(tier, tier.is_whole)
    old = {*tier.nodes}
    tier.use_map(a_map(*[("127.0.0.1", port) for port in range(1, 65)]))
    assert {*tier.numbers.values()} == old, "the old map is in use until all nodes have been made"
    calls = 0
    while {*tier.numbers.values()} & old:
        tier.make_some_nodes()
        calls += 1
    assert calls == 64 // 8 - 1
    assert sum(tier.nodes[number].peer.has_begun for number in tier.numbers.values()) <= 8


def test_node_without_threads_is_absent(
    tier: ClusterTier, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(tier, tier.is_whole)
    start = threading.Thread.start

    def refuses(thread: threading.Thread) -> None:
        if thread.name.startswith("kvoffload-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    tier.use_map(a_map(("127.0.0.1", server.port), ("localhost", server.port)))
    keys = some_keys(*range(50))
    assert not tier.contains(keys).any()
    assert not tier.unknown(keys).any()
    assert tier.submit_probe(keys) == -1 or not tier.finished()
    monkeypatch.undo()
    wait(tier, lambda: bool(tier.unknown(keys).all()))
