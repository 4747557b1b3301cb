"""A real Valkey server behind RAM: what comes back, what never does, how long anything takes at most.

Blocks have the bytes of their numbers. A deadline is tested against factors of ten, never against this
machine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.errors import ConfigError, MisuseError, UnavailableError
from kvoffload.tiers.contract import JobResult
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.shared.identity import HEADER_BYTES, Epoch, head_bytes, rest_names
from kvoffload.tiers.shared.write_log import WriteLog
from kvoffload.tiers.spec import TierOwner, parse_tier
from kvoffload.tiers.valkey.login import PASSWORD, USERNAME
from kvoffload.tiers.valkey.resp import Login
from support.fault_proxy import FaultProxy
from support.shared_tier_contract import Rig, SharedTierContract
from support.sharing_client import NUM_SLOTS, some_keys
from support.valkey_client import BLOCK_BYTES, Client
from support.valkey_server import PATIENCE_S, Server, redis, running, self_signed, valkey


@pytest.fixture(
    scope="module",
    params=[pytest.param(valkey, id="valkey"), pytest.param(redis, id="redis", marks=pytest.mark.slow)],
)
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), program=request.param()) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.say("FLUSHALL")
    return shared_server


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def client(make: Callable[..., Client], server: Server) -> Client:
    return make(server)


@pytest.fixture
def make() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def one(*place: Any, **options: Any) -> Client:
        made.append(Client(*place, **options))
        return made[-1]

    yield one
    for client in made:
        client.tier.close()


class TestSharedTier(SharedTierContract):
    @pytest.fixture
    def rig(self, server: Server, proxy: FaultProxy, make: Callable[..., Client]) -> Rig:
        return Rig(server, proxy, partial(make, server), partial(make, proxy))


# ---- one machine


def test_blocks_come_back(client: Client) -> None:
    assert client.believes(1, 2, 3) == [None] * 3
    assert client.probe(1, 2, 3) == []
    assert client.believes(1, 2, 3) == [False] * 3
    assert client.write(1, 2) == [1, 2]
    assert client.believes(1, 2, 3) == [True, True, False]
    assert client.read(2, 3, 1) == [2, 1]
    stats = client.tier.stats()
    assert (stats.written, stats.read, stats.stale, stats.failed, stats.probes) == (2, 2, 1, 0, 3)
    assert (stats.bytes_written, stats.bytes_read) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert stats.in_flight == 0


def test_what_is_known_changes_only_when_a_job_is_taken_in(client: Client) -> None:
    """Not between two questions: a block of which it is not known whether it is here would be neither."""
    client.write(1)
    client.tier.presence.clear()
    job = client.tier.submit_probe(some_keys(1, 2))
    until = time.monotonic() + PATIENCE_S
    while not client.tier.jobs.ended:
        assert time.monotonic() < until
        time.sleep(0.0005)
    assert client.believes(1, 2) == [None, None]
    client.wait(job)
    assert client.believes(1, 2) == [True, False]


def test_many_windows_of_blocks(client: Client) -> None:
    """A window of one block, of several, and the last one smaller."""
    numbers = list(range(1, 61))
    for blocks in (1, 7, 60):
        client.tier.dialect.window_bytes, client.tier.dialect.most_at_once = blocks * BLOCK_BYTES, 3
        client.tier.presence.clear()
        assert client.write(*numbers) == numbers
        assert client.read(*numbers, 99, 98) == numbers


def test_what_is_there_is_not_written_again(
    client: Client, make: Callable[..., Client], server: Server
) -> None:
    other = make(server)
    client.write(1, 2)
    assert client.write(1, 2) == [], "a hint says so"
    assert other.write(1, 2, 3) == [1, 2, 3], "the server says so"
    stats = other.tier.stats()
    assert (stats.written, stats.skipped) == (1, 2)
    assert other.believes(1, 2, 3) == [True] * 3


def test_what_is_being_written_is_not_written_twice(client: Client, server: Server) -> None:
    with server.stopped():
        job, taken = client.tier.submit_write(some_keys(1, 2), client.pool, np.arange(2))
        again, other = client.tier.submit_write(some_keys(2, 1, 3), client.pool, np.arange(3))
    assert taken.tolist() == [True, True]
    assert other.tolist() == [False, False, True]
    until, ended = time.monotonic() + PATIENCE_S, set[int]()
    while ended != {job, again}:
        ended |= {result.job for result in client.tier.finished() if result.ok.all()}
        assert time.monotonic() < until


def test_blocks_have_an_end_if_the_user_says_so(make: Callable[..., Client], server: Server) -> None:
    client = make(server, ttl=3600.0)
    client.write(1)
    assert 3000 < server.say("TTL", client.name(1)) <= 3600
    forever = make(server, namespace="other")
    forever.write(1)
    assert server.say("TTL", forever.name(1)) == -1


def test_what_is_in_flight_is_bounded(client: Client) -> None:
    client.tier.jobs.in_flight_bytes = 3 * BLOCK_BYTES
    assert client.tier.queue_room == 3
    assert client.write(1, 2, 3, 4, 5) == [1, 2, 3]
    assert client.tier.stats().dropped == 2
    assert client.tier.queue_room == 3, "what has ended is no longer in flight"
    assert client.read(1, 2, 3) == [1, 2, 3]
    result = client.wait(client.begin_read(1, 2, 3, 1, 9))
    assert result.ok.tolist() == [True, True, True, False, False]
    assert result.stale is not None
    assert not result.stale.any()
    assert client.believes(9) == [None], "what was not asked for is not known"


def test_a_child_has_no_part_in_it(client: Client) -> None:
    client.write(1)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            client.tier.contains(some_keys(1))
        except MisuseError:
            os.write(write, b"refused")
        client.tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    os.close(write)
    assert client.read(1) == [1], "the parent's connections are as they were"


@pytest.mark.parametrize("block_bytes", [64 << 10, 512 << 10, 9 << 18])
def test_a_server_needs_no_more_memory_than_blocks_have(
    tmp_path: Path, make: Callable[..., Client], block_bytes: int
) -> None:
    """With jemalloc, which would take a quarter more for a block of a power of two behind its header."""
    with running(tmp_path, program=redis()) as server:
        if b"mem_allocator:jemalloc" not in server.ask("INFO", "memory"):
            pytest.skip("this redis-server is not built with jemalloc")
        client, numbers = make(server, block_bytes=block_bytes), [*range(1, 61)]

        assert client.write(*numbers) == numbers
        used_bytes = sum(server.say("MEMORY", "USAGE", name) for name in server.names())
        assert used_bytes <= 1.04 * 60 * block_bytes
        assert client.read(*numbers) == numbers


# ---- several machines


def test_one_machine_hits_what_another_has_computed(
    client: Client, make: Callable[..., Client], server: Server
) -> None:
    client.write(1, 2)
    other = make(server)
    assert other.probe(1, 2, 3) == [1, 2]
    assert other.read(1, 2) == [1, 2]


def test_a_wrong_hint_is_a_stale_miss_and_learnt_at_once(client: Client, server: Server) -> None:
    client.write(1, 2)
    server.say("DEL", client.name(1))
    result = client.wait(client.begin_read(1, 2))
    assert result.ok.tolist() == [False, True]
    assert result.stale is not None
    assert result.stale.tolist() == [True, False]
    assert client.believes(1, 2) == [False, True]
    assert client.tier.stats().stale == 1


def test_a_reset_between_two_windows_of_a_read(
    server: Server, proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    slow, other = make(proxy), make(server)
    slow.tier.dialect.window_bytes = BLOCK_BYTES
    slow.write(1, 2, 3, 4)
    resets = iter([lambda: (other.tier.clear(), other.tier.drain(PATIENCE_S))])

    def reset_once(replies: list[bytes]) -> list[bytes]:
        if any(len(one) > BLOCK_BYTES // 2 for one in replies):
            next(resets, lambda: None)()
        return replies

    proxy.set(replies=reset_once)
    assert slow.read(1, 2, 3, 4) == [], "not even those that had arrived"
    slow.come_to_terms()
    assert slow.believes(1) == [None]


def test_jobs_of_before_a_reset_leave_no_trace_behind_it(client: Client, server: Server) -> None:
    client.write(1)
    with server.stopped():
        job = client.begin_read(1)
        probe = client.tier.submit_probe(some_keys(1))
        client.tier.clear()
    assert client.tier.drain(PATIENCE_S)
    results = {result.job: result for result in client.tier.finished()}
    assert not results[job].ok.any()
    assert not results[probe].ok.any()
    assert client.believes(1) == [None]
    assert client.probe(1) == []


def test_a_server_that_has_lost_its_epoch_is_given_a_new_one(client: Client, server: Server) -> None:
    """As after an eviction of just that: what is there from before must not come back."""
    client.write(1)
    before = client.name(1)
    server.say("DEL", client.tier.peer.keyspace.epoch_keys[0])
    assert client.read(1) == []
    client.come_to_terms()
    assert client.name(1) != before
    assert client.probe(1) == []
    assert server.say("EXISTS", before) == 1


def test_a_server_whose_epoch_is_damaged_is_given_a_new_one_by_a_reset(
    client: Client, server: Server
) -> None:
    client.write(1)
    server.say("SET", client.tier.peer.keyspace.epoch_keys[0], "nonsense")
    assert client.read(1) == []
    assert client.believes(1) == [False]
    client.tier.clear()
    assert client.tier.drain(PATIENCE_S)
    assert client.write(1) == [1]


def test_a_server_that_was_started_anew_is_empty_and_is_used(
    tmp_path: Path, make: Callable[..., Client]
) -> None:
    with running(tmp_path) as server:
        client = make(server)
        client.write(1)
        server.stop()
        assert client.read(1) == []
        server.start()
        until = time.monotonic() + PATIENCE_S
        while client.write(1) != [1]:
            client.try_again_now()
            assert time.monotonic() < until
        assert client.read(1) == [1]


# ---- what is told of it


def test_only_what_it_wrote_itself_is_told_and_what_of_that_is_gone(
    client: Client, make: Callable[..., Client], server: Server
) -> None:
    other = make(server)
    assert client.changes() == other.changes() == [], "from now on they want to know"
    other.write(1)
    client.write(1, 2, 3, 4)
    assert other.changes() == [({1}, False)]
    assert client.changes() == [({2, 3, 4}, False)], "another machine had written 1"
    server.say("DEL", client.name(2))
    server.say("SET", client.name(3), "damage")
    assert client.read(1, 2, 3, 4) == [1, 4]
    assert client.changes() == [({2, 3}, True)]
    assert client.read(2, 3) == []
    server.say("DEL", client.name(1), client.name(4))
    assert client.probe(1, 4) == []
    assert client.changes() == [({4}, True)], "each once, and not what others wrote"
    assert client.write(2) == [2]
    other.tier.clear()
    assert other.tier.drain(PATIENCE_S)
    assert client.read(2) == []
    assert client.changes() == [({2}, False), ({2}, True)], "another's reset"
    assert other.changes() == [({1}, True)]


def test_nothing_is_told_gone_of_which_nothing_is_known(
    proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    client = make(proxy, timeout=0.3, probe_timeout=0.2)
    client.changes()
    client.write(1, 2)
    assert client.changes() == [({1, 2}, False)]
    proxy.set(hang=True)
    assert client.read(1, 2) == client.probe(1, 2) == client.read(1) == []
    assert client.tier.stats().circuit_open == 1
    assert client.changes() == [], "it did not answer"


def test_it_vouches_for_so_many_and_no_more() -> None:
    vouching = WriteLog(most_keys=2)
    vouching.stored(some_keys(9))
    assert vouching.take() == [], "nobody had asked"
    vouching.stored(some_keys(1, 2))
    vouching.stored(some_keys(2, 3))
    vouching.lost(some_keys(1, 9))
    vouching.lost_all()
    one, two, three = some_keys(1, 2, 3)
    assert vouching.take() == [([one, two], False), ([three], False), ([one], True), ([two, three], True)]
    vouching.lost_all()
    assert vouching.take() == []


# ---- damage, through the server's own door


HEAD_BYTES = HEADER_BYTES + head_bytes(BLOCK_BYTES)
"""Of the first value of a block; what is left is the second."""


def damaged(kind: str, value: bytes, other: bytes, epoch: Epoch) -> tuple[bytes, bytes]:
    """Both values of a block with that damage."""
    header, block = value[:HEADER_BYTES], value[HEADER_BYTES:]
    changes: dict[str, Callable[[], bytes]] = {
        "flip in the block": lambda: header + block[:100] + bytes([block[100] ^ 1]) + block[101:],
        "flip in its first byte": lambda: header + bytes([block[0] ^ 1]) + block[1:],
        "flip in the header": lambda: header[:20] + bytes([header[20] ^ 4]) + header[21:] + block,
        "flip in the checksum": lambda: header[:-1] + bytes([header[-1] ^ 128]) + block,
        "swapped with another": lambda: other,
        "another's block": lambda: header + other[HEADER_BYTES:],
        "another's header": lambda: other[:HEADER_BYTES] + block,
        "another's second value": lambda: value[:HEAD_BYTES] + other[HEAD_BYTES:],
        "truncated by one": lambda: value[:-1],
        "truncated to nothing": lambda: b"",
        "only the header": lambda: header,
        "longer by one": lambda: value + b"\0",
        "much longer": lambda: value * 4,
        "zeros": lambda: bytes(len(value)),
        "zeros in the block": lambda: header + bytes(len(block)),
        "zeros in the second value": lambda: value[:HEAD_BYTES] + bytes(len(value) - HEAD_BYTES),
        "shifted": lambda: value[1:] + value[:1],
        "another version": lambda: header[:8] + b"\2" + header[9:] + block,
        "another epoch": lambda: header[:40] + (epoch.number ^ 1).to_bytes(8, "little") + header[48:] + block,
        "another producer": lambda: header[:24] + bytes(16) + header[40:] + block,
    }
    cuts = {"cut a byte earlier": -1, "cut a byte later": 1}
    whole, at = changes.get(kind, lambda: value)(), HEAD_BYTES + cuts.get(kind, 0)
    first, second = whole[:at], whole[at:]
    return {
        "first value longer": (first + b"\0", second),
        "first value shorter": (first[:-1], second),
        "first value much longer": (first + whole * 4, second),
        "whole in the first value": (whole, second),
        "values exchanged": (second, first),
    }.get(kind, (first, second))


KINDS = [
    "flip in the block",
    "flip in its first byte",
    "flip in the header",
    "flip in the checksum",
    "swapped with another",
    "another's block",
    "another's header",
    "another's second value",
    "truncated by one",
    "truncated to nothing",
    "only the header",
    "longer by one",
    "much longer",
    "zeros",
    "zeros in the block",
    "zeros in the second value",
    "shifted",
    "another version",
    "another epoch",
    "another producer",
    "cut a byte earlier",
    "cut a byte later",
    "first value longer",
    "first value shorter",
    "first value much longer",
    "whole in the first value",
    "values exchanged",
]


def test_blocks_here_have_two_values(client: Client, server: Server) -> None:
    client.write(1)
    name = client.name(1)
    assert server.names() == [name, *rest_names([name])]
    assert [len(server.value(one)) for one in server.names()] == [HEAD_BYTES, BLOCK_BYTES - 64]
    assert HEAD_BYTES == 128


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_a_miss_and_what_comes_next_is_right(
    client: Client, server: Server, kind: str
) -> None:
    client.write(1, 2, 3, 4)
    epoch = client.tier.peer.epoch
    assert epoch is not None
    (first, second), whole, other = client.names(2), client.whole(server, 2), client.whole(server, 4)
    for one, value in zip((first, second), damaged(kind, whole, other, epoch), strict=True):
        assert server.say("SET", one, value) == b"OK"
    too_long = "much longer" in kind
    assert client.read(1, 2, 3) == ([1] if too_long else [1, 3])
    if too_long:  # not received: the connection was closed
        assert client.tier.stats().failed > 0
        server.say("DEL", first, second)
    else:
        assert client.tier.stats().mismatches == 1
        assert server.say("EXISTS", first, second) == 0, "nobody else meets it"
    assert client.believes(2) == [False]
    assert client.read(3, 4, 1) == [3, 4, 1]
    client.tier.presence.clear()
    assert client.write(2) == [2]
    assert client.read(2) == [2]


@pytest.mark.parametrize("value", [0, 1])
def test_half_a_block_is_none(
    client: Client, server: Server, make: Callable[..., Client], value: int
) -> None:
    """As after an eviction of one of its values."""
    client.write(1, 2)
    server.say("DEL", client.names(1)[value])
    result = client.wait(client.begin_read(1, 2))
    assert result.ok.tolist() == [False, True]
    assert result.stale is not None
    assert result.stale.tolist() == [True, False]
    other = make(server)
    assert other.probe(1, 2) == [2]
    assert other.write(1) == [1]
    assert other.tier.stats().skipped == 0
    assert client.read(1, 2) == [1, 2]
    assert client.tier.stats().mismatches == 0


@pytest.mark.parametrize("options", [{"namespace": "other"}, {"fingerprint": "other"}])
def test_a_block_that_was_copied_from_another_place_is_a_miss(
    client: Client, make: Callable[..., Client], server: Server, options: dict[str, str]
) -> None:
    """Byte by byte under a name where it does not belong."""
    other = make(server, **options)
    other.write(1)
    client.write(2)
    for source, to in zip(other.names(1), client.names(1), strict=True):
        server.say("COPY", source, to)
    assert client.read(1, 2) == [2]
    assert client.tier.stats().mismatches == 1


def test_a_block_of_an_older_epoch_is_a_miss(client: Client, server: Server) -> None:
    client.write(1)
    before = client.names(1)
    client.tier.clear()
    client.tier.drain(PATIENCE_S)
    for source, to in zip(before, client.names(1), strict=True):
        server.say("COPY", source, to)
    assert client.probe(1) == [1], "it is there, by its name"
    assert client.read(1) == []
    assert client.tier.stats().mismatches == 1


@pytest.mark.parametrize("value", ["list", "number"])
def test_what_is_no_block_at_all_is_a_miss(client: Client, server: Server, value: str) -> None:
    client.write(1, 2)
    server.say("DEL", client.name(1))
    server.say("LPUSH", client.name(1), "x") if value == "list" else server.say("SET", client.name(1), "12")
    assert client.read(1, 2) == [2]
    assert client.read(2) == [2]


# ---- the network


def test_a_flipped_byte_anywhere_in_the_answer(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client = make(proxy)
    client.write(1, 2, 3)
    length = 3 * (HEADER_BYTES + BLOCK_BYTES + 10) + 22
    for flip_at in [*range(0, 110, 3), *range(110, length, 4999), *range(length - 8, length)]:
        proxy.set(flip_at=flip_at)
        served = client.read(1, 2, 3)
        proxy.set()
        assert {*served} < {1, 2, 3}, "one of them was damaged"
        client.try_again_now()
        client.come_to_terms()
        client.tier.presence.clear()
        client.write(1, 2, 3)
        assert client.read(1, 2, 3) == [1, 2, 3]


def test_a_connection_that_is_cut_anywhere(proxy: FaultProxy, make: Callable[..., Client]) -> None:
    client = make(proxy)
    client.write(1, 2, 3)
    length = 3 * (HEADER_BYTES + BLOCK_BYTES + 10) + 22
    for cut_after in [0, 1, 21, 22, 23, 30, 94, 95, *range(100, length, 9973), length - 1]:
        proxy.set(cut_after=cut_after)
        served = client.read(1, 2, 3)
        assert served == [1, 2, 3][: len(served)] != [1, 2, 3], "what had arrived counts"
        if cut_after > 2 * (HEADER_BYTES + BLOCK_BYTES + 20) + 22:
            assert served == [1, 2]
        proxy.set()
        client.try_again_now()
        client.come_to_terms()
        assert client.read(1, 2, 3) == [1, 2, 3]


def test_of_a_write_that_is_cut_what_was_confirmed_counts(
    proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    client, numbers = make(proxy), [*range(1, 11)]
    client.tier.dialect.window_bytes = BLOCK_BYTES
    epoch_and_all_are_missing = len(b"$16\r\n%016x\r\n" % 0) + 10 * len(b":0\r\n")
    a_block = 2 * len(b"+OK\r\n")
    proxy.set(cut_after=epoch_and_all_are_missing + 3 * a_block + a_block // 2)
    assert client.write(*numbers) == [1, 2, 3]
    stats = client.tier.stats()
    assert (stats.written, stats.failed) == (3, 7)
    assert client.believes(3) == [True]
    proxy.set()
    client.try_again_now()
    client.come_to_terms()
    client.tier.presence.clear()
    assert client.write(*numbers) == numbers, "what is there counts, whoever wrote it"
    assert client.read(*numbers) == numbers


@pytest.mark.parametrize("fault", ["swapped", "repeated", "left out", "all the same"])
def test_replies_that_are_not_to_what_was_asked(
    proxy: FaultProxy, make: Callable[..., Client], fault: str
) -> None:
    client = make(proxy, timeout=1.0)
    client.write(1, 2, 3)
    changes: dict[str, Callable[[list[bytes]], list[bytes]]] = {
        "swapped": lambda found: found[::-1],
        "repeated": lambda found: [one for one in found for _ in range(2)],
        "left out": lambda found: found[1:],
        "all the same": lambda found: found[-1:] * len(found),
    }
    proxy.set(replies=changes[fault])
    for _ in range(3):
        assert client.read(1, 2, 3) != [1, 2, 3], "each that is served has its own bytes"
    proxy.set()
    proxy.drop_connections()
    client.tier.options = dataclasses.replace(client.tier.options, timeout_s=PATIENCE_S)
    client.try_again_now()
    client.come_to_terms()
    client.tier.presence.clear()
    client.write(1, 2, 3)
    assert client.read(1, 2, 3) == [1, 2, 3]


def test_a_connection_that_brought_damage_is_not_used_again(
    proxy: FaultProxy, make: Callable[..., Client]
) -> None:
    client = make(proxy)
    client.write(1, 2)
    connections = proxy.num_connections
    proxy.set(flip_at=12_000)
    assert client.read(1) == []
    assert client.read(2) == client.read(2) == [2]
    assert proxy.num_connections > connections


FAULTS: dict[str, dict[str, Any]] = {
    "hangs": {"hang": True},
    "one byte a second": {"bytes_per_s": 1.0},
    "hangs in the middle of a block": {"bytes_per_s": 20.0},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_takes_longer_than_its_deadline(
    proxy: FaultProxy, make: Callable[..., Client], fault: str
) -> None:
    """A read may take 0.3 s and a probe 0.2; ten times that is far from what a fault takes: for ever."""
    client = make(proxy, timeout=0.3, probe_timeout=0.2)
    writer = make(proxy)
    writer.write(1, 2)
    proxy.set(**FAULTS[fault])
    begun = time.monotonic()
    job = client.begin_read(1, 2)
    probe = client.tier.submit_probe(some_keys(3, 4))
    results: dict[int, JobResult] = {}
    while {job, probe} - {*results}:
        before = time.thread_time()
        results |= {result.job: result for result in client.tier.finished()}
        client.believes(1)
        assert time.thread_time() - before < 0.1, "the scheduler's thread does not wait"
        assert time.monotonic() - begun < 3.0
    assert client.check(results[job], 1, 2) == []
    assert not results[probe].ok.any()
    assert client.believes(1, 3) == [False, False], "not asked for again at once"
    assert client.tier.stats().timeouts == 4
    after = client.pool.copy()
    proxy.set()
    client.come_to_terms()
    client.probe(9)
    assert (client.pool == after).all(), "what comes late is written nowhere"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_stops_in_the_middle(
    tmp_path: Path, make: Callable[..., Client], number: signal.Signals
) -> None:
    with running(tmp_path) as server:
        client = make(server, timeout=0.3, probe_timeout=0.2)
        writer = make(server)
        numbers = list(range(1, 61))
        writer.write(*numbers)
        begun = time.monotonic()
        job = client.begin_read(*numbers)
        server.signal(number)
        client.check(client.wait(job), *numbers)
        assert client.probe(70) == []
        for _ in range(5):
            client.read(*numbers)
        assert time.monotonic() - begun < 30.0
        assert not client.tier.is_open()
        if number is signal.SIGSTOP:
            server.signal(signal.SIGCONT)
        else:
            server.stop()
            server.start()
        until = time.monotonic() + PATIENCE_S
        while not client.tier.is_open():
            client.try_again_now()
            assert time.monotonic() < until
        client.tier.presence.clear()
        client.tier.options = writer.tier.options
        writer_has = number is signal.SIGSTOP
        assert client.read(1, 2) == ([1, 2] if writer_has else [])


# ---- what a server may refuse


@pytest.mark.parametrize("window_bytes", [BLOCK_BYTES, 4 << 20])
def test_a_full_server_is_a_dropped_write_and_not_a_failure(
    tmp_path: Path,
    make: Callable[..., Client],
    caplog: pytest.LogCaptureFixture,
    window_bytes: int,
) -> None:
    with running(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        client = make(server)
        client.tier.dialect.window_bytes = window_bytes
        written = [number for first in (1, 61, 121) for number in client.write(*range(first, first + 60))]
        assert 0 < len(written) < 180
        stats = client.tier.stats()
        assert stats.dropped == 180 - len(written)
        assert (stats.failed, stats.circuit_open) == (0, 0)
        assert "is full and evicts nothing" in caplog.text
        assert client.read(*written[:10]) == written[:10]
        assert client.write(500) == [], "it pauses"
        client.tier.end_pauses()
        for name in server.names():
            server.say("DEL", name)
        assert client.write(500) == [500]


@pytest.mark.parametrize(("policy", "ttl"), [("volatile-lru", 3600.0), ("allkeys-lru", None)])
def test_a_server_that_evicts_what_it_likes(
    tmp_path: Path, make: Callable[..., Client], policy: str, ttl: float | None
) -> None:
    """With an end to each block the server never evicts the epoch, which has none; without, it may, and then
    all is lost, and nothing wrong."""
    with running(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", policy) as server:
        client = make(server, ttl=ttl)
        batches = [range(first, first + 60) for first in range(1, 601, 60)]
        written = [number for batch in batches for number in client.write(*batch)]
        served = [number for batch in batches for number in client.read(*batch)]
        assert len(served) < 600
        stats = client.tier.stats()
        assert stats.mismatches == 0
        if ttl is not None:
            assert len(written) == 600
            assert served
            assert stats.stale == 600 - len(served)


def test_a_node_of_a_cluster_is_refused_at_the_start(tmp_path: Path, make: Callable[..., Client]) -> None:
    with (
        running(tmp_path, "--cluster-enabled", "yes") as server,
        pytest.raises(ConfigError, match=r"use valkey\+cluster://.*CLUSTERDOWN"),
    ):
        make(server)


def acl(server: Server, *users: str) -> None:
    for user in users:
        assert server.say("ACL", "SETUSER", *user.split()) == b"OK"


COMMANDS = "+get +set +exists +del"


def test_tenants_are_fenced(
    tmp_path: Path, make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as server:
        acl(
            server, f"a on >hunter2 ~kvo1:tenant-a:* {COMMANDS}", f"b on >hunter3 ~kvo1:tenant-b:* {COMMANDS}"
        )
        monkeypatch.setenv(USERNAME, "a")
        monkeypatch.setenv(PASSWORD, "hunter2")
        mine = make(server, namespace="tenant-a")
        assert mine.write(1) == [1]
        assert mine.read(1) == [1]
        with pytest.raises(ConfigError, match="NOPERM") as refused:
            make(server, namespace="tenant-b")
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("username", "password", "message"),
    [("", "wrong", "WRONGPASS"), ("nobody", "hunter2", "WRONGPASS"), ("", "", "NOAUTH")],
)
def test_a_wrong_password_is_refused_at_the_start(
    tmp_path: Path,
    make: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    username: str,
    password: str,
    message: str,
) -> None:
    with running(tmp_path, "--requirepass", "hunter2", login=Login("", "hunter2")) as server:
        monkeypatch.setenv(USERNAME, username)
        monkeypatch.setenv(PASSWORD, password)
        with pytest.raises(ConfigError, match=message):
            make(server)


def test_a_password_is_in_no_log_and_no_text(
    tmp_path: Path,
    make: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(tmp_path, "--requirepass", "hunter2", login=Login("", "hunter2")) as server:
        (tmp_path / "password").write_text("hunter2\n")
        monkeypatch.delenv(PASSWORD, raising=False)
        with caplog.at_level(logging.DEBUG):
            client = make(server, password_file=str(tmp_path / "password"))
            assert client.write(1) == [1]
            server.stop()
            for _ in range(4):
                client.read(1)
        text = f"{caplog.text} {client.tier.stats()} {client.tier.last_error!r} {vars(client.tier)}"
        assert "does not answer as it should" in caplog.text
        assert "hunter2" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "valkey://me:hunter2@host/ns",
            "tier.url: 'valkey://***@host/ns' is invalid; allowed: valkey://HOST",
        ),
        ("valkey://me@host/ns", "user and password from KVOFFLOAD_VALKEY_USERNAME"),
        ("valkey://host:6379", "tier.url: 'valkey://host:6379' is invalid"),
        ("valkey://host:6379/a/b", "tier.url: "),
        ("valkey://host:6379/a:b", "tier.url: "),
        ("valkey://host:port/ns", "tier.url: "),
        ("valkey:///ns", "tier.url: "),
        ("valkey:host:6379", "tier.url: None is invalid; it must be given"),
        ("valkey://host/ns?ttl=soon", "tier.ttl: 'soon' is invalid; allowed: seconds"),
        ("valkey://host/ns?timeout=0", "tier.timeout: '0' is invalid"),
        ("valkey://host/ns?admission=some", "tier.admission: 'some' is invalid"),
        ("valkey://host/ns?capacity=5GiB", "tier.capacity: '5GiB' is invalid; there is no such option"),
        ("redis://host/ns", "allowed: s3://, valkey://, valkeys://, valkey+cluster://"),
        ("valkey://a,b/ns", "tier.url: 'valkey://a,b/ns' is invalid"),
        ("valkey+cluster://a,,b/ns", "tier.url: 'valkey+cluster://a,,b/ns' is invalid"),
        ("valkey+cluster://me:hunter2@a,b/ns", "tier.url: 'valkey+cluster://***@a,b/ns' is invalid"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tier("tier", text)
    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_as_users_type_it() -> None:
    found = parse_tier("tier", "valkey://cache:6380/team.a?ttl=1d&timeout=500ms&admission=reuse:2")
    assert found == ValkeyOptions(
        url="valkey://cache:6380/team.a", ttl=86400.0, timeout=0.5, admission="reuse:2"
    )
    assert parse_tier("tier", str(found)) == found


OWNER = TierOwner(BLOCK_BYTES, 36, "model")


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for options, field in [({"password_file": missing}, "password_file"), ({"ca": missing}, "ca")]:
        with pytest.raises(ConfigError, match=f"^{field}: "):
            ValkeyOptions(url="valkeys://127.0.0.1:1/ns", **options).open(OWNER)
    with pytest.raises(ConfigError, match="for valkeys://"):
        ValkeyOptions(url="valkey://127.0.0.1:1/ns", ca=missing).open(OWNER)


def test_a_server_that_is_not_there_costs_a_command_its_start_and_an_engine_nothing(
    server: Server, make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    with FaultProxy(server.port) as proxy:
        proxy.set(refuse=True)
        with pytest.raises(UnavailableError, match="cannot be used now"):
            make(proxy)
        owner = TierOwner(BLOCK_BYTES, 36, "model", go_on_without=lambda error: pytest.fail("it has a tier"))
        tier = ValkeyOptions(url=f"valkey://127.0.0.1:{proxy.port}/ns").open(owner)
        assert "does not answer yet" in caplog.text
        assert not tier.contains(some_keys(1)).any()
        proxy.set()
        until = time.monotonic() + PATIENCE_S
        while not tier.unknown(some_keys(1)).any():
            tier.end_pauses()
            assert time.monotonic() < until
        tier.close()


def test_who_stands_open_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    owner = TierOwner(BLOCK_BYTES, 36, "model", go_on_without=lambda error: None)
    for host, warned in [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("192.0.2.1", True)]:
        caplog.clear()
        ValkeyOptions(url=f"valkey://{host}:1/ns").open(owner).close()
        assert ("without TLS and a password" in caplog.text) == warned


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of our own for 127.0.0.1, and one of somebody else."""
    directory = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        self_signed(directory, name)
    return directory


def tls_in_front(server: Server, certificates: Path) -> FaultProxy:
    return FaultProxy(server.port, tls=(str(certificates / "server.pem"), str(certificates / "server.key")))


def test_blocks_come_back_over_tls(server: Server, certificates: Path) -> None:
    """The server in the wheel has no TLS: a proxy in front of it has."""
    with tls_in_front(server, certificates) as proxy:
        url = f"valkeys://127.0.0.1:{proxy.port}/ns"
        options: dict[str, Any] = {"timeout": PATIENCE_S, "probe_timeout": PATIENCE_S}
        tier = ValkeyOptions(url=url, ca=str(certificates / "server.pem"), **options).open(OWNER)
        client = Client.__new__(Client)
        client.tier, client.ram = tier, MemoryTier(NUM_SLOTS, BLOCK_BYTES)
        client.pool = client.ram.pool
        numbers = list(range(1, 41))
        assert client.write(*numbers) == numbers
        assert client.read(*numbers) == numbers
        tier.close()
        for ca in (str(certificates / "other.pem"), ""):
            with pytest.raises(ConfigError, match="certificate verify failed"):
                ValkeyOptions(url=url, ca=ca, **options).open(OWNER)
