"""Two machines share a cluster, while others damage, remove and move what is in it, and maps are old: no
block is served that is not its own, or from before a reset, and in the end all is used again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.tiers.base import NO_JOB
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.options import TierOwner
from kvoffload.tiers.remote.cluster import MapQuestion
from kvoffload.tiers.remote.divisions import slot_of
from kvoffload.tiers.remote.identity import HEADER_BYTES
from sharing_client import some_keys
from valkey_server import PATIENCE_S, Cluster, Server, clustered

BLOCK_BYTES, NUM_KEYS = 512, 12
numbers = st.lists(st.integers(1, NUM_KEYS), min_size=1, max_size=NUM_KEYS, unique=True)
machines = st.integers(0, 1)
any_number = st.integers(0, 2**32)

CLUSTER: list[Cluster] = []


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with clustered(tmp_path_factory.mktemp("cluster")) as cluster:
        CLUSTER.append(cluster)
        yield
        CLUSTER.clear()


class SharingMachine(RuleBasedStateMachine):
    """Blocks have the bytes of their numbers, and begin with how many resets were confirmed before them."""

    @initialize()
    def start(self) -> None:
        (self.cluster,) = CLUSTER
        for master in self.cluster.masters:
            assert master.say("FLUSHALL") == b"OK"
        self.num_resets = 0
        described = ValkeyOptions(url=f"{self.cluster.url}/ns", timeout=PATIENCE_S, probe_timeout=PATIENCE_S)
        self.tiers: list[Any] = [described.open(TierOwner(BLOCK_BYTES, 36, "m")) for _ in range(2)]
        self.pool = np.zeros((NUM_KEYS, BLOCK_BYTES), np.uint8)

    def wait(self, machine: int, job: int) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (results := self.tiers[machine].finished()):
            assert time.monotonic() < until, "a job does not end"
            time.sleep(0.0002)
        (result,) = results
        assert result.job == job
        return result

    def some_name(self, number: int) -> tuple[Server, bytes] | None:
        """A block, and the master that has it."""
        names = [(master, name) for master in self.cluster.masters for name in master.names()]
        return names[number % len(names)] if names else None

    @rule(machine=machines, of=numbers)
    def write(self, machine: int, of: list[int]) -> None:
        for row, number in enumerate(of):
            self.pool[row] = number
            self.pool[row, :4] = np.frombuffer(self.num_resets.to_bytes(4, "big"), np.uint8)
        job, taken = self.tiers[machine].submit_write(some_keys(*of), self.pool, np.arange(len(of)))
        if job != NO_JOB:
            assert len(self.wait(machine, job).ok) == np.count_nonzero(taken)

    @rule(machine=machines, of=numbers)
    def read(self, machine: int, of: list[int]) -> None:
        self.served(machine, of)

    def served(self, machine: int, of: list[int]) -> int:
        """How many of these blocks the machine gets."""
        self.pool[:] = 0xEE
        job = self.tiers[machine].submit_read(some_keys(*of), self.pool, np.arange(len(of)))
        ok = self.wait(machine, job).ok
        for row in np.flatnonzero(ok).tolist():
            assert (self.pool[row, 4:] == of[row]).all(), "another block was served"
            age = int.from_bytes(self.pool[row, :4].tobytes(), "big")
            assert age == self.num_resets, "a block from before a reset was served"
        return int(np.count_nonzero(ok))

    @rule(machine=machines, of=numbers)
    def probe(self, machine: int, of: list[int]) -> None:
        job = self.tiers[machine].submit_probe(some_keys(*of))
        if job != NO_JOB:
            self.wait(machine, job)

    @rule(machine=machines)
    def reset(self, machine: int) -> None:
        tier = self.tiers[machine]
        tier.clear()
        until = time.monotonic() + PATIENCE_S
        while not tier.drain(0.05):
            self.try_again_now()
            assert time.monotonic() < until
        self.num_resets += 1

    @rule(number=any_number, at=st.integers(0, HEADER_BYTES + BLOCK_BYTES - 1))
    def a_byte_flips(self, number: int, at: int) -> None:
        if found := self.some_name(number):
            server, name = found
            byte = server.say("GETRANGE", name, str(at), str(at))
            server.say("SETRANGE", name, str(at), bytes([byte[0] ^ 1]) if byte else b"x")

    @rule(number=any_number)
    def a_block_leaves(self, number: int) -> None:
        if found := self.some_name(number):
            server, name = found
            server.say("DEL", name)

    @rule(number=any_number)
    def an_epoch_leaves(self, number: int) -> None:
        """As by an eviction. What was under it must not come back with the next one."""
        if found := self.some_name(number):
            server, name = found
            *begin, _, tag, _ = name.split(b":")
            assert server.say("DEL", b":".join([*begin, b"epoch", tag])) == 1

    @rule(number=any_number, to=st.integers(1, 2))
    def a_slot_moves(self, number: int, to: int) -> None:
        """With all that is in it, and before the machines hear of it."""
        if not (found := self.some_name(number)):
            return
        source, name = found
        target = self.cluster.masters[(self.cluster.masters.index(source) + to) % 3]
        slot = str(slot_of(name))
        identity = self.cluster.identity(target)
        assert target.say("CLUSTER", "SETSLOT", slot, "IMPORTING", self.cluster.identity(source)) == b"OK"
        assert source.say("CLUSTER", "SETSLOT", slot, "MIGRATING", identity) == b"OK"
        for one in source.ask("CLUSTER", "GETKEYSINSLOT", slot, "1000"):
            assert source.say("MIGRATE", "127.0.0.1", str(target.port), one, "0", "60000") == b"OK"
        for server in (target, source, *self.cluster.masters):
            assert server.say("CLUSTER", "SETSLOT", slot, "NODE", identity) == b"OK"

    @rule(machine=machines)
    def a_map_is_old(self, machine: int) -> None:
        """All divisions are one node further."""
        tier = self.tiers[machine]
        numbers = [*tier._number_of.items()]
        wrong = MapQuestion(deadline=0.0)
        wrong.divisions = {
            address: tier._nodes[numbers[row - 1][1]].divisions for row, (address, _) in enumerate(numbers)
        }
        wrong.num_replicas = dict.fromkeys(wrong.divisions, 0)
        tier._follow(wrong)

    @rule()
    def try_again_now(self) -> None:
        """The pauses of questions, circuits and greetings are over."""
        for tier in self.tiers:
            tier._ask_at = tier._look_at = 0.0
            for node in tier._nodes.values():
                node._greet_at = 0.0
                if node._circuit._next_try is not None:
                    node._circuit._next_try = 0.0

    @invariant()
    def nothing_is_left_over(self) -> None:
        for tier in getattr(self, "tiers", []):
            assert tier.stats().in_flight == 0
            assert tier.stats().mismatches >= 0
            keys = some_keys(*range(1, NUM_KEYS + 1))
            assert not (tier.contains(keys) & tier.unknown(keys)).any()

    def come_to_terms(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not all(tier._is_whole() for tier in self.tiers):
            self.try_again_now()
            for tier in self.tiers:
                tier.contains(some_keys(*range(1, 100)))
            assert time.monotonic() < until
            time.sleep(0.001)

    def teardown(self) -> None:
        """Both machines share again."""
        if not hasattr(self, "tiers"):
            return
        try:
            every, until, num_served = [*range(1, NUM_KEYS + 1)], time.monotonic() + PATIENCE_S, 0
            while (
                num_served < NUM_KEYS
            ):  # what is damaged, and where blocks are now, is found by the first reads
                self.come_to_terms()
                for machine, tier in enumerate(self.tiers):
                    self.probe(machine, every)
                    for node in tier._nodes.values():
                        node._hints.clear()
                self.write(0, every)
                num_served = min(self.served(0, every), self.served(1, every))
                assert time.monotonic() < until
        finally:
            for tier in self.tiers:
                tier.close()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(
    stateful_step_count=30, deadline=None, max_examples=settings().max_examples // 10
)
