"""Tests that every shared tier passes: before a server, a cluster and a bucket.

A test file derives a class from `SharedTierContract`, provides the fixtures `rig` and `damage`, and sets the
attributes of the class.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvoffload.errors import UnavailableError
from kvoffload.tiers.contract import NO_JOB, JobResult
from support.fault_proxy import FaultProxies, FaultProxy
from support.pauses import end_pauses
from support.sharing_client import CANARY, SharingClient, some_keys
from support.valkey_server import PATIENCE_S

BLOCKS = [*range(1, 9)]
"""Two whole groups of a bucket."""
GROUP = BLOCKS[:4]

FAULTS: dict[str, dict[str, Any]] = {
    "no reply": {"hang": True},
    "one byte a second": {"bytes_per_s": 1.0},
    "a hang in the middle of a block": {"bytes_per_s": 20.0},
}


@dataclass
class Rig:
    """Machines that share one server.

    Attributes:
        server: the server, with `stopped`, `get`, `put`, `delete`, `has`, `snapshot` and `restore`.
        proxy: a proxy in front of the server.
        connect: makes a machine before the server.
        connect_through_proxy: makes a machine before the proxy.
    """

    server: Any
    proxy: FaultProxy | FaultProxies
    connect: Callable[..., Any]
    connect_through_proxy: Callable[..., Any]


@dataclass(frozen=True)
class Damage:
    """A change to block 2 on the server, which has `BLOCKS`.

    Attributes:
        apply: changes the values, given the server and a machine.
        served: the blocks from 1 to 5 that a read returns then.
        is_received: False if the machine closes the connection at an impossible length.
    """

    name: str
    apply: Callable[[Any, Any], None]
    served: Sequence[int]
    is_received: bool = True


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Return a copy of a test that is marked as slow, for a class whose server is slow."""

    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    return pytest.mark.slow(copy)


def stored_together(client: SharingClient, number: int) -> list[int]:
    """Return the blocks that share a value with a block: the block alone, or a group of a bucket."""
    return [other for other in range(1, 13) if client.names(other) == client.names(number)]


def check_blocks_return(client: SharingClient, other: SharingClient) -> None:
    """Write blocks from one machine, and read them on both."""
    assert client.presence(*BLOCKS) == [None] * 8
    assert client.probe(*GROUP) == []
    assert client.presence(*BLOCKS) == [False] * 4 + [None] * 4
    assert client.write(*GROUP) == GROUP
    assert client.presence(*GROUP, 9) == [True] * 4 + [None]
    assert client.read(*GROUP[::-1], 9) == GROUP[::-1]
    assert client.write(*GROUP) == [], "the presence cache has them"
    stats, block_bytes = client.tier.stats(), client.tier.block_bytes
    assert (stats.written, stats.read, stats.stale, stats.failed, stats.probes) == (4, 4, 1, 0, 4)
    assert (stats.bytes_written, stats.bytes_read) == (4 * block_bytes, 4 * block_bytes)
    assert (stats.in_flight, stats.mismatches) == (0, 0)

    assert other.write(*BLOCKS) == BLOCKS, "the server has the first four"
    stats = other.tier.stats()
    assert (stats.written, stats.skipped) == (4, 4)
    assert other.presence(*BLOCKS) == [True] * 8
    other.forget()
    assert other.probe(*BLOCKS, 9) == BLOCKS
    assert other.read(*BLOCKS) == BLOCKS
    stats = other.tier.stats()
    assert (stats.failed, stats.mismatches) == (0, 0)


