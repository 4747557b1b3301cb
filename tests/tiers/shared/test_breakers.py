"""Circuit breakers of a shared tier: which jobs end when a breaker opens, and when it is tried again."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload.tiers.contract import NO_JOB, JobResult
from kvoffload.tiers.shared.circuit import PROBE, READ, WRITE, Breakers, CircuitBreaker
from kvoffload.tiers.shared.epochs import EpochHistory
from kvoffload.tiers.shared.exchanges import Probe, Read, Write
from kvoffload.tiers.shared.groups import BlockGroups
from kvoffload.tiers.shared.identity import SingleEpoch, SingleKeyspace
from kvoffload.tiers.shared.peer import Peer
from kvoffload.tiers.shared.remote_errors import CacheResetError, ServerError
from kvoffload.tiers.shared.server import RemoteOptions, Server
from kvoffload.tiers.shared.speeds import measure_speeds
from kvoffload.tiers.valkey.protocol import Resp
from kvoffload.tiers.valkey.resp import Connection, Login
from support.gated_server import ANSWERS, BLOCK_BYTES, FAILS, HANGS, GatedServer
from support.sharing_client import some_keys
from support.valkey_server import PATIENCE_S


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> GatedServer:
    return GatedServer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(server: GatedServer, clock: Clock) -> Iterator[Callable[..., Any]]:
    tiers: list[Any] = []

    def make(**options: Any) -> Any:
        tiers.append(server.tier(clock, **options))
        return tiers[-1]

    yield make
    server.gate.set()
    for tier in tiers:
        tier.close()


POOL = np.zeros((64, BLOCK_BYTES), np.uint8)


def write(tier: Any, number: int) -> int:
    job, taken = tier.submit_write(some_keys(number), POOL, np.zeros(1, np.int64))
    assert taken.all() or job == NO_JOB
    return int(job)


def read(tier: Any, number: int) -> int:
    return int(tier.submit_read(some_keys(number), POOL, np.ones(1, np.int64)))


def wait(tier: Any, *jobs: int) -> dict[int, JobResult]:
    """Wait until these jobs have ended."""
    until, results = time.monotonic() + PATIENCE_S, dict[int, JobResult]()
    while not results.keys() >= {*jobs}:
        results |= {result.job: result for result in tier.finished()}
        assert time.monotonic() < until, "a job does not end"
        time.sleep(0.0002)
    assert results.keys() == {*jobs}
    return results


def settle(tier: Any) -> None:
    """Wait until no job or handshake is in flight, and process the results."""
    until = time.monotonic() + PATIENCE_S
    while tier.jobs.in_flight or tier.peer.handshake is not None or tier.jobs.ended:
        tier.process_ended()
        assert time.monotonic() < until
        time.sleep(0.0002)


# ---- queued jobs


def test_queued_jobs_end_when_the_breaker_opens(
    server: GatedServer, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The server hangs at the first two of 40 writes; the other writes end and keep no RAM pinned."""
    tier = make(lines=2)
    server.modes = {"write": HANGS, "probe": FAILS}
    jobs = [write(tier, number) for number in range(40)]
    until = time.monotonic() + PATIENCE_S
    while server.num_operations.get("write", 0) < 2:
        assert time.monotonic() < until
        time.sleep(0.0002)
    assert tier.finished() == []
    for number in range(2):
        wait(tier, tier.submit_probe(some_keys(100 + number)))
    ended = wait(tier, *jobs[2:], tier.submit_probe(some_keys(200)))
    assert tier.stats().circuit_open == 1
    assert not any(result.ok.any() for result in ended.values())
    assert tier.stats().in_flight == 2
    assert tier.stats().timeouts == 3, "writes that were not sent have not timed out"
    server.gate.set()
    assert all(result.ok.all() for result in wait(tier, *jobs[:2]).values())


