"""``KVOffloadSpec``: the class that vLLM's ``OffloadingConnector`` instantiates (``spec_name``).

Assembles the scheduler side and the worker side. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingSpec

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.integrations.logs import join, refusals_logged
from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
from kvoffload.integrations.vllm.scheduler_side.metrics import definitions
from kvoffload.integrations.vllm.scheduler_side.sessions import Sessions
from kvoffload.integrations.vllm.shared.logs import logger
from kvoffload.integrations.vllm.shared.node_pool import join_node_pool
from kvoffload.integrations.vllm.shared.options import ALWAYS, VLLMOptions, parse_options
from kvoffload.integrations.vllm.shared.patches import name_failed_loads, own_connector
from kvoffload.integrations.vllm.shared.pool import SCHEDULER, SharedPool
from kvoffload.integrations.vllm.shared.producer import GIVEN, find_configuration
from kvoffload.integrations.vllm.shared.tiers import EngineTiers, Producer
from kvoffload.integrations.vllm.shared.versions import (
    SINCE_DEVICES,
    caches_uncomputed,
    check_version,
    engine_facts,
    facts_with_chunks,
    fences_come_late,
    resumed_are_new,
    steps_in_flight,
    warn_of_seeds,
)
from kvoffload.integrations.vllm.worker_side.auditor import Auditor, value_types
from kvoffload.integrations.vllm.worker_side.copies import Copies, HostCopies
from kvoffload.integrations.vllm.worker_side.layout import Layout
from kvoffload.integrations.vllm.worker_side.worker import KVOffloadWorker
from kvoffload.text import size

WORKERS_WAIT_S, WORKERS_WAIT_S_PER_GIB = 600.0, 2.0
"""A worker waits for the other workers' allocations for at most the larger of two times: a fixed number of
seconds, or a number of seconds for each GiB of the pool.

