"""A state machine of manager, RAM and a real disk, with requests, crashes, damage and resets in any order.

Every loaded byte is compared. Two drivers take the machine's steps: Hypothesis, which shrinks failures, and a
faster seeded driver. KVOFFLOAD_STEPS sets the number of seeded steps (`make soak`: a million), and
KVOFFLOAD_SEED repeats a failed round, apart from the timing of threads.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffload.admission.reuse import ReuseAdmission
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION, LookupResult
from kvoffload.core.policy import EvictionPolicy
from kvoffload.policies.arc import ARC
from kvoffload.policies.lru import LRU
from kvoffload.policies.s3fifo import S3FIFO
from kvoffload.replay import content
from kvoffload.testing.audit import audit
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.files import PAGE_BYTES
from kvoffload.tiers.disk.slab import MISMATCH, SOUND, Outcomes, Slab
from kvoffload.tiers.disk.slab_layout import Layout
from kvoffload.tiers.memory import MemoryTier
from support.disk_blocks import KEY_BYTES, Disk, keys_of, slab_in, slab_name
from support.recording_files import write_image
from support.small_hazard import SmallHazard
from support.timeouts import HANGS_S

BLOCK_BYTES, RAM_BLOCKS, DISK_BLOCKS = 4096, 8, 20
LAYOUT = Layout.holding(BLOCK_BYTES, KEY_BYTES, DISK_BLOCKS)
# Classes, not names: at every reopening a name is looked up among all installed packages.
POLICIES, DISK_POLICIES = [LRU, ARC, SmallHazard], [LRU, S3FIFO, SmallHazard]
STORES = [ON_COMPUTE, ON_DEVICE_EVICTION]
HAPPENS = (
    "hits in RAM", "hits on disk", "blocks written", "blocks restored", "blocks found damaged",
    "resets", "restarts", "crashes",
)  # fmt: skip
"""Events that a machine counts, all of which occur within a few thousand steps."""
runs = st.tuples(st.integers(0, 24), st.integers(1, 10)).map(lambda run: range(run[0], sum(run)))


class TieredDiskMachine(RuleBasedStateMachine):
    """Random requests for runs of numbered blocks, whose bytes follow from key and era.

    An era ends with a reset, as after a change of weights: blocks of an earlier era would be wrong.

    Attributes:
        parent: parent of the machine's directory; None for the system's default.
        seen: count of each event of `HAPPENS`.
    """

    parent: str | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        disk_policy=st.sampled_from(DISK_POLICIES),
        is_gated=st.booleans(),
        store=st.sampled_from(STORES),
    )
    def start(
        self,
        policy: type[EvictionPolicy],
        disk_policy: type[EvictionPolicy],
        is_gated: bool,
        store: str,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=self.parent))
        self.lives, self.era = 0, 0
        self.seen: Counter[str] = Counter()
        self.options: dict[str, Any] = {"policy": policy, "store": store}
        self.disk_policy, self.is_gated = disk_policy, is_gated
        self.open()

    def open(self) -> None:
        self.path = self.directory / str(self.lives)
        admission = ReuseAdmission(KEY_BYTES, 2, 50) if self.is_gated else "all"
        self.driver = Disk(self.path, DISK_BLOCKS, BLOCK_BYTES, policy=self.disk_policy, admission=admission)
        self.disk = self.driver.tier
        self.ram = MemoryTier(RAM_BLOCKS, BLOCK_BYTES)
        self.device = np.zeros((32, BLOCK_BYTES), np.uint8)
        self.manager = TieredManager(
            RAM_BLOCKS,
            key_bytes=KEY_BYTES,
            ram=self.ram,
            tiers=[self.disk],
            max_in_flight=1.0,
            deadline_s=HANGS_S,
            **self.options,
        )

    def close(self) -> None:
        """End a life, and check that nothing is in flight and the counters agree."""
        assert self.manager.settle(HANGS_S)
        self.sound_inside()
        final = self.manager.stats()
        assert (final.writing, final.condemned, final.ready) == (0, 0, final.evictable)
        self.manager.close()
        stats, (from_ram, from_disk) = self.disk.stats(), self.manager.hit_blocks
        self.seen.update(
            {
                "hits in RAM": from_ram,
                "hits on disk": from_disk,
                "blocks written": stats.written,
                "blocks restored": stats.restored,
                "blocks found damaged": stats.mismatches,
            }
        )

    @rule(run=runs, waits=st.booleans())
    def serve(self, run: range, waits: bool) -> None:
        """Serve a request: load, compare and store its blocks; with `waits`, wait for the disk."""
        keys, rows = keys_of(run), np.arange(len(run))
        ctx = self.manager.begin_request("r", keys)
        result = self.manager.lookup(keys, ctx)
        while waits and result.stopped_by is LookupResult.RETRY:
            assert self.manager.settle(HANGS_S)
            result = self.manager.lookup(keys, ctx)
        plan = self.manager.prepare_load(keys[: result.num_ready], ctx)
        sound = self.ram.read(plan.keys, plan.slots, self.device, rows[: result.num_ready])
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
        self.device[: len(keys)] ^= np.uint8(self.era % 251)

    def compare(self, keys: Any, sound: Any) -> None:
        self.device[: len(keys)] ^= np.uint8(self.era % 251)
        is_correct = content.matches(keys, self.device, np.arange(len(keys)))
        assert not (sound & ~is_correct).any(), "wrong bytes were served"

    @rule()
    def settle(self) -> None:
        assert self.manager.settle(HANGS_S)

    @rule()
    def restart(self) -> None:
        """Close the manager, and open another on the same slab, which must have all blocks."""
        self.close()
        ready = self.disk.stats().ready
        self.open()
        assert self.disk.stats().restored == ready
        self.seen["restarts"] += 1

    @rule(bits=st.lists(st.floats(0, 1, exclude_max=True), max_size=12))
    def crash(self, bits: list[float]) -> None:
        """Open another manager on a copy of the slab that is made while the disk is written.

        The copy mixes several instants, and bits are flipped in it: worse than any crash.
        """
        copy = self.directory / str(self.lives + 1)
        shutil.copytree(self.path, copy, ignore=shutil.ignore_patterns("*.lock"))
        slots_bytes = LAYOUT.num_slots * LAYOUT.slot_bytes
        with slab_in(copy).open("r+b") as file:
            for number, bit in enumerate(bits):
                # One of four flips is in the superblock or the journal; the others are in slots.
                in_slots = LAYOUT.slots_offset + int(bit * slots_bytes)
                at = int(bit * LAYOUT.slots_offset) if number % 4 == 3 else in_slots
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
        self.close()
        shutil.rmtree(self.path)
        self.lives += 1
        self.open()
        self.seen["crashes"] += 1

    @rule()
    def new_weights(self) -> None:
        self.manager.reset()
        self.era += 1
        # Wait, because a copy made before the reset is durable could revive blocks of the old era.
        assert self.manager.settle(HANGS_S)
        assert self.disk.drain(HANGS_S)
        self.seen["resets"] += 1

    @rule(number=st.integers(0, 34))
    def the_disk_forgets(self, number: int) -> None:
        self.disk.delete(keys_of([number]))

    @invariant()
    def sound_inside(self) -> None:
        audit(self.manager)
        self.driver.audit()
        assert self.driver.slots_in_use() == list(range(LAYOUT.num_slots))

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.close()
            shutil.rmtree(self.directory)


TestTieredDisk = TieredDiskMachine.TestCase
TestTieredDisk.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


# ---- without Hypothesis: any number of steps

SHORT_STEPS, ROUND_STEPS = 2500, 500
AUDIT_STEPS = 25
"""Steps between two audits; each close has another audit."""
WEIGHTS = {"serve": 84, "settle": 6, "the_disk_forgets": 7, "new_weights": 1, "restart": 1, "crash": 1}
"""Weights of the rules. The last two close the manager; each of them costs as much as ten other rules."""


def take_step(machine: TieredDiskMachine, chance: random.Random) -> None:
    """Run a random rule, with arguments from the ranges that Hypothesis uses."""
    (name,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
    arguments: dict[str, Any] = {}
    if name == "serve":
        first = chance.randint(0, 24)
        arguments = {"run": range(first, first + chance.randint(1, 10)), "waits": chance.random() < 0.5}
    elif name == "crash":
        arguments = {"bits": [chance.random() for _ in range(chance.randint(0, 12))]}
    elif name == "the_disk_forgets":
        arguments = {"number": chance.randint(0, 34)}
    getattr(machine, name)(**arguments)


def play(seed: int, steps: int) -> Counter[str]:
    """Run a machine with random options for `steps` steps; returns the counts of its events.

    Slabs are in memory if there is a file system for that. The message of an `AssertionError` tells how to
    repeat the failure.
    """
    chance, machine, step = random.Random(seed), TieredDiskMachine(), 0
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as machine.parent:
        machine.start(
            policy=chance.choice(POLICIES),
            disk_policy=chance.choice(DISK_POLICIES),
            is_gated=chance.random() < 0.5,
            store=chance.choice(STORES),
        )
        try:
            for step in range(1, steps + 1):
                take_step(machine, chance)
                if step % AUDIT_STEPS == 0:
                    machine.sound_inside()
            machine.teardown()
        except Exception as error:
            raise AssertionError(f"KVOFFLOAD_SEED={seed}, step {step}: {error!r}") from error
        finally:
            machine.disk.close()
    return machine.seen


def play_rounds(first_seed: int, steps: int) -> Counter[str]:
    """Run rounds, each with its own seed, so that a failed round can be repeated alone.

    Prints the progress twice a minute.
    """
    counts: Counter[str] = Counter()
    began = reported = time.monotonic()
    for number in range(-(-steps // ROUND_STEPS)):
        counts.update(play(first_seed + number, ROUND_STEPS))
        done, now = (number + 1) * ROUND_STEPS, time.monotonic()
        if now - reported > 30 or done >= steps:
            reported = now
            print(f"{done:,} steps, {done / (now - began):.0f}/s: {dict(counts)}", flush=True)
    return counts


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Silence log lines about damage, which would fill memory during a million steps."""
    caplog.set_level(logging.CRITICAL, "kvoffload.disk")


