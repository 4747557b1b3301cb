"""Tiers behind the RAM pool of an engine: whose blocks they hold, and how they see the pool. Runs no job."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload._version import __version__
from kvoffload.core.request import RequestContext
from kvoffload.errors import ConfigError, UnavailableError
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.pool import SharedPool
from kvoffload.integrations.vllm.shared.producer import commit_of, draft_model, kv_configuration, why_not_kept
from kvoffload.integrations.vllm.shared.versions import SINCE_STEADY_KEYS, EngineFacts, minor
from kvoffload.model.weights import FILES_OF_A_MODEL, weights_identity
from kvoffload.structures.keys import Keys
from kvoffload.tiering.manager import TieredManager
from kvoffload.tiers.contract import Mask
from kvoffload.tiers.spec import TierOptions, TierOwner
from kvoffload.transfer import Blocks
from kvoffload.transfer.engine import cpu_capability

_NAMES_OF_WEIGHTS = ("model_weights", "revision")
"""Fields of vLLM's ``ModelConfig`` that name weights. Machines that share tell weights apart by content."""
_SLOT_LAYOUT = 1
"""How a slot of the pool is divided among workers and tensors: a higher number after every change of that."""


@dataclass(frozen=True)
class Producer:
    """The engine that computes the blocks of its tiers.

    Attributes:
        identity: the engine's own description: `EngineFacts.identity`.
        configuration: what else determines KV: `kv_configuration`.
        weights: names and paths of the models with KV, the main model first, each with its commit of a hub.
        not_kept: says why no later process can use the blocks of a tier, given whether the user has named
            the weights for that tier; empty if it can.
    """

    identity: Mapping[str, Any]
    configuration: Mapping[str, Any]
    weights: tuple[tuple[str, str], ...]
    not_kept: Callable[[bool], str]

    @classmethod
    def of(
        cls, facts: EngineFacts, vllm_config: Any, *, sees_requests: bool = False, **more: str
    ) -> Producer:
        """The producer that an engine is; `more` is part of its identity.

        Raises: `ConfigError` without the configuration: blocks that outlive the process could be computed
            with another one, and served.
        """
        if vllm_config is None:
            why = "vLLM's configuration was not found, so blocks of another one could be served; "
            raise ConfigError("tiers", "given", why + "allowed: a specification that vLLM's connector makes")
        more |= {name: str(getattr(vllm_config.model_config, name, None) or "") for name in _NAMES_OF_WEIGHTS}
        models = [(str(facts.identity.get("model", "")), commit_of(vllm_config.model_config))]
        if draft := draft_model(vllm_config):
            speculative = vllm_config.speculative_config
            models.append((draft, commit_of(getattr(speculative, "draft_model_config", None))))
        return cls(
            {**more, **facts.identity},
            kv_configuration(vllm_config),
            tuple(models),
            lambda named: why_not_kept(vllm_config, sees_requests=sees_requests, are_named=named),
        )


def tier_owner(
    producer: Producer, facts: EngineFacts, block_bytes: int, key_bytes: int, missing: list[str]
) -> TierOwner:
    """The engine as the owner of blocks in tiers.

    Args:
        missing: gets the places of tiers that cannot be opened now. They cost their blocks, and a line in the
            log: the engine starts without them.
    """

    def go_on_without(error: UnavailableError) -> None:
        logger.error(
            "kvoffload: the engine runs WITHOUT a tier behind RAM, until it is started again: %s", error
        )
        missing.append(str(error.value))

    return TierOwner(
        block_bytes,
        key_bytes,
        fingerprint(producer),
        facts.replica,
        go_on_without=go_on_without,
        shared_fingerprint=lambda name: shared_fingerprint(producer, name),
    )


def is_named(tier: TierOptions) -> bool:
    """Whether the user has named the weights for this tier, and answers for what they compute."""
    return bool(getattr(tier, "salt", "") or getattr(tier, "identity", ""))


