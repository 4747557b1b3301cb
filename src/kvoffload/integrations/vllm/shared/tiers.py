"""Tiers behind an engine's RAM pool: fingerprints of the engine, and the tiers' access to the pool."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from kvoffload.model.weights import files_of, weights_identity
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.contract import Mask, SecondaryTier
from kvoffload.tiers.spec import TierOptions, TierOwner, open_tiers
from kvoffload.transfer import Blocks
from kvoffload.transfer.engine import cpu_capability

USUAL_KEY_BYTES = 36
"""Bytes of a key: a SHA-256 hash and the number of the KV group. Other hash algorithms give other lengths."""
_NAMES_OF_WEIGHTS = ("model_weights", "revision")
"""Fields of vLLM's ``ModelConfig`` that name weights. Shared tiers identify weights by content instead."""
_SLOT_LAYOUT = 1
"""Version of the slot layout; increment it with every change of the layout."""


@dataclass(frozen=True)
class Producer:
    """The engine that computes the blocks in its tiers, described by everything that changes a block's bytes.

    Attributes:
        identity: see `EngineFacts.identity`.
        configuration: result of `kv_configuration`.
        weights: name or path, and hub commit, of the main model and of the draft model, if there is one.
        not_kept: function that calls `why_not_kept` for this engine. Argument: `are_named`.
    """

    identity: Mapping[str, Any]
    configuration: Mapping[str, Any]
    weights: tuple[tuple[str, str], ...]
    not_kept: Callable[[bool], str]

    @classmethod
    def of(
        cls, facts: EngineFacts, vllm_config: Any, *, sees_requests: bool = False, **identity: str
    ) -> Producer:
        """Return the producer of an engine.

        The keyword arguments `identity` are added to the engine's identity.

        Raises: `ConfigError` if `vllm_config` is None, because tiers could serve blocks of another
            configuration.
        """
        if vllm_config is None:
            why = "vLLM's configuration was not found, so blocks of another configuration could be served; "
            raise ConfigError("tiers", "given", why + "allowed: only in vLLM's OffloadingConnector or ours")
        identity |= {
            name: str(getattr(vllm_config.model_config, name, None) or "") for name in _NAMES_OF_WEIGHTS
        }
        models = [(str(facts.identity.get("model", "")), commit_of(vllm_config.model_config))]
        if draft := draft_model(vllm_config):
            speculative = vllm_config.speculative_config
            models.append((draft, commit_of(getattr(speculative, "draft_model_config", None))))
        return cls(
            {**identity, **facts.identity},
            kv_configuration(vllm_config),
            tuple(models),
            lambda named: why_not_kept(vllm_config, sees_requests=sees_requests, are_named=named),
        )


def is_named(tier: TierOptions) -> bool:
    """Return True if the options name the weights (``salt`` or ``identity``).

    The user must then change the name whenever the weights change.
    """
    return bool(getattr(tier, "salt", "") or getattr(tier, "identity", ""))


class EngineTiers:
    """The tiers behind an engine's RAM.

    The engine starts without the tiers that cannot be opened, and without the tiers whose blocks a later
    process could not identify. The log has an error for each such tier.
    """

    def __init__(self, options: Sequence[TierOptions], facts: EngineFacts, producer: Producer) -> None:
        self._options, self._facts, self._producer = options, facts, producer
        self._unused: list[str] = []

    def open(self, block_bytes: int, key_bytes: int, *, reports_paths: bool = True) -> list[SecondaryTier]:
        """Open the tiers, from the fastest to the slowest. `reports_paths`: see `TierOwner`."""
        self._unused = []
        if not self.accept(key_bytes):
            return []
        owner = TierOwner(
            block_bytes,
            key_bytes,
            fingerprint(self._producer),
            self._facts.replica,
            reports_paths=reports_paths,
            on_unavailable=self._leave_out,
            shared_fingerprint=lambda name: shared_fingerprint(self._producer, name),
        )
        return open_tiers([tier for tier in self._options if self._is_usable(tier)], owner)

    def accept(self, key_bytes: int) -> bool:
        """Return True if tiers can keep keys of this length. Otherwise log an error and call `give_up`."""
        if key_bytes != USUAL_KEY_BYTES:
            self.give_up()
            logger.error(
                "kvoffload: no tiers behind RAM: keys have %d bytes, and tiers need keys of %d bytes; set "
                "--prefix-caching-hash-algo sha256 or sha256_cbor", key_bytes, USUAL_KEY_BYTES
            )  # fmt: skip
        return key_bytes == USUAL_KEY_BYTES

    def give_up(self) -> None:
        """Record that the engine uses none of the tiers from now on."""
        self._unused = [str(tier) for tier in self._options]

    def log_unreached(self) -> None:
        """Log the tiers that a reset of the cache does not empty, because the engine does not use them."""
        for place in self._unused:
            logger.error(
                "kvoffload: this reset does not reach %s, which is not in use: delete its blocks, or old "
                "blocks are served when the tier is in use again", place
            )  # fmt: skip

    def _leave_out(self, error: UnavailableError) -> None:
        logger.error("kvoffload: the engine runs WITHOUT a tier behind RAM until its next start: %s", error)
        self._unused.append(str(error.value))

    def _is_usable(self, tier: TierOptions) -> bool:
        if why := self._producer.not_kept(is_named(tier)):
            logger.error(
                "kvoffload: the engine runs WITHOUT the tier %s: %s. To use the tier nevertheless, name the "
                "weights with salt=NAME (disk) or identity=NAME (server), and change the name with them",
                tier, why
            )  # fmt: skip
            self._unused.append(str(tier))
        return not why


