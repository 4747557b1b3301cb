"""A real cluster behind RAM: a dead, hanging, moved or empty node costs its own blocks and nothing else.

Three masters with a replica each. A deadline is tested against factors of ten, never against this machine.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay, ReplayConfig
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.errors import ProtocolError, ServerError
from kvoffload.tiers.shared.identity import rest_names
from kvoffload.tiers.shared.tier import RemoteOptions
from kvoffload.tiers.spec import TierOwner, parse_tier, parse_tiers
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.cluster_map import Address, MapQuestion
from kvoffload.tiers.valkey.divisions import division_of, slot_of
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.fault_proxy import FaultProxy
from support.sharing_client import CANARY, some_keys
from support.valkey_client import BLOCK_BYTES, Client
from support.valkey_server import PATIENCE_S, Cluster, Server, clustered, running, self_signed

NUMBERS = list(range(1, 61))
PART_BY_PART = ("--cluster-require-full-coverage", "no")
"""A master that is gone does not take the others with it."""


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("cluster"), *PART_BY_PART) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    for server in shared_cluster.masters:
        assert server.say("FLUSHALL") == b"OK"
    return shared_cluster


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def one(*place: Any, **options: Any) -> Client:
        made.append(Client(*place, **options))
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


def test_a_cluster_of_which_nothing_is_known_drops_what_is_offered() -> None:
    """So it may be for hours, behind an engine that was started without it."""

    def nobody(address: Address, deadline: float) -> Connection:
        raise ConnectionRefusedError

    options = RemoteOptions(namespace="ns")
    tier = ClusterTier(
        "valkey", "nowhere", [("127.0.0.1", 1)], nobody, options, block_bytes=BLOCK_BYTES, fingerprint="model"
    )
    assert tier.queue_room > 0, "or RAM would keep blocks for it"
    job, taken = tier.submit_write(some_keys(1, 2), np.zeros((2, BLOCK_BYTES), np.uint8), np.arange(2))
    assert (job, taken.tolist()) == (NO_JOB, [False, False])
    tier.close()


def node_of(client: Client, number: int) -> Any:
    """The node that has this block, as the client believes."""
    return client.tier.nodes[client.tier.homes[division_of(some_keys(number))[0]]]


def name_of(client: Client, number: int) -> bytes:
    found: bytes = node_of(client, number).peer.epoch.names(some_keys(number))[0]
    return found


def numbers_in(client: Client, server: Server) -> list[int]:
    return [
        number for number in NUMBERS if node_of(client, number).place.startswith(f"127.0.0.1:{server.port}/")
    ]


def try_again_now(client: Client) -> None:
    """End all pauses."""
    client.tier.end_pauses()


def come_to_terms(client: Client) -> None:
    """Wait until the client has found all nodes."""
    until = time.monotonic() + PATIENCE_S
    while not (client.tier.is_whole() and all(n.is_open("read") for n in client.tier.nodes.values())):
        try_again_now(client)
        client.believes(*NUMBERS)
        assert time.monotonic() < until
        time.sleep(0.005)


def forget(client: Client) -> None:
    for node in client.tier.nodes.values():
        node.presence.clear()


# ---- all is well


def test_blocks_are_spread_and_come_back(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    assert client.probe(*NUMBERS) == []
    assert client.write(*NUMBERS) == NUMBERS
    assert client.believes(*NUMBERS) == [True] * 60
    assert client.read(*NUMBERS[::-1], 99) == NUMBERS[::-1]
    sizes = [len(server.blocks()) for server in cluster.masters]
    assert sum(sizes) == 60
    assert min(sizes) > 5, "each has its share"
    stats = client.tier.stats()
    assert (stats.written, stats.read, stats.stale, stats.failed, stats.probes) == (60, 60, 1, 0, 60)
    assert stats.in_flight == stats.circuit_open == 0
    other = make(cluster)
    assert other.probe(*NUMBERS, 99) == NUMBERS
    assert other.read(*NUMBERS) == NUMBERS
    assert other.write(*NUMBERS) == []


def test_many_small_windows(
    cluster: Cluster, make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(cluster)
    client.tier.dialect.window_bytes = 2 * BLOCK_BYTES
    assert client.write(*NUMBERS) == NUMBERS
    assert client.read(*NUMBERS) == NUMBERS


def test_slots_are_those_of_the_servers(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    for number in NUMBERS:
        name = name_of(client, number)
        assert slot_of(name) == 64 * division_of(some_keys(number))[0]
        assert cluster.servers[0].say("CLUSTER", "KEYSLOT", name) == slot_of(name)
    for name in (b"{}x", b"x{ab}{cd}", b"{", b"}{", b"plain", b"{{a}}"):
        assert cluster.servers[0].say("CLUSTER", "KEYSLOT", name) == slot_of(name)


def test_a_damaged_block_is_a_miss_and_leaves(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    client.write(*NUMBERS)
    name = name_of(client, 7)
    owner = cluster.owner(slot_of(name))
    assert owner is not None
    (rest,) = rest_names([name])
    assert owner.say("SETRANGE", rest, "1000", "damage") == 24 * 1024 - 64
    assert client.read(*NUMBERS) == [number for number in NUMBERS if number != 7]
    assert client.tier.stats().mismatches == 1
    assert owner.say("EXISTS", name, rest) == 0
    assert client.read(8, 9) == [8, 9]


def told(client: Client) -> tuple[set[int], set[int]]:
    """What is there now, and what is gone, by the changes since the last time."""
    changes = client.changes()
    there, gone = ([numbers for numbers, removed in changes if removed is which] for which in (False, True))
    return set().union(*there), set().union(*gone)


def test_what_is_told_of_a_cluster(cluster: Cluster, make: Callable[..., Client]) -> None:
    client, other = make(cluster), make(cluster)
    other.write(1, 2)
    client.changes()
    client.write(*NUMBERS)
    assert told(client) == ({*NUMBERS[2:]}, set())
    owner = cluster.owner(slot_of(name_of(client, 7)))
    assert owner is not None
    owner.say("DEL", name_of(client, 7))
    client.read(*NUMBERS)
    assert told(client) == (set(), {7})
    wrong = MapQuestion(deadline=0.0)
    client.tier.use_map(wrong)  # nobody is there any more
    client.tier.end_pauses()
    client.tier.finished()
    assert told(client) == (set(), {*NUMBERS[2:]} - {7}), "it cannot vouch for them"
    come_to_terms(client)
    client.write(*NUMBERS, 100)
    assert told(client) == ({7, 100}, set())


def test_replicas_are_enough_to_begin_with(cluster: Cluster, make: Callable[..., Client]) -> None:
    replicas = ",".join(f"127.0.0.1:{one.port}" for one in cluster.servers[3:])
    client = make(SimpleNamespace(url=f"valkey+cluster://{replicas}"))
    assert client.write(*NUMBERS) == client.read(*NUMBERS) == NUMBERS


# ---- resets


def test_a_reset_is_for_all_and_all_replicas_have_it(cluster: Cluster, make: Callable[..., Client]) -> None:
    client, other = make(cluster), make(cluster)
    client.write(*NUMBERS)
    assert other.read(*NUMBERS) == NUMBERS
    client.tier.clear()
    assert client.tier.drain(PATIENCE_S)
    assert not client.tier.is_reset_wanted.any()
    assert other.believes(1) == [True], "it has not heard of it"
    assert other.read(*NUMBERS) == []
    come_to_terms(other)
    assert other.probe(*NUMBERS) == []
    assert other.write(1, 2, 3) == [1, 2, 3]
    assert client.probe(*NUMBERS) == [1, 2, 3]


def test_a_reset_waits_for_a_node_that_hangs_and_for_no_other(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, other = make(cluster, timeout=0.3, probe_timeout=0.2), make(cluster)
        client.write(*NUMBERS)
        hanging, *_ = cluster.masters
        theirs = numbers_in(client, hanging)
        with hanging.stopped():
            client.tier.clear()
            until = time.monotonic() + PATIENCE_S
            while client.tier.is_reset_wanted.all():
                client.believes(*NUMBERS)
                assert time.monotonic() < until
            assert None in client.believes(*NUMBERS), "the others have forgotten, and are used"
            assert not client.tier.drain(0.0)
            assert client.read(*theirs) == [], "nothing is served of which it is not known to be forgotten"
        until = time.monotonic() + PATIENCE_S
        while not client.tier.drain(0.1):
            try_again_now(client)
            assert time.monotonic() < until
        come_to_terms(client)
        assert client.probe(*NUMBERS) == []
        assert other.read(*NUMBERS) == []


def test_a_reset_survives_the_death_of_a_master(tmp_path: Path, make: Callable[..., Client]) -> None:
    """A replica that had not got it would bring everything back."""
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, other = make(cluster), make(cluster, timeout=0.3, probe_timeout=0.2)
        client.write(*NUMBERS)
        assert set(other.probe(*NUMBERS)) | set(other.probe(*NUMBERS)) <= {*NUMBERS}
        client.tier.clear()
        assert client.tier.drain(PATIENCE_S)
        for master in cluster.masters[:1]:
            master.stop()
        come_to_terms(other)
        assert other.read(*NUMBERS) == []
        come_to_terms(other)
        assert other.probe(*NUMBERS) == []


# ---- masters that are gone


def write_on(client: Client, over: threading.Event) -> None:
    first = 1000
    while not over.is_set():
        first += 20
        client.write(*range(first, first + 20))
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_master_that_is_gone_costs_its_own_blocks_until_its_replica_takes_over(
    tmp_path: Path, make: Callable[..., Client], number: signal.Signals
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, busy = (make(cluster, timeout=1.0, probe_timeout=1.0) for _ in range(2))
        writer = make(cluster)
        assert writer.write(*NUMBERS) == NUMBERS
        gone = cluster.masters[1]
        theirs = numbers_in(writer, gone)
        others = [number for number in NUMBERS if number not in theirs]
        assert theirs
        assert {*client.probe(*NUMBERS)} <= {*NUMBERS}
        come_to_terms(client)
        forget(client)
        while client.probe(*NUMBERS) != NUMBERS:
            forget(client)
        over = threading.Event()
        thread = threading.Thread(target=write_on, args=(busy, over))
        thread.start()
        gone.signal(number)
        begun, longest = time.monotonic(), 0.0
        served: list[list[int]] = []
        back_after = None
        while back_after is None:
            before = time.monotonic()
            served.append(client.read(*NUMBERS))
            longest = max(longest, time.monotonic() - before)
            if served[-1] == NUMBERS:
                back_after = time.monotonic() - begun
            for node in client.tier.nodes.values():  # what could not be read is not there for 5 s
                node.presence.clear()
            client.probe(*NUMBERS)
            assert time.monotonic() - begun < PATIENCE_S
        over.set()
        thread.join()
        assert longest < 10.0, "ten times its deadline"
        part = [one for one in served if one != NUMBERS]
        assert part, "it was gone"
        assert any({*others} <= {*one} for one in part), "and the others were there"
        assert client.tier.stats().mismatches == busy.tier.stats().mismatches == 0
        print(f"longest {longest:.2f} s, back after {back_after:.2f} s, {len(part)} of {len(served)} in part")
        after = client.pool.copy()
        if number is signal.SIGSTOP:
            gone.signal(signal.SIGCONT)
            cluster.wait(lambda: b"role:slave" in gone.ask("INFO", "replication"))
        assert (client.pool == after).all(), "what comes late is written nowhere"
        assert client.read(*NUMBERS) == NUMBERS


@pytest.mark.slow
def test_load_goes_on_while_masters_come_and_go(tmp_path: Path, make: Callable[..., Client]) -> None:
    """Two machines read and write while each master in turn hangs, dies and returns."""

    def lines() -> Iterator[threading.Thread]:
        return (thread for thread in threading.enumerate() if thread.name.startswith("kvoffload-valkey"))

    before = {*lines()}
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        clients = [make(cluster, timeout=0.3, probe_timeout=0.2) for _ in range(2)]
        over, problems = threading.Event(), list[BaseException]()
        counts = [0, 0]

        def load(which: int) -> None:
            random = np.random.default_rng(which)
            try:
                while not over.is_set():
                    begin = int(random.integers(1, 200))
                    numbers = range(begin, begin + int(random.integers(1, 40)))
                    getattr(clients[which], random.choice(["read", "write", "probe"]))(*numbers)
                    counts[which] += 1
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=load, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for server in cluster.masters:
            with server.stopped():
                time.sleep(0.3)
            server.stop()
            time.sleep(0.5)
            server.start()
            cluster.wait(cluster.is_ready)
        over.set()
        for thread in threads:
            thread.join()
        assert not problems
        assert min(counts) > 10
        for client in clients:
            come_to_terms(client)
            forget(client)
            client.write(*NUMBERS)
            assert client.read(*NUMBERS) == NUMBERS
            stats = client.tier.stats()
            assert (stats.mismatches, stats.in_flight) == (0, 0)
            assert len(client.tier.nodes) == 3, "who has gone is let go"
        cluster.wait(lambda: len({*lines()} - before) == 2 * 10)


@pytest.mark.slow
def test_a_whole_cluster_that_is_gone_costs_nothing_and_is_found_again(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with clustered(tmp_path, num_masters=3) as cluster:
        client = make(cluster, timeout=0.3, probe_timeout=0.2)
        client.write(1, 2, 3)
        for server in cluster.servers:
            server.stop()
        until = time.monotonic() + PATIENCE_S
        while client.tier.stats().circuit_open < 3:
            assert client.read(*NUMBERS) == []
            assert time.monotonic() < until
        assert client.believes(*NUMBERS) == [False] * 60
        assert client.tier.submit_probe(some_keys(*NUMBERS)) == NO_JOB
        assert client.write(*NUMBERS) == []
        for server in cluster.servers:
            server.start()
        cluster.wait(cluster.is_ready)
        come_to_terms(client)
        assert client.probe(*NUMBERS) == []
        assert client.write(*NUMBERS) == client.read(*NUMBERS) == NUMBERS


@pytest.mark.slow
def test_a_machine_that_starts_while_a_master_is_dead_has_the_others(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with clustered(tmp_path, *PART_BY_PART, num_masters=3) as cluster:
        for server in (cluster.servers[0], cluster.servers[3]):
            server.stop()
        client = make(cluster, timeout=0.3, probe_timeout=0.2)
        begun = time.monotonic()
        written = client.write(*NUMBERS)
        assert time.monotonic() - begun < 30.0
        assert 20 < len(written) < 60
        assert client.read(*NUMBERS) == written
        for server in (cluster.servers[0], cluster.servers[3]):
            server.start()
        come_to_terms(client)
        forget(client)
        assert {*client.write(*NUMBERS)} >= {*NUMBERS} - {*written}
        assert client.read(*NUMBERS) == NUMBERS


# ---- blocks that move


def migrate(cluster: Cluster, slot: int, source: Server, to: Server, names: list[bytes]) -> None:
    assert to.say("CLUSTER", "SETSLOT", str(slot), "IMPORTING", cluster.identity(source)) == b"OK"
    assert source.say("CLUSTER", "SETSLOT", str(slot), "MIGRATING", cluster.identity(to)) == b"OK"
    for name in names:
        assert source.say("MIGRATE", "127.0.0.1", str(to.port), name, "0", "5000") == b"OK"


@pytest.mark.parametrize("epoch_goes", ["first", "last"])
@pytest.mark.slow
def test_a_slot_on_its_way_costs_its_own_blocks_and_arrives(
    tmp_path: Path, make: Callable[..., Client], epoch_goes: str
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, reader = make(cluster), make(cluster)
        client.write(*NUMBERS)
        forget(reader)
        assert reader.probe(*NUMBERS) == NUMBERS
        slot = slot_of(name_of(client, 5))
        source = cluster.owner(slot)
        assert source is not None
        to = next(one for one in cluster.masters if one is not source)
        count = str(source.say("CLUSTER", "COUNTKEYSINSLOT", str(slot)))
        here = source.ask("CLUSTER", "GETKEYSINSLOT", str(slot), count)
        epoch = [name for name in here if b":epoch:" in name]
        mine = [number for number in NUMBERS if name_of(client, number) in here]
        assert len(epoch) == 1
        assert 5 in mine
        assert len(here) == 2 * len(mine) + 1, "the values of each, and the epoch"
        others = [number for number in NUMBERS if number not in mine]
        migrate(cluster, slot, source, to, epoch if epoch_goes == "first" else [name_of(client, 5)])
        for _ in range(4):
            found = reader.read(*NUMBERS)
            assert {*found} >= {*others}
            assert 5 not in found
            forget(reader)
            assert {*reader.probe(*NUMBERS)} >= {*others}
            assert 5 not in reader.write(*NUMBERS), "nothing is written into a slot on its way"
        late = make(cluster)
        assert {*late.probe(*NUMBERS)} >= {*others}
        assert reader.tier.stats().circuit_open == late.tier.stats().circuit_open == 0
        rest = [name for name in here if source.say("EXISTS", name) == 1]
        migrate(cluster, slot, source, to, rest)
        for server in (to, source, *cluster.servers):
            if server in cluster.masters:
                assert server.say("CLUSTER", "SETSLOT", str(slot), "NODE", cluster.identity(to)) == b"OK"
        for one in (reader, late, client):
            until = time.monotonic() + PATIENCE_S
            while one.read(*NUMBERS) != NUMBERS:
                come_to_terms(one)
                forget(one)
                one.probe(*NUMBERS)
                assert time.monotonic() < until
            assert node_of(one, 5).place.startswith(f"127.0.0.1:{to.port}/")


def test_a_master_that_becomes_a_replica_sends_its_clients_elsewhere(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client = make(cluster)
        client.write(*NUMBERS)
        old, new = cluster.servers[0], cluster.servers[3]
        assert new.say("CLUSTER", "FAILOVER") == b"OK"
        cluster.wait(lambda: b"role:slave" in old.ask("INFO", "replication"))
        until = time.monotonic() + PATIENCE_S
        while client.read(*NUMBERS) != NUMBERS:
            assert client.tier.stats().circuit_open == 0, "it is well, and says where the blocks are"
            come_to_terms(client)
            client.probe(*NUMBERS)
            assert time.monotonic() < until
        assert numbers_in(client, new)
        assert not numbers_in(client, old)


def test_an_old_map_is_corrected(cluster: Cluster, make: Callable[..., Client]) -> None:
    """As from a node that has not heard of anything for a while: all divisions are one node further."""
    client = make(cluster)
    client.write(*NUMBERS)
    true = {address: client.tier.divisions[number] for address, number in client.tier.numbers.items()}
    wrong = MapQuestion(deadline=0.0)
    addresses = [*true]
    wrong.divisions = {addresses[row]: true[addresses[row - 1]] for row in range(3)}
    wrong.num_replicas = dict.fromkeys(addresses, 1)
    client.tier.use_map(wrong)
    until = time.monotonic() + PATIENCE_S
    while client.read(*NUMBERS) != NUMBERS:
        come_to_terms(client)
        client.probe(*NUMBERS)
        assert time.monotonic() < until
    assert client.tier.stats().mismatches == 0


# ---- deadlines, through proxies that the cluster names as its nodes


@pytest.fixture
def proxies(tmp_path: Path) -> Iterator[tuple[Cluster, list[FaultProxy]]]:
    with clustered(tmp_path, *PART_BY_PART) as cluster, ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server.port)) for server in cluster.masters]
        announce(cluster, proxies)
        yield cluster, proxies


def announce(cluster: Cluster, proxies: list[FaultProxy]) -> None:
    ports = {proxy.port for proxy in proxies}
    for server, proxy in zip(cluster.masters, proxies, strict=True):
        assert server.say("CONFIG", "SET", "cluster-announce-port", str(proxy.port)) == b"OK"
    cluster.wait(
        lambda: all(
            {one[2][1] for one in server.ask("CLUSTER", "SLOTS")} == ports for server in cluster.masters
        )
    )


@pytest.mark.parametrize("fault", [{"hang": True}, {"bytes_per_s": 20.0}])
def test_nothing_takes_longer_than_its_deadline(
    proxies: tuple[Cluster, list[FaultProxy]], make: Callable[..., Client], fault: dict[str, Any]
) -> None:
    cluster, (bad, *_) = proxies
    client = make(cluster, timeout=0.3, probe_timeout=0.2)
    writer = make(cluster)
    writer.write(*NUMBERS)
    theirs = [n for n in NUMBERS if node_of(writer, n).place.startswith(f"127.0.0.1:{bad.port}/")]
    others = [number for number in NUMBERS if number not in theirs]
    forget(client)
    client.probe(*NUMBERS)
    bad.set(**fault)
    begun = time.monotonic()
    job = client.begin_read(*NUMBERS)
    probe = client.tier.submit_probe(some_keys(*NUMBERS))
    results: dict[int, Any] = {}
    while {job, probe} - {*results}:
        before = time.thread_time()
        results |= {result.job: result for result in client.tier.finished()}
        client.believes(1)
        assert time.thread_time() - before < 0.1, "the scheduler's thread does not wait"
        assert time.monotonic() - begun < 3.0
    assert client.check(results[job], *NUMBERS) == others
    assert [number for number, ok in zip(NUMBERS, results[probe].ok, strict=True) if ok] == others
    after = client.pool.copy()
    bad.set()
    come_to_terms(client)
    client.probe(99)
    assert (client.pool == after).all(), "what comes late is written nowhere"
    assert (client.pool[60:] == CANARY).all()


def test_blocks_come_back_over_tls(tmp_path: Path, make: Callable[..., Client]) -> None:
    """The server in the wheel has no TLS: proxies in front of it have."""
    pem, key = self_signed(tmp_path)
    with clustered(tmp_path, *PART_BY_PART) as cluster, ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server.port, tls=(pem, key))) for server in cluster.masters]
        announce(cluster, proxies)
        url = f"valkeys+cluster://127.0.0.1:{proxies[0].port}"
        client = make(SimpleNamespace(url=url), ca=pem)
        assert client.write(*NUMBERS) == client.read(*NUMBERS) == NUMBERS
        assert all(proxy.num_connections for proxy in proxies)


# ---- what is refused


@pytest.mark.slow
def test_what_is_no_cluster_is_refused(tmp_path: Path, make: Callable[..., Client]) -> None:
    with running(tmp_path) as server, pytest.raises(ConfigError, match="cluster support disabled"):
        make(SimpleNamespace(url=f"valkey+cluster://127.0.0.1:{server.port}"))


@pytest.mark.slow
def test_nobody_there_costs_a_command_its_start() -> None:
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="cannot be used now"):
        ValkeyOptions(url="valkey+cluster://127.0.0.1:1/ns").open(TierOwner(BLOCK_BYTES, 36, "m"))
    assert time.monotonic() - begun < 20.0


RIGHTS = "+get +set +exists +del +wait +cluster|info +cluster|slots"


@pytest.mark.slow
def test_tenants_are_fenced(
    tmp_path: Path, make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        for server in cluster.servers:
            user = f"a on >hunter2 ~kvo1:tenant-a:* {RIGHTS}"
            assert server.say("ACL", "SETUSER", *user.split()) == b"OK"
        monkeypatch.setenv(USERNAME, "a")
        monkeypatch.setenv(PASSWORD, "hunter2")
        mine = make(cluster, namespace="tenant-a")
        assert mine.write(*NUMBERS) == mine.read(*NUMBERS) == NUMBERS
        mine.tier.clear()
        assert mine.tier.drain(PATIENCE_S)
        assert "hunter2" not in f"{vars(mine.tier)} {mine.tier.stats()}"
        with pytest.raises(ConfigError, match="NOPERM") as refused:
            make(cluster, namespace="tenant-b")
        assert "hunter2" not in str(refused.value)
        monkeypatch.setenv(PASSWORD, "wrong")
        with pytest.raises(ConfigError, match="WRONGPASS"):
            make(cluster, namespace="tenant-a")


def test_as_users_type_it() -> None:
    text = "valkey+cluster://a:7201,b,[::1]:7203/team.a?ttl=1d"
    found = parse_tier("tier", text)
    assert found == ValkeyOptions(url="valkey+cluster://a:7201,b,[::1]:7203/team.a", ttl=86400.0)
    assert parse_tier("tier", str(found)) == found
    several = parse_tiers("tiers", f"disk:/data/kv:5GiB+{text}")
    assert [one.name for one in several] == ["disk", "valkey"]
    assert several[1] == found


class _Says:
    """A connection to a node that answers so, when it is asked for its map."""

    host = "asked"

    def __init__(self, ranges: Any, state: Any = b"cluster_state:ok\r\ncluster_size:3\r\n") -> None:
        self._answers = [state, ranges]

    def send(self, *_: Any) -> None: ...

    def answer(self, *_: Any) -> Any:
        return self._answers.pop(0)


def test_a_map_is_read_as_nodes_write_it() -> None:
    question = MapQuestion(deadline=0.0)
    replica = [b"1.2.3.4", 8, b"id", []]
    question.run(
        _Says(  # type: ignore[arg-type]
            [
                [0, 127, [b"h", 7, b"id", [b"hostname", b"x"]], replica, replica],
                [128, 128, [None, 9, b"id"], replica],
                [129, 191, [b"", 9, b"id"]],
                [192, 192, [b"?", 9, b"id"]],
                [256, 256, [b"h", 7, b"id"], replica, replica],
            ]
        )
    )
    assert question.divisions == {("h", 7): (0, 1, 4), ("asked", 9): (2,)}
    assert question.num_replicas[("h", 7)] == 2
    for nonsense in (b"OK", None, [1], [[0, 1]], [[0, 1, [b"h"]]], [[0, b"x", [b"h", 1]]], [[0, 1, 5]]):
        with pytest.raises(ProtocolError):
            MapQuestion(deadline=0.0).run(_Says(nonsense))  # type: ignore[arg-type]
    for state, what in [
        (b"cluster_state:fail\r\n", "CLUSTERDOWN"),
        (ServerError("NOPERM"), "NOPERM"),
        (None, "CLUSTER INFO"),
    ]:
        question = MapQuestion(deadline=0.0)
        with pytest.raises((ServerError, ProtocolError), match=what):
            question.run(_Says([[0, 127, [b"h", 7, b"id"]]], state))  # type: ignore[arg-type]
        assert not question.divisions


@pytest.mark.slow
def test_a_replay_with_a_cluster_is_one_with_a_tier_that_holds_all(cluster: Cluster) -> None:
    trace, block_bytes = generate(builtin("chat", sessions=60)), 4096
    data = DataPlane(40, block_bytes)
    try:
        found = Replay(trace, ReplayConfig(40, tiers=parse_tiers("t", f"{cluster.url}/replay")), data).run()
    finally:
        data.close()
    planned = Replay(trace, ReplayConfig(40, tiers=parse_tiers("t", "1000000"))).run()
    assert found.mismatches_served == 0
    assert found.prefix_hit_ratio == planned.prefix_hit_ratio
    assert found.tiers[1].hit_blocks == planned.tiers[1].hit_blocks > 0
