"""How a request learns that its load failed.

vLLM's connector takes it that loads succeed, but the engine behind it knows better: it computes a request
again whose load is named as failed. This names it.
"""

from __future__ import annotations

from typing import Any

from kvoffload.integrations.vllm.logs import logger
from kvoffload.integrations.vllm.worker import KVOffloadWorker


def name_failed_loads(group: Any, spec: Any, worker: KVOffloadWorker) -> bool:
    """From now on the results of this process's connector name the requests whose loads have failed.

    What follows is vLLM's ``kv_load_failure_policy``: ``recompute``, which we want, or ``fail``, vLLM's
    default, with which such a request ends with an error. The engine lives either way.

    Args:
        group: the connector of the process, or one that combines several.
        spec: the specification that made the worker; it tells which connector is ours.

    Returns whether there is a connector that can be told. If not, a failed load is reported as such, and the
    engine stops rather than compute with what has not arrived.
    """
    connectors = [group, *getattr(group, "_connectors", ())]
    sides = [getattr(one, "connector_worker", None) for one in connectors]
    ours = [one for one, side in zip(connectors, sides, strict=True) if getattr(side, "spec", None) is spec]
    if not ours:
        logger.warning("kvoffload: this engine cannot be told of a load that fails: it would stop")
        return False
    (connector,) = ours
    if connector._vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        logger.warning(
            "kvoffload: a request whose load fails ends with an error; with "
            '"kv_load_failure_policy": "recompute" it is computed instead'
        )
    if hasattr(connector, "get_transfer_results"):
        _name_requests(connector, worker)
    else:
        _name_blocks(connector, worker)
    return True


def _name_requests(connector: Any, worker: KVOffloadWorker) -> None:
    results_of = connector.get_transfer_results

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        # vLLM forgets which request a load was for while it reports the load.
        requests = dict(connector.connector_worker._load_jobs)
        results = results_of(finished_req_ids)
        failed = {requests[job] for job in worker.take_failed_loads() if job in requests}
        results.failed_recving.update(failed)
        return results

    connector.get_transfer_results = get_transfer_results


def _name_blocks(connector: Any, worker: KVOffloadWorker) -> None:
    """The same for vLLM before 0.30, which asks for the engine's blocks that did not arrive."""
    blocks: dict[int, list[int]] = {}
    submit = worker.submit_load

    def submit_load(job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        blocks[job_id] = list(dst_spec.block_ids)
        return submit(job_id, src_spec, dst_spec)

    def get_block_ids_with_load_errors() -> set[int]:
        failed = {int(block) for job in worker.take_failed_loads() for block in blocks.get(job, ())}
        for job_id in blocks.keys() - worker.running():
            del blocks[job_id]
        return failed

    worker.submit_load = submit_load  # type: ignore[method-assign, assignment]
    connector.get_block_ids_with_load_errors = get_block_ids_with_load_errors
