"""kvoffload inside vLLM: `KVOffloadConnector` (``kv_connector``) and `KVOffloadSpec` (``spec_name``).

This is the only package that knows vLLM. It imports vLLM only when one of these classes is used, so that
options can be checked on a machine without vLLM.
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
        raise ImportError(f"{name} needs vLLM, which cannot be imported: {error}") from error
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
