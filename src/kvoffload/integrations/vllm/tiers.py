"""Tiers behind the RAM pool of an engine: what users write of them, and whose blocks they hold.

Owns the options of a tier, the fingerprint of an engine, and the pool as tiers see it. Runs no job.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.config import parse_size
from kvoffload.core.admission import ADMISSIONS, DEFAULT_ADMISSION
from kvoffload.core.policy import DEFAULT_POLICY, POLICIES
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.pool import SharedPool
from kvoffload.integrations.vllm.versions import EngineFacts
from kvoffload.structures.keys import Keys
from kvoffload.tiering.manager import TieredManager
from kvoffload.tiers.base import Mask, SecondaryTier, key_digests
from kvoffload.tiers.budgeted import BudgetedTier
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.striped import StripedTier
from kvoffload.transfer import Blocks
from kvoffload.transfer.engine import cpu_capability

_REQUIRED, _OPTIONAL = (
    ("type", "path", "capacity"),
    ("policy", "admission", "max_write_bytes_per_day", "salt"),
)


@dataclass(frozen=True)
class TierOptions:
    """A disk tier, as a user described it, checked.

    Attributes:
        paths: directories; blocks are spread over them.
        capacity_bytes: of all of them together, in equal shares.
        policy, admission: of this tier, whatever RAM has.
        max_write_bytes_per_day: to all of them together; None for no limit.
        salt: blocks of engines with another salt are not theirs: for weights that change under one name.
    """

    paths: tuple[str, ...]
    capacity_bytes: int
    policy: str = DEFAULT_POLICY
    admission: str = DEFAULT_ADMISSION
    max_write_bytes_per_day: int | None = None
    salt: str = ""

    def open(self, block_bytes: int, key_bytes: int, fingerprint: str, replica: str = "") -> SecondaryTier:
        """The tier, with what an earlier life of this engine has left. Raises `ConfigError`.

        A directory has one owner: engines that share the path have one below it each, called `replica`.
        """
        tier: SecondaryTier
        with contextlib.ExitStack() as undo:
            disks: list[SecondaryTier] = []
            for path in self.paths:
                disks.append(
                    DiskTier(
                        Path(path) / replica,
                        self.capacity_bytes // len(self.paths),
                        block_bytes,
                        key_bytes=key_bytes,
                        fingerprint=fingerprint + self.salt,
                        policy=self.policy,
                        admission=self.admission,
                    )
                )
                undo.callback(disks[-1].close)
            tier = disks[0] if len(disks) == 1 else StripedTier(disks)
            if self.max_write_bytes_per_day is not None:
                tier = BudgetedTier(tier, self.max_write_bytes_per_day)
            undo.pop_all()
        return tier


def parse_tiers(name: str, value: Any) -> tuple[TierOptions, ...]:
    """What ``"tiers": [{"type": "disk", "path": ..., "capacity": "500GiB"}]`` means. Raises `ConfigError`."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(name, value, "allowed: a list of tiers, from the fastest to the slowest")
    return tuple(_parse(f"{name}[{number}]", tier) for number, tier in enumerate(value))


def open_tiers(
    options: Sequence[TierOptions], facts: EngineFacts, block_bytes: int, key_bytes: int
) -> list[SecondaryTier]:
    """All of them, or none. Raises `ConfigError`."""
    owner = fingerprint(facts.identity)
    with contextlib.ExitStack() as stack:
        opened = []
        for tier in options:
            opened.append(tier.open(block_bytes, key_bytes, owner, facts.replica))
            stack.callback(opened[-1].close)
        stack.pop_all()
    return opened


def _parse(name: str, tier: Any) -> TierOptions:
    if not isinstance(tier, Mapping):
        raise ConfigError(name, tier, 'allowed: {"type": "disk", "path": "/data/kv", "capacity": "500GiB"}')
    for option in tier:
        if option not in (*_REQUIRED, *_OPTIONAL):
            raise ConfigError(
                f"{name}.{option}", tier[option], f"allowed options: {', '.join((*_REQUIRED, *_OPTIONAL))}"
            )
    for option in _REQUIRED:
        if tier.get(option) in (None, "", []):
            raise ConfigError(f"{name}.{option}", tier.get(option), "it must be given")
    if tier["type"] != "disk":
        raise ConfigError(f"{name}.type", tier["type"], "allowed: disk")
    paths = [tier["path"]] if isinstance(tier["path"], str) else tier["path"]
    if not isinstance(paths, Sequence) or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"{name}.path", tier["path"], "allowed: a directory, or a list of directories")
    if len({*paths}) < len(paths):
        raise ConfigError(f"{name}.path", tier["path"], "allowed: each directory once")
    budget = tier.get("max_write_bytes_per_day")
    options = TierOptions(
        tuple(paths),
        _bytes(f"{name}.capacity", tier["capacity"]),
        str(tier.get("policy", DEFAULT_POLICY)),
        str(tier.get("admission", DEFAULT_ADMISSION)),
        None if budget is None else _bytes(f"{name}.max_write_bytes_per_day", budget),
        str(tier.get("salt", "")),
    )
    POLICIES.find(options.policy)
    ADMISSIONS.find(options.admission)
    return options


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(name, value, "allowed: bytes, or a size such as 500GiB")
    return parse_size(name, str(value))


def tier_counts(manager: TieredManager) -> dict[str, dict[str, Any]]:
    """What each tier behind RAM has counted, by a name of its own: ``disk``, ``disk-1``, ..."""
    counts: dict[str, dict[str, Any]] = {}
    tiers = zip(manager.tier_names, manager.hit_blocks[1:], manager.tier_stats(), strict=True)
    for number, (name, hits, stats) in enumerate(tiers):
        counts[name if name not in counts else f"{name}-{number}"] = {"hits": hits, **asdict(stats)}
    return counts


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Says whose blocks these are: engines with equal fingerprints compute equal bytes for equal keys.

    To what the engine says of itself it adds what the layout of KV pages on a CPU depends on, and, where
    the model is a local directory, names, sizes and times of its files. What it cannot see, weights that
    are replaced behind the name of a hub, is what the option `salt` is for.
    """
    known = {
        "kvoffload": __version__.rsplit(".", 1)[0],
        "machine": platform.machine(),
        "instructions": cpu_capability(),
        "files": _model_files(str(identity.get("model", ""))),
        **identity,
    }
    return json.dumps(known, sort_keys=True, default=str)


def _model_files(model: str) -> list[tuple[str, int, int]]:
    directory = Path(model)
    if not model or not directory.is_dir():
        return []
    kinds = ("*.safetensors", "*.bin", "*.gguf", "config.json")
    files = {path for kind in kinds for path in directory.glob(kind)}
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]


class PoolMemory:
    """The shared pool as tiers see it: whole slots, of all workers together.

    Args:
        has_checksums: workers take checksums of what they store.
    """

    def __init__(self, pool: SharedPool, has_checksums: bool) -> None:
        self._pool, self._has_checksums = pool, has_checksums

    @property
    def pool(self) -> Blocks:
        return self._pool.slots

    def seal(self, keys: Keys, slots: npt.NDArray[np.int32]) -> None:
        if self._has_checksums:
            digests = key_digests(keys)
            for part in range(self._pool.num_parts):
                self._pool.seal(part, slots, digests)

    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask:
        if self._has_checksums:
            return self._pool.verify(slots, key_digests(keys))
        return np.ones(len(slots), np.bool_)
