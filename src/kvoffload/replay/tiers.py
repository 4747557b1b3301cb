"""The tiers behind RAM of a replay, as plain values: what they are, and how they are opened."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.config import parse_capacity, split_tier
from kvoffload.core.policy import EvictionPolicy
from kvoffload.errors import ConfigError
from kvoffload.replay.keys import KEY_BYTES
from kvoffload.tiers.base import SecondaryTier
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.disk.layout import LOCK_FILE_BYTES, Layout
from kvoffload.tiers.simulated import SimulatedTier

FINGERPRINT = "kvoffload replay, contents from keys, 1"
"""The producer of a replay's blocks: any replay may read what another one has left on a disk."""


@dataclass(frozen=True)
class TierConfig:
    """A tier behind RAM. Values are checked where they are used.

    Attributes:
        capacity_blocks: how many blocks it holds.
        policy, admission: as `OffloadingManager` takes them.
        path: the directory of a disk tier; empty for one that keeps account of blocks and keeps none.
    """

    capacity_blocks: int
    policy: str | type[EvictionPolicy] = "lru"
    admission: str = "all"
    path: str = ""

    def open(self, block_bytes: int) -> SecondaryTier:
        """The tier, with what it holds from before; `block_bytes` is 0 in a replay without data."""
        if not self.path:
            return SimulatedTier(
                self.capacity_blocks,
                key_bytes=KEY_BYTES,
                block_bytes=block_bytes,
                policy=self.policy,
                admission=self.admission,
            )
        layout = Layout.holding(block_bytes, KEY_BYTES, self.capacity_blocks)
        return DiskTier(
            self.path,
            layout.file_bytes + LOCK_FILE_BYTES,
            block_bytes,
            key_bytes=KEY_BYTES,
            fingerprint=FINGERPRINT,
            policy=self.policy,
            admission=self.admission,
        )


def parse_tier(text: str, block_bytes: int, unique_blocks: int, *, with_data: bool) -> TierConfig:
    """What ``disk:PATH:CAPACITY`` or ``simulated:CAPACITY`` mean, with options behind commas.

    Raises: `ConfigError`, also for a disk without bytes to put on it.
    """
    tier = split_tier(text)
    kind, path, capacity = tier.pop("type"), tier.pop("path"), tier.pop("capacity")
    if kind not in ("disk", "simulated") or (kind == "disk") != bool(path):
        raise ConfigError("tier", text, "allowed: disk:PATH:CAPACITY or simulated:CAPACITY")
    if kind == "disk" and not with_data:
        raise ConfigError("tier", text, "without data it has nothing to hold; take simulated:CAPACITY")
    return TierConfig(parse_capacity("tier", capacity, block_bytes, unique_blocks), path=path, **tier)
