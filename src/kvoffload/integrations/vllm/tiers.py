"""Tiers behind the RAM pool of an engine: whose blocks they hold, and how they see the pool. Runs no job."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.vllm.logs import logger
from kvoffload.integrations.vllm.pool import SharedPool
from kvoffload.integrations.vllm.versions import SINCE_STEADY_KEYS, EngineFacts, minor
from kvoffload.structures.keys import Keys
from kvoffload.tiering.manager import TieredManager
from kvoffload.tiers.base import Mask, key_digests
from kvoffload.tiers.options import TierOwner
from kvoffload.transfer import Blocks
from kvoffload.transfer.engine import cpu_capability
from kvoffload.weights import weights_identity

_SLOT_LAYOUT = 1
"""How a slot of the pool is divided among workers and tensors: a higher number after every change of that."""


def tier_owner(
    facts: EngineFacts, block_bytes: int, key_bytes: int, missing: list[str], **more: str
) -> TierOwner:
    """The engine as the owner of blocks in tiers; `more` is part of its identity.

    Args:
        missing: gets the places of tiers that cannot be opened now. They cost their blocks, and a line in the
            log: the engine starts without them.
    """
    producer = fingerprint({**more, **facts.identity})

    def go_on_without(error: UnavailableError) -> None:
        logger.error(
            "kvoffload: the engine runs WITHOUT a tier behind RAM, until it is started again: %s", error
        )
        missing.append(str(error.value))

    return TierOwner(
        block_bytes,
        key_bytes,
        producer,
        facts.replica,
        go_on_without=go_on_without,
        shared_fingerprint=lambda weights: shared_fingerprint({**more, **facts.identity}, weights),
    )


def say_what_a_reset_misses(missing: Iterable[str]) -> None:
    """A cache is reset while some of its tiers are not there to forget."""
    for place in missing:
        logger.error(
            "kvoffload: this reset does not reach %s, which could not be opened: delete what is there, or "
            "old blocks are served when it is back", place
        )  # fmt: skip


HOST, DISK, ELSEWHERE = "host", "disk", "external_unspecified"
"""Members of vLLM's ``CacheHitSource``, as their values."""


def leave_out_tiers(manager: TieredManager, ctx: RequestContext, req_context: Any) -> None:
    """Let a request load from no tiers that it leaves out: its ``kv_load_tiers`` names them by where they
    are. Those that machines share are remote."""
    allowed = getattr(req_context, "load_tier_filter", None)
    if allowed is None:
        return
    from vllm.v1.kv_offload.base import Locality, Medium

    for shared, locality in ((False, Locality.LOCAL), (True, Locality.REMOTE)):
        if not allowed.allows(Medium.STORAGE, locality):
            manager.leave_out_tiers(ctx, shared=shared)


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


def shared_fingerprint(identity: Mapping[str, Any], weights: str) -> str:
    """As `fingerprint`, for blocks that machines share: without what differs between machines and makes no
    difference to bytes, such as a path, and with what identifies the weights themselves.

    Args:
        weights: what the user calls them; if empty it is found out (`weights_identity`).

    Raises: `ConfigError` for keys that no other process can have, and for weights that cannot be identified.
    """
    version, seed = str(identity.get("vllm", "")), os.getenv("PYTHONHASHSEED", "random")
    found = minor(version)
    if found is not None and found < SINCE_STEADY_KEYS and not seed.isdigit():
        why = "this vLLM seeds its keys with it: give all engines that share the same number"
        raise ConfigError("PYTHONHASHSEED", os.getenv("PYTHONHASHSEED"), why)
    known = {
        "machine": platform.machine(),
        "slots": _SLOT_LAYOUT,
        "weights": f"named {weights}" if weights else weights_identity(str(identity.get("model", ""))),
        **{name: value for name, value in identity.items() if name != "model"},
    }
    if _is_on_cpu():
        known["instructions"] = cpu_capability()
    return json.dumps(known, sort_keys=True, default=str)


def _is_on_cpu() -> bool:
    """Whether the layout of KV pages depends on the processor's instructions."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


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
