"""kvoffload inside SGLang: `KVOffloadStorage`, a ``dynamic`` storage backend of HiCache.

The only package that knows SGLang. SGLang is imported at the first use of `KVOffloadStorage`.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVOffloadStorage"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    except ImportError as error:
        raise ImportError(f"{name} needs SGLang, which cannot be imported: {error}") from error
    return getattr(importlib.import_module(f"{__name__}.storage"), name)
