"""kvoffload inside vLLM.

The only package that knows vLLM, and that imports it only in use: the options and the command line work
without it. `KVOffloadSpec` is named in ``kv_connector_extra_config``, `KVOffloadConnector` in
``kv_connector_module_path``.
"""

from __future__ import annotations

import importlib
from typing import Any

from llvmlite.binding import ffi

# vLLM 0.31 and newer read `vars(value)` of each value in each module when a CPU worker starts without Triton.
# llvmlite's library handle, which numba imports, answers a request for `__dict__` with a function, and the
# engine dies of an AttributeError. With this entry the answer is an empty dictionary.
ffi.lib._fntab.setdefault("__dict__", {})

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
