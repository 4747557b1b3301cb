"""The kind ``simulated:CAPACITY``: a tier for replays that stores no bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.settings.read import NotNegative
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, TierOwner
from kvoffload.tiers.write_budget import WriteBudget, budget_of_recording


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions(SizedTierOptions):
    """Options of a simulated tier, for replays of decisions, sweeps and plans.

    Attributes:
        max_write_blocks_per_day: write limit in blocks of the trace, spent evenly over the recording
            (`budget_of_recording`); None for no limit.
        per_engine: True if each engine has its own tier of this capacity, like a local disk. False if all
            engines share the tier, like a server. Only the last of several tiers can be shared.
    """

    name = "simulated"
    keeps_blocks = False

    max_write_blocks_per_day: NotNegative | None = None
    per_engine: bool = False

    def open(self, owner: TierOwner) -> SimulatedTier:
        if not owner.counts_blocks:
            raise ConfigError("tier", str(self), "a simulated tier stores no bytes: it is for replays only")
        return SimulatedTier(
            self.num_blocks,
            key_bytes=owner.key_bytes,
            block_bytes=owner.block_bytes,
            policy=self.policy,
            admission=self.admission,
            write_budget=self.write_budget(owner.recorded_s, owner.clock),
        )

    def write_budget(self, recorded_s: float, clock: Callable[[], float] | None) -> WriteBudget | None:
        """Create the write budget of a replay, in blocks; return None if there is no write limit.

        Raises: `ConfigError` if the recording has no times, and the limit is not 0.
        """
        if self.max_write_blocks_per_day is None:
            return None
        if clock is None or (self.max_write_blocks_per_day and not recorded_s):
            why = "the recording has no times; leave the limit out"
            raise ConfigError("max_write_blocks_per_day", self.max_write_blocks_per_day, why)
        return budget_of_recording(self.max_write_blocks_per_day, clock)


def simulated_like(field: str, tier: TierOptions) -> SimulatedOptions:
    """Return the options of a simulated tier with the capacity, policy and admission rule of `tier`.

    Each engine gets its own simulated tier (`per_engine`), as with a disk. If `tier` is already simulated,
    returns `tier` unchanged.

    Raises: `ConfigError` if `tier` has no capacity or has a write limit in bytes.
    """
    if isinstance(tier, SimulatedOptions):
        return tier
    if not isinstance(tier, SizedTierOptions):
        why = "it has no capacity to simulate: use simulated:CAPACITY"
        raise ConfigError(field, str(tier), why)
    if getattr(tier, "max_write_bytes_per_day", None) is not None:
        why = f"use simulated:{tier.capacity},max_write_blocks_per_day=N"
        raise ConfigError(field, str(tier), why)
    return SimulatedOptions(
        label=tier.label or tier.name,
        capacity=tier.capacity,
        policy=tier.policy,
        admission=tier.admission,
        per_engine=True,
    )