@pytest.mark.parametrize("kind", ["read", "write", "probe"])
def test_queued_job_ends_at_its_deadline(server: GatedServer, make: Callable[..., Any], kind: str) -> None:
    """The jobs before it hang, because the gate stays shut."""
    tier = make(timeout_s=0.01, probe_timeout_s=0.01, write_timeout_s=0.01)
    server.modes = {kind: HANGS}
    begin = {"read": read, "write": write, "probe": lambda tier, n: tier.submit_probe(some_keys(n))}[kind]
    jobs = [begin(tier, number) for number in range(5)]
    until, ended = time.monotonic() + PATIENCE_S, set[int]()
    while len(ended) < 4:
        ended |= {result.job for result in tier.finished()}
        assert time.monotonic() < until, "a queued job does not end"
        time.sleep(0.0002)
    server.gate.set()
    wait(tier, *({*jobs} - ended))


def test_deadline_of_a_write_begins_at_its_submission(make: Callable[..., Any]) -> None:
    tier = make(timeout_s=2.0)
    before = time.monotonic()
    write(tier, 1)
    (batch,) = tier.jobs.in_flight.values()
    assert before + 10.0 <= batch.deadline <= time.monotonic() + 10.0


# ---- a type of operation that fails


def test_server_that_hangs_on_values_costs_three_deadlines(
    server: GatedServer, make: Callable[..., Any], clock: Clock
) -> None:
    """25 requests a second for 30 s, each with a probe, which is answered, and a read, which fails."""
    tier = make()
    wait(tier, write(tier, 1))
    server.modes = {"read": FAILS}
    waited, num_requests, begun = [], 0, clock.now
    while clock.now < begun + 30.0:
        num_requests += 1
        job = tier.submit_probe(some_keys(1))
        if job != NO_JOB:
            wait(tier, job)
        if tier.contains(some_keys(1)).any():
            assert not wait(tier, read(tier, 1)).popitem()[1].ok.any()
            waited.append(clock.now - begun)
            clock.now += 2.0
        settle(tier)
        clock.now += 0.04
    assert len(waited) == 3
    assert num_requests > 500
    assert 3 < server.num_operations["read"] - 3 <= 8, "attempts after 1, 2, 4 and 8 s, with a jitter of half"
    server.modes = {}
    clock.now += 90.0
    tier.contains(some_keys(1))
    settle(tier)
    assert tier.contains(some_keys(1)).all(), "the first successful attempt closes the breaker"
    assert wait(tier, read(tier, 1)).popitem()[1].ok.all()


def test_attempt_has_no_result_for_a_caller(
    server: GatedServer, make: Callable[..., Any], clock: Clock
) -> None:
    tier = make()
    wait(tier, write(tier, 1))
    server.modes = {"read": FAILS}
    for _ in range(3):
        wait(tier, read(tier, 1))
    assert not tier.contains(some_keys(1)).any()
    assert not tier.unknown(some_keys(2)).any(), "no probe while reads fail"
    assert wait(tier, read(tier, 1)).popitem()[1].ok.tolist() == [False], "at once"
    assert server.num_operations["read"] == 3
    clock.now += 2.0
    server.modes = {"read": HANGS}
    tier.contains(some_keys(1))  # three failures without a success have opened the breaker of the server, too
    settle(tier)
    tier.contains(some_keys(1))
    assert tier.stats().in_flight == 0
    assert tier.drain(0.0), "no caller waits for the attempt"
    assert tier.finished() == []
    tier.contains(some_keys(1))
    server.gate.set()
    settle(tier)
    assert server.num_operations["read"] == 4, "one at a time"
    assert tier.finished() == []
    assert tier.contains(some_keys(1)).all()


def test_attempt_to_probe_is_not_counted_as_a_probe(
    server: GatedServer, make: Callable[..., Any], clock: Clock
) -> None:
    tier = make()
    wait(tier, write(tier, 1))
    server.modes = {"probe": FAILS}
    for _ in range(3):
        wait(tier, tier.submit_probe(some_keys(1)))
    server.modes = {}
    clock.now += 2.0
    for _ in range(2):  # a handshake, then the attempt
        tier.contains(some_keys(1))
        settle(tier)
    assert server.num_operations["probe"] == 4
    assert (tier.stats().probes, tier.stats().probe_hits) == (3, 0)


