"""Marks for tests that need a feature of newer vLLM versions; a skip names version and missing feature."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

from vllm import __version__

from kvoffload.integrations.vllm.shared import versions

VERSION = versions.minor(__version__) or versions.NEWEST
"""The minor version that is installed, as ``(0, 32)``; a build without a number counts as the newest."""

MAY_RESET = VERSION >= (0, 27)
"""True if caches may be reset while requests run. 0.25 then keeps the numbers of their transfers, and crashes
when such a request is preempted (KeyError in build_connector_meta). 0.25 and 0.26 do not notify a manager
about requests that had already ended, with transfers still in flight, when the caches were reset."""

MAY_ABORT = VERSION != (0, 26)
"""True if requests may be aborted: 0.26 stores blocks that they have not computed, and crashes (an assertion
in _build_store_jobs), with its own manager as well."""

# Features that tests need: the first version, and a description.
CONNECTOR = versions.SINCE_CONNECTOR, "the scheduler's side that KVOffloadConnector builds on"
DEVICES = versions.SINCE_DEVICES, "the module that pins memory for copies on devices"
SECONDARY = versions.SINCE_SECONDARY, "the interface of tiers like KVOffloadDisk"
POLLED_TIERS = (0, 33), "a thread that polls tiers"
SOURCES = (0, 32), "sources of hits"
OWN_CONNECTORS = (0, 32), "the modules of transfers that `cpu_transfers` runs on a CPU"
RESETS = (0, 27), "resets under running requests"
POSITIONS = (0, 31), "records of the keys of a request"
ORDER = (0, 31), "policies that are notified of the end of a request, as vLLM's LRU"
NAMED_POLICIES = (0, 27), "policies that are named by a module"
COUNTS_OF_OFFERS = (0, 29), "a threshold that counts offers, not lookups"
FENCES = (0, 28), "fences around the blocks that a transfer reads"
COUNTS_EVERY_STEP = (0, 28), "statistics of steps without an output in engines outside servers"
NAMED_TIERS = (0, 28), "tiers that are named by a module"
FILTERS = (0, 27), "requests that exclude tiers"


def lacks(since: tuple[int, int], feature: str) -> str:
    """Return the reason to skip a test of a feature since that version; empty to run the test."""
    return f"vLLM {__version__} lacks {feature}: since {since[0]}.{since[1]}" if since > VERSION else ""


def needs(since: tuple[int, int], feature: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs this feature."""
    return pytest.mark.skipif(since > VERSION, reason=lacks(since, feature))
