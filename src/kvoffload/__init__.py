"""A KV-cache block store for LLM servers: host RAM, tiers behind RAM, and eviction policies.

`__all__` lists the public names; everything else may change. A name is imported on first use, so that
``import kvoffload`` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvoffload._version import __version__ as __version__

if TYPE_CHECKING:
    from kvoffload.admission.reuse import ReuseAdmission
    from kvoffload.cache.cache import KVCache
    from kvoffload.cache.kv_layout import KVLayout
    from kvoffload.cache.open import open
    from kvoffload.cache.request import KVRequest
    from kvoffload.core.admission import Admission
    from kvoffload.core.hints import Hints
    from kvoffload.core.manager import OffloadingManager
    from kvoffload.core.plans import (
        LoadPlan,
        LookupResult,
        ManagerStats,
        OffloadingEvent,
        PrefixLookup,
        StorePlan,
    )
    from kvoffload.core.policy import BlockwisePolicy, EvictionPolicy
    from kvoffload.core.request import RequestContext
    from kvoffload.core.tenants import Quota, TenantStats
    from kvoffload.errors import (
        ConfigError,
        GoneError,
        KVOffloadError,
        MisuseError,
        PolicyError,
        TraceError,
    )
    from kvoffload.node.node_manager import NodeManager
    from kvoffload.node.pool_directory import PoolDirectory
    from kvoffload.replay.optimum import optimum
    from kvoffload.replay.replay import Replay, ReplayConfig
    from kvoffload.replay.report import ReplayReport
    from kvoffload.structures.keys import Keys, OffloadKey
    from kvoffload.tiering.tiered_manager import TieredManager
    from kvoffload.tiers.contract import SecondaryTier
    from kvoffload.tiers.disk import DiskTier
    from kvoffload.tiers.memory import MemoryTier
    from kvoffload.tiers.spec import open_tier
    from kvoffload.tiers.striped import StripedTier
    from kvoffload.tiers.write_budget import WriteBudget
    from kvoffload.traces.format import read_trace
    from kvoffload.traces.formats.mooncake import write_trace
    from kvoffload.traces.sources import load_trace
    from kvoffload.traces.trace import Trace
    from kvoffload.transfer import copy_blocks, copy_engine_for

_HOME = {
    "Admission": "core.admission",
    "BlockwisePolicy": "core.policy",
    "ConfigError": "errors",
    "DiskTier": "tiers.disk",
    "EvictionPolicy": "core.policy",
    "GoneError": "errors",
    "Hints": "core.hints",
    "KVCache": "cache.cache",
    "KVLayout": "cache.kv_layout",
    "KVOffloadError": "errors",
    "KVRequest": "cache.request",
    "Keys": "structures.keys",
    "LoadPlan": "core.plans",
    "LookupResult": "core.plans",
    "ManagerStats": "core.plans",
    "MemoryTier": "tiers.memory",
    "MisuseError": "errors",
    "NodeManager": "node.node_manager",
    "OffloadKey": "structures.keys",
    "OffloadingEvent": "core.plans",
    "OffloadingManager": "core.manager",
    "PolicyError": "errors",
    "PoolDirectory": "node.pool_directory",
    "PrefixLookup": "core.plans",
    "Quota": "core.tenants",
    "Replay": "replay.replay",
    "ReplayConfig": "replay.replay",
    "ReplayReport": "replay.report",
    "RequestContext": "core.request",
    "ReuseAdmission": "admission.reuse",
    "SecondaryTier": "tiers.contract",
    "StorePlan": "core.plans",
    "StripedTier": "tiers.striped",
    "TenantStats": "core.tenants",
    "TieredManager": "tiering.tiered_manager",
    "Trace": "traces.trace",
    "TraceError": "errors",
    "WriteBudget": "tiers.write_budget",
    "copy_blocks": "transfer",
    "copy_engine_for": "transfer",
    "load_trace": "traces.sources",
    "open": "cache.open",
    "open_tier": "tiers.spec",
    "optimum": "replay.optimum",
    "read_trace": "traces.format",
    "write_trace": "traces.formats.mooncake",
}

__all__ = [
    "Admission",
    "BlockwisePolicy",
    "ConfigError",
    "DiskTier",
    "EvictionPolicy",
    "GoneError",
    "Hints",
    "KVCache",
    "KVLayout",
    "KVOffloadError",
    "KVRequest",
    "Keys",
    "LoadPlan",
    "LookupResult",
    "ManagerStats",
    "MemoryTier",
    "MisuseError",
    "NodeManager",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "PolicyError",
    "PoolDirectory",
    "PrefixLookup",
    "Quota",
    "Replay",
    "ReplayConfig",
    "ReplayReport",
    "RequestContext",
    "ReuseAdmission",
    "SecondaryTier",
    "StorePlan",
    "StripedTier",
    "TenantStats",
    "TieredManager",
    "Trace",
    "TraceError",
    "WriteBudget",
    "copy_blocks",
    "copy_engine_for",
    "load_trace",
    "open",
    "open_tier",
    "optimum",
    "read_trace",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvoffload' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvoffload.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
