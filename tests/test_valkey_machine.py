"""Two machines and a server in any order: writes, reads, resets, and all that a server and a network may do.

Every block says which key it has, and after how many resets it was written. So the model need not know what
is where: whatever is served must have the right key, and be of now.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.structures.keys import Keys
from kvoffload.testing.fault_proxy import FaultProxy
from kvoffload.tiers.base import NO_JOB, JobResult
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.options import TierOwner
from kvoffload.tiers.remote.identity import HEADER_BYTES
from kvoffload.tiers.remote.tier import RemoteTier
from valkey_server import PATIENCE_S, Server, running

BLOCK_BYTES, NUM_KEYS = 512, 8
numbers = st.lists(st.integers(1, NUM_KEYS), min_size=1, max_size=NUM_KEYS, unique=True)
machines = st.integers(0, 1)

SERVER: list[Server] = []


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        SERVER.append(server)
        yield
        SERVER.clear()


def some_keys(*of: int) -> Keys:
    return Keys.pack([number.to_bytes(36, "big") for number in of], 36)


class SharingMachine(RuleBasedStateMachine):
    """The machines reach the server through a proxy, each with connections of its own."""

    @initialize(block_bytes=st.sampled_from([BLOCK_BYTES]))
    def start(self, block_bytes: int) -> None:
        (self.server,) = SERVER
        self.server.say("FLUSHALL")
        self.proxy = FaultProxy(self.server.port)
        self.num_resets = 0
        url = f"valkey://127.0.0.1:{self.proxy.port}/ns"
        described = ValkeyOptions(url=url, timeout=PATIENCE_S, probe_timeout=PATIENCE_S)
        self.tiers: list[RemoteTier] = [described.open(TierOwner(block_bytes, 36, "m")) for _ in range(2)]
        self.pool = np.zeros((NUM_KEYS, block_bytes), np.uint8)

    def wait(self, tier: RemoteTier, job: int) -> JobResult:
        until = time.monotonic() + PATIENCE_S
        while not (results := tier.finished()):
            assert time.monotonic() < until, "a job does not end"
            time.sleep(0.0002)
        (result,) = results
        assert result.job == job
        return result

    @rule(machine=machines, of=numbers)
    def write(self, machine: int, of: list[int]) -> None:
        for row, number in enumerate(of):
            self.pool[row] = number
            self.pool[row, :4] = np.frombuffer(self.num_resets.to_bytes(4, "big"), np.uint8)
        job, taken = self.tiers[machine].submit_write(some_keys(*of), self.pool, np.arange(len(of)))
        if job != NO_JOB:
            assert len(self.wait(self.tiers[machine], job).ok) == np.count_nonzero(taken)

    @rule(machine=machines, of=numbers)
    def read(self, machine: int, of: list[int]) -> None:
        self.served(machine, of)

    def served(self, machine: int, of: list[int]) -> int:
        """How many of these blocks the machine gets."""
        self.pool[:] = 0xEE
        job = self.tiers[machine].submit_read(some_keys(*of), self.pool, np.arange(len(of)))
        ok = self.wait(self.tiers[machine], job).ok
        for row in np.flatnonzero(ok).tolist():
            assert (self.pool[row, 4:] == of[row]).all(), "another block was served"
            age = int.from_bytes(self.pool[row, :4].tobytes(), "big")
            assert age == self.num_resets, "a block from before a reset was served"
        return int(np.count_nonzero(ok))

    @rule(machine=machines, of=numbers)
    def probe(self, machine: int, of: list[int]) -> None:
        job = self.tiers[machine].submit_probe(some_keys(*of))
        if job != NO_JOB:
            self.wait(self.tiers[machine], job)

    @rule(machine=machines)
    def reset(self, machine: int) -> None:
        tier = self.tiers[machine]
        tier.clear()
        assert not tier.contains(some_keys(1)).any()
        if not tier.drain(0.2 if self.proxy.faults.refuse else PATIENCE_S):
            assert self.proxy.faults.refuse or tier._circuit.is_open
            self.network_heals()
            self.open_again()
            assert tier.drain(PATIENCE_S)
        self.num_resets += 1

    @rule(name=st.integers(0, 2**32), at=st.integers(0, HEADER_BYTES + BLOCK_BYTES - 1))
    def a_byte_flips(self, name: int, at: int) -> None:
        names = self.server.names()
        if names:
            one = names[name % len(names)]
            byte = self.server.say("GETRANGE", one, str(at), str(at))
            self.server.say("SETRANGE", one, str(at), bytes([byte[0] ^ 1]) if byte else b"x")

    @rule(first=st.integers(0, 2**32), second=st.integers(0, 2**32))
    def blocks_are_exchanged(self, first: int, second: int) -> None:
        names = self.server.names()
        if names:
            one, other = names[first % len(names)], names[second % len(names)]
            if one != other:
                self.server.say("COPY", one, other, "REPLACE")

    @rule(name=st.integers(0, 2**32))
    def a_block_leaves(self, name: int) -> None:
        names = self.server.names()
        if names:
            self.server.say("DEL", names[name % len(names)])

    @rule()
    def the_epoch_leaves(self) -> None:
        self.server.say("DEL", self.tiers[0]._epoch_name)

    @rule()
    def connections_are_dropped(self) -> None:
        self.proxy.drop_connections()

    @rule()
    def the_network_refuses(self) -> None:
        self.proxy.set(refuse=True)
        self.proxy.drop_connections()

    @rule(cut_after=st.integers(0, 3000))
    def the_network_cuts(self, cut_after: int) -> None:
        self.proxy.set(cut_after=cut_after)

    @rule(flip_at=st.integers(0, 3000))
    def the_network_flips(self, flip_at: int) -> None:
        self.proxy.set(flip_at=flip_at)

    @rule()
    def network_heals(self) -> None:
        self.proxy.set()

    @rule()
    def open_again(self) -> None:
        """The pauses of circuits and greetings are over."""
        for tier in self.tiers:
            if tier._circuit._next_try is not None:
                tier._circuit._next_try = 0.0
            tier._greet_at = 0.0

    @invariant()
    def nothing_is_left_over(self) -> None:
        for tier in getattr(self, "tiers", []):
            assert tier.stats().in_flight == 0
            assert not (tier.contains(some_keys(1, 2)) & tier.unknown(some_keys(1, 2))).any()

    def teardown(self) -> None:
        """When the network heals both machines share again."""
        if not hasattr(self, "tiers"):
            return
        try:
            self.network_heals()
            until = time.monotonic() + PATIENCE_S
            while not all(tier._is_open() for tier in self.tiers):
                self.open_again()
                assert time.monotonic() < until
            for tier in self.tiers:
                tier._hints.clear()
            self.probe(0, [1])
            self.probe(1, [1])
            until = time.monotonic() + PATIENCE_S
            while not all(tier._is_open() for tier in self.tiers):
                self.open_again()
                assert time.monotonic() < until
            every = [*range(1, NUM_KEYS + 1)]
            for _ in range(2):  # what is damaged is found by the first read
                for tier in self.tiers:
                    tier._hints.clear()
                self.write(0, every)
                num_served = self.served(1, every)
            assert num_served == NUM_KEYS
        finally:
            for tier in self.tiers:
                tier.close()
            self.proxy.close()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(stateful_step_count=40, deadline=None)
