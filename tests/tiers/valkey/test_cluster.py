"""A real cluster of three masters with a replica each: the contract of shared tiers, and failures of nodes.

A dead, hanging, moved or empty node costs only the blocks of that node.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.data import DataPlane
from kvoffload.replay.replay import Replay
from kvoffload.tiers.contract import NO_JOB
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.shared.server import RemoteOptions
from kvoffload.tiers.spec import parse_tiers
from kvoffload.tiers.valkey.cluster import ClusterTier
from kvoffload.tiers.valkey.cluster_map import Address, MapQuestion
from kvoffload.tiers.valkey.divisions import division_of, slot_of
from kvoffload.tiers.valkey.resp import Connection
from kvoffload.traces.sessions import generate
from kvoffload.traces.workloads import builtin
from support.background_load import background_load
from support.fault_proxy import FaultProxies, FaultProxy
from support.pauses import end_pauses
from support.refusals import refusal
from support.shared_tier_contract import Damage, Rig, slow
from support.sharing_client import CANARY, closed_at_the_end, some_keys
from support.valkey_client import BLOCK_BYTES, Client
from support.valkey_contract import DAMAGES, ValkeyContract
from support.valkey_server import PART_BY_PART, PATIENCE_S, Cluster, Server, clustered, running

NUMBERS = list(range(1, 61))


def master_of(number: int) -> int:
    """Return the row of the master that has a block: each of three masters has a third of the slots."""
    division: int = division_of(some_keys(number))[0]
    return 3 * division // 256


MUCH_LONGER = replace(
    next(damage for damage in DAMAGES if damage.name == "much longer"),
    served=[number for number in range(1, 6) if number == 1 or master_of(number) != master_of(2)],
)
"""A damage at which the connection to one node is closed."""


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, FaultProxies]]:
    """A cluster, and the proxies that its masters announce: clients reach the masters through the proxies."""
    with (
        clustered(tmp_path_factory.mktemp("cluster"), *PART_BY_PART) as cluster,
        ExitStack() as stack,
    ):
        proxies = FaultProxies([stack.enter_context(FaultProxy(server.port)) for server in cluster.masters])
        cluster.announce(proxies.ports)
        yield cluster, proxies


@pytest.fixture
def cluster(shared_cluster: tuple[Cluster, FaultProxies]) -> Cluster:
    cluster, _ = shared_cluster
    cluster.empty()
    return cluster


@pytest.fixture
def proxies(shared_cluster: tuple[Cluster, FaultProxies], cluster: Cluster) -> Iterator[FaultProxies]:
    _, proxies = shared_cluster
    yield proxies
    proxies.set()


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    yield from closed_at_the_end(Client)


def url_of(ports: Iterable[int], scheme: str = "valkey+cluster") -> str:
    return f"{scheme}://" + ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.fixture(autouse=True)
def start_without_some_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the wait at a start: a cluster whose nodes refuse or do not answer uses all of it."""
    monkeypatch.setattr(ValkeyOptions, "start_s", 5.0)


