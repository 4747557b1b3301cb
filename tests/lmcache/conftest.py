"""LMCache on a CPU, without its usage reports."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in (
        "v1.check.check_mode_test_l2_adapter",
        "v1.distributed.storage_manager",
        "v1.distributed.l2_adapters.fault_inject_l2_adapter",
        "integration.vllm.vllm_multi_process_adapter",
    ):
        importlib.import_module(f"lmcache.{module}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of LMCache and its libraries at import and use."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
