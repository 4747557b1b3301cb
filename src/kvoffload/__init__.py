"""A KV-cache block store for LLM servers: host RAM, tiers behind RAM, and eviction policies.

`__all__` lists the public names; everything else may change. A name is imported on first use, so that
``import kvoffload`` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvoffload._version import __version__ as __version__

if TYPE_CHECKING:
    from kvoffload.admission.reuse import ReuseAdmission as ReuseAdmission
    from kvoffload.cache.cache import KVCache as KVCache
    from kvoffload.cache.kv_layout import KVLayout as KVLayout
    from kvoffload.cache.open import open as open
    from kvoffload.cache.request import KVRequest as KVRequest
    from kvoffload.core.admission import Admission as Admission
    from kvoffload.core.hints import Hints as Hints
    from kvoffload.core.manager import OffloadingManager as OffloadingManager
    from kvoffload.core.plans import LoadPlan as LoadPlan
    from kvoffload.core.plans import LookupResult as LookupResult
    from kvoffload.core.plans import ManagerStats as ManagerStats
    from kvoffload.core.plans import OffloadingEvent as OffloadingEvent
    from kvoffload.core.plans import PrefixLookup as PrefixLookup
    from kvoffload.core.plans import StorePlan as StorePlan
    from kvoffload.core.policy import BlockwisePolicy as BlockwisePolicy
    from kvoffload.core.policy import EvictionPolicy as EvictionPolicy
    from kvoffload.core.request import RequestContext as RequestContext
    from kvoffload.core.tenants import Quota as Quota
    from kvoffload.core.tenants import TenantStats as TenantStats
    from kvoffload.errors import ConfigError as ConfigError
    from kvoffload.errors import GoneError as GoneError
    from kvoffload.errors import KVOffloadError as KVOffloadError
    from kvoffload.errors import MisuseError as MisuseError
    from kvoffload.errors import PolicyError as PolicyError
    from kvoffload.errors import TraceError as TraceError
    from kvoffload.node.node_manager import NodeManager as NodeManager
    from kvoffload.node.pool_directory import PoolDirectory as PoolDirectory
    from kvoffload.replay.config import ReplayConfig as ReplayConfig
    from kvoffload.replay.optimum import optimum as optimum
    from kvoffload.replay.replay import Replay as Replay
    from kvoffload.replay.report import ReplayReport as ReplayReport
    from kvoffload.structures.keys import Keys as Keys
    from kvoffload.structures.keys import OffloadKey as OffloadKey
    from kvoffload.tiering.tiered_manager import TieredManager as TieredManager
    from kvoffload.tiers.contract import SecondaryTier as SecondaryTier
    from kvoffload.tiers.disk import DiskTier as DiskTier
    from kvoffload.tiers.memory import MemoryTier as MemoryTier
    from kvoffload.tiers.spec import open_tier as open_tier
    from kvoffload.tiers.striped import StripedTier as StripedTier
    from kvoffload.tiers.write_budget import WriteBudget as WriteBudget
    from kvoffload.traces.format import read_trace as read_trace
    from kvoffload.traces.formats.mooncake import write_trace as write_trace
    from kvoffload.traces.sources import load_trace as load_trace
    from kvoffload.traces.trace import Trace as Trace
    from kvoffload.transfer import copy_blocks as copy_blocks
    from kvoffload.transfer import copy_engine_for as copy_engine_for

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
    "ReplayConfig": "replay.config",
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

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvoffload' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvoffload.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
