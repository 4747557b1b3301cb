"""An adversary of the disk tier: seeded cases of damage, truncation, kills, wrong clocks and capacities.

    PYTHONPATH=src:tests python tests/support/disk_adversary.py --seed 1 --cases 100

In each case several producers open one directory in turn, and the case disturbs the directory between two
openings. Checked: no wrong bytes are served, no exception is raised, the files stay within the capacity, and
an acknowledged block is lost only by damage, eviction or a smaller capacity.
`tests/tiers/disk/test_adversary.py` runs a few cases.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.errors import ConfigError
from kvoffload.tiers.disk.files import PAGE_BYTES
from kvoffload.tiers.disk.inspection import opened, verify
from kvoffload.tiers.disk.slab_directory import slabs_in
from support.disk_blocks import Disk, capacity_for, keys_of
from support.recording_files import FailingFiles, raises, works
from support.timeouts import HANGS_S

PRODUCERS = ("first", "second", "third")
CAPACITIES = (12, 40, 60, 61, 90, 150, 400)
NUM_NUMBERS = 120
SECONDS_2033 = 2_000_000_000.0


@dataclass
class Counts:
    """Counts over cases. The counts from `wrong` on must stay 0.

    Attributes:
        lives: openings of a directory by a producer.
        wrong: blocks served with wrong bytes.
        lost: acknowledged blocks that are absent without damage or eviction.
        over_capacity: openings with files longer than the capacity.
        unsound: problems that `kvoffload disk verify` reports without damage.
        exceptions: lives that ended in an exception.
        problems: descriptions of the first problems.
    """

    cases: int = 0
    lives: int = 0
    written: int = 0
    served: int = 0
    wrong: int = 0
    lost: int = 0
    over_capacity: int = 0
    unsound: int = 0
    exceptions: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.lost or self.over_capacity or self.unsound or self.exceptions)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "problems")


class Case:
    """A case: one directory.

    Attributes:
        known: by producer, the version that a block must have if it is served.
        owed: by producer, the blocks that must not be lost.
    """

    def __init__(self, directory: Path, seed: int, counts: Counts) -> None:
        self.directory, self.seed, self.counts = directory, seed, counts
        self.chance, self.files = random.Random(seed), FailingFiles(SECONDS_2033)
        self.known: dict[str, dict[int, int]] = {producer: {} for producer in PRODUCERS}
        self.owed: dict[str, set[int]] = {producer: set() for producer in PRODUCERS}
        self.capacity = self.chance.choice(CAPACITIES)
        self.version, self.happened = 0, list[str]()

    def run(self, num_lives: int = 8) -> None:
        for _ in range(num_lives):
            try:
                self._live(self.chance.choice(PRODUCERS[: self.chance.choice([1, 2, 3])]))
                self._disturb()
            except Exception as error:
                self._problem("exceptions", f"{type(error).__name__}: {error}")
                return

    def _problem(self, kind: str, text: str, count: int = 1) -> None:
        setattr(self.counts, kind, getattr(self.counts, kind) + count)
        if len(self.counts.problems) < 20:
            last = ", ".join(self.happened[-6:])
            self.counts.problems.append(f"seed {self.seed}: {kind}: {text} (after {last})")

    # ---- a life

    def _live(self, producer: str) -> None:
        chance, files = self.chance, self.files
        self.counts.lives += 1
        self.happened.append(f"{producer} with room for {self.capacity}")
        disk = Disk(self.directory, self.capacity, fingerprint=producer, files=files)
        disk.versions = self.known[producer]
        if sum(path.stat().st_size for path in self.directory.iterdir()) > capacity_for(self.capacity, 4096):
            self._problem("over_capacity", "at the opening")
        self._check(disk, producer)
        for _ in range(chance.randint(0, 12)):
            self._step(disk, producer)
        files.fail = works
        self.counts.wrong += disk.wrong
        if disk.wrong:
            self._problem("wrong", "bytes were served", 0)
        disk.audit()
        self.owed[producer] = set(disk.here(range(NUM_NUMBERS)))
        if chance.random() < 0.7:
            assert disk.tier.drain(HANGS_S)
            disk.tier.close()
        else:
            self._kill(disk)
        self._forgive_evictions(producer)

    def _forgive_evictions(self, producer: str) -> None:
        """Stop expecting blocks of other producers that were evicted for this producer."""
        remaining: dict[str, set[int]] = {}
        for path in slabs_in(self.directory):
            with contextlib.suppress(ConfigError), opened(path) as (found_slab, recovered):
                keys = recovered.contents.keys(recovered.contents.slots())
                remaining[found_slab.identity.text] = {int(key[3:]) for key in keys}
        for other in PRODUCERS:
            if other != producer:
                self.owed[other] &= remaining.get(other, set())

    def _check(self, disk: Disk, producer: str) -> None:
        """Check that no owed block is lost, except for lack of space."""
        here = disk.here(range(NUM_NUMBERS))
        served = set[int]()
        for start in range(0, len(here), 50):
            served |= set(disk.read(here[start : start + 50]))
        self.counts.served += len(served)
        fits = disk.tier.stats().capacity
        lost = self.owed[producer] - served
        if lost and len(served) < fits:
            # Blocks that did not fit are not lost.
            self._problem("lost", f"{len(lost)} of {len(self.owed[producer])} of {producer}", len(lost))

    def _step(self, disk: Disk, producer: str) -> None:
        chance, files = self.chance, self.files
        numbers = chance.sample(range(NUM_NUMBERS), chance.randint(1, 20))
        action = chance.random()
        files.passed_s += chance.choice([0, 1, 400])
        if action < 0.55:
            self.version += 1
            disk.tier.delete(keys_of(numbers))
            for number in numbers:
                self.known[producer].pop(number, None)
            self.counts.written += len(disk.write(numbers, version=self.version))
        elif action < 0.7:
            disk.use(numbers)
        elif action < 0.85:
            disk.read(disk.here(numbers))
        elif action < 0.9:
            number = chance.choice([errno.ENOMEM, errno.ESTALE])
            files.fail = raises(number, "read")
            disk.read(disk.here(numbers))
            files.fail = works
        elif action < 0.95:
            files.fail = raises(errno.ENOSPC, "allocate")
        elif action < 0.97:
            disk.tier.clear()
            for known in self.known.values():
                known.clear()
            for owed in self.owed.values():
                owed.clear()
            assert disk.tier.drain(HANGS_S)
        else:
            disk.tier.delete(keys_of(numbers))

    def _kill(self, disk: Disk) -> None:
        self.happened.append("kill")
        disk.kill()

    # ---- between two lives

    def _disturb(self) -> None:
        """Disturb the directory in a random way, or not at all."""
        self.chance.choice(
            [bool, self._cut, self._damage, self._capacity, self._clock, self._verify, self._interrupt]
        )()

    def _capacity(self) -> None:
        before, self.capacity = self.capacity, self.chance.choice(CAPACITIES)
        if self.capacity < before:
            self._owe_nothing()

    def _clock(self) -> None:
        days = self.chance.choice([-4000, -1, 1, 300])
        self.files.clock_s = SECONDS_2033 + days * 86400
        self.happened.append(f"clock {days:+} days")

    def _cut(self) -> None:
        path = self._a_slab()
        with opened(path) as (found_slab, recovered):
            contents, layout = recovered.contents, found_slab.layout
            slots = contents.slots()
            end = self.chance.randint(layout.first_slot, layout.num_slots)
            cut_off = {int(key[3:]) for key in contents.keys(slots[slots >= end])}
            producer = found_slab.identity.text
        size = layout.slot_offset(end) + self.chance.choice([0, 0, 100])
        if size < path.stat().st_size:
            os.truncate(path, size)
            self.owed[producer] -= cut_off
            self.happened.append(f"cut {producer} at slot {end}")

    def _damage(self) -> None:
        """Flip, zero, exchange or overwrite pages. Blocks may then be lost, but not wrong."""
        path, chance = self._a_slab(), self.chance
        with path.open("r+b") as file:
            pages = max(1, path.stat().st_size // PAGE_BYTES)
            for _ in range(chance.randint(1, 8)):
                at = chance.choice([chance.randrange(pages), chance.randrange(min(pages, 40))]) * PAGE_BYTES
                file.seek(at)
                page = bytearray(file.read(PAGE_BYTES))
                kind = chance.choice(["flip", "zero", "other", "noise"])
                if kind == "flip" and page:
                    page[chance.randrange(len(page))] ^= 1 << chance.randrange(8)
                elif kind == "zero":
                    page = bytearray(len(page))
                elif kind == "noise":
                    page = bytearray(chance.randbytes(len(page)))
                else:
                    file.seek(chance.randrange(pages) * PAGE_BYTES)
                    page = bytearray(file.read(len(page)))
                file.seek(at)
                file.write(page)
        self.happened.append("damage")
        self._owe_nothing()
        self.was_damaged = True

    was_damaged = False

    def _verify(self) -> None:
        """Verify all slabs, unless there was damage."""
        if self.was_damaged:
            return
        for path in slabs_in(self.directory):
            with opened(path) as (found_slab, recovered):
                bad = [
                    problem
                    for problem in verify(found_slab, recovered)
                    if problem.slot < found_slab.num_reserved
                ]
            if bad or recovered.damaged:
                self._problem(
                    "unsound", f"{len(bad)} blocks, {recovered.damaged} parts", len(bad) + recovered.damaged
                )

    def _interrupt(self) -> None:
        """Leave the file of an interrupted creation."""
        (self.directory / f"kvoffload-{self.seed:016x}.slab.new").write_bytes(b"unfinished")

    def _a_slab(self) -> Path:
        return self.chance.choice(slabs_in(self.directory))

    def _owe_nothing(self) -> None:
        for owed in self.owed.values():
            owed.clear()


def run(seed: int, cases: int, report: Callable[[str], None] = lambda line: None) -> Counts:
    """Run cases with seeds derived from `seed`; returns their counts."""
    counts, root = Counts(), Path(tempfile.mkdtemp(prefix="kvoffload-adversary-"))
    try:
        for number in range(cases):
            directory = root / str(number)
            Case(directory, seed * 1_000_003 + number, counts).run()
            counts.cases += 1
            shutil.rmtree(directory, ignore_errors=True)
            if number % 50 == 49:
                report(str(counts))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--cases", type=int, default=100)
    given = parser.parse_args()
    print(f"disk adversary: seed {given.seed}, {given.cases} cases", flush=True)
    counts = run(given.seed, given.cases, lambda line: print(line, flush=True))
    print("\n".join(counts.problems))
    print(counts)
    return 0 if counts.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