class SharedTierContract:
    """Tests of sharing, resets, damage and network faults.

    Attributes:
        num_servers: servers with a circuit breaker each.
        window_blocks: sizes of a window in blocks; `most_at_once`: windows or requests in flight.
        timeout_s, probe_timeout_s: deadlines in tests of deadlines.
        least_timeouts: the number of jobs, out of two reads and two probes, that must exceed their deadlines.
        faults: settings of `FaultProxy` with which neither a read nor a probe ends.
        flip_timeout_s: deadline of a read whose reply has a flipped byte.
        flipped_at: numbers of reply bytes to flip in a read of `GROUP`.
        cut_at: numbers of reply bytes after which to cut a read of `GROUP`.
    """

    num_servers: ClassVar[int] = 1
    window_blocks: ClassVar[Sequence[int]] = (1, 7, 60)
    most_at_once: ClassVar[int] = 3
    many: ClassVar[list[int]] = [*range(1, 61)]
    timeout_s: ClassVar[float] = 0.3
    probe_timeout_s: ClassVar[float] = 0.2
    least_timeouts: ClassVar[int] = 4
    faults: ClassVar[dict[str, dict[str, Any]]] = FAULTS
    flip_timeout_s: ClassVar[float] = PATIENCE_S
    flipped_at: ClassVar[Sequence[int]]
    cut_at: ClassVar[Sequence[int]]

    # ---- sharing

    def test_blocks_return_on_all_machines(self, rig: Rig) -> None:
        check_blocks_return(rig.connect(), rig.connect())

    def test_windows_may_have_any_size(self, rig: Rig) -> None:
        """Tried: one block, several blocks with a smaller last window, all blocks."""
        client = rig.connect()
        for num_blocks in self.window_blocks:
            client.tier.dialect.window_bytes = num_blocks * client.tier.block_bytes
            client.tier.dialect.most_at_once = self.most_at_once
            client.forget()
            assert client.write(*self.many) == self.many
            assert client.read(*self.many, 99, 98) == self.many

    @pytest.mark.parametrize(
        "options", [{"fingerprint": "other weights"}, {"namespace": "tenant-b"}, {"identity": "x"}]
    )
    def test_foreign_blocks_are_not_served(self, rig: Rig, options: dict[str, str]) -> None:
        rig.connect().write(*BLOCKS)
        other = rig.connect(**options)
        assert other.probe(1) == []
        assert other.read(1) == []

    def test_several_machines_write_the_same_blocks_at_once(self, rig: Rig) -> None:
        clients = [rig.connect() for _ in range(3)]
        threads = [threading.Thread(target=client.write, args=BLOCKS) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            assert client.read(*BLOCKS) == BLOCKS

    def test_admission_counts_a_request_once(self, rig: Rig) -> None:
        client = rig.connect(admission="reuse:2")
        first = client.record = client.record or client.tier.begin_request("first")
        assert client.write(*BLOCKS) == client.write(*BLOCKS) == []
        client.tier.finish_request(first, some_keys(*BLOCKS))
        assert client.tier.stats().refused == 2 * len(BLOCKS)
        client.record = client.tier.begin_request("second")
        assert client.write(*BLOCKS) == BLOCKS

    def test_blocks_in_flight_are_bounded(self, rig: Rig) -> None:
        client = rig.connect()
        client.limit_in_flight(4)
        assert client.tier.queue_room == client.tier.read_room(some_keys(*BLOCKS)) == 4
        assert client.write(*BLOCKS) == GROUP
        assert client.tier.stats().dropped == 4
        assert client.tier.queue_room == 4, "a finished job is not in flight"
        assert client.read(*GROUP) == GROUP
        result = client.wait(client.begin_read(*GROUP, 1, 9))
        assert result.ok.tolist() == [True] * 4 + [False] * 2
        assert result.stale is not None
        assert not result.stale.any()
        assert client.presence(9) == [None], "the server was not asked"

    def test_absent_block_in_the_presence_cache_is_a_stale_miss(self, rig: Rig) -> None:
        client = rig.connect()
        client.write(*BLOCKS)
        for name in client.names(1):
            rig.server.delete(name)
        result = client.wait(client.begin_read(1, 5))
        assert result.ok.tolist() == [False, True]
        assert result.stale is not None
        assert result.stale.tolist() == [True, False]
        assert client.presence(1, 5) == [False, True]
        assert client.tier.stats().stale == 1

    def test_only_own_writes_are_reported(self, rig: Rig) -> None:
        client, other = rig.connect(), rig.connect()
        assert client.changes() == other.changes() == [], "reports begin"
        other.write(*GROUP)
        client.write(*range(1, 13))
        assert other.changes() == [({*GROUP}, False)]
        assert client.changes() == [({*range(5, 13)}, False)], "another machine has written the first four"
        rig.server.put(client.names(5)[0], b"damage")
        for name in client.names(9):
            rig.server.delete(name)
        damaged = {5, 6} & {*stored_together(client, 5)}
        assert {*client.read(1, 5, 6)} == {1, 5, 6} - damaged
        assert client.changes() == [(damaged, True)]
        assert client.read(*damaged) == []
        client.forget()
        absent = {9, 10} & {*stored_together(client, 9)}
        for name in client.names(1):
            rig.server.delete(name)
        assert {*client.probe(1, 9, 10)} == {9, 10} - absent
        assert client.changes() == [(absent, True)], "each loss once, and no block of others"
        rewritten = stored_together(client, 5)
        assert client.write(*rewritten) == rewritten
        assert client.changes() == [(damaged, False)]
        other.reset()
        assert client.read(*range(1, 13)) == []
        assert client.changes() == [({*range(5, 13)} - absent, True)], "the other machine's reset"
        assert other.changes() == [({*GROUP}, True)]

    # ---- starting and closing

    def test_unreachable_server_stops_a_command_and_no_engine(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig.proxy.set(refuse=True)
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot be used now"):
            rig.connect_through_proxy()
        assert time.monotonic() - begun < 20.0
        client = rig.connect_through_proxy(on_unavailable=lambda error: pytest.fail("there is a tier"))
        assert "does not answer yet" in caplog.text
        assert client.presence(1) == [False]
        rig.proxy.set()
        client.reconnect()
        assert client.presence(1) == [None]

    def test_closed_tier_is_empty_and_raises_nothing(self, rig: Rig) -> None:
        client = rig.connect()
        client.write(*GROUP)
        with rig.server.stopped():
            job = client.begin_read(1)
            client.tier.close()
            client.tier.close()
        assert not client.wait(job).ok.any()
        assert client.presence(1) == [False]
        assert client.write(*BLOCKS[4:]) == client.read(1) == client.probe(1) == []
        assert (client.pool[1:] == CANARY).all()
        assert not [t for t in threading.enumerate() if t.name.startswith("kvoffload-") and not t.daemon]

    # ---- resets

    def test_no_read_after_a_confirmed_reset_returns_an_older_block(self, rig: Rig) -> None:
        client, other = rig.connect(), rig.connect()
        client.write(*BLOCKS)
        assert other.read(*BLOCKS) == BLOCKS
        with rig.server.stopped():
            client.tier.clear()
            assert client.presence(1) == [False], "closed until the server has confirmed the reset"
            assert client.read(*BLOCKS) == []
            assert not client.tier.drain(0.01)
        assert client.tier.drain(PATIENCE_S)
        assert client.presence(1) == [None]
        assert other.presence(1) == [True], "the other machine does not know of the reset"
        assert other.read(*BLOCKS) == []
        other.reconnect()
        assert other.presence(1, 8) == [None, None]
        assert other.write(*GROUP) == GROUP
        assert client.probe(*BLOCKS) == GROUP

    @pytest.mark.parametrize("operation", ["probe", "write"])
    def test_first_operation_after_a_reset_notices_the_reset(self, rig: Rig, operation: str) -> None:
        client, other = rig.connect(), rig.connect()
        other.write(*GROUP)
        client.reset()
        assert getattr(other, operation)(*BLOCKS) == [], "an exchange of the old epoch has no results"
        other.reconnect()
        assert other.presence(1) == [None]
        assert client.probe(1) == []

    def test_lost_epoch_is_replaced(self, rig: Rig) -> None:
        """The server has evicted the epoch alone: its earlier blocks remain, but are not found."""
        client = rig.connect()
        client.write(*GROUP)
        (name, *_) = client.names(1)
        rig.server.delete(client.epoch_key(1))
        assert client.read(1) == []
        client.reconnect()
        assert client.names(1)[0] != name
        assert client.probe(1) == []
        assert rig.server.has(name)

    def test_block_of_an_older_epoch_is_a_miss(self, rig: Rig) -> None:
        client = rig.connect()
        client.write(*GROUP)
        values = [rig.server.get(name) for name in client.names(1)]
        client.reset()
        for name, value in zip(client.names(1), values, strict=True):
            rig.server.put(name, value)
        assert client.probe(1) == [1], "its name is there"
        assert client.read(1) == []
        assert client.tier.stats().mismatches == 1

    def test_restored_epoch_is_reset_again(self, rig: Rig) -> None:
        """A server that restores a snapshot has its old epoch and blocks again."""
        client = rig.connect()
        assert client.write(*BLOCKS) == BLOCKS
        snapshot, epoch_keys = rig.server.snapshot(), {client.epoch_key(number) for number in BLOCKS}
        client.reset()
        assert client.read(*BLOCKS) == []
        rig.server.restore(snapshot)
        new = rig.connect()
        assert new.read(*BLOCKS) == BLOCKS, "a new machine cannot know that the epoch is old"
        until = time.monotonic() + PATIENCE_S
        while any(rig.server.get(key) == snapshot[key] for key in epoch_keys):
            client.forget()
            client.assume_present(*BLOCKS)
            assert client.read(*BLOCKS) == []
            end_pauses(client.tier)
            assert time.monotonic() < until
        client.reconnect()
        assert client.read(*BLOCKS) == client.probe(*BLOCKS) == new.read(*BLOCKS) == []
        new.reconnect()
        assert new.write(*BLOCKS) == BLOCKS
        assert client.read(*BLOCKS) == BLOCKS, "both machines are in one epoch"

    # ---- damage

    def test_damaged_block_is_a_miss(self, rig: Rig, damage: Damage) -> None:
        client = rig.connect()
        client.write(*BLOCKS)
        names, lost = client.names(2), stored_together(client, 2)
        damage.apply(rig.server, client)
        assert client.read(1, 2, 3, 4, 5) == [*damage.served]
        stats = client.tier.stats()
        if damage.is_received:
            assert (stats.mismatches, stats.failed) == (5 - len(damage.served), 0)
            assert not any(map(rig.server.has, names)), "no other machine meets the damage"
            assert client.presence(5) == [True]
        else:
            assert stats.failed > 0
            for name in names:
                rig.server.delete(name)
        assert client.presence(*lost) == [False] * len(lost)
        sound = [number for number in BLOCKS[::-1] if number not in lost]
        assert client.read(*sound) == sound
        assert client.write(*lost) == lost
        assert client.read(*lost) == lost

    @pytest.mark.parametrize("options", [{"namespace": "other"}, {"fingerprint": "other"}])
    def test_block_copied_from_another_place_is_a_miss(self, rig: Rig, options: dict[str, str]) -> None:
        client, other = rig.connect(), rig.connect(**options)
        other.write(*GROUP)
        client.write(*BLOCKS[4:])
        for number in (1, 2):
            for source, name in zip(other.names(number), client.names(number), strict=True):
                rig.server.put(name, rig.server.get(source))
        assert client.read(1, 2, 5) == [5]
        assert client.tier.stats().mismatches == 2

    # ---- the network

    def test_slow_network_causes_no_failure(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*GROUP)
        rig.proxy.set(delay_s=0.01, bytes_per_s=2e6)
        assert client.read(*GROUP) == GROUP

    def test_connection_closed_while_idle_causes_no_failure(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*GROUP)
        for _ in range(3):
            rig.proxy.drop_connections()
            time.sleep(0.1)  # for the client to notice it
            assert client.read(1, 2) == [1, 2]
            assert client.probe(9) == []
            client.forget(9)
        assert client.tier.stats().failed == 0

    def test_dead_server_is_not_asked_until_it_returns(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*GROUP)
        rig.proxy.set(refuse=True)
        rig.proxy.drop_connections()
        for _ in range(3):
            assert client.read(*BLOCKS) == []
        until = time.monotonic() + PATIENCE_S
        while client.is_open():
            assert time.monotonic() < until
        assert client.tier.stats().circuit_open == self.num_servers
        assert client.write(*BLOCKS[4:]) == client.read(1) == client.probe(1) == []
        assert client.tier.submit_probe(some_keys(1)) == NO_JOB
        assert client.presence(1, 9) == [False, False], "no request waits for the server"
        assert client.tier.stats().dropped == 4
        rig.proxy.set()
        client.reconnect()
        assert client.tier.stats().circuit_open == 0
        assert client.probe(1) == [1]
        assert client.read(1) == [1]

    def test_flipped_byte_of_a_reply_is_not_served(self, rig: Rig) -> None:
        client = rig.connect_through_proxy(timeout=self.flip_timeout_s)
        client.write(*GROUP)
        for flip_at in self.flipped_at:
            rig.proxy.set(flip_at=flip_at)
            self.check_flipped(client.read(*GROUP))  # which checks the bytes of the served blocks
            rig.proxy.set()
            client.reconnect()
            client.forget()
            client.write(*GROUP)
            client.assume_present(*GROUP)
            assert client.read(*GROUP) == GROUP

    def check_flipped(self, served: list[int]) -> None:
        """Check the blocks of `GROUP` that were served although a byte of the reply was flipped."""
        assert {*served} < {*GROUP}

    def test_connection_cut_during_a_reply_loses_the_rest_of_the_reply(self, rig: Rig) -> None:
        client = rig.connect_through_proxy()
        client.write(*GROUP)
        for cut_at in self.cut_at:
            rig.proxy.set(cut_after=cut_at)
            self.check_cut(cut_at, client.read(*GROUP))
            rig.proxy.set()
            client.reconnect()
            client.assume_present(*GROUP)
            assert client.read(*GROUP) == GROUP

    def check_cut(self, cut_at: int, served: list[int]) -> None:
        """Check the blocks of `GROUP` that were served although the connection was cut."""
        assert {*served} < {*GROUP}

    @pytest.mark.parametrize("fault", FAULTS)
    def test_jobs_end_by_their_deadlines(self, rig: Rig, fault: str) -> None:
        """Each job has ten times its deadline; with the fault the reply takes much longer, or never comes."""
        client = rig.connect_through_proxy(timeout=self.timeout_s, probe_timeout=self.probe_timeout_s)
        rig.connect_through_proxy().write(*GROUP)
        rig.proxy.set(**self.faults[fault])
        begun = time.monotonic()
        job = client.begin_read(1, 2)
        probe = client.tier.submit_probe(some_keys(5, 6))
        results: dict[int, JobResult] = {}
        while {job, probe} - {*results}:
            before = time.thread_time()
            results |= {result.job: result for result in client.tier.finished()}
            client.presence(1)
            assert time.thread_time() - before < 0.1, "the scheduler's thread does not wait"
            assert time.monotonic() - begun < 10 * self.timeout_s
        assert client.check(results[job], 1, 2) == []
        assert not results[probe].ok.any()
        assert client.presence(1, 5) == [False, False], "not asked for again at once"
        assert self.least_timeouts <= client.tier.stats().timeouts <= 4
        pool = client.pool.copy()
        rig.proxy.set()
        client.reconnect()
        client.probe(9)
        assert (client.pool == pool).all(), "late bytes are written nowhere"
