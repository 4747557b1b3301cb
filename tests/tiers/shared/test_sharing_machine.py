"""State machines of a server, a cluster and a bucket that two machines share (`sharing_machine.py`).

KVOFFLOAD_SHARINGS sets the number of sequences; `make soak` plays more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.s3.protocol import S3, epoch_name
from kvoffload.tiers.shared.identity import is_rest, rest_names
from kvoffload.tiers.shared.remote_tier import RemoteTier
from kvoffload.tiers.spec import TierOwner
from kvoffload.tiers.valkey.cluster_map import MapQuestion
from kvoffload.tiers.valkey.divisions import slot_of
from support import s3_server
from support.fault_proxy import FaultProxy
from support.pauses import end_pauses
from support.s3_server import BUCKET, KEY_ID, SECRET, Rclone
from support.sharing_client import some_keys
from support.sharing_machine import EVERY, BehindAProxy, SharingMachine, any_number, machines
from support.valkey_server import PATIENCE_S, Cluster, Server, clustered, running

PATIENT: dict[str, Any] = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
QUICK: dict[str, Any] = {"timeout": 0.5, "probe_timeout": 0.5}
"""Deadlines behind a proxy: with a flipped end of line, the rest of the line never arrives."""
SHARINGS = os.environ.get("KVOFFLOAD_SHARINGS")


def sequences(steps: int, one_of: int = 1) -> settings:
    """Return settings for sequences of `steps` steps; `one_of` divides the number of sequences."""
    count = max(1, int(SHARINGS or settings().max_examples) // one_of)
    return settings(stateful_step_count=steps, deadline=None, max_examples=count)


class ServerMachine(BehindAProxy):
    """A server, and blocks of one value."""

    server: ClassVar[Server]

    def begin(self) -> list[Any]:
        self.server.execute("FLUSHALL")
        self.proxy = FaultProxy(self.server.port)
        described = ValkeyOptions(url=f"valkey://127.0.0.1:{self.proxy.port}/ns", **QUICK)
        return [described.open(TierOwner(self.block_bytes, 36, "m")) for _ in range(2)]

    def values(self) -> list[bytes]:
        return self.server.names()

    def get(self, place: bytes) -> bytes:
        return self.server.get(place)

    def put(self, place: bytes, value: bytes) -> None:
        self.server.put(place, value)

    def remove(self, place: bytes) -> None:
        self.server.delete(place)

    def remove_epoch(self, place: bytes) -> None:
        self.server.delete(self.tiers[0].peer.keyspace.epoch_keys[0])

    def snapshot(self) -> dict[bytes, bytes]:
        return self.server.snapshot()

    def restore(self, snapshot: dict[bytes, bytes]) -> None:
        self.server.restore(snapshot)

    def is_epoch(self, place: bytes) -> bool:
        return b":epoch" in place


class MachineOfTwoValues(ServerMachine):
    """A server, and blocks of two values."""

    block_bytes = 16 << 10

    def whole(self, place: bytes) -> list[bytes]:
        first = place[:-1] if is_rest(place) else place
        return [first, *rest_names([first])]


class ClusterMachine(SharingMachine):
    """A cluster of three masters whose slots move and whose maps are old, and blocks of one value."""

    cluster: ClassVar[Cluster]

    def begin(self) -> list[Any]:
        for master in self.cluster.masters:
            assert master.execute("FLUSHALL") == b"OK"
        described = ValkeyOptions(url=f"{self.cluster.url}/ns", **PATIENT)
        return [described.open(TierOwner(self.block_bytes, 36, "m")) for _ in range(2)]

    def values(self) -> list[tuple[Server, bytes]]:
        return [(master, name) for master in self.cluster.masters for name in master.names()]

    def get(self, place: tuple[Server, bytes]) -> bytes:
        server, name = place
        return server.get(name)

    def put(self, place: tuple[Server, bytes], value: bytes) -> None:
        server, name = place
        server.put(name, value)

    def remove(self, place: tuple[Server, bytes]) -> None:
        server, name = place
        server.delete(name)

    def remove_epoch(self, place: tuple[Server, bytes]) -> None:
        server, name = place
        *begin, _, tag, _ = name.split(b":")
        server.delete(b":".join([*begin, b"epoch", tag]))

    def snapshot(self) -> dict[bytes, bytes]:
        return self.cluster.snapshot()

    def restore(self, snapshot: dict[bytes, bytes]) -> None:
        self.cluster.restore(snapshot)

    def is_epoch(self, place: bytes) -> bool:
        return b":epoch" in place

    def parts(self, tier: Any) -> list[Any]:
        return [*tier.nodes.values()]

    def is_well(self, tier: Any) -> bool:
        tier.contains(some_keys(*range(1, 100)))
        return bool(tier.is_whole()) and all(node.is_open("read") for node in tier.nodes.values())

    def epochs(self, tier: Any) -> list[int]:
        known = [node.peer.epoch.numbers for node in tier.nodes.values() if node.peer.epoch is not None]
        return [number for numbers in known for number in numbers if number is not None]

    @rule()
    def try_again_now(self) -> None:
        super().try_again_now()
        for tier in self.tiers:
            end_pauses(tier)

    @rule(number=any_number, to=st.integers(1, 2))
    def a_slot_moves(self, number: int, to: int) -> None:
        """Move a slot with its contents, before the machines know of the move."""
        if (place := self.some_place(number)) is None:
            return
        source, name = place
        target = self.cluster.masters[(self.cluster.masters.index(source) + to) % 3]
        slot = str(slot_of(name))
        identity = self.cluster.identity(target)
        assert target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", self.cluster.identity(source)) == b"OK"
        assert source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", identity) == b"OK"
        for key in source.ask("CLUSTER", "GETKEYSINSLOT", slot, "1000"):
            assert source.execute("MIGRATE", "127.0.0.1", str(target.port), key, "0", "60000") == b"OK"
        for server in (target, source, *self.cluster.masters):
            assert server.execute("CLUSTER", "SETSLOT", slot, "NODE", identity) == b"OK"

    @rule(machine=machines, number=st.integers(0, 2))
    def a_master_hangs(self, machine: int, number: int) -> None:
        """Let a master hang for a moment: its replies arrive after the deadline."""
        with self.cluster.masters[number].stopped():
            self.read_past_deadline(machine)

    @rule(machine=machines)
    def a_map_is_old(self, machine: int) -> None:
        """Use a map with all divisions one node further."""
        tier = self.tiers[machine]
        known = [*tier.numbers.items()]
        wrong = MapQuestion(deadline=0.0)
        wrong.divisions = {
            address: tier.divisions[known[row - 1][1]] for row, (address, _) in enumerate(known)
        }
        wrong.num_replicas = dict.fromkeys(wrong.divisions, 0)
        tier.use_map(wrong)


class BucketMachine(BehindAProxy):
    """A bucket with two blocks in an object."""

    rclone: ClassVar[Rclone]

    def begin(self) -> list[Any]:
        self.rclone.empty()
        self.proxy = FaultProxy(self.rclone.port)
        described = S3Options(
            url=f"s3://{BUCKET}/ns",
            endpoint=f"http://127.0.0.1:{self.proxy.port}",
            region="us-east-1",
            pack=2 * self.block_bytes,
            **QUICK,
        )
        tiers = [described.open(TierOwner(self.block_bytes, 36, "m")) for _ in range(2)]
        for tier in tiers:
            assert isinstance(tier, RemoteTier)
            assert isinstance(tier.dialect, S3)
            tier.dialect.most_at_once = 1  # rclone answers 500 to one of several PUTs at once
            assert tier.group_blocks == 2
            tier.extend_path(tier.begin_request("r"), some_keys(*EVERY))
        return tiers

    def values(self) -> list[str]:
        return self.rclone.names()

    def get(self, place: str) -> bytes:
        return self.rclone.file(place).read_bytes()

    def put(self, place: str, value: bytes) -> None:
        self.rclone.put(place, value)

    def remove(self, place: str) -> None:
        self.rclone.delete(place)

    def remove_epoch(self, place: str) -> None:
        self.rclone.delete(epoch_name("ns", self.tiers[0].peer.keyspace.producer).decode())

    def snapshot(self) -> dict[str, bytes]:
        return self.rclone.snapshot()

    def restore(self, snapshot: dict[str, bytes]) -> None:
        self.rclone.restore(snapshot)

    def is_epoch(self, place: str) -> bool:
        return "/epochs/" in place


def before(machine: Any, name: str, started: Callable[[Path], Any]) -> Any:
    """Return a fixture that starts a server and sets it as this attribute of the machine."""

    @pytest.fixture(name=name)
    def engine(tmp_path: Path) -> Iterator[None]:
        with started(tmp_path) as running_server:
            setattr(machine, name, running_server)
            yield
            delattr(machine, name)

    return engine


server = before(ServerMachine, "server", running)
cluster = before(ClusterMachine, "cluster", clustered)


@pytest.fixture
def rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with s3_server.running(Rclone, tmp_path) as server:
        assert isinstance(server, Rclone)
        BucketMachine.rclone = server
        yield
        del BucketMachine.rclone


@pytest.mark.slow
@pytest.mark.usefixtures("server")
class TestServer(ServerMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = sequences(40)


@pytest.mark.slow
@pytest.mark.usefixtures("server")
class TestTwoValues(MachineOfTwoValues.TestCase):  # type: ignore[name-defined, misc]
    settings = sequences(40, one_of=2)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestCluster(ClusterMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = sequences(30, one_of=4)


@pytest.mark.slow
@pytest.mark.usefixtures("rclone")
class TestBucket(BucketMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = sequences(30, one_of=2)