def test_reads_and_writes_fail_independently(
    server: GatedServer, make: Callable[..., Any], clock: Clock
) -> None:
    tier = make()
    wait(tier, write(tier, 1))
    server.modes = {"read": FAILS}
    for _ in range(3):
        wait(tier, read(tier, 1))
        wait(tier, write(tier, next(fresh)))
    assert wait(tier, write(tier, next(fresh))).popitem()[1].ok.all()
    server.modes = {}
    clock.now += 2.0
    tier.contains(some_keys(1))
    settle(tier)
    server.modes = {"write": FAILS}
    for _ in range(3):
        wait(tier, write(tier, next(fresh)))
        wait(tier, read(tier, 1))
    assert write(tier, next(fresh)) == NO_JOB
    assert wait(tier, read(tier, 1)).popitem()[1].ok.all()
    clock.now += 2.0
    attempt = write(tier, next(fresh))
    assert attempt != NO_JOB
    assert write(tier, next(fresh)) == NO_JOB
    wait(tier, attempt)
    assert write(tier, next(fresh)) == NO_JOB, "the attempt has failed"
    server.modes = {}
    clock.now += 4.0
    assert wait(tier, write(tier, next(fresh))).popitem()[1].ok.all()
    assert wait(tier, write(tier, next(fresh))).popitem()[1].ok.all()


fresh = itertools.count(5000)


def test_reply_without_a_block_closes_the_breaker_briefly(clock: Clock) -> None:
    breaker = CircuitBreaker(clock, chance=lambda: 0.5)
    for _ in range(3):
        breaker.failed()
    clock.now += 1.1
    breaker.answered()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open, "the next failure opens the breaker"
    clock.now += 1.9
    assert not breaker.may_attempt, "the pause is longer"
    clock.now += 0.2
    assert breaker.may_attempt
    breaker.succeeded()
    breaker.answered()
    breaker.failed()
    assert not breaker.is_open


# ---- recovery


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_restored_server_is_found_within_five_seconds(
    server: GatedServer, make: Callable[..., Any], clock: Clock, chance: float
) -> None:
    tier = make(chance=lambda: chance)
    wait(tier, write(tier, 1))
    server.modes = dict.fromkeys(("handshake", "probe", "read", "write"), FAILS)
    for number in range(3):
        wait(tier, tier.submit_probe(some_keys(number)))
    begun = clock.now
    while clock.now < begun + 120.0:
        assert not tier.contains(some_keys(1)).any()
        settle(tier)
        clock.now += 0.1
    assert 120 / 4.6 - 1 <= server.num_operations["handshake"] - 1 <= 120, "a handshake every few seconds"
    server.modes = dict.fromkeys(("handshake", "probe", "read", "write"), ANSWERS)
    back = clock.now
    while not tier.is_open(READ):
        settle(tier)
        clock.now += 0.1
    assert clock.now - back <= 5.0


def test_outages_are_counted_with_their_seconds(clock: Clock) -> None:
    breakers = Breakers(clock)
    for _ in range(3):
        breakers.server.failed()
    breakers.note_outage(5.0)
    clock.now += 10.0
    breakers.note_outage(1.0)
    assert (breakers.num_outages, breakers.outage_s) == (1, 15.0)
    assert breakers.open_kinds() == {PROBE, READ, WRITE}
    breakers.server.succeeded()
    breakers.note_outage(0.0)
    clock.now += 100.0
    assert breakers.outage_s == 15.0
    breakers.operations[READ].open()
    breakers.note_outage(2.0)
    clock.now += 1.0
    assert (breakers.num_outages, breakers.outage_s, breakers.open_kinds()) == (2, 18.0, {READ})


