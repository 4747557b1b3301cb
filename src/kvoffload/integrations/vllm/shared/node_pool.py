"""Membership in the pool that engines of a machine share (``ram: {"shared": "node"}``).

Decides whether an engine may share its RAM, and lists the settings that must be equal in all engines of a
pool. Decides nothing about blocks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.options import VLLMOptions
from kvoffload.integrations.vllm.shared.tiers import Producer, fingerprint
from kvoffload.integrations.vllm.shared.versions import SINCE_STEADY_KEYS, EngineFacts, minor
from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory, log_other_pools
from kvoffload.text import size

_LONG_HASHES = ("sha256", "sha256_cbor")


def join_node_pool(
    options: VLLMOptions,
    facts: EngineFacts,
    vllm_config: Any,
    *,
    sees_requests: bool,
    root: Path = SHARED_MEMORY,
) -> PoolDirectory | None:
    """Join the pool of the engines whose blocks are interchangeable with blocks of this engine.

    Returns None if the options request no shared pool. If this engine cannot share RAM, logs the reason and
    returns None. All processes of an engine get the same result. Raises the errors of `PoolDirectory.join`.
    """
    if not options.ram.shared:
        return None
    why, producer = _why_not_shared(facts, vllm_config), None
    if not why:
        producer = Producer.of(facts, vllm_config, sees_requests=sees_requests)
        why = producer.not_kept(False)
    if why or producer is None:
        text = "kvoffload: RAM is NOT shared: %s; this engine has its own pool of %s"
        logger.error(text, why, size(options.ram_bytes))
        return None
    equal = {
        "policy": options.policy,
        "ram_bytes": options.ram_bytes,
        "blocks_per_chunk": facts.blocks_per_chunk,
        "producer": fingerprint(producer),
    }
    pool = PoolDirectory.join(equal, facts.engine_id, keep_s=options.ram.keep_s, root=root)
    log_other_pools(pool, equal, logger)
    return pool


def _why_not_shared(facts: EngineFacts, vllm_config: Any) -> str:
    """Return the reason why other processes cannot use this engine's blocks; "" if there is none."""
    if vllm_config is None:
        return "vLLM's configuration was not found, so blocks of another configuration could be served"
    version = str(facts.identity.get("vllm", ""))
    number, seed = minor(version), os.getenv("PYTHONHASHSEED", "random")
    if number is not None and number < SINCE_STEADY_KEYS and not seed.isdigit():
        return f"vLLM {version} seeds its keys differently in each process; set PYTHONHASHSEED to a number"
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _LONG_HASHES:
        return f"--prefix-caching-hash-algo is {algorithm}; allowed: {', '.join(_LONG_HASHES)}"
    if getattr(vllm_config.parallel_config, "worker_extension_cls", ""):
        return "with worker_extension_cls the weights may change while the engine runs"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "with enable_sleep_mode the weights may change while the engine runs"
    return ""
