"""The shipped state machine, over every built-in policy and admission rule, and over the naive twins."""

from __future__ import annotations

import random

from kvoffload.admission import ReuseAdmission
from kvoffload.core.index import Index
from kvoffload.core.keys import Keys
from kvoffload.core.protection import Protected
from kvoffload.policies import REFUSED
from kvoffload.policies.base import Slots
from kvoffload.policies.hazard import Hazard
from kvoffload.testing.machine import manager_machine
from kvoffload.testing.naive.arc import NaiveARC
from kvoffload.testing.naive.fifo import NaiveFIFO
from kvoffload.testing.naive.gdsf import NaiveGDSF
from kvoffload.testing.naive.hazard import NaiveHazard
from kvoffload.testing.naive.lfu import NaiveLFU
from kvoffload.testing.naive.lirs import NaiveLIRS
from kvoffload.testing.naive.lru import NaiveLRU
from kvoffload.testing.naive.reuse import NaiveReuse
from kvoffload.testing.naive.s3fifo import NaiveS3FIFO
from kvoffload.testing.naive.sieve import NaiveSIEVE
from kvoffload.testing.naive.slru import NaiveSLRU
from kvoffload.testing.naive.tinylfu import NaiveTinyLFU
from kvoffload.testing.naive.two_q import NaiveTwoQ
from kvoffload.testing.naive.wtinylfu import NaiveWTinyLFU
from kvoffload.types import ON_DEVICE_EVICTION

TestLru = manager_machine("lru", key_bytes=32, max_examples=80).TestCase
TestLruWithReuse = manager_machine(
    "lru", lambda: ReuseAdmission(20, 2, 7), capacity_blocks=3, key_bytes=20, max_examples=60
).TestCase
TestArc = manager_machine("arc", key_bytes=36, max_examples=80).TestCase
TestArcWithReuse = manager_machine(
    "arc", lambda: ReuseAdmission(8, 2, 40), capacity_blocks=4, key_bytes=8, max_examples=80
).TestCase
TestArcOfOneBlock = manager_machine("arc", capacity_blocks=1, key_bytes=5, max_examples=20).TestCase
TestReuseByName = manager_machine("lru", "reuse:2", max_examples=3).TestCase
TestFifo = manager_machine("fifo", key_bytes=32, max_examples=25).TestCase
TestSlru = manager_machine("slru", key_bytes=8, max_examples=30).TestCase
TestLfu = manager_machine("lfu", key_bytes=20, max_examples=30).TestCase
TestSieve = manager_machine("sieve", key_bytes=32, max_examples=40).TestCase
TestSieveOfOneBlock = manager_machine("sieve", capacity_blocks=1, key_bytes=5, max_examples=10).TestCase
TestSieveWithReuse = manager_machine(
    "sieve", lambda: ReuseAdmission(8, 2, 40), key_bytes=8, max_examples=20
).TestCase
TestS3Fifo = manager_machine("s3fifo", key_bytes=36, max_examples=40).TestCase
TestS3FifoOfOneBlock = manager_machine("s3fifo", capacity_blocks=1, key_bytes=5, max_examples=10).TestCase
TestS3FifoWithReuse = manager_machine(
    "s3fifo", lambda: ReuseAdmission(8, 2, 40), key_bytes=8, max_examples=20
).TestCase
TestNaiveLru = manager_machine(NaiveLRU, max_examples=20).TestCase
TestNaiveLruWithReuse = manager_machine(NaiveLRU, lambda: NaiveReuse(2, 4), max_examples=20).TestCase
TestNaiveArc = manager_machine(NaiveARC, max_examples=20).TestCase
TestNaiveArcWithReuse = manager_machine(NaiveARC, lambda: NaiveReuse(2, 9), max_examples=20).TestCase
TestNaiveFifo = manager_machine(NaiveFIFO, max_examples=5).TestCase
TestNaiveSlru = manager_machine(NaiveSLRU, max_examples=5).TestCase
TestNaiveLfu = manager_machine(NaiveLFU, max_examples=5).TestCase
TestNaiveSieve = manager_machine(NaiveSIEVE, max_examples=10).TestCase
TestNaiveS3Fifo = manager_machine(NaiveS3FIFO, max_examples=10).TestCase

TestTwoQ = manager_machine("2q", key_bytes=36, max_examples=50).TestCase
TestTwoQOfOneBlock = manager_machine("2q", capacity_blocks=1, key_bytes=5, max_examples=15).TestCase
TestTwoQOfTwoBlocks = manager_machine("2q", "tinylfu", capacity_blocks=2, max_examples=20).TestCase
TestNaiveTwoQ = manager_machine(NaiveTwoQ, max_examples=15).TestCase

