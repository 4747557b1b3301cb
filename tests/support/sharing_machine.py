"""Two machines and what they share, in any order: writes, reads, resets, and all that an engine, a network
and others may do to it.

Every block says which key it has, and after how many resets it was written. So the model need not know what
is where: whatever is served must have the right key, and be of now. Engines differ in how they are damaged.
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
from support.sharing_client import some_keys
from support.valkey_server import PATIENCE_S

NUM_KEYS = 8
SEALED_BYTES = HEADER_BYTES - 8
"""All of a header but the checksum."""
EVERY = (*range(1, NUM_KEYS + 1),)
numbers = st.lists(st.sampled_from(EVERY), min_size=1, max_size=NUM_KEYS, unique=True)
machines = st.integers(0, 1)
any_number = st.integers(0, 2**32)
readers = st.sampled_from([0, 1, 0, 1, None])
MOMENT_S = 0.1
"""The deadline of a read that will not be answered."""

Place = Any
"""Where a value is: as `SharingMachine.values` names it."""


class SharingMachine(RuleBasedStateMachine):
    """Two machines with an engine that they share.

    Attributes:
        block_bytes: of each block.
        told: of each machine the blocks that its tier has told of, and not taken back.
        given_away: the memory of the last reads, and what it had when they ended.
    """

    block_bytes: ClassVar[int] = 512

    @abstractmethod
    def begin(self) -> list[Any]:
        """Empty the engine; the tiers of both machines."""

    @abstractmethod
    def values(self) -> list[Place]:
        """All values with blocks that the engine has."""

    @abstractmethod
    def get(self, place: Place) -> bytes:
        """What is there."""

    @abstractmethod
    def put(self, place: Place, value: bytes) -> None:
        """What is there from now on."""

    def whole(self, place: Place) -> list[Place]:
        """All values of the block that this is one of."""
        return [place]

    @abstractmethod
    def remove(self, place: Place) -> None:
        """It leaves, as by an eviction."""

    @abstractmethod
    def remove_epoch(self, place: Place) -> None:
        """The epoch of the blocks there leaves, as by an eviction."""

    @abstractmethod
    def snapshot(self) -> dict[Place, bytes]:
        """All that the engine has, epochs included."""

    @abstractmethod
    def restore(self, snapshot: dict[Place, bytes]) -> None:
        """Replace the contents of the engine."""

    @abstractmethod
    def is_epoch(self, place: Place) -> bool:
        """Whether a place of a snapshot has an epoch."""

    def parts(self, tier: Any) -> list[Any]:
        """What has hints, a circuit and greetings of its own."""
        return [tier]

    def is_well(self, tier: Any) -> bool:
        """Whether it can use all that is there, as far as it knows."""
        return bool(tier.is_open("read"))

    def epochs(self, tier: Any) -> list[int]:
        """The numbers of the epochs that it finds blocks of."""
        return [tier.peer.epoch.number]

    def some_place(self, number: int, reader: int | None = None) -> Place | None:
        """Any value; one that this machine finds, if there is one that reads next."""
        found = self.values()
        if reader is not None:
            numbers = [f"{one:016x}" for one in self.epochs(self.tiers[reader])]
            found = [place for place in found if any(one in str(place) for one in numbers)]
        return found[number % len(found)] if found else None

    # ---- what machines do

    @initialize()
    def start(self) -> None:
        self.num_resets = 0
        self.saved: dict[Place, bytes] | None = None
        self.reset_since_saved: set[int] = set()
        self.tiers = self.begin()
        self.told: list[set[bytes]] = [set(), set()]
        self.hear()
        self.pool = np.zeros((NUM_KEYS, self.block_bytes), np.uint8)
        self.given_away: deque[tuple[Any, Any]] = deque(maxlen=20)

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
        """How many of these blocks the machine gets."""
        pool = np.full((NUM_KEYS, self.block_bytes), 0xEE, np.uint8)
        job = self.tiers[machine].submit_read(some_keys(*of), pool, np.arange(len(of)))
        ok = self.wait(machine, job).ok
        self.given_away.append((pool, pool.copy()))
        for row in np.flatnonzero(ok).tolist():
            assert (pool[row, 4:] == of[row]).all(), "another block was served"
            age = int.from_bytes(pool[row, :4].tobytes(), "big")
            assert age == self.num_resets, "a block from before a reset was served"
        return int(np.count_nonzero(ok))

    def read_in_vain(self, machine: int) -> None:
        """A read that ends at its deadline."""
        parts = self.parts(self.tiers[machine])
        before = [part.options for part in parts]
        for part in parts:
            part.options = replace(part.options, timeout_s=MOMENT_S)
        self.served(machine, [*EVERY])
        for part, options in zip(parts, before, strict=True):
            part.options = options

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
        """The pauses of circuits, greetings and full servers are over."""
        for tier in self.tiers:
            for part in self.parts(tier):
                part.end_pauses()

    @rule(machine=machines)
    def forget(self, machine: int) -> None:
        """Whatever it believed is too long ago."""
        for part in self.parts(self.tiers[machine]):
            part.presence.clear()

    def network_heals(self) -> None:
        """Where one can fail."""

    # ---- what others do

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
        """As a whole; all but what says whose they are; all but that and the checksum."""
        self.will_be_read_by(reader)
        for row, kept_bytes in enumerate((0, SEALED_BYTES, HEADER_BYTES)):
            one, other = (
                self.some_place(first + 2 * row, reader),
                self.some_place(first + 2 * row + 1, reader),
            )
            if one is not None and other is not None:
                # Only the first value of a block has a header.
                for source, to, kept in zip(
                    self.whole(one), self.whole(other), (kept_bytes, 0), strict=False
                ):
                    self.put(to, self.get(to)[:kept] + self.get(source)[kept:])
        self.is_read_by(reader)

    def will_be_read_by(self, reader: int | None) -> None:
        """All blocks are there for this machine, and it knows."""
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
        """What was under it must not come back with the next one."""
        if (place := self.some_place(number)) is not None:
            self.remove_epoch(place)

    @rule()
    def a_snapshot_is_saved(self) -> None:
        """Of epochs that both machines have seen: of others none can know later that they are old."""
        self.network_heals()
        self.come_to_terms()
        for machine in (0, 1):
            self.probe(machine, [*EVERY])
        self.come_to_terms()
        saved = self.snapshot()
        if all(self.numbers_in(saved).issuperset(self.epochs(tier)) for tier in self.tiers):
            self.saved, self.reset_since_saved = saved, set()

    @rule()
    def a_snapshot_returns(self) -> None:
        """As after a crash. A machine that has reset since asks first, and no other is told before."""
        if self.saved is None:
            return
        self.network_heals()
        self.come_to_terms()
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
        """All three in a row, which chance alone seldom plays."""
        self.network_heals()
        self.come_to_terms()
        self.write_all(machine)
        self.a_snapshot_is_saved()
        self.reset(machine)
        self.a_snapshot_returns()

    def numbers_in(self, snapshot: dict[Place, bytes]) -> set[int]:
        """The epochs of a snapshot."""
        epochs = [value for place, value in snapshot.items() if self.is_epoch(place)]
        return {int(value, 16) for value in epochs if len(value) == 16}

    def has_blocks(self, snapshot: dict[Place, bytes], number: int) -> bool:
        """Whether a snapshot has blocks of this epoch."""
        return any(f"{number:016x}" in str(place) for place in snapshot if not self.is_epoch(place))

    # ---- what always holds

    def hear(self) -> None:
        for told, tier in zip(self.told, self.tiers, strict=True):
            for keys, removed in tier.take_changes():
                assert told.isdisjoint(keys) != removed, "a block is told of once, and taken back once"
                told.difference_update(keys) if removed else told.update(keys)

    @invariant()
    def nothing_is_left_over(self) -> None:
        if not hasattr(self, "tiers"):
            return
        self.hear()
        assert all((pool == then).all() for pool, then in self.given_away), "written to after its deadline"
        for tier in self.tiers:
            assert tier.stats().in_flight == 0
            keys = some_keys(*EVERY)
            assert not (tier.contains(keys) & tier.unknown(keys)).any()

    def come_to_terms(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not all(self.is_well(tier) for tier in self.tiers):
            self.try_again_now()
            assert time.monotonic() < until
            time.sleep(0.001)

    def share(self, readers: list[int]) -> None:
        """All blocks are there for these machines."""
        until = time.monotonic() + PATIENCE_S
        # Damage, resets and where blocks are now are found by the first reads.
        while min(self.served(machine, [*EVERY]) for machine in readers) < NUM_KEYS:
            assert time.monotonic() < until, "what was written is not served"
            for machine in readers:
                self.come_to_terms()
                self.forget(machine)
                self.probe(machine, [*EVERY])
            self.write(readers[0], [*EVERY])

    def teardown(self) -> None:
        """When all is well both machines share again."""
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
        """What is to be closed besides the tiers."""


class BehindAProxy(SharingMachine):
    """Both machines reach the engine through one proxy."""

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
        """And goes on: what was under way arrives when nobody waits for it any more."""
        self.proxy.set(hang=True)
        self.read_in_vain(machine)
        self.network_heals()

    @rule()
    def network_heals(self) -> None:
        self.proxy.set()

    def over(self) -> None:
        self.proxy.close()
