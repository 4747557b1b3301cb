"""Injection of damage into a RAM tier: bit flips, swapped blocks, lost and torn writes.

Changes the public arrays of a `MemoryTier`, so that the tier itself needs no code for damage. The caller
checks that the tier detects the damage and never returns a damaged block as intact.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError
from kvoffload.tiers.memory import MemoryTier
from kvoffload.transfer import Rows


class Injection:
    """Damages each written block with a fixed probability.

    With the same seed, the same blocks are damaged on every machine, because Python guarantees the sequence
    of `random.Random.random`.

    Attributes:
        kind: kind of damage, a key of `KINDS`.
        probability: probability that a written block is damaged.
        injected: number of damaged slots so far.
    """

    def __init__(self, kind: str, probability: float, seed: int = 0) -> None:
        self.kind, self.probability, self.seed = kind, probability, seed
        self.injected = 0
        self._random = random.Random(seed)
        self._damage = KINDS[kind]

    def apply(self, tier: MemoryTier, slots: Rows) -> npt.NDArray[np.int64]:
        """Damage some of `slots`, which have just been written; returns the damaged slots, ascending.

        The bytes of every returned slot have changed, and no other slot has changed. A swap or a torn write
        needs a second slot, which is another of `slots` or, if there is only one, any slot of the tier. A
        swap damages both slots.
        """
        batch = [int(slot) for slot in slots]
        before: dict[int, npt.NDArray[np.uint8]] = {}
        for slot in batch:
            if self._random.random() < self.probability:
                candidates = [other for other in batch if other != slot] or range(tier.num_slots)
                other = candidates[self._below(len(candidates))]
                for touched in (slot, other):
                    before.setdefault(touched, tier.pool[touched].copy())
                self._damage(tier, slot, other, self._below)
        # A second swap may undo the first, and a block of zeros may be zeroed: neither is damage.
        damaged = sorted(slot for slot, old in before.items() if not np.array_equal(old, tier.pool[slot]))
        self.injected += len(damaged)
        return np.array(damaged, np.int64)

    def _below(self, n: int) -> int:
        return int(self._random.random() * n)

    def __repr__(self) -> str:
        return f"Injection({self.kind}:{self.probability:g}, seed={self.seed}, injected={self.injected})"


def parse_injection(spec: str, seed: int = 0) -> Injection:
    """Parse ``KIND:PROBABILITY``, such as ``bitflip:1e-4``. Raises `ConfigError` if `spec` is invalid."""
    kind, _, probability = spec.partition(":")
    try:
        rate = float(probability)
    except ValueError:
        rate = -1.0
    if kind not in KINDS or not 0.0 <= rate <= 1.0:
        raise ConfigError(
            "inject", spec, f"allowed: KIND:PROBABILITY with KIND {', '.join(KINDS)} and PROBABILITY 0 to 1"
        )
    return Injection(kind, rate, seed)


Below = Callable[[int], int]


def _bitflip(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    bit = below(tier.block_bytes * 8)
    tier.pool[slot, bit // 8] ^= 1 << bit % 8


def _swap(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """Exchange the contents and checksums of two slots: each block stays intact, but is in the wrong slot."""
    tier.pool[[slot, other]] = tier.pool[[other, slot]]
    if tier.checksums is not None:
        tier.checksums[[slot, other]] = tier.checksums[[other, slot]]


def _zero(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """Zero the block, as if its write were lost."""
    tier.pool[slot] = 0


def _torn(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """Overwrite the block's second half with another block's, as if the write had stopped half-way."""
    half = tier.block_bytes // 2
    tier.pool[slot, half:] = tier.pool[other, half:]


KINDS: dict[str, Callable[[MemoryTier, int, int, Below], None]] = {
    "bitflip": _bitflip,
    "swap": _swap,
    "zero": _zero,
    "torn": _torn,
}