@pytest.mark.usefixtures("quiet")
@pytest.mark.slow
def test_any_number_of_steps() -> None:
    steps = int(os.environ.get("KVOFFLOAD_STEPS") or SHORT_STEPS)
    seed = int(os.environ.get("KVOFFLOAD_SEED") or random.SystemRandom().randrange(10**9))
    print(f"KVOFFLOAD_SEED={seed}", flush=True)
    counts = play_rounds(seed, steps)
    if steps >= SHORT_STEPS:
        assert not [event for event in HAPPENS if not counts[event]], "the steps must cover every event"


def without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk serve blocks without verification."""
    honest = Slab.read_blocks

    def read_blocks(self: Slab, *arguments: Any) -> Outcomes:
        outcomes = honest(self, *arguments)
        outcomes[outcomes == MISMATCH] = SOUND
        return outcomes

    monkeypatch.setattr(Slab, "read_blocks", read_blocks)


def without_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk keep its blocks at a reset."""
    monkeypatch.setattr(DiskTier, "clear", lambda self: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fault", [without_verification, without_resets])
def test_a_disk_that_serves_wrong_bytes_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"KVOFFLOAD_SEED=\d+, step \d+: .*wrong bytes were served"):
        play_rounds(0, 20 * ROUND_STEPS)


@pytest.mark.parametrize("writes_afterwards", [False, True])
def test_damage_to_the_journal_restores_no_block_from_before_a_reset(
    tmp_path: Path, writes_afterwards: bool
) -> None:
    """Damage each metadata page in turn, with the removals as the last group of the log or not."""
    old = list(range(8))
    disk = Disk(tmp_path / "life", DISK_BLOCKS, BLOCK_BYTES)
    assert disk.write(old) == old
    disk.tier.clear()
    assert disk.tier.drain(HANGS_S)
    if writes_afterwards:
        assert disk.write([30]) == [30]
    disk.tier.close()
    image = slab_in(tmp_path / "life").read_bytes()
    restored = {}
    for offset in range(0, LAYOUT.slots_offset, PAGE_BYTES):
        damaged = bytearray(image)
        damaged[offset + 20] ^= 1
        write_image(tmp_path / str(offset), slab_name(BLOCK_BYTES), bytes(damaged))
        disk = Disk(tmp_path / str(offset), DISK_BLOCKS, BLOCK_BYTES)
        disk.versions = dict.fromkeys(old, 0)
        if served := disk.read(old):
            restored[offset] = served
        disk.tier.close()
    assert restored == {}
