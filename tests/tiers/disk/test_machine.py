"""A state machine over the disk tier: writes, reads, deletions, uses, crashes and reopenings in any order."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload.tiers.contract import NO_JOB
from support.disk_blocks import Disk, block_of, keys_of, slab_in, slab_name
from support.recording_files import KINDS, Recorder, write_image
from support.timeouts import HANGS_S

NUM_SLOTS, BLOCK_BYTES = 16, 512
NUMBERS = st.lists(st.integers(0, 39), min_size=1, max_size=9, unique=True)


class DiskMachine(RuleBasedStateMachine):
    """Compares a tier with a dict of acknowledged blocks.

    Writes and reads stay in flight until a rule collects them, so a crash may interrupt them.
    """

    @initialize(policy=st.sampled_from(["lru", "arc", "fifo", "s3fifo"]))
    def open(self, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvoffload-machine-"))
        self.policy, self.life, self.version = policy, 0, 0
        self.allowed: dict[int, set[int]] = {}
        self.owed: dict[int, int] = {}
        self.files, self.disk = Recorder(), None
        self._open(self.root / "0")

    def _open(self, directory: Path) -> None:
        self.files = Recorder()
        self.disk = Disk(directory, NUM_SLOTS, BLOCK_BYTES, files=self.files, policy=self.policy)
        self.directory = directory
        self.under_way: dict[int, tuple[list[int], int, np.ndarray]] = {}

    @rule(numbers=NUMBERS)
    def write(self, numbers: list[int]) -> None:
        self.version += 1
        pool = np.stack([block_of(number, self.version, BLOCK_BYTES) for number in numbers])
        job, taken = self.disk.tier.submit_write(keys_of(numbers), pool, np.arange(len(numbers)))
        assert (job == NO_JOB) == (not taken.any())
        chosen = [number for number, t in zip(numbers, taken.tolist(), strict=True) if t]
        for number in chosen:
            self.allowed.setdefault(number, set()).add(self.version)
        if chosen:
            self.under_way[job] = chosen, self.version, pool
        self._forget_what_is_gone()

    @rule(numbers=NUMBERS)
    def read(self, numbers: list[int]) -> None:
        pool = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        job = self.disk.tier.submit_read(keys_of(numbers), pool, np.arange(len(numbers)))
        self.under_way[job] = numbers, -1, pool

    @rule()
    def collect(self) -> None:
        assert self.disk.tier.drain(HANGS_S)
        # Reads first: they may have begun before the block was deleted and written again.
        for result in sorted(self.disk.tier.finished(), key=lambda result: self.under_way[result.job][1]):
            numbers, version, pool = self.under_way.pop(result.job)
            for row, (number, ok) in enumerate(zip(numbers, result.ok.tolist(), strict=True)):
                if version >= 0:
                    assert ok, "the medium is sound"
                    self.owed[number] = version
                    self.allowed[number] = {version}
                elif ok:
                    assert any(
                        np.array_equal(pool[row], block_of(number, known, BLOCK_BYTES))
                        for known in self.allowed[number]
                    ), "served bytes that were never written under this key"
        assert not self.under_way
        self._forget_what_is_gone()
        assert sorted(self.owed) == self.disk.here(range(40))

    @rule(numbers=NUMBERS)
    def delete(self, numbers: list[int]) -> None:
        here = self.disk.here(numbers)
        assert self.disk.tier.delete(keys_of(numbers)) == len(here)
        self._forget_what_is_gone()

    @rule(numbers=NUMBERS)
    def use(self, numbers: list[int]) -> None:
        self.disk.use(numbers)

    @precondition(lambda self: self.life < 6)
    @rule(seed=st.integers(0, 1000), kind=st.sampled_from(KINDS))
    def crash(self, seed: int, kind: str) -> None:
        """Crash now, with all jobs in flight."""
        position = self.files.position
        self.files.size_bytes = slab_in(self.directory).stat().st_size
        image = self.files.image(position, random.Random(seed), kind, self.base)
        self._end()
        self._reopen(image, crashed=True)

    @precondition(lambda self: self.life < 6)
    @rule()
    def restart(self) -> None:
        self.collect()
        self._end()
        self._reopen(slab_in(self.directory).read_bytes(), crashed=False)

    base = b""

    def _end(self) -> None:
        self.disk.tier.close()
        self.disk.tier.finished()

    def _reopen(self, image: bytes, *, crashed: bool) -> None:
        self.life += 1
        directory = self.root / str(self.life)
        write_image(directory, slab_name(self.disk.block_bytes), image)
        self._open(directory)
        self.base = image
        here = self.disk.here(range(40))
        assert set(self.owed) <= set(here), "a block that was acknowledged is lost"
        assert crashed or set(here) == set(self.owed)
        assert self.disk.tier.stats().journal_damage == 0
        job = self.disk.tier.submit_read(keys_of(here), self.disk.pool, np.arange(len(here)))
        assert self.disk.wait(job).all(), "every entry is sound after a crash"
        for row, number in enumerate(here):
            versions = [
                v
                for v in self.allowed[number]
                if np.array_equal(self.disk.pool[row], block_of(number, v, 512))
            ]
            assert versions, "served bytes that were never written under this key"
            assert versions[0] >= self.owed.get(number, 0)
            self.owed[number], self.allowed[number] = versions[0], {versions[0]}

    def _forget_what_is_gone(self) -> None:
        """Drop evicted and deleted blocks, which a crash may lose or revive."""
        for number in set(self.owed) - set(self.disk.here(range(40))):
            del self.owed[number]

    @invariant()
    def books(self) -> None:
        if getattr(self, "disk", None) is not None:
            self.disk.audit()
            assert self.disk.slots_in_use() == list(range(NUM_SLOTS + 1))
            assert self.disk.tier.stats().mismatches == 0

    def teardown(self) -> None:
        if getattr(self, "disk", None) is not None:
            self.disk.tier.close()
            shutil.rmtree(self.root)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=3 if settings().max_examples <= 20 else settings().max_examples // 2,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
