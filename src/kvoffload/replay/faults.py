"""Damage on purpose: what hardware, bugs and power cuts do to a tier's bytes, at a rate and from a seed.

Owns the kinds of damage. Works on a `MemoryTier` from outside, through what the tier exposes: the tier
has no switch for it. The caller decides what must follow: damage is caught, never served.
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
    """Damages each block that is written with one probability, in one way.

    The random numbers come from `random.Random.random` alone, whose sequence Python promises for a seed:
    the same writes are damaged in the same way on every version and machine.

    Attributes:
        kind: a key of `KINDS`. probability: of each block written. seed: says it all again.
        injected: slots damaged so far.
    """

    def __init__(self, kind: str, probability: float, seed: int = 0) -> None:
        self.kind, self.probability, self.seed = kind, probability, seed
        self.injected = 0
        self._random = random.Random(seed)
        self._damage = KINDS[kind]

    def apply(self, tier: MemoryTier, slots: Rows) -> npt.NDArray[np.int64]:
        """Damage some of `slots`, which have just been written; answer the slots that were, ascending.

        The answer is exact: each of them now holds other bytes than before the call, and no other slot
        does. A swap or a tear takes its other half from the same batch or, for a batch of one, from
        any slot of the tier; a swap damages both.
        """
        batch = [int(slot) for slot in slots]
        before: dict[int, npt.NDArray[np.uint8]] = {}
        for slot in batch:
            if self._random.random() < self.probability:
                others = [other for other in batch if other != slot] or range(tier.num_slots)
                other = others[self._below(len(others))]
                for touched in (slot, other):
                    before.setdefault(touched, tier.pool[touched].copy())
                self._damage(tier, slot, other, self._below)
        # A swap may be swapped back, a block of zeros may be zeroed: that is no damage.
        damaged = sorted(slot for slot, old in before.items() if not np.array_equal(old, tier.pool[slot]))
        self.injected += len(damaged)
        return np.array(damaged, np.int64)

    def _below(self, n: int) -> int:
        return int(self._random.random() * n)

    def __repr__(self) -> str:
        return f"Injection({self.kind}:{self.probability:g}, seed={self.seed}, injected={self.injected})"


def parse_injection(spec: str, seed: int = 0) -> Injection:
    """Read ``KIND:PROBABILITY``, such as ``bitflip:1e-4``. Raises `ConfigError` that says what is allowed."""
    kind, _, probability = spec.partition(":")
    try:
        rate = float(probability)
    except ValueError:
        rate = -1.0
    if kind not in KINDS or not 0.0 <= rate <= 1.0:
        raise ConfigError(
            "inject", spec, f"expected KIND:PROBABILITY, KIND one of {', '.join(KINDS)}, PROBABILITY in 0..1"
        )
    return Injection(kind, rate, seed)


Below = Callable[[int], int]


def _bitflip(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """One bit is wrong."""
    bit = below(tier.block_bytes * 8)
    tier.pool[slot, bit // 8] ^= 1 << bit % 8


def _swap(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """Two slots have changed places, checksums and all: each is right in itself."""
    tier.pool[[slot, other]] = tier.pool[[other, slot]]
    if tier.checksums is not None:
        tier.checksums[[slot, other]] = tier.checksums[[other, slot]]


def _zero(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """The bytes never arrived."""
    tier.pool[slot] = 0


def _torn(tier: MemoryTier, slot: int, other: int, below: Below) -> None:
    """The write stopped half-way: the second half is another block's."""
    half = tier.block_bytes // 2
    tier.pool[slot, half:] = tier.pool[other, half:]


KINDS: dict[str, Callable[[MemoryTier, int, int, Below], None]] = {
    "bitflip": _bitflip,
    "swap": _swap,
    "zero": _zero,
    "torn": _torn,
}