The allocation of a GiB in pages of 4 KiB takes 0.6 s. The wait is part of the engine's start
(``VLLM_ENGINE_READY_TIMEOUT_S``)."""


def checked_options(extra_config: Mapping[str, Any]) -> VLLMOptions:
    """Parse the options. If any is wrong, log every problem and raise `ConfigError`."""
    with refusals_logged(logger, "not started"):
        return parse_options(extra_config)


class KVOffloadSpec(OffloadingSpec):
    """kvoffload as an offloading backend of vLLM.

    Attributes:
        options: the user's options, checked.

    Raises `ConfigError` when the engine starts, never later. The error lists all problems.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return our metrics, for vLLM's ``/metrics``."""
        return definitions()

    def __init__(self, *config: Any) -> None:
        check_version(vllm_version)
        if not current_platform.is_cpu():
            check_version(vllm_version, SINCE_DEVICES, "kvoffload with a GPU")
        join(logger)
        super().__init__(*config)
        self.facts = engine_facts(self, vllm_version)
        self.options = checked_options(self.facts.extra_config)
        self.facts = facts_with_chunks(self, self.facts, self.options.blocks_per_chunk)
        self._vllm_config = find_configuration(self, self.facts.engine_id)
        # Only our connector passes requests to the manager, and offers blocks before the GPU drops them.
        self._sees_requests = GIVEN.get() is not None
        if not self._sees_requests:
            self._check_for_vllms_connector()
        self.offload_prompt_only = self.options.prompt_only
        # True: one worker stores a block, and all workers load it.
        self.replicated_layout = self.facts.replicated
        self._node_pool = join_node_pool(
            self.options, self.facts, self._vllm_config, sees_requests=self._sees_requests
        )
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None

    def _check_for_vllms_connector(self) -> None:
        """Raise `ConfigError` for options that need `KVOffloadConnector` instead of vLLM's connector."""
        options, allowed = self.options, "allowed: only with kv_connector: KVOffloadConnector"
        if options.store == ON_DEVICE_EVICTION:
            raise ConfigError("store", options.store, allowed)
        if options.record is not None:
            raise ConfigError("record", str(options.record), allowed)
        if caches_uncomputed(self._vllm_config):
            logger.warning(
                "kvoffload: with --scheduling-policy priority vLLM may cache blocks that it does not "
                "compute, and its own connector stores these blocks; use KVOffloadConnector (docs/vllm.md)"
            )

    def get_manager(self) -> KVOffloadManager:
        """Return the scheduler side. The first call creates it."""
        if self._manager is None:
            facts = self.facts
            tiers: EngineTiers | None = None
            if self.options.tiers:
                warn_of_seeds(vllm_version)
                producer = Producer.of(facts, self._vllm_config, sees_requests=self._sees_requests)
                tiers = EngineTiers(self.options.tiers, facts, producer)
            pool = self._attach(SCHEDULER, facts.worker_block_bytes * facts.blocks_per_chunk)
            tokens = min(facts.tokens_per_block) * facts.blocks_per_chunk
            self._manager = KVOffloadManager(
                self.options,
                pool,
                enable_events=facts.enable_events,
                tokens_per_block=tokens,
                blocks_per_chunk=facts.blocks_per_chunk,
                tiers=tiers,
                node_pool=self._node_pool,
                sessions=self._sessions(),
                steps_in_flight=steps_in_flight(self._vllm_config),
            )
            logger.info("%s", self._summary(pool, tokens))
        return self._manager

    def _sessions(self) -> Sessions | None:
        if self._sees_requests:
            return None  # our scheduler side corrects the blocks
        return Sessions(resumed_are_new=resumed_are_new(self._vllm_config))

    def get_worker(self, kv_caches: Any) -> KVOffloadWorker:
        """Return the worker side. The first call creates it, for this worker's KV tensors `kv_caches`."""
        if self._worker is None:
            layout = Layout.of(kv_caches, self.facts.blocks_per_chunk)
            pool = self._attach(1 + self.facts.rank, layout.part_bytes)
            part = 0 if self.facts.replicated else self.facts.rank
            copies = copies_for(kv_caches, layout, pool, part)
            connector = own_connector(_connector(), self)
            self._worker = KVOffloadWorker(
                pool,
                part,
                copies,
                blocks_per_chunk=self.facts.blocks_per_chunk,
                seal=self.options.verification == ALWAYS,
                auditor=self._auditor(connector, kv_caches, layout, pool, part),
            )
            self._worker.failures_are_named = name_failed_loads(connector, self._worker)
            self._worker.fences_come_late = self._fences_come_late(connector)
        return self._worker

    def _auditor(
        self, connector: Any, kv_caches: Any, layout: Layout, pool: SharedPool, part: int
    ) -> Auditor | None:
        if self.options.audit is None:
            return None
        types: list[str | None] = [None] * len(layout.regions)
        if (config := getattr(connector, "_kv_cache_config", None)) is not None:
            types = value_types(config, str(connector._vllm_config.cache_config.cache_dtype))
        return Auditor(kv_caches, layout, pool, part, types)

    def _fences_come_late(self, connector: Any) -> bool:
        late = fences_come_late(
            getattr(connector, "_vllm_config", None),
            getattr(connector, "_kv_cache_config", None),
            vllm_version,
        )
        if late:
            logger.info(
                "kvoffload: vLLM's model runner V2 may zero a block while a store reads the block; such "
                "stores are dropped (docs/vllm.md)"
            )
        return late

    def _attach(self, member: int, part_bytes: int) -> SharedPool:
        num_parts = 1 if self.facts.replicated else self.facts.num_workers
        if self._node_pool is not None:
            return SharedPool.attach_shared(
                self._node_pool,
                member=member,
                num_parts=num_parts,
                part_bytes=part_bytes,
                capacity_bytes=self.options.ram_bytes,
            )
        return SharedPool.attach(
            self.facts.engine_id,
            member=member,
            num_members=1 + self.facts.num_workers,
            num_parts=num_parts,
            part_bytes=part_bytes,
            capacity_bytes=self.options.ram_bytes,
        )

    def _summary(self, pool: SharedPool, tokens_per_block: int) -> str:
        options, groups = self.options, len(self.facts.tokens_per_block)
        tokens = pool.num_slots * tokens_per_block // groups
        return (
            f"kvoffload: {pool.num_slots:,} blocks of {tokens_per_block} tokens, room for {tokens:,} tokens "
            f"in {size(pool.num_slots * pool.slot_stride)}; policy {options.policy}, admission "
            f"{options.admission}, store {options.store}, verification {options.verification}"
            + (f", shared in the pool {self._node_pool.path.name}" if self._node_pool is not None else "")
            + (f", {groups} KV groups" if groups > 1 else "")
            + "".join(f", behind it {tier}" for tier in options.tiers)
        )


def _connector() -> Any:
    """Return vLLM's connector in this worker process; None if there is none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def workers_wait_s(pool_bytes: int) -> float:
    """Return the seconds after which a worker stops waiting for the other workers' allocations."""
    return max(WORKERS_WAIT_S, WORKERS_WAIT_S_PER_GIB * pool_bytes / 2**30)


def copies_for(kv_caches: Any, layout: Layout, pool: SharedPool, part: int) -> Copies:
    """Return `HostCopies` if all tensors of this worker are in host memory, otherwise `DeviceCopies`."""
    if all(tensor.tensor.device.type == "cpu" for tensor in kv_caches.tensors):
        return HostCopies(kv_caches, layout, pool.part(part))
    from kvoffload.integrations.vllm.worker_side.cuda import DeviceCopies

    # Pinning touches the whole pool, including the parts of other workers.
    if not pool.wait_for_workers(workers_wait_s(pool.num_slots * pool.slot_stride)):
        logger.warning(
            "kvoffload: another worker has not allocated its part of the pool in time; some of its memory "
            "may be placed on the wrong NUMA node"
        )
    return DeviceCopies(kv_caches, layout, pool, part)