class TestCluster(ValkeyContract):
    num_servers = 3
    rights = "+get +set +exists +del +wait +cluster|info +cluster|slots"
    flipped_at = (*range(0, 110, 9), 5000, 12_000)
    cut_at = (0, 1, 22, 23, 30, 95, 100, 10_000, 20_000)

    @pytest.fixture
    def rig(self, cluster: Cluster, proxies: FaultProxies, make: Callable[..., Client]) -> Rig:
        return Rig(cluster, proxies, partial(make, cluster), partial(make, url_of(proxies.ports)))

    @pytest.fixture(params=[DAMAGES[0], MUCH_LONGER], ids=lambda damage: damage.name)
    def damage(self, request: pytest.FixtureRequest) -> Damage:
        damage: Damage = request.param
        return damage

    def servers(self, rig: Rig) -> list[Server]:
        servers: list[Server] = rig.server.masters
        return servers

    @contextmanager
    def over_tls(self, rig: Rig, files: tuple[str, str], **tls: Any) -> Iterator[str]:
        cluster = rig.server
        with ExitStack() as stack:
            proxies = [
                stack.enter_context(FaultProxy(server.port, tls=files, **tls)) for server in cluster.masters
            ]
            ports = [proxy.port for proxy in proxies]
            cluster.announce(ports)
            try:
                yield url_of(ports, "valkeys+cluster")
            finally:
                cluster.announce(rig.proxy.ports)

    test_rights_keep_tenants_apart = slow(ValkeyContract.test_rights_keep_tenants_apart)
    test_blocks_return_over_tls = slow(ValkeyContract.test_blocks_return_over_tls)
    test_other_certificates_are_refused = slow(ValkeyContract.test_other_certificates_are_refused)
    test_refusal_of_the_clients_certificate_is_no_outage = slow(
        ValkeyContract.test_refusal_of_the_clients_certificate_is_no_outage
    )
    test_unreachable_server_stops_a_command_and_no_engine = slow(
        ValkeyContract.test_unreachable_server_stops_a_command_and_no_engine
    )

    def test_blocks_in_flight_are_bounded(self, rig: Rig) -> None:
        """Each node has its own bound, so the contract's test does not hold for all nodes together."""
        client = rig.connect()
        client.limit_in_flight(4)
        assert client.tier.queue_room == 4
        shares = [client.numbers_on(master, NUMBERS) for master in rig.server.masters]
        accepted = sorted(number for share in shares for number in share[:4])
        assert len(accepted) == 12
        assert client.write(*NUMBERS) == accepted
        assert client.tier.stats().dropped == 60 - 12
        assert client.tier.queue_room == 4, "a finished job is not in flight"
        assert client.read(*accepted) == accepted
        first_late = min(NUMBERS.index(share[4]) for share in shares if len(share) > 4)
        assert client.tier.read_room(some_keys(*NUMBERS)) == first_late
        result = client.wait(client.begin_read(*NUMBERS))
        assert [number for number, ok in zip(NUMBERS, result.ok, strict=True) if ok] == accepted
        assert result.stale is not None
        assert not result.stale.any()


def test_unknown_cluster_drops_writes() -> None:
    """An engine may start hours before the cluster."""

    def nobody(address: Address, deadline: float) -> Connection:
        raise ConnectionRefusedError

    options = RemoteOptions(namespace="ns", fingerprint="model", block_bytes=BLOCK_BYTES)
    tier = ClusterTier("valkey", "nowhere", [("127.0.0.1", 1)], nobody, options)
    assert tier.queue_room > 0, "otherwise RAM would keep blocks for the cluster"
    job, taken = tier.submit_write(some_keys(1, 2), np.zeros((2, BLOCK_BYTES), np.uint8), np.arange(2))
    assert (job, taken.tolist()) == (NO_JOB, [False, False])
    tier.close()


# ---- the map


