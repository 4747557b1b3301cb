"""kvoffload inside vLLM.

The only package that knows vLLM, and that imports it only in use: the options and the command line work
without it. `KVOffloadSpec` is named in ``kv_connector_extra_config``, `KVOffloadConnector` in
``kv_connector_module_path``.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"KVOffloadConnector": "connector", "KVOffloadSpec": "spec"}

__all__ = ["KVOffloadConnector", "KVOffloadSpec"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise ImportError(f"{name} is part of vLLM, which cannot be imported here: {error}") from error
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
