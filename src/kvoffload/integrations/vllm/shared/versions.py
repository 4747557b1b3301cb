"""Code for differences between vLLM 0.25 and 0.33, for example in the facts about an engine and in events.

Most differences need no code. Our classes always define the methods that only some versions call
(`get_load_source`, `lock`, `on_reset_flushed`, `config_info`), and give defaults to the parameters that only
some versions pass (``expedited``, ``req_context``). tests/vllm_interfaces/signatures.json lists every form of
every interface; tests/vllm_interfaces/test_versions.py checks our classes against the list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.shared.logs import logger

OLDEST, NEWEST = (0, 25), (0, 33)
"""The oldest and newest known minor version. docs/vllm.md lists the versions that were tested."""
SINCE_CONNECTOR = (0, 32)
"""First version whose scheduler side has the methods that `KVOffloadConnector` overrides."""
SINCE_SECONDARY = (0, 32)
"""First version that passes a congestion detector to tiers and lets a job report the loaded keys."""
SINCE_DEVICES = (0, 32)
"""First version with vLLM's module for pinned memory, and with the current arguments of vLLM's copies."""

SINCE_STEADY_KEYS = (0, 29)
"""First version in which equal tokens have equal SHA keys in every process."""

_PARALLEL = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_PARALLEL_0_25 = (
    "world_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the engine that a specification belongs to, in one form for all versions of vLLM.

    Attributes:
        engine_id: unique for each engine and data-parallel rank; equal in all processes of an engine.
        extra_config: ``kv_connector_extra_config``.
        tokens_per_block: tokens in a block of each KV-cache group.
        blocks_per_chunk: engine blocks in a block of kvoffload.
        worker_block_bytes: KV bytes of an engine block at a worker, all layers and groups.
        num_workers: number of workers that share a block.
        rank: this worker's number; 0 at the scheduler.
        replicated: True if all workers hold the same bytes of a block (MLA under tensor parallelism). A
            single copy is then enough.
        enable_events: True if the user wants KV events.
        identity: the settings that determine the bytes of a block, without the block's key.
        replica: name of this engine among data-parallel engines; empty if there is only one.
    """

    engine_id: str
    extra_config: Mapping[str, Any]
    tokens_per_block: tuple[int, ...]
    blocks_per_chunk: int
    worker_block_bytes: int
    num_workers: int
    rank: int
    replicated: bool
    enable_events: bool
    identity: Mapping[str, Any]
    replica: str = ""


def engine_facts(spec: Any, vllm_version: str = "") -> EngineFacts:
    """Return the facts about a specification's engine. Call this after vLLM's base constructor."""
    config = getattr(spec, "config", None)
    if config is None:
        return _facts_of_0_25(spec, vllm_version)
    return EngineFacts(
        engine_id=config.engine_id,
        extra_config=config.extra_config,
        tokens_per_block=tuple(group.tokens_per_block for group in config.groups),
        blocks_per_chunk=config.cache.blocks_per_chunk,
        worker_block_bytes=config.worker_kv_bytes_per_block,
        num_workers=config.parallel.world_size,
        rank=config.parallel.rank,
        replicated=bool(getattr(config, "replicated_layout", False)),
        enable_events=config.enable_kv_cache_events,
        identity={
            "vllm": vllm_version,
            "model": config.model.name,
            "dtype": config.model.dtype,
            "layout": getattr(config, "kv_cache_layout", None),
            "groups": [(group.tokens_per_block, group.layer_names) for group in config.groups],
            "worker_block_bytes": config.worker_kv_bytes_per_block,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "parallel": [getattr(config.parallel, name, 1) for name in _PARALLEL],
        },
        replica=_replica(config.parallel, "data_parallel_index"),
    )


def facts_with_chunks(spec: Any, facts: EngineFacts, blocks_per_chunk: int | None) -> EngineFacts:
    """Apply the option ``blocks_per_chunk`` to the facts and, for vLLM 0.25, to the specification.

    vLLM 0.26 and later read this option themselves. 0.25 has only ``block_size`` in tokens.
    """
    if blocks_per_chunk is None or getattr(spec, "config", None) is not None:
        return facts
    spec.block_size_factor = blocks_per_chunk
    return _facts_of_0_25(spec, facts.identity["vllm"])


def fences_come_late(vllm_config: Any, kv_cache_config: Any, version: str) -> bool:
    """Return True if this engine may overwrite a block before it waits for the stores that read the block.

    In each step, vLLM waits for stores when it calls ``handle_preemptions``. Model runner V1 makes this call
    before it writes to new blocks. Model runner V2 makes this call too late for models whose new blocks must
    be zeroed: it first zeroes the blocks and makes copy-on-write copies (docs/upstream.md, "Fences before
    writes").

    If a setting is unknown, the result is True, because a wrong True only costs a few blocks that are not
    stored.
    """
    number = minor(version)
    if number is not None and number < SINCE_DEVICES:
        return False  # runner V2 needs a GPU, and with a GPU these versions are refused
    if not getattr(vllm_config, "use_v2_model_runner", True):
        return False
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