TestLirs = manager_machine("lirs", key_bytes=36, max_examples=50).TestCase
TestLirsOfOneBlock = manager_machine("lirs", capacity_blocks=1, key_bytes=5, max_examples=15).TestCase
TestLirsOfThreeBlocks = manager_machine("lirs", "tinylfu", capacity_blocks=3, max_examples=20).TestCase
TestNaiveLirs = manager_machine(NaiveLIRS, max_examples=15).TestCase

TestWTinyLfu = manager_machine("wtinylfu", key_bytes=36, max_examples=50).TestCase
TestWTinyLfuOfOneBlock = manager_machine("wtinylfu", capacity_blocks=1, key_bytes=5, max_examples=15).TestCase
TestWTinyLfuOfThreeBlocks = manager_machine(
    "wtinylfu", "tinylfu", capacity_blocks=3, max_examples=20
).TestCase
TestNaiveWTinyLfu = manager_machine(NaiveWTinyLFU, max_examples=15).TestCase

TestGdsf = manager_machine("gdsf", key_bytes=36, max_examples=50).TestCase
TestGdsfOfOneBlock = manager_machine("gdsf", capacity_blocks=1, key_bytes=5, max_examples=15).TestCase
TestGdsfOfTwoBlocks = manager_machine("gdsf", "tinylfu", capacity_blocks=2, max_examples=20).TestCase
TestNaiveGdsf = manager_machine(NaiveGDSF, lambda: NaiveTinyLFU(5), max_examples=15).TestCase


class RefusesAtRandom(NaiveLRU):
    """LRU that has no use for three blocks in ten, whichever, unless they are admitted."""

    name = "refuses-at-random"
    refuses = True

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.random = random.Random(5)

    def replace(self, keys: Keys, slots: Slots, num_free: int, protected: Protected) -> None:
        refusing = False
        entering = []
        for row, key in enumerate(keys):
            if row >= num_free:
                refusing = (refusing and protected.one_prefix) or self.random.random() < 0.3
                refusing = refusing and not protected.admitted
                slots[row] = REFUSED if refusing else self.victim(key, protected)
            if slots[row] != REFUSED:
                entering.append(int(slots[row]))
        self.slots += reversed(entering)


TestRefusesAtRandom = manager_machine(RefusesAtRandom, max_examples=40).TestCase
TestRefusesAtRandomWithReuse = manager_machine(RefusesAtRandom, "reuse:2", max_examples=10).TestCase

TestVictimLru = manager_machine("lru", store=ON_DEVICE_EVICTION, key_bytes=32, max_examples=80).TestCase
TestVictimLruWithReuse = manager_machine(
    "lru", lambda: ReuseAdmission(20, 2, 7), store=ON_DEVICE_EVICTION, key_bytes=20, max_examples=60
).TestCase
TestVictimArc = manager_machine("arc", store=ON_DEVICE_EVICTION, key_bytes=8, max_examples=50).TestCase
TestVictimOfOneBlock = manager_machine(
    "arc", store=ON_DEVICE_EVICTION, capacity_blocks=1, key_bytes=5, max_examples=20
).TestCase
TestVictimNaiveLru = manager_machine(NaiveLRU, store=ON_DEVICE_EVICTION, max_examples=30).TestCase
TestVictimRefusesAtRandom = manager_machine(
    RefusesAtRandom, store=ON_DEVICE_EVICTION, max_examples=60
).TestCase
TestVictimRefusesAtRandomWithReuse = manager_machine(
    RefusesAtRandom, lambda: NaiveReuse(2, 9), store=ON_DEVICE_EVICTION, max_examples=40
).TestCase


class SmallHazard(Hazard):
    """Small enough that its history and sample overflow, and that its guards change their mind."""

    history_capacity, sample_capacity, half_life, duel_window, warm_up = 9, 2, 40, 8, 1


class SmallNaiveHazard(NaiveHazard):
    history_capacity, sample_capacity, half_life, duel_window, warm_up = 9, 2, 40, 8, 1


TestHazard = manager_machine(SmallHazard, key_bytes=8, max_examples=40).TestCase
TestHazardWithReuse = manager_machine(SmallHazard, "reuse:2", key_bytes=36, max_examples=5).TestCase
TestVictimHazard = manager_machine(
    SmallHazard, store=ON_DEVICE_EVICTION, key_bytes=8, max_examples=50
).TestCase
TestVictimHazardOfOneBlock = manager_machine(
    SmallHazard, store=ON_DEVICE_EVICTION, capacity_blocks=1, max_examples=4
).TestCase
TestNaiveHazard = manager_machine(SmallNaiveHazard, max_examples=2).TestCase
TestVictimNaiveHazard = manager_machine(SmallNaiveHazard, store=ON_DEVICE_EVICTION, max_examples=2).TestCase
