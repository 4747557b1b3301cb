"""The differences between vLLM 0.25 and 0.33: no other file knows versions.

Most differences need no code. What only some versions call (`get_load_source`, `lock`, `on_reset_flushed`,
`config_info`) is a method that the others never call; what only some versions pass (``expedited``,
``req_context``) is a parameter with a default. tests/vllm_interfaces/signatures.json lists every form of
every interface; tests/vllm_interfaces/test_versions.py checks our classes against it. The rest is here: how a
specification learns about its engine, and how an event names its medium.
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
"""The minor versions whose interfaces we know; docs/vllm.md says which of them have been run."""
SINCE_CONNECTOR = (0, 32)
"""Since then the scheduler side of vLLM's connector is as `KVOffloadConnector` needs it."""
SINCE_SECONDARY = (0, 32)
"""Since then vLLM's tiers are told about congestion, and tell which keys of a job have arrived."""
SINCE_DEVICES = (0, 32)
"""Since then vLLM has the module that pins the pool, and its copies take the arguments that ours give."""

SINCE_STEADY_KEYS = (0, 29)
"""Since then equal tokens have equal keys in every process, with hashes of the SHA family."""

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
    """What a specification needs to know of its engine, from any version.

    Attributes:
        engine_id: one for each engine and data-parallel rank; equal in all of its processes.
        extra_config: ``kv_connector_extra_config``.
        tokens_per_block: of each KV-cache group.
        blocks_per_chunk: engine blocks in one block of ours.
        worker_block_bytes: KV bytes of an engine block at one worker, all layers and groups.
        num_workers, rank: workers that share a block, and which one this is; 0 at the scheduler.
        replicated: all workers hold the same bytes of a block (MLA under tensor parallelism), so that one
            copy is enough.
        enable_events: KV events are wanted.
        identity: what the bytes of a block depend on besides its key.
        replica: name of this engine among several data-parallel ones; empty if it is the only one.
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
    """Facts of the engine that a specification serves, once vLLM's base constructor has run on it.

    Since 0.26 the engine's facts are its ``config``; in 0.25 they are vLLM's two configurations.
    """
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
    """The facts with chunks of as many blocks as the user wants.

    Since 0.26 vLLM reads that option itself. 0.25 knows only ``block_size``, in tokens; what it makes of that
    is an attribute of the specification.
    """
    if blocks_per_chunk is None or getattr(spec, "config", None) is not None:
        return facts
    spec.block_size_factor = blocks_per_chunk
    return _facts_of_0_25(spec, facts.identity["vllm"])


def fences_come_late(vllm_config: Any, kv_cache_config: Any, version: str) -> bool:
    """Whether this engine may overwrite a block before it waits for the stores that read the block.

    The fence of a step is ``handle_preemptions``. vLLM's model runner V2 calls it after it has zeroed the
    blocks that the step has allocated and has made copy-on-write copies into them; model runner V1 calls it
    before (docs/upstream.md, "Fences before writes"). Only models that need zeroing have such writes:
    copy-on-write needs recurrent state, and recurrent state needs zeroing.

    What a version does not say counts as late: the cost is a few blocks that are not stored.
    """
    found = minor(version)
    if found is not None and found < SINCE_DEVICES:
        return False  # runner V2 needs a GPU, and with a GPU these versions are refused
    if not getattr(vllm_config, "use_v2_model_runner", True):
        return False
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


def warn_of_seeds(version: str) -> None:
    """Say so, if blocks that outlive this process have keys that no other process will ask for."""
    found = minor(version)
    if found is not None and found < SINCE_STEADY_KEYS and os.getenv("PYTHONHASHSEED") is None:
        logger.warning(
            "kvoffload: vLLM %s seeds its keys anew in each process: what is in tiers behind RAM is not "
            "found again after a restart, unless PYTHONHASHSEED is set",
            version,
        )


def _facts_of_0_25(spec: Any, vllm_version: str) -> EngineFacts:
    parallel, cache = spec.vllm_config.parallel_config, spec.kv_cache_config
    sizes = [tensor.size for tensor in cache.kv_cache_tensors]
    # Packed tensors are places in one allocation, and each of them has the size of all.
    packed = any(getattr(tensor, "block_stride", 0) for tensor in cache.kv_cache_tensors)
    total_bytes = sizes[0] if packed else sum(sizes)
    return EngineFacts(
        engine_id=spec.vllm_config.kv_transfer_config.engine_id,
        extra_config=spec.extra_config,
        tokens_per_block=tuple(spec.gpu_block_size),
        blocks_per_chunk=spec.block_size_factor,
        worker_block_bytes=total_bytes // cache.num_blocks if cache.num_blocks else 0,
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
            "worker_block_bytes": total_bytes // cache.num_blocks if cache.num_blocks else 0,
            "blocks_per_chunk": spec.block_size_factor,
            "parallel": [getattr(parallel, name, 1) for name in _PARALLEL_0_25],
        },
        replica=_replica(parallel, "data_parallel_rank"),
    )


def _replica(parallel: Any, index: str) -> str:
    several = getattr(parallel, "data_parallel_size", 1) > 1
    return f"replica-{getattr(parallel, index, 0)}" if several else ""


RAM = "CPU"
"""The medium of events about RAM, for us and for vLLM."""


def events(base: Any, keys: list[bytes], removed: bool, medium: str = RAM) -> list[Any]:
    """vLLM's event, if it has one for that: blocks became readable in RAM, or in the shared tier of that
    name, or left it.

    `base` is ``vllm.v1.kv_offload.base``. Media are names in 0.25 and 0.26, and members of an enum since. A
    version whose events do not say whose storage it is would take the end of a block there for its end in
    RAM.
    """
    media = getattr(base, "Medium", None)
    if medium == RAM:
        found = base.OffloadingEvent(keys=keys, medium=RAM if media is None else media.CPU, removed=removed)
    elif media is not None and "ownership" in getattr(base.OffloadingEvent, "__dataclass_fields__", {}):
        found = base.OffloadingEvent(
            keys=keys,
            medium=media.STORAGE,
            removed=removed,
            locality=base.Locality.REMOTE,
            ownership=medium,
        )
    else:
        return []
    return [found]


def minor(version: str) -> tuple[int, int] | None:
    """``(0, 32)`` of ``0.32.0+cpu``; None if there is no number, as for some builds from source."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else None


def check_version(version: str, since: tuple[int, int] = OLDEST, what: str = "kvoffload") -> None:
    """Check at start-up that this version of vLLM is one that we know.

    Raises `ConfigError` for a version too old for `what`. A newer version than we have tested gets a warning:
    its interfaces may have changed.
    """
    found = minor(version)
    known = f"{_text(since)} to {_text(NEWEST)}"
    if found is None:
        logger.warning("kvoffload: vLLM %s has no number; known versions are %s", version, known)
    elif found < since:
        raise ConfigError("vllm", version, f"allowed: {what} needs vLLM {known}")
    elif found > NEWEST:
        logger.warning("kvoffload: vLLM %s is newer than the tested versions, %s", version, known)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