def caches_uncomputed(vllm_config: Any) -> bool:
    """Return True if vLLM may cache uncomputed blocks: with priority scheduling (docs/upstream.md)."""
    return str(getattr(getattr(vllm_config, "scheduler_config", None), "policy", "")) == "priority"


def resumed_are_new(vllm_config: Any) -> bool:
    """Return True if vLLM schedules a preempted request as new when it resumes (model runner V2)."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def steps_in_flight(vllm_config: Any) -> int:
    """Return the largest number of steps that vLLM schedules before it has seen the end of the first of them.

    If vLLM's configuration does not tell, the result is a number that is large enough for every version.
    """
    return int(getattr(vllm_config, "max_concurrent_batches", 0)) or 64


def warn_of_seeds(version: str) -> None:
    """Log a warning if each process seeds its keys differently, so that later processes find no blocks."""
    number = minor(version)
    if number is not None and number < SINCE_STEADY_KEYS and os.getenv("PYTHONHASHSEED") is None:
        logger.warning(
            "kvoffload: vLLM %s seeds its keys differently in each process: blocks in tiers behind RAM are "
            "not found after a restart; set PYTHONHASHSEED to a number",
            version,
        )


def _facts_of_0_25(spec: Any, vllm_version: str) -> EngineFacts:
    parallel, cache = spec.vllm_config.parallel_config, spec.kv_cache_config
    sizes = [tensor.size for tensor in cache.kv_cache_tensors]
    # Packed tensors lie in one allocation, and each reports the size of the whole allocation.
    packed = any(getattr(tensor, "block_stride", 0) for tensor in cache.kv_cache_tensors)
    total_bytes = sizes[0] if packed else sum(sizes)
    block_bytes = total_bytes // cache.num_blocks if cache.num_blocks else 0
    return EngineFacts(
        engine_id=spec.vllm_config.kv_transfer_config.engine_id,
        extra_config=spec.extra_config,
        tokens_per_block=tuple(spec.gpu_block_size),
        blocks_per_chunk=spec.block_size_factor,
        worker_block_bytes=block_bytes,
        num_workers=parallel.world_size,
        rank=parallel.rank,
        replicated=False,
        enable_events=spec.kv_events_config.enable_kv_cache_events,
        identity={
            "vllm": vllm_version,
            "model": spec.vllm_config.model_config.model,
            "dtype": str(spec.vllm_config.cache_config.cache_dtype),
            "groups": [
                (size, tuple(group.layer_names))
                for size, group in zip(spec.gpu_block_size, cache.kv_cache_groups, strict=True)
            ],
            "worker_block_bytes": block_bytes,
            "blocks_per_chunk": spec.block_size_factor,
            "parallel": [getattr(parallel, name, 1) for name in _PARALLEL_0_25],
        },
        replica=_replica(parallel, "data_parallel_rank"),
    )


def _replica(parallel: Any, index: str) -> str:
    several = getattr(parallel, "data_parallel_size", 1) > 1
    return f"replica-{getattr(parallel, index, 0)}" if several else ""


RAM = "CPU"
"""Name of RAM in the field `medium` of an event."""


def events(base: Any, keys: list[bytes], removed: bool, medium: str = RAM) -> list[Any]:
    """Return a list with vLLM's event for blocks that were added to a medium or removed from it.

    For a shared tier, the list is empty if the events of this vLLM version have no field ``ownership``.
    Without that field, vLLM would take a removal from the tier for a removal from RAM.

    Args:
        base: ``vllm.v1.kv_offload.base``.
        medium: `RAM`, or the name of a shared tier.
    """
    media = getattr(base, "Medium", None)
    if medium == RAM:
        event = base.OffloadingEvent(keys=keys, medium=RAM if media is None else media.CPU, removed=removed)
    elif media is not None and "ownership" in getattr(base.OffloadingEvent, "__dataclass_fields__", {}):
        event = base.OffloadingEvent(
            keys=keys,
            medium=media.STORAGE,
            removed=removed,
            locality=base.Locality.REMOTE,
            ownership=medium,
        )
    else:
        return []
    return [event]


def minor(version: str) -> tuple[int, int] | None:
    """Parse ``0.32.0+cpu`` to ``(0, 32)``.

    Returns None if there is no number, as in some builds from source.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match is not None else None


def check_version(version: str, since: tuple[int, int] = OLDEST, feature: str = "kvoffload") -> None:
    """Check the version of vLLM at start-up.

    Raises `ConfigError` if the version is older than `since`, the first version that supports `feature`.
    Warns if the version is newer than the tested versions, because interfaces may have changed.
    """
    number = minor(version)
    known = f"{_text(since)} to {_text(NEWEST)}"
    if number is None:
        logger.warning("kvoffload: vLLM %s has no version number; known versions are %s", version, known)
    elif number < since:
        raise ConfigError("vllm", version, f"allowed: {feature} needs vLLM {known}")
    elif number > NEWEST:
        logger.warning("kvoffload: vLLM %s is newer than the tested versions, %s", version, known)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
