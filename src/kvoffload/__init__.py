"""Keep an LLM server's KV-cache blocks in host RAM and behind it, and decide which are worth keeping.

The public names stand in `__all__`; everything else may change. They are imported when they are used, so
that ``import kvoffload`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvoffload.admission import Admission, ReuseAdmission
    from kvoffload.core.keys import Keys, OffloadKey
    from kvoffload.core.manager import OffloadingManager
    from kvoffload.core.request import RequestContext
    from kvoffload.errors import ConfigError, KVOffloadError, MisuseError, PolicyError, TraceError
    from kvoffload.policies import BlockwisePolicy, EvictionPolicy
    from kvoffload.replay.optimum import optimum
    from kvoffload.replay.readers import read_trace, write_trace
    from kvoffload.replay.replay import Replay, ReplayConfig
    from kvoffload.replay.report import ReplayReport
    from kvoffload.replay.sources import load_trace
    from kvoffload.replay.trace import Trace
    from kvoffload.tiering import TieredManager
    from kvoffload.tiers.base import SecondaryTier
    from kvoffload.tiers.disk import DiskTier
    from kvoffload.tiers.memory import MemoryTier
    from kvoffload.transfer import copy_blocks, copy_engine_for
    from kvoffload.types import (
        LoadPlan,
        LookupResult,
        ManagerStats,
        OffloadingEvent,
        PrefixLookup,
        StorePlan,
    )

_HOME = {
    "Admission": "admission",
    "BlockwisePolicy": "policies",
    "ConfigError": "errors",
    "DiskTier": "tiers.disk",
    "EvictionPolicy": "policies",
    "KVOffloadError": "errors",
    "Keys": "core.keys",
    "LoadPlan": "types",
    "LookupResult": "types",
    "ManagerStats": "types",
    "MemoryTier": "tiers.memory",
    "MisuseError": "errors",
    "OffloadKey": "core.keys",
    "OffloadingEvent": "types",
    "OffloadingManager": "core.manager",
    "PolicyError": "errors",
    "PrefixLookup": "types",
    "Replay": "replay.replay",
    "ReplayConfig": "replay.replay",
    "ReplayReport": "replay.report",
    "RequestContext": "core.request",
    "ReuseAdmission": "admission",
    "SecondaryTier": "tiers.base",
    "StorePlan": "types",
    "TieredManager": "tiering",
    "Trace": "replay.trace",
    "TraceError": "errors",
    "copy_blocks": "transfer",
    "copy_engine_for": "transfer",
    "load_trace": "replay.sources",
    "optimum": "replay.optimum",
    "read_trace": "replay.readers",
    "write_trace": "replay.readers",
}

__all__ = [
    "Admission",
    "BlockwisePolicy",
    "ConfigError",
    "DiskTier",
    "EvictionPolicy",
    "KVOffloadError",
    "Keys",
    "LoadPlan",
    "LookupResult",
    "ManagerStats",
    "MemoryTier",
    "MisuseError",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "PolicyError",
    "PrefixLookup",
    "Replay",
    "ReplayConfig",
    "ReplayReport",
    "RequestContext",
    "ReuseAdmission",
    "SecondaryTier",
    "StorePlan",
    "TieredManager",
    "Trace",
    "TraceError",
    "copy_blocks",
    "copy_engine_for",
    "load_trace",
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
