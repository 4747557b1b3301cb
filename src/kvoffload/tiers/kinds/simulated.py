"""The kind ``simulated:CAPACITY``: a tier that decides about blocks and stores no bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.spec import SizedTierOptions, TierOwner


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions(SizedTierOptions):
    """Options of a simulated tier, for replays of decisions, sweeps and plans."""

    name = "simulated"
    keeps_blocks = False

    def open(self, owner: TierOwner) -> SimulatedTier:
        if not owner.counts_blocks:
            raise ConfigError("tier", str(self), "a simulated tier stores no bytes: it is for replays only")
        return SimulatedTier(
            self.num_blocks,
            key_bytes=owner.key_bytes,
            block_bytes=owner.block_bytes,
            policy=self.policy,
            admission=self.admission,
        )
