"""All changes to vLLM's objects at run time. A patch changes one object, never a class or module of vLLM.

- `take_over` gives vLLM's connector our scheduler side. Needed until vLLM lets a connector choose the class
  of its scheduler side.
- `watch_evictions` wraps `BlockPool._maybe_evict_cached_block`. Needed until vLLM's block pools have eviction
  listeners.
- `name_failed_loads` reports the requests or blocks of failed loads. Needed until vLLM's worker side lists
  failed loads in its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.worker_side.worker import KVOffloadWorker

T = TypeVar("T")


def take_over(ours: type[T], made: object) -> T:
    """Return a new object of class `ours` that takes over the attributes of `made`.

    `ours` must be a subclass of the class of `made`.
    """
    taken = ours.__new__(ours)
    vars(taken).update(vars(made))
    return taken


def watch_evictions(block_pool: Any, notify: Callable[[int, Any], None]) -> None:
    """From now on, call ``notify(block_id, key)`` whenever the pool drops a cached block."""
    evict = block_pool._maybe_evict_cached_block

    def evict_and_notify(block: Any) -> Any:
        key = block.block_hash
        if key is not None:
            notify(block.block_id, key)
        return evict(block)

    block_pool._maybe_evict_cached_block = evict_and_notify


def name_failed_loads(connector: Any | None, worker: KVOffloadWorker) -> bool:
    """Patch the connector of this process so that it reports failed loads to vLLM.

    vLLM's connector assumes that loads succeed. If a failure is reported, vLLM's engine continues, and
    ``kv_load_failure_policy`` decides: ``recompute`` computes the request again; ``fail``, vLLM's default,
    ends the request with an error.

    Returns False if `connector` is None. The caller must then report failed loads as failed jobs, which stop
    the engine. Otherwise the engine would compute with missing bytes.
    """
    if connector is None:
        logger.warning("kvoffload: this engine cannot report failed loads; it stops if a load fails")
        return False
    if connector._vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        logger.warning(
            "kvoffload: a request whose load fails ends with an error; set "
            '"kv_load_failure_policy": "recompute" to compute it again'
        )
    if hasattr(connector, "get_transfer_results"):
        _name_requests(connector, worker)
    else:
        _name_blocks(connector, worker)
    return True


def own_connector(group: Any, spec: Any) -> Any | None:
    """Return the connector that uses the specification `spec`, or None.

    `group` is the connector of this process, which may combine several connectors.
    """
    for connector in (group, *getattr(group, "_connectors", ())):
        if getattr(getattr(connector, "connector_worker", None), "spec", None) is spec:
            return connector
    return None


def _name_requests(connector: Any, worker: KVOffloadWorker) -> None:
    results_of = connector.get_transfer_results

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        # Copied first, because vLLM forgets the request of a load when it reports the load.
        requests = dict(connector.connector_worker._load_jobs)
        results = results_of(finished_req_ids)
        failed = {requests[job] for job in worker.take_failed_loads() if job in requests}
        results.failed_recving.update(failed)
        return results

    connector.get_transfer_results = get_transfer_results


def _name_blocks(connector: Any, worker: KVOffloadWorker) -> None:
    """Report the blocks (not the requests) of failed loads, as vLLM before 0.30 expects."""
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
