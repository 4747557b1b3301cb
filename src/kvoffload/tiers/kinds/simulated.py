"""``simulated:CAPACITY``: a tier that keeps account of blocks, and keeps none."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.spec import SizedTierOptions, TierOwner


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions(SizedTierOptions):
    """For replays of decisions, sweeps and plans."""

    name = "simulated"
    keeps_blocks = False

    def open(self, owner: TierOwner) -> SimulatedTier:
        if not owner.counts_blocks:
            raise ConfigError("tier", str(self), "a simulated tier keeps no blocks: it is for replays")
        return SimulatedTier(
            self.num_blocks,
            key_bytes=owner.key_bytes,
            block_bytes=owner.block_bytes,
            policy=self.policy,
            admission=self.admission,
        )