def test_breaker_of_a_replay_opens_at_the_first_timeout(
    server: GatedServer, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    tier = make(gives_up_at_once=True)
    wait(tier, write(tier, 1))
    server.modes = {"read": FAILS}
    wait(tier, read(tier, 1))
    assert not tier.contains(some_keys(1)).any()
    assert tier.stats().outages == 1
    assert sum("is silent" in record.getMessage() for record in caplog.records) == 1


# ---- nodes of a cluster


def peer_of(history: EpochHistory | None, **more: Any) -> Peer:
    keyspace = SingleKeyspace("ns", bytes(16), (b"epoch",))
    server = Server("host:1/ns", lambda _: None, Resp(), keyspace)
    options = RemoteOptions(namespace="ns", fingerprint="model", block_bytes=BLOCK_BYTES, **more)
    return Peer("valkey", server, options, send=lambda *_: None, forget=lambda **_: None, history=history)


def ended_probe(error: Exception | None = None, refused: ServerError | None = None) -> Probe:
    epoch = SingleEpoch("ns", bytes(16), 1)
    probe = Probe(
        job=1, num_rows=1, keys=some_keys(1), epoch=epoch, block_bytes=BLOCK_BYTES, deadline=0.0,
        refused=refused,
    )  # fmt: skip
    probe.error, probe.ended = error, time.monotonic()
    return probe


@pytest.mark.parametrize("code", ["MOVED 3999 127.0.0.1:6381", "ASK 3999 127.0.0.1:6381", "TRYAGAIN later"])
def test_block_on_another_node_is_no_failure_of_a_node(code: str) -> None:
    """It is a reason to read the map again. For a single server it is a failure."""
    node, single = peer_of(EpochHistory()), peer_of(None)
    for number in range(1, 6):
        error = ServerError(code)
        assert node.note(ended_probe(error)) == set()
        assert (node.num_troubles, node.last_error) == (number, error)
        assert single.note(ended_probe(error)) == ({PROBE, READ, WRITE} if number == 3 else set())
    assert not node.breakers.is_any_open
    assert single.num_troubles == 0


def test_troubles_of_a_node_are_failures_and_blocks_on_another_node() -> None:
    node = peer_of(EpochHistory())
    node.note(ended_probe())
    node.note(ended_probe(CacheResetError()))
    node.note(ended_probe(refused=ServerError("OOM command not allowed")))
    assert node.num_troubles == 0
    node.note(ended_probe(refused=ServerError("MOVED 3999 127.0.0.1:6381")))
    assert node.num_troubles == 1
    for number in range(1, 4):
        opened = node.note(ended_probe(ServerError("LOADING")))
        assert opened == ({PROBE, READ, WRITE} if number == 3 else set())
        assert node.num_troubles == 1 + number
    node.note(ended_probe(refused=ServerError("MOVED 3999 127.0.0.1:6381")))
    assert node.breakers.server.is_open, "only a handshake closes it"


# ---- slow servers


def late_transfer(kind: type[Read | Write], num_ok: int) -> Read | Write:
    """Return a transfer of four blocks that has exceeded its deadline."""
    transfer = kind(
        job=1, num_rows=4, keys=some_keys(1, 2, 3, 4), epoch=SingleEpoch("ns", bytes(16), 1),
        block_bytes=BLOCK_BYTES, deadline=0.0, pool=POOL, rows=np.arange(4),
    )  # fmt: skip
    transfer.ok[:num_ok] = True
    transfer.error, transfer.ended = TimeoutError("deadline exceeded"), time.monotonic()
    return transfer


@pytest.mark.parametrize("kind", [Read, Write])
def test_transfer_of_some_blocks_by_its_deadline_is_no_failure(
    kind: type[Read | Write], caplog: pytest.LogCaptureFixture
) -> None:
    """A network of 1 Gbit/s transfers less than 256 MiB, the limit in flight, in 2 s."""
    peer = peer_of(None)
    for _ in range(2):
        for _ in range(2):
            assert peer.note(late_transfer(kind, 0)) == set()
        for _ in range(4):
            assert peer.note(late_transfer(kind, 3)) == set()
    assert "is slow: 3 of 4 blocks of a" in caplog.text
    for number in range(1, 4):
        assert peer.note(late_transfer(kind, 0)) == ({PROBE, READ, WRITE} if number == 3 else set())


def test_late_write_of_blocks_that_were_there_is_a_failure() -> None:
    peer = peer_of(None)
    for number in range(1, 4):
        late = late_transfer(Write, 3)
        late.was_there[:] = late.ok  # type: ignore[union-attr]
        assert peer.note(late) == ({PROBE, READ, WRITE} if number == 3 else set())


def test_late_read_of_a_replay_opens_the_breaker() -> None:
    assert peer_of(None, gives_up_at_once=True).note(late_transfer(Read, 3)) == {PROBE, READ, WRITE}


# ---- silence


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a server that accepts connections, and neither reads nor answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("num_bytes", [10, 64 << 20])
def test_silence_ends_an_exchange_long_before_its_deadline(mute: int, num_bytes: int) -> None:
    """With 64 MiB the server does not receive the request."""
    until = time.monotonic() + PATIENCE_S
    connection = Connection("127.0.0.1", mute, Login(), until, silence_s=0.02)

    def exchange() -> None:
        connection.send([b"x" * num_bytes], until)
        connection.reply(until)

    with pytest.raises(TimeoutError, match=r"nothing received for 0\.02 s"):
        exchange()
    connection.close()


def test_deadline_before_the_longest_silence_counts(mute: int) -> None:
    connection = Connection("127.0.0.1", mute, Login(), time.monotonic() + 60.0, silence_s=60.0)
    with pytest.raises(TimeoutError, match="deadline exceeded"):
        connection.reply(time.monotonic() + 0.01)
    connection.close()


# ---- writes


def written(tier: Any, *numbers: int) -> list[int]:
    """Offer blocks of a path; return the accepted blocks once they are written."""
    request, keys = tier.begin_request("r"), some_keys(*numbers)
    tier.extend_path(request, keys)
    job, taken = tier.submit_write(keys, POOL, np.arange(len(keys)), request)
    assert tier.drain(PATIENCE_S)
    assert [result.ok.tolist() for result in tier.finished()] == [[True] * int(taken.sum())] * (job != NO_JOB)
    return [number for number, was_taken in zip(numbers, taken.tolist(), strict=True) if was_taken]


@pytest.mark.parametrize("group_blocks", [1, 4])
def test_the_limit_of_bytes_in_flight_admits_a_block_or_group_of_any_size(
    make: Callable[..., Any], group_blocks: int
) -> None:
    tier = make(groups=BlockGroups(group_blocks))
    tier.jobs.in_flight_bytes = group_blocks * BLOCK_BYTES - 1
    assert tier.queue_room == group_blocks
    numbers = [*range(1, 9)]
    assert written(tier, *numbers) == numbers[:group_blocks]


def test_rows_may_change_while_a_job_is_in_flight(server: GatedServer, make: Callable[..., Any]) -> None:
    tier, pool = make(), np.zeros((3, BLOCK_BYTES), np.uint8)
    pool[0] = 7
    server.modes = {"read": HANGS, "write": HANGS}
    rows = np.zeros(1, np.int64)
    job, _ = tier.submit_write(some_keys(1), pool, rows)
    rows[0] = 1
    server.gate.set()
    wait(tier, job)
    server.gate.clear()
    rows[0] = 1
    job = tier.submit_read(some_keys(1), pool, rows)
    rows[0] = 2
    server.gate.set()
    wait(tier, job)
    assert pool[:, 0].tolist() == [7, 7, 0]


def test_a_key_that_is_offered_twice_is_written_once(make: Callable[..., Any]) -> None:
    assert written(make(), 1, 2, 1) == [1, 2]


def test_a_key_that_is_offered_twice_completes_no_group(make: Callable[..., Any]) -> None:
    tier = make(groups=BlockGroups(2))
    tier.extend_path(tier.begin_request("r"), some_keys(1, 2))
    job, taken = tier.submit_write(some_keys(1, 1), POOL, np.arange(2))
    assert (job, taken.tolist()) == (NO_JOB, [False, False])


@pytest.mark.parametrize(("group_blocks", "num_blocks"), [(1, 64), (5, 60), (100, 100)])
def test_speeds_are_measured_with_whole_groups(
    make: Callable[..., Any], group_blocks: int, num_blocks: int
) -> None:
    speeds = measure_speeds(make(groups=BlockGroups(group_blocks)), 2, PATIENCE_S)
    assert (speeds.num_blocks, speeds.num_wrong) == (num_blocks, 0)