HOST, DISK, EXTERNAL = "host", "disk", "external_unspecified"
"""Values of members of vLLM's ``CacheHitSource``."""


def leave_out_tiers(manager: TieredManager, ctx: RequestContext, req_context: Any) -> None:
    """Forbid loads from the tiers that a request's ``kv_load_tiers`` excludes.

    vLLM's option distinguishes local from remote tiers. Disks count as local, shared tiers as remote.
    """
    allowed = getattr(req_context, "load_tier_filter", None)
    if allowed is None:
        return
    from vllm.v1.kv_offload.base import Locality, Medium

    for shared, locality in ((False, Locality.LOCAL), (True, Locality.REMOTE)):
        if not allowed.allows(Medium.STORAGE, locality):
            manager.leave_out_tiers(ctx, shared=shared)


def fingerprint(producer: Producer) -> str:
    """Return a text that identifies a producer on this machine.

    Producers with equal texts compute equal bytes for equal keys. The text contains the configuration, the
    layout of KV pages on a CPU, and the identity of each model's weights. Weights from the hub are identified
    by name and commit; local files by name, size and time. If the weights change but these facts do not, the
    user must change the option `salt`.
    """
    parts = {
        "kvoffload": __version__.rsplit(".", 1)[0],
        "machine": platform.machine(),
        "instructions": cpu_instructions(),
        "slots": _SLOT_LAYOUT,
        "weights": [[model, commit, *files_of(model)] for model, commit in producer.weights],
        **producer.identity,
        **producer.configuration,
    }
    return json.dumps(parts, sort_keys=True, default=str)


def shared_fingerprint(producer: Producer, name: str) -> str:
    """Return a text that identifies a producer on all machines, for shared tiers.

    The text contains the configuration, but no paths and no times.

    Args:
        name: the user's name of the weights; empty to identify the weights by content (`weights_identity`).

    Raises: `ConfigError` for keys with a random seed, and for weights that cannot be identified.
    """
    version, seed = str(producer.identity.get("vllm", "")), os.getenv("PYTHONHASHSEED", "random")
    number = minor(version)
    if number is not None and number < SINCE_STEADY_KEYS and not seed.isdigit():
        why = "this version of vLLM seeds its keys with it; set the same number for all engines of the tier"
        raise ConfigError("PYTHONHASHSEED", os.getenv("PYTHONHASHSEED"), why)
    weights = f"named {name}"
    if not name:
        models = producer.weights
        weights = " and ".join(f"commit {commit}" if commit else weights_identity(m) for m, commit in models)
    parts = {
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
    if is_on_cpu():
        parts["instructions"] = cpu_instructions()
    return json.dumps(parts, sort_keys=True, default=str)


def cpu_instructions() -> str:
    """Return this CPU's instruction set. On a CPU, the layout of KV pages depends on it."""
    torch = sys.modules.get("torch")
    has_amx = getattr(getattr(torch, "cpu", None), "_is_amx_tile_supported", bool)()
    return cpu_capability() + (" with AMX" if has_amx else "")


def is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class PoolMemory:
    """The shared pool in the form in which tiers access RAM: whole slots, with the parts of all workers.

    Args:
        has_checksums: True if workers compute checksums of stored blocks.
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