def usable_tiers(producer: Producer, tiers: Iterable[TierOptions], missing: list[str]) -> list[TierOptions]:
    """The tiers whose blocks a later process can identify; the others are logged and added to `missing`."""
    usable = []
    for tier in tiers:
        if why := producer.not_kept(is_named(tier)):
            logger.error(
                "kvoffload: the engine runs WITHOUT the tier %s: %s. To answer for that yourself, name the "
                "weights with salt=NAME of a disk or identity=NAME of a server", tier, why
            )  # fmt: skip
            missing.append(str(tier))
        else:
            usable.append(tier)
    return usable


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
    """The counters of each tier behind RAM, by its name (`kvoffload.tiers.spec.names_of`).

    Equal names, which only tiers without options have, are numbered.
    """
    counts: dict[str, dict[str, Any]] = {}
    tiers = zip(manager.tier_names, manager.hit_blocks[1:], manager.tier_stats(), strict=True)
    for number, (name, hits, stats) in enumerate(tiers):
        counts[name if name not in counts else f"{name}-{number}"] = {"hits": hits, **asdict(stats)}
    return counts


def fingerprint(producer: Producer) -> str:
    """The text that identifies a producer on this machine: equal texts compute equal bytes for equal keys.

    It has the configuration, the layout of KV pages on a CPU, and of each model its name and its commit of a
    hub or, for a local directory, names, sizes and times of its files. Weights that change elsewhere without
    another name are what the option `salt` is for.
    """
    known = {
        "kvoffload": __version__.rsplit(".", 1)[0],
        "machine": platform.machine(),
        "instructions": cpu_instructions(),
        "slots": _SLOT_LAYOUT,
        "weights": [[model, commit, *_model_files(model)] for model, commit in producer.weights],
        **producer.identity,
        **producer.configuration,
    }
    return json.dumps(known, sort_keys=True, default=str)


def shared_fingerprint(producer: Producer, name: str) -> str:
    """As `fingerprint`, for blocks that machines share: without paths and times, which differ between
    machines and make no difference to bytes, and with an identity of the weights themselves.

    Args:
        name: the user's name of the weights; if empty they are identified by content (`weights_identity`).
            The configuration is part of the text with a name as well.

    Raises: `ConfigError` for keys that no other process can have, and for weights that cannot be identified.
    """
    version, seed = str(producer.identity.get("vllm", "")), os.getenv("PYTHONHASHSEED", "random")
    found = minor(version)
    if found is not None and found < SINCE_STEADY_KEYS and not seed.isdigit():
        why = "this vLLM seeds its keys with it: give all engines that share the same number"
        raise ConfigError("PYTHONHASHSEED", os.getenv("PYTHONHASHSEED"), why)
    weights = f"named {name}"
    if not name:
        models = producer.weights
        weights = " and ".join(f"commit {commit}" if commit else weights_identity(m) for m, commit in models)
    known = {
        "machine": platform.machine(),
        "slots": _SLOT_LAYOUT,
        "weights": weights,
        **{
            name: value
            for name, value in producer.identity.items()
            if name not in ("model", *_NAMES_OF_WEIGHTS)
        },
        **producer.configuration,
    }
    if _is_on_cpu():
        known["instructions"] = cpu_instructions()
    return json.dumps(known, sort_keys=True, default=str)


def cpu_instructions() -> str:
    """The instructions of this CPU, on which the layout of KV pages depends: AMX packs keys otherwise."""
    torch = sys.modules.get("torch")
    has_amx = getattr(getattr(torch, "cpu", None), "_is_amx_tile_supported", bool)()
    return cpu_capability() + (" with AMX" if has_amx else "")


def _is_on_cpu() -> bool:
    """Whether the layout of KV pages depends on the processor's instructions."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _model_files(model: str) -> list[tuple[str, int, int]]:
    given = Path(model)
    if not model or not given.exists():
        return []
    files = {given}
    if given.is_dir():
        files = {path for kind in FILES_OF_A_MODEL for path in given.glob(kind) if path.is_file()}
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
            digests = keys.digests
            for part in range(self._pool.num_parts):
                self._pool.seal(part, slots, digests)

    def verify_slots(self, keys: Keys, slots: npt.NDArray[np.int32]) -> Mask:
        if self._has_checksums:
            return self._pool.verify(slots, keys.digests)
        return np.ones(len(slots), np.bool_)
