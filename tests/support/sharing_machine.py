"""A state machine of two machines that share a server, a cluster or a bucket.

Rules write, read and reset; damage, remove and restore values; and cut the network. Every block contains its
key and the number of resets before its write. So the model need not know the contents of the server: a served
block must have its own key and the present number of resets.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.tiers.contract import NO_JOB, JobResult
from kvoffload.tiers.shared.identity import HEADER_BYTES
from support.fault_proxy import FaultProxy
from support.pauses import end_pauses
from support.sharing_client import some_keys
from support.valkey_server import PATIENCE_S

NUM_KEYS = 8
SEALED_BYTES = HEADER_BYTES - 8
"""Bytes of a header before the checksum."""
EVERY = (*range(1, NUM_KEYS + 1),)
numbers = st.lists(st.sampled_from(EVERY), min_size=1, max_size=NUM_KEYS, unique=True)
machines = st.integers(0, 1)
any_number = st.integers(0, 2**32)
readers = st.sampled_from([0, 1, 0, 1, None])
MOMENT_S = 0.1
"""Deadline of a read without a reply."""

Place = Any
"""Name of a value, as `SharingMachine.values` returns it."""


class SharingMachine(RuleBasedStateMachine):
    """Two machines that share a server.

    Attributes:
        block_bytes: bytes of a block.
        reported: for each machine, the blocks that its tier has reported as stored and not as lost.
        ended_reads: the rows of the last reads, and a copy from the end of each read.
    """

    block_bytes: ClassVar[int] = 512

    @abstractmethod
    def begin(self) -> list[Any]:
        """Empty the server; returns the tiers of both machines."""

    @abstractmethod
    def values(self) -> list[Place]:
        """Return the names of all values with blocks."""

    @abstractmethod
    def get(self, place: Place) -> bytes:
        """Return a value."""

    @abstractmethod
    def put(self, place: Place, value: bytes) -> None:
        """Replace a value."""

    def whole(self, place: Place) -> list[Place]:
        """Return the names of all values of the block with this value."""
        return [place]

    @abstractmethod
    def remove(self, place: Place) -> None:
        """Remove a value, as an eviction does."""

    @abstractmethod
    def remove_epoch(self, place: Place) -> None:
        """Remove the epoch of a value, as an eviction does."""

    @abstractmethod
    def snapshot(self) -> dict[Place, bytes]:
        """Return the values of all blocks and epochs."""

    @abstractmethod
    def restore(self, snapshot: dict[Place, bytes]) -> None:
        """Replace the contents of the server."""

    @abstractmethod
    def is_epoch(self, place: Place) -> bool:
        """Return True if a value of a snapshot is an epoch."""

    def parts(self, tier: Any) -> list[Any]:
        """Return the tiers with a presence cache, circuit breaker and handshakes: the tier, or its nodes."""
        return [tier]

    def is_well(self, tier: Any) -> bool:
        """Return True if a tier can read all blocks, as far as the tier knows."""
        return bool(tier.is_open("read"))

    def epochs(self, tier: Any) -> list[int]:
        """Return the numbers of the epochs that a tier uses."""
        return [tier.peer.epoch.number]

    def some_place(self, number: int, reader: int | None = None) -> Place | None:
        """Return any value, or with a reader a value in an epoch of the reader."""
        places = self.values()
        if reader is not None:
            epochs = [f"{epoch:016x}" for epoch in self.epochs(self.tiers[reader])]
            places = [place for place in places if any(epoch in str(place) for epoch in epochs)]
        return places[number % len(places)] if places else None

    # ---- rules of the machines

    @initialize()
    def start(self) -> None:
        self.num_resets = 0
        self.saved: dict[Place, bytes] | None = None
        self.reset_since_saved: set[int] = set()
        self.tiers = self.begin()
        self.reported: list[set[bytes]] = [set(), set()]
        self.take_reports()
        self.pool = np.zeros((NUM_KEYS, self.block_bytes), np.uint8)
        self.ended_reads: deque[tuple[Any, Any]] = deque(maxlen=20)

    def wait(self, machine: int, job: int) -> JobResult:
        until = time.monotonic() + PATIENCE_S
        while not (results := self.tiers[machine].finished()):
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
            assert len(self.wait(machine, job).ok) == np.count_nonzero(taken)

    @rule(machine=machines)
    def write_all(self, machine: int) -> None:
        self.write(machine, [*EVERY])

    @rule(machine=machines, of=numbers)
    def read(self, machine: int, of: list[int]) -> None:
        self.served(machine, of)

    def served(self, machine: int, of: list[int]) -> int:
        """Read blocks, and check their bytes; returns the number of served blocks."""
        pool = np.full((NUM_KEYS, self.block_bytes), 0xEE, np.uint8)
        job = self.tiers[machine].submit_read(some_keys(*of), pool, np.arange(len(of)))
        ok = self.wait(machine, job).ok
        self.ended_reads.append((pool, pool.copy()))
        for row in np.flatnonzero(ok).tolist():
            assert (pool[row, 4:] == of[row]).all(), "another block was served"
            age = int.from_bytes(pool[row, :4].tobytes(), "big")
            assert age == self.num_resets, "a block from before a reset was served"
        return int(np.count_nonzero(ok))

    def read_past_deadline(self, machine: int) -> None:
        """Read with a deadline that is exceeded."""
        nodes = self.parts(self.tiers[machine])
        before = [node.options for node in nodes]
        for node in nodes:
            node.options = replace(node.options, timeout_s=MOMENT_S)
        self.served(machine, [*EVERY])
        for node, options in zip(nodes, before, strict=True):
            node.options = options

    @rule(machine=machines, of=numbers)
    def probe(self, machine: int, of: list[int]) -> None:
        job = self.tiers[machine].submit_probe(some_keys(*of))
        if job != NO_JOB:
            self.wait(machine, job)

    @rule(machine=machines)
    def reset(self, machine: int) -> None:
        tier = self.tiers[machine]
        tier.clear()
        assert not tier.contains(some_keys(*EVERY)).any()
        until = time.monotonic() + PATIENCE_S
        while not tier.drain(0.2):
            self.network_heals()
            self.try_again_now()
            assert time.monotonic() < until
        self.num_resets += 1
        self.reset_since_saved.add(machine)

    @rule()
    def try_again_now(self) -> None:
        """End the pauses of circuit breakers, handshakes and full servers."""
        for tier in self.tiers:
            for node in self.parts(tier):
                end_pauses(node)

    @rule(machine=machines)
    def forget(self, machine: int) -> None:
        """Clear the presence cache of a machine, as if all entries had expired."""
        for node in self.parts(self.tiers[machine]):
            node.presence.clear()

    def network_heals(self) -> None:
        """End all faults of the network."""

    # ---- rules of the server

    @rule(number=any_number, at=st.integers(0, 2 * (HEADER_BYTES + 512)), reader=readers)
    def a_byte_flips(self, number: int, at: int, reader: int | None) -> None:
        self.will_be_read_by(reader)
        if (place := self.some_place(number, reader)) is not None and (value := self.get(place)):
            at %= len(value)
            self.put(place, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
        self.is_read_by(reader)

    @rule(number=any_number, length=st.integers(0, 700), reader=readers)
    def a_value_is_cut_or_lengthened(self, number: int, length: int, reader: int | None) -> None:
        self.will_be_read_by(reader)
        if (place := self.some_place(number, reader)) is not None:
            self.put(place, (self.get(place) + bytes(100))[:length])
        self.is_read_by(reader)

    @rule(first=any_number, reader=readers)
    def values_become_others(self, first: int, reader: int | None) -> None:
        """Replace values: whole, without the header up to the checksum, and without the header."""
        self.will_be_read_by(reader)
        for row, kept_bytes in enumerate((0, SEALED_BYTES, HEADER_BYTES)):
            source_place, place = (
                self.some_place(first + 2 * row, reader),
                self.some_place(first + 2 * row + 1, reader),
            )
            if source_place is not None and place is not None:
                # Only the first value of a block has a header.
                for source, to, kept in zip(
                    self.whole(source_place), self.whole(place), (kept_bytes, 0), strict=False
                ):
                    self.put(to, self.get(to)[:kept] + self.get(source)[kept:])
        self.is_read_by(reader)

    def will_be_read_by(self, reader: int | None) -> None:
        """Write all blocks, and let the reader know of them."""
        if reader is not None:
            self.network_heals()
            self.share([reader])

    def is_read_by(self, reader: int | None) -> None:
        if reader is not None:
            self.served(reader, [*EVERY])

    @rule(number=any_number)
    def a_value_leaves(self, number: int) -> None:
        if (place := self.some_place(number)) is not None:
            self.remove(place)

    @rule(number=any_number)
    def an_epoch_leaves(self, number: int) -> None:
        """Remove an epoch: blocks of this epoch must not return with the next epoch."""
        if (place := self.some_place(number)) is not None:
            self.remove_epoch(place)

    @rule()
    def a_snapshot_is_saved(self) -> None:
        """Save a snapshot whose epochs both machines have seen: they can recognize the epochs later."""
        self.network_heals()
        self.reconnect()
        for machine in (0, 1):
            self.probe(machine, [*EVERY])
        self.reconnect()
        saved = self.snapshot()
        if all(self.numbers_in(saved).issuperset(self.epochs(tier)) for tier in self.tiers):
            self.saved, self.reset_since_saved = saved, set()

    @rule()
    def a_snapshot_returns(self) -> None:
        """Restore the snapshot, as after a crash. A machine that has reset since then reads first."""
        if self.saved is None:
            return
        self.network_heals()
        self.reconnect()
        self.restore(self.saved)
        if self.reset_since_saved:
            machine = min(self.reset_since_saved)
            old = {number for number in self.numbers_in(self.saved) if self.has_blocks(self.saved, number)}
            until = time.monotonic() + PATIENCE_S
            while not old.isdisjoint(self.numbers_in(self.snapshot())):
                self.served(machine, [*EVERY])
                self.try_again_now()
                assert time.monotonic() < until, "an old epoch stays"

    @rule(machine=machines)
    def a_crash_undoes_a_reset(self, machine: int) -> None:
        """Save a snapshot, reset, and restore the snapshot: random sequences seldom do."""
        self.network_heals()
        self.reconnect()
        self.write_all(machine)
        self.a_snapshot_is_saved()
        self.reset(machine)
        self.a_snapshot_returns()

    def numbers_in(self, snapshot: dict[Place, bytes]) -> set[int]:
        """Return the numbers of the epochs in a snapshot."""
        epochs = [value for place, value in snapshot.items() if self.is_epoch(place)]
        return {int(value, 16) for value in epochs if len(value) == 16}

    def has_blocks(self, snapshot: dict[Place, bytes], number: int) -> bool:
        """Return True if a snapshot has blocks of this epoch."""
        return any(f"{number:016x}" in str(place) for place in snapshot if not self.is_epoch(place))

    # ---- invariants

    def take_reports(self) -> None:
        for reported, tier in zip(self.reported, self.tiers, strict=True):
            for keys, are_lost in tier.take_changes():
                assert reported.isdisjoint(keys) != are_lost, "a change was reported twice"
                reported.difference_update(keys) if are_lost else reported.update(keys)

    @invariant()
    def nothing_is_left_over(self) -> None:
        if not hasattr(self, "tiers"):
            return
        self.take_reports()
        assert all((pool == then).all() for pool, then in self.ended_reads), (
            "a row was written after its read"
        )
        for tier in self.tiers:
            assert tier.stats().in_flight == 0
            keys = some_keys(*EVERY)
            assert not (tier.contains(keys) & tier.unknown(keys)).any()

    def reconnect(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not all(self.is_well(tier) for tier in self.tiers):
            self.try_again_now()
            assert time.monotonic() < until
            time.sleep(0.001)

    def share(self, readers: list[int]) -> None:
        """Write all blocks until these machines are served all of them."""
        until = time.monotonic() + PATIENCE_S
        # The first reads find damage, resets and moved slots.
        while min(self.served(machine, [*EVERY]) for machine in readers) < NUM_KEYS:
            assert time.monotonic() < until, "written blocks are not served"
            for machine in readers:
                self.reconnect()
                self.forget(machine)
                self.probe(machine, [*EVERY])
            self.write(readers[0], [*EVERY])

    def teardown(self) -> None:
        """Check that both machines share blocks again without faults."""
        if not hasattr(self, "tiers"):
            return
        try:
            self.network_heals()
            self.share([0, 1])
            self.nothing_is_left_over()
        finally:
            for tier in self.tiers:
                tier.close()
            self.over()

    def over(self) -> None:
        """Close everything besides the tiers."""


class BehindAProxy(SharingMachine):
    """Two machines before a proxy."""

    proxy: FaultProxy

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

    @rule(machine=machines)
    def the_network_hangs(self, machine: int) -> None:
        """Let the network hang for a moment: replies arrive after the deadline."""
        self.proxy.set(hang=True)
        self.read_past_deadline(machine)
        self.network_heals()

    @rule()
    def network_heals(self) -> None:
        self.proxy.set()

    def over(self) -> None:
        self.proxy.close()
