"""The kind ``disk:PATH:CAPACITY``: one or more directories on local disks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.settings.paths import expanded
from kvoffload.settings.read import SizeOrNothing, parse_size
from kvoffload.tiers.contract import SecondaryTier
from kvoffload.tiers.disk.disk_tier import DiskTier
from kvoffload.tiers.disk.slab_layout import LOCK_FILE_BYTES, Layout
from kvoffload.tiers.producer_text import add_salt
from kvoffload.tiers.spec import SizedTierOptions, TierOwner
from kvoffload.tiers.striped import StripedTier
from kvoffload.tiers.write_budget import WriteBudget


class _PathsParser:
    allowed = "a directory, or a list of directories, each once, without | and , in their names"

    def parse(self, field: str, value: object) -> tuple[str, ...]:
        paths = [value] if isinstance(value, (str, Path)) else value
        if not isinstance(paths, Sequence) or not all(
            isinstance(path, (str, Path)) and str(path) for path in paths
        ):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        texts = tuple(expanded(field, str(path)) for path in paths)
        # In a text, | separates paths, and a comma precedes options.
        is_ambiguous = any(sign in path for path in texts for sign in "|,")
        if is_ambiguous or not texts or len(set(map(Path, texts))) < len(texts):
            raise ConfigError(field, value, f"allowed: {self.allowed}")
        return texts


Salt: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[^,]*$")]
Paths: TypeAlias = Annotated[tuple[str, ...], _PathsParser()]


@dataclass(frozen=True, kw_only=True)
class DiskOptions(SizedTierOptions):
    """Options of a disk tier.

    If the tier has several directories, each gets an equal share of the capacity and keys.

    Attributes:
        max_write_bytes_per_day: limit for all directories together; None for no limit.
        salt: part of the producer's identity. Change it if the weights change but the model's name does not.
    """

    name = "disk"

    path: Paths
    max_write_bytes_per_day: SizeOrNothing | None = None
    salt: Salt = ""

    def open(self, owner: TierOwner) -> SecondaryTier:
        """Open the tier in the subdirectory `owner.replica` of each path, so that engines can share paths.

        An unavailable path is reported (`TierOwner.handle_unavailable`) and left out, unless all paths are.
        """
        if owner.block_bytes == 0:
            raise ConfigError(
                "tier",
                str(self),
                f"a replay without data has no bytes to store; use simulated:{self.capacity}",
            )
        limit = self.max_write_bytes_per_day
        budget = None if limit is None else WriteBudget(limit)
        with ExitStack() as undo:
            disks: list[SecondaryTier] = []
            for path in self.path:
                try:
                    disks.append(self._open_one(Path(path) / owner.replica, owner, budget))
                except UnavailableError as error:
                    if len(disks) == 0 and path == self.path[-1]:
                        raise
                    owner.handle_unavailable(error)
                else:
                    undo.callback(disks[-1].close)
            tier: SecondaryTier = disks[0] if len(disks) == 1 else StripedTier(disks)
            undo.pop_all()
        return tier

    def _open_one(self, directory: Path, owner: TierOwner, budget: WriteBudget | None) -> DiskTier:
        return DiskTier(
            directory,
            self._bytes_each(owner),
            owner.block_bytes,
            key_bytes=owner.key_bytes,
            fingerprint=add_salt(owner.fingerprint, self.salt),
            policy=self.policy,
            admission=self.admission,
            write_budget=budget,
        )

    def _bytes_each(self, owner: TierOwner) -> int:
        if not owner.counts_blocks:
            return parse_size("capacity", self.capacity) // len(self.path)
        num_blocks = -(-self.num_blocks // len(self.path))
        return Layout.holding(owner.block_bytes, owner.key_bytes, num_blocks).file_bytes + LOCK_FILE_BYTES
