"""All changes to vLLM's objects at run time, each with the hook that would replace it.

| patch | what it changes | the hook that would replace it |
|---|---|---|
| `take_over` | the scheduler side that vLLM's connector has made | a connector asks a factory for its sides |
| `watch_evictions` | `BlockPool._maybe_evict_cached_block` | a pool tells listeners which blocks it evicts |
| `name_failed_loads` | results of the connector's worker side | a worker names the loads that have failed |

Each patch changes attributes of one object, never of a class or module of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.worker_side.worker import KVOffloadWorker

T = TypeVar("T")


def take_over(ours: type[T], made: object) -> T:
    """An object of `ours` with the state of the one of its base class that vLLM has made, to replace it.

    vLLM's connector makes its sides by name, and has no option for another class.
    """
    taken = ours.__new__(ours)
    vars(taken).update(vars(made))
    return taken


def watch_evictions(block_pool: Any, tell: Callable[[int, Any], None]) -> None:
    """From now on call `tell` with number and key of each cached block that this pool drops."""
    evict = block_pool._maybe_evict_cached_block

    def evict_and_tell(block: Any) -> Any:
        key = block.block_hash
        if key is not None:
            tell(block.block_id, key)
        return evict(block)

    block_pool._maybe_evict_cached_block = evict_and_tell


def name_failed_loads(group: Any, spec: Any, worker: KVOffloadWorker) -> bool:
    """From now on the results of this process's connector name the requests whose loads have failed.

    vLLM's connector assumes that loads succeed, but its engine can handle a failed one, as vLLM's
    ``kv_load_failure_policy`` says: ``recompute``, which we want, computes the request again; ``fail``,
    vLLM's default, ends it with an error. The engine survives either way.

    Args:
        group: the connector of the process, or one that combines several.
        spec: the specification that made the worker; it identifies our connector.

    Returns whether there is a connector that can report failed loads. If not, a failed load is reported as a
    failed job, and the engine stops rather than compute with bytes that have not arrived.
    """
    connector = own_connector(group, spec)
    if connector is None:
        logger.warning("kvoffload: this engine has no way to report a failed load: it would stop")
        return False
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


def own_connector(group: Any, spec: Any) -> Any | None:
    """The connector in this process that has made this specification; None if there is none.

    `group` is the connector of the process, or one that combines several.
    """
    connectors = [group, *getattr(group, "_connectors", ())]
    sides = [getattr(one, "connector_worker", None) for one in connectors]
    ours = [one for one, side in zip(connectors, sides, strict=True) if getattr(side, "spec", None) is spec]
    return ours[0] if ours else None


def _name_requests(connector: Any, worker: KVOffloadWorker) -> None:
    results_of = connector.get_transfer_results

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        # While vLLM reports a load it forgets which request the load was for.
        requests = dict(connector.connector_worker._load_jobs)
        results = results_of(finished_req_ids)
        failed = {requests[job] for job in worker.take_failed_loads() if job in requests}
        results.failed_recving.update(failed)
        return results

    connector.get_transfer_results = get_transfer_results


def _name_blocks(connector: Any, worker: KVOffloadWorker) -> None:
    """The same for vLLM before 0.30, which asks for the numbers of blocks that did not arrive."""
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
