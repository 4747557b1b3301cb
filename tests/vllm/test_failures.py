"""Reports of failed loads, in the two forms of vLLM's versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

from kvoffload.integrations.vllm.shared.patches import name_failed_loads, own_connector


class Worker:
    """A stand-in for our worker, with running and failed jobs."""

    def __init__(self) -> None:
        self.jobs: set[int] = set()
        self.failed: set[int] = set()

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.jobs.add(job_id)
        return True

    def take_failed_loads(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def running(self) -> set[int]:
        return self.jobs


SPEC = object()


def connector_with(**attributes: Any) -> Any:
    """Return a stand-in for vLLM's connector with our worker side."""
    return SimpleNamespace(
        connector_worker=SimpleNamespace(_load_jobs={4: "a", 5: "b"}, spec=SPEC),
        _vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute")),
        **attributes,
    )


def test_since_0_30_requests_are_named() -> None:
    worker: Any = Worker()
    results = SimpleNamespace(failed_recving=set())
    connector = connector_with(get_transfer_results=lambda finished: results)
    assert name_failed_loads(own_connector(connector, SPEC), worker)
    worker.failed = {5, 9}
    assert connector.get_transfer_results(set()).failed_recving == {"b"}


def test_before_0_30_blocks_are_named() -> None:
    worker: Any = Worker()
    connector = connector_with()
    assert name_failed_loads(own_connector(connector, SPEC), worker)
    for job in (1, 2, 3):
        assert worker.submit_load(job, None, SimpleNamespace(block_ids=[10 * job, 10 * job + 1]))
    worker.failed = {2}
    worker.jobs = {3}
    assert connector.get_block_ids_with_load_errors() == {20, 21}
    worker.failed = {1, 3}
    assert connector.get_block_ids_with_load_errors() == {30, 31}, "1 had ended without an error"
