"""The ranks of an SGLang server: which ranks compute equal pages, and which directory each rank uses.

A rank is one scheduler process. `HiCacheStorageConfig` has the ranks of tensor, pipeline and context
parallelism. SGLang's runtime context has the rank of data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from kvoffload.errors import ConfigError
from kvoffload.tiers.spec import SizedTierOptions, TierOptions

_RANK_SHARDED = {PoolName.MAMBA.value}
"""Pools of which each rank holds a different part of a page, even if all ranks have equal KV pages (MLA)."""


def check_ranks(config: HiCacheStorageConfig, tiers: Sequence[TierOptions]) -> None:
    """Raise `ConfigError` if this server's ranks cannot use these tiers."""
    if config.should_split_heads:
        raise ConfigError("tp_lcm_size", config.tp_lcm_size, "allowed: none, because pages are stored whole")
    replica, replicas = _replica()
    for tier in tiers:
        if not isinstance(tier, SizedTierOptions):
            continue
        if config.is_mla_model and config.tp_size > 1:
            why = f"with MLA only one of {config.tp_size} ranks writes, and a directory has one owner"
            raise ConfigError(
                "tiers", str(tier), f"{why}; allowed: valkey:// or s3://, or attention data parallelism"
            )
        if replicas > 1 and replica is None:
            why = f"the number of this replica, of {replicas}, is unknown, and a directory has one owner"
            raise ConfigError("tiers", str(tier), f"{why}; allowed: valkey:// or s3://, or --dp-size 1")


def num_ranks(config: HiCacheStorageConfig) -> int:
    """Return the number of ranks that share a tier's capacity. Each rank has its own directory."""
    return int(config.tp_size * config.pp_size * config.attn_cp_size * _data_parallel(config)[1])


def directory_of(config: HiCacheStorageConfig) -> str:
    """Return the name of the directory in which this rank stores pages; empty if the server has one rank."""
    names = [
        f"{kind}{rank}of{count}"
        for kind, rank, count in (
            ("tp", config.tp_rank, config.tp_size),
            ("pp", config.pp_rank, config.pp_size),
            ("cp", config.attn_cp_rank, config.attn_cp_size),
            ("dp", *_data_parallel(config)),
        )
        if count > 1
    ]
    return "-".join(names)


def shard_of(config: HiCacheStorageConfig, name: str) -> str:
    """Return a text that identifies the part of each page that this rank has in the pool `name`.

    Ranks that have equal pages get equal texts, and can use each other's pages.
    """
    shard = f"pp{config.pp_rank}/{config.pp_size} cp{config.attn_cp_rank}/{config.attn_cp_size}"
    if config.dcp_size > 1:
        shard += f" dcp{config.dcp_rank}/{config.dcp_size}"
    if config.is_mla_model and name not in _RANK_SHARDED:
        return shard
    return f"{shard} tp{config.tp_rank}/{config.tp_size}"


def _data_parallel(config: HiCacheStorageConfig) -> tuple[int, int]:
    """Return the data-parallel rank, and the number of such ranks: replicas times attention groups."""
    replica, replicas = _replica()
    groups = max(of_context("attn_dp_size") or 1, config.dp_rank + 1)
    return (replica or 0) * groups + config.dp_rank, replicas * groups


def _replica() -> tuple[int | None, int]:
    """Return the index of this replica (None if unknown), and the number of replicas (``--dp-size``)."""
    return of_context("dp_rank"), of_context("dp_size") or 1


def of_context(name: str) -> int | None:
    """Return a value of SGLang's runtime context; None if the value is unknown in this process."""
    try:
        from sglang.srt.runtime_context import get_parallel

        value = getattr(get_parallel(), name)
    except (ImportError, RuntimeError, ValueError, AttributeError):
        return None
    return None if value is None else int(value)
