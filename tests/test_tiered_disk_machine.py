"""Manager, RAM and a real disk together, in any order of requests, crashes, damage and resets: nothing lies.

Every byte that is loaded is compared. KVOFFLOAD_STEPS makes it longer (`make soak` takes a million).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from disk_blocks import KEY_BYTES, capacity_for, keys_of
from kvoffload.admission import ReuseAdmission
from kvoffload.replay import content
from kvoffload.testing.audit import audit
from kvoffload.tiering import TieredManager
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.memory import MemoryTier
from kvoffload.types import ON_DEVICE_EVICTION, LookupResult

BLOCK_BYTES, RAM_BLOCKS, DISK_BLOCKS, STEPS = 4096, 8, 20, 40
NUM_EXAMPLES = max(25, int(os.environ.get("KVOFFLOAD_STEPS", "0")) // STEPS)
runs = st.tuples(st.integers(0, 24), st.integers(1, 10)).map(lambda run: range(run[0], sum(run)))


class TieredDiskMachine(RuleBasedStateMachine):
    """Requests whose blocks are `runs` of numbers; the bytes of a block follow from its key and an era.

    An era ends with a reset: weights have changed, and what an earlier era stored would be wrong now.
    """

    @initialize(
        policy=st.sampled_from(["lru", "arc", "hazard"]),
        disk_policy=st.sampled_from(["lru", "s3fifo", "hazard"]),
        is_gated=st.booleans(),
        store=st.sampled_from(["on-compute", ON_DEVICE_EVICTION]),
    )
    def start(self, policy: str, disk_policy: str, is_gated: bool, store: str) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.lives, self.era = 0, 0
        self.options: dict[str, Any] = {"policy": policy, "store": store}
        self.disk_policy, self.is_gated = disk_policy, is_gated
        self.open()

    def open(self) -> None:
        self.path = self.directory / str(self.lives)
        self.disk = DiskTier(
            self.path,
            capacity_for(DISK_BLOCKS, BLOCK_BYTES),
            BLOCK_BYTES,
            key_bytes=KEY_BYTES,
            fingerprint="model",
            policy=self.disk_policy,
            admission=ReuseAdmission(KEY_BYTES, 2, 50) if self.is_gated else "all",
            num_threads=2,
        )
        self.ram = MemoryTier(RAM_BLOCKS, BLOCK_BYTES)
        self.device = np.zeros((32, BLOCK_BYTES), np.uint8)
        self.manager = TieredManager(
            RAM_BLOCKS,
            key_bytes=KEY_BYTES,
            ram=self.ram,
            tiers=[self.disk],
            max_in_flight=1.0,
            deadline_s=20.0,
            **self.options,
        )

    @rule(run=runs, waits=st.booleans())
    def serve(self, run: range, waits: bool) -> None:
        """A request: its prefix is loaded, compared and stored; in a hurry it does not wait for the disk."""
        keys, rows = keys_of(run), np.arange(len(run))
        ctx = self.manager.begin_request("r", keys)
        found = self.manager.lookup(keys, ctx)
        while waits and found.stopped_by is LookupResult.RETRY:
            assert self.manager.settle(20.0)
            found = self.manager.lookup(keys, ctx)
        plan = self.manager.prepare_load(keys[: found.num_ready], ctx)
        sound = self.ram.read(plan.keys, plan.slots, self.device, rows[: found.num_ready])
        self.compare(plan.keys, sound)
        self.manager.complete_load(plan, np.flatnonzero(~sound))
        self.compute(keys, rows)
        stored = self.manager.prepare_store(keys, ctx)
        if stored is not None:
            self.ram.write(stored.keys, stored.slots, self.device, rows[stored.rows])
            self.manager.complete_store(stored)
        self.manager.finish_request(ctx)

    def compute(self, keys: Any, rows: Any) -> None:
        content.fill(keys, self.device, rows)
        self.device[rows] ^= np.uint8(self.era % 251)

    def compare(self, keys: Any, sound: Any) -> None:
        rows = np.arange(len(keys))
        self.device[rows] ^= np.uint8(self.era % 251)
        right = content.matches(keys, self.device, rows)
        assert not (sound & ~right).any(), "wrong bytes were served"

    @rule()
    def settle(self) -> None:
        assert self.manager.settle(20.0)

    @rule()
    def restart(self) -> None:
        """An orderly end, and another life on the same slab."""
        self.manager.close()
        shutil.copytree(self.path, self.directory / str(self.lives + 1))
        shutil.rmtree(self.path)
        self.lives += 1
        self.open()

    @rule(bits=st.lists(st.floats(0, 1, exclude_max=True), max_size=12))
    def crash(self, bits: list[float]) -> None:
        """Another life on what the file holds at some moments: a copy is made while the disk is written.

        It is no image of one instant, and bits are flipped in it besides: worse than any crash.
        """
        copy = self.directory / str(self.lives + 1)
        shutil.copytree(self.path, copy, ignore=shutil.ignore_patterns("*.lock"))
        (slab,) = copy.glob("*.slab")
        with slab.open("r+b") as file:
            size = slab.stat().st_size
            slots_bytes = DISK_BLOCKS * 2 * BLOCK_BYTES
            for number, bit in enumerate(bits):
                # One of four in the journal, perhaps; the others in slots.
                at = int(bit * size) if number % 4 == 3 else size - 1 - int(bit * slots_bytes)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
        self.manager.close()
        shutil.rmtree(self.path)
        self.lives += 1
        self.open()

    @rule()
    def new_weights(self) -> None:
        self.manager.reset()
        self.era += 1
        # What a copy made before this is settled may bring back is the old era's: such a copy is no crash.
        assert self.manager.settle(20.0)
        assert self.disk.drain(20.0)

    @rule(number=st.integers(0, 34))
    def the_disk_forgets(self, number: int) -> None:
        self.disk.delete(keys_of([number]))

    @invariant()
    def sound_inside(self) -> None:
        audit(self.manager)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            assert self.manager.settle(20.0)
            stats = self.manager.stats()
            assert (stats.writing, stats.condemned, stats.ready) == (0, 0, stats.evictable)
            self.manager.close()
            shutil.rmtree(self.directory)


TestTieredDisk = TieredDiskMachine.TestCase
TestTieredDisk.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