def test_slots_agree_with_the_servers(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    for number in NUMBERS:
        name = client.name(number)
        assert slot_of(name) == 64 * division_of(some_keys(number))[0]
        assert cluster.servers[0].execute("CLUSTER", "KEYSLOT", name) == slot_of(name)
    for name in (b"{}x", b"x{ab}{cd}", b"{", b"}{", b"plain", b"{{a}}"):
        assert cluster.servers[0].execute("CLUSTER", "KEYSLOT", name) == slot_of(name)


def test_blocks_of_removed_nodes_are_reported_lost(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    client.changes()
    client.write(*NUMBERS)
    assert client.changes() == [({*NUMBERS}, False)]
    client.tier.use_map(MapQuestion(deadline=0.0))  # a map without nodes
    end_pauses(client.tier)
    client.tier.finished()
    assert client.changes() == [({*NUMBERS}, True)]
    client.reconnect()
    client.write(*NUMBERS, 100)
    assert client.changes() == [({100}, False)], "the other blocks were found"


def test_each_master_has_a_share_of_the_blocks(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(cluster)
    assert client.write(*NUMBERS) == NUMBERS
    shares = [len(server.blocks()) for server in cluster.masters]
    assert sum(shares) == 60
    assert min(shares) > 5


def test_replicas_are_sufficient_as_seeds(cluster: Cluster, make: Callable[..., Client]) -> None:
    client = make(url_of(replica.port for replica in cluster.servers[3:]))
    assert client.write(*NUMBERS) == client.read(*NUMBERS) == NUMBERS


def test_outdated_map_is_corrected(cluster: Cluster, make: Callable[..., Client]) -> None:
    """All divisions are one node further."""
    client = make(cluster)
    client.write(*NUMBERS)
    divisions = {address: client.tier.divisions[number] for address, number in client.tier.numbers.items()}
    addresses, outdated = [*divisions], MapQuestion(deadline=0.0)
    outdated.divisions = {addresses[row]: divisions[addresses[row - 1]] for row in range(3)}
    outdated.num_replicas = dict.fromkeys(addresses, 1)
    client.tier.use_map(outdated)
    read_all(client)
    assert client.tier.stats().mismatches == 0


def read_all(client: Client) -> None:
    """Read until the client has found all blocks again."""
    until = time.monotonic() + PATIENCE_S
    while client.read(*NUMBERS) != NUMBERS:
        client.reconnect()
        client.forget()
        client.probe(*NUMBERS)
        assert time.monotonic() < until


# ---- resets


def test_reset_waits_for_a_hanging_node_alone(tmp_path: Path, make: Callable[..., Client]) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, other = make(cluster, timeout=0.3, probe_timeout=0.2), make(cluster)
        client.write(*NUMBERS)
        hanging, *_ = cluster.masters
        lost = client.numbers_on(hanging, NUMBERS)
        with hanging.stopped():
            client.tier.clear()
            until = time.monotonic() + PATIENCE_S
            while client.tier.is_reset_wanted.all():
                client.presence(*NUMBERS)
                assert time.monotonic() < until
            assert None in client.presence(*NUMBERS), "the other nodes have confirmed the reset"
            assert not client.tier.drain(0.0)
            assert client.read(*lost) == [], "their reset is not confirmed"
        until = time.monotonic() + PATIENCE_S
        while not client.tier.drain(0.1):
            end_pauses(client.tier)
            assert time.monotonic() < until
        client.reconnect()
        assert client.probe(*NUMBERS) == []
        assert other.read(*NUMBERS) == []


def test_reset_survives_the_failure_of_a_master(tmp_path: Path, make: Callable[..., Client]) -> None:
    """A replica without the reset would revive the blocks."""
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, other = make(cluster), make(cluster, timeout=0.3, probe_timeout=0.2)
        client.write(*NUMBERS)
        assert set(other.probe(*NUMBERS)) | set(other.probe(*NUMBERS)) <= {*NUMBERS}
        client.reset()
        assert not client.tier.is_reset_wanted.any()
        cluster.masters[0].stop()
        other.reconnect()
        assert other.read(*NUMBERS) == []
        other.reconnect()
        assert other.probe(*NUMBERS) == []


# ---- masters that fail


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_failed_master_costs_its_own_blocks_until_failover(
    tmp_path: Path, make: Callable[..., Client], number: signal.Signals
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, busy = (make(cluster, timeout=1.0, probe_timeout=1.0) for _ in range(2))
        writer = make(cluster)
        assert writer.write(*NUMBERS) == NUMBERS
        failed = cluster.masters[1]
        lost = writer.numbers_on(failed, NUMBERS)
        kept = [number for number in NUMBERS if number not in lost]
        assert lost
        assert {*client.probe(*NUMBERS)} <= {*NUMBERS}
        client.reconnect()
        client.forget()
        while client.probe(*NUMBERS) != NUMBERS:
            client.forget()
        served: list[list[int]] = []
        with background_load(
            [lambda random: busy.write(*range(start := int(random.integers(1000, 60_000)), start + 20))]
        ):
            failed.signal(number)
            until, longest = time.monotonic() + PATIENCE_S, 0.0
            while not served or served[-1] != NUMBERS:
                begun = time.monotonic()
                served.append(client.read(*NUMBERS))
                longest = max(longest, time.monotonic() - begun)
                client.forget()  # a block of a failed read is absent for 5 s
                client.probe(*NUMBERS)
                assert time.monotonic() < until
        assert longest < 10.0, "ten times the deadline"
        partial_reads = served[:-1]
        assert partial_reads, "the master was down"
        assert any({*kept} <= {*numbers} for numbers in partial_reads), "the other masters answered"
        assert client.tier.stats().mismatches == busy.tier.stats().mismatches == 0
        pool = client.pool.copy()
        if number is signal.SIGSTOP:
            failed.signal(signal.SIGCONT)
            cluster.wait(lambda: b"role:slave" in failed.ask("INFO", "replication"))
        assert (client.pool == pool).all(), "late bytes are written nowhere"
        client.use_long_deadlines()
        assert client.read(*NUMBERS) == NUMBERS


def use(client: Client, random: np.random.Generator) -> None:
    """Read, write or probe some blocks."""
    start = int(random.integers(1, 200))
    numbers = range(start, start + int(random.integers(1, 40)))
    operation = (client.read, client.write, client.probe)[random.integers(3)]
    operation(*numbers)


@pytest.mark.slow
def test_load_while_each_master_fails_and_returns(tmp_path: Path, make: Callable[..., Client]) -> None:
    """Two machines read and write while each master in turn hangs, is killed and returns."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("kvoffload-valkey")}

    before = threads()
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        clients = [make(cluster, timeout=0.3, probe_timeout=0.2) for _ in range(2)]
        with background_load([partial(use, client) for client in clients]):
            for server in cluster.masters:
                with server.stopped():
                    time.sleep(0.3)
                server.stop()
                time.sleep(0.5)
                server.start()
                cluster.wait(cluster.is_ready)
        for client in clients:
            client.reconnect()
            client.use_long_deadlines()
            client.forget()
            client.write(*NUMBERS)
            assert client.read(*NUMBERS) == NUMBERS
            stats = client.tier.stats()
            assert (stats.mismatches, stats.in_flight) == (0, 0)
            assert len(client.tier.nodes) == 3, "nodes that have left the map are removed"
        cluster.wait(lambda: len(threads() - before) == 2 * 10)


@pytest.mark.slow
def test_dead_cluster_is_found_again(tmp_path: Path, make: Callable[..., Client]) -> None:
    with clustered(tmp_path, num_masters=3) as cluster:
        client = make(cluster, timeout=0.3, probe_timeout=0.2)
        client.write(1, 2, 3)
        for server in cluster.servers:
            server.stop()
        until = time.monotonic() + PATIENCE_S
        while client.tier.stats().circuit_open < 3:
            assert client.read(*NUMBERS) == []
            assert time.monotonic() < until
        assert client.presence(*NUMBERS) == [False] * 60
        assert client.tier.submit_probe(some_keys(*NUMBERS)) == NO_JOB
        assert client.write(*NUMBERS) == []
        for server in cluster.servers:
            server.start()
        cluster.wait(cluster.is_ready)
        client.reconnect()
        client.use_long_deadlines()
        assert client.probe(*NUMBERS) == []
        assert client.write(*NUMBERS) == client.read(*NUMBERS) == NUMBERS


@pytest.mark.slow
def test_start_while_a_master_is_dead(tmp_path: Path, make: Callable[..., Client]) -> None:
    with clustered(tmp_path, *PART_BY_PART, num_masters=3) as cluster:
        for server in (cluster.servers[0], cluster.servers[3]):
            server.stop()
        client = make(cluster)  # connections to the dead master are refused, so no deadline passes
        begun = time.monotonic()
        written = client.write(*NUMBERS)
        assert time.monotonic() - begun < 30.0
        assert 20 < len(written) < 60
        assert client.read(*NUMBERS) == written
        for server in (cluster.servers[0], cluster.servers[3]):
            server.start()
        client.reconnect()
        client.forget()
        assert {*client.write(*NUMBERS)} >= {*NUMBERS} - {*written}
        assert client.read(*NUMBERS) == NUMBERS


# ---- blocks that move


def migrate(cluster: Cluster, slot: int, source: Server, to: Server, names: list[bytes]) -> None:
    assert to.execute("CLUSTER", "SETSLOT", str(slot), "IMPORTING", cluster.identity(source)) == b"OK"
    assert source.execute("CLUSTER", "SETSLOT", str(slot), "MIGRATING", cluster.identity(to)) == b"OK"
    for name in names:
        assert source.execute("MIGRATE", "127.0.0.1", str(to.port), name, "0", "5000") == b"OK"


@pytest.mark.parametrize("epoch_moves", ["first", "last"])
@pytest.mark.slow
def test_migrating_slot_costs_its_own_blocks(
    tmp_path: Path, make: Callable[..., Client], epoch_moves: str
) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client, reader = make(cluster), make(cluster)
        client.write(*NUMBERS)
        reader.forget()
        assert reader.probe(*NUMBERS) == NUMBERS
        slot = slot_of(client.name(5))
        source = cluster.server_of(client.name(5))
        to = next(master for master in cluster.masters if master is not source)
        count = str(source.execute("CLUSTER", "COUNTKEYSINSLOT", str(slot)))
        names = source.ask("CLUSTER", "GETKEYSINSLOT", str(slot), count)
        epoch = [name for name in names if b":epoch:" in name]
        moving = [number for number in NUMBERS if client.name(number) in names]
        assert len(epoch) == 1
        assert 5 in moving
        assert len(names) == 2 * len(moving) + 1, "two values for each block, and the epoch"
        kept = {*NUMBERS} - {*moving}
        migrate(cluster, slot, source, to, epoch if epoch_moves == "first" else [client.name(5)])
        for _ in range(4):
            served = reader.read(*NUMBERS)
            assert {*served} >= kept
            assert 5 not in served
            reader.forget()
            assert {*reader.probe(*NUMBERS)} >= kept
            assert 5 not in reader.write(*NUMBERS), "nothing is written into a migrating slot"
        late = make(cluster)
        assert {*late.probe(*NUMBERS)} >= kept
        assert reader.tier.stats().circuit_open == late.tier.stats().circuit_open == 0
        migrate(cluster, slot, source, to, [name for name in names if source.has(name)])
        for server in (to, source, *cluster.masters):
            assert server.execute("CLUSTER", "SETSLOT", str(slot), "NODE", cluster.identity(to)) == b"OK"
        for machine in (reader, late, client):
            read_all(machine)
            assert machine.numbers_on(to, [5]) == [5]


def test_clients_follow_a_failover(tmp_path: Path, make: Callable[..., Client]) -> None:
    with clustered(tmp_path, *PART_BY_PART) as cluster:
        client = make(cluster)
        client.write(*NUMBERS)
        old, new = cluster.servers[0], cluster.servers[3]
        assert new.execute("CLUSTER", "FAILOVER") == b"OK"
        cluster.wait(lambda: b"role:slave" in old.ask("INFO", "replication"))
        until = time.monotonic() + PATIENCE_S
        while client.read(*NUMBERS) != NUMBERS:
            assert client.tier.stats().circuit_open == 0, "a node that redirects to another node is healthy"
            client.reconnect()
            client.probe(*NUMBERS)
            assert time.monotonic() < until
        assert client.numbers_on(new, NUMBERS)
        assert not client.numbers_on(old, NUMBERS)


# ---- deadlines


@pytest.mark.parametrize("fault", [{"hang": True}, {"bytes_per_s": 20.0}])
def test_slow_node_costs_its_own_blocks(
    cluster: Cluster, proxies: FaultProxies, make: Callable[..., Client], fault: dict[str, Any]
) -> None:
    client, writer = make(cluster, timeout=1.0, probe_timeout=1.0), make(cluster)
    writer.write(*NUMBERS)
    lost = writer.numbers_on(cluster.masters[0], NUMBERS)
    kept = [number for number in NUMBERS if number not in lost]
    client.forget()
    client.probe(*NUMBERS)
    proxies.proxies[0].set(**fault)
    begun = time.monotonic()
    job = client.begin_read(*NUMBERS)
    probe = client.tier.submit_probe(some_keys(*NUMBERS))
    results: dict[int, Any] = {}
    while {job, probe} - {*results}:
        before = time.thread_time()
        results |= {result.job: result for result in client.tier.finished()}
        client.presence(1)
        assert time.thread_time() - before < 0.1, "the scheduler's thread does not wait"
        assert time.monotonic() - begun < 10.0, "ten times the deadline"
    assert client.check(results[job], *NUMBERS) == kept
    assert [number for number, ok in zip(NUMBERS, results[probe].ok, strict=True) if ok] == kept
    pool = client.pool.copy()
    proxies.set()
    client.reconnect()
    client.probe(99)
    assert (client.pool == pool).all(), "late bytes are written nowhere"
    assert (client.pool[60:] == CANARY).all()


# ---- options, and replays


@pytest.mark.slow
def test_server_without_cluster_support_is_refused(tmp_path: Path, make: Callable[..., Client]) -> None:
    with running(tmp_path) as server, refusal("cluster support disabled"):
        make(url_of([server.port]))


def test_warns_once_about_a_cluster_that_saves(
    cluster: Cluster, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    for master in cluster.masters:
        assert master.execute("CONFIG", "SET", "save", "3600 1") == b"OK"
    try:
        make(cluster)
    finally:
        for master in cluster.masters:
            assert master.execute("CONFIG", "SET", "save", "") == b"OK"
    assert sum("saves" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_replay_equals_a_replay_with_a_tier_for_all_blocks(cluster: Cluster) -> None:
    trace, block_bytes = generate(builtin("chat", sessions=60)), 4096
    data = DataPlane(40, block_bytes)
    try:
        shared = Replay(trace, ReplayConfig(40, tiers=parse_tiers("t", f"{cluster.url}/replay")), data).run()
    finally:
        data.close()
    planned = Replay(trace, ReplayConfig(40, tiers=parse_tiers("t", "1000000"))).run()
    assert shared.mismatches_served == 0
    assert shared.prefix_hit_ratio == planned.prefix_hit_ratio
    assert shared.tiers[1].hit_blocks == planned.tiers[1].hit_blocks > 0
