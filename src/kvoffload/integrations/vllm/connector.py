"""``KVOffloadConnector``: vLLM's ``OffloadingConnector`` with kvoffload's scheduler side.

The class checks the options and installs this scheduler side. The worker side is vLLM's own.
"""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
from kvoffload.integrations.vllm.scheduler_side.recording import Recording, recording
from kvoffload.integrations.vllm.scheduler_side.scheduler import KVOffloadScheduler, OnDeviceEvictionScheduler
from kvoffload.integrations.vllm.shared.options import ONE_BY_ONE
from kvoffload.integrations.vllm.shared.producer import GIVEN
from kvoffload.integrations.vllm.shared.versions import (
    SINCE_CONNECTOR,
    caches_uncomputed,
    check_version,
)
from kvoffload.integrations.vllm.spec import checked_options


class KVOffloadConnector(OffloadingConnector):
    """A connector for vLLM that looks up whole prefixes, instead of one block after another.

    With the option `store: on-device-eviction` it stores the blocks that the GPU drops.

        {"kv_connector": "KVOffloadConnector", "kv_connector_module_path":
         "kvoffload.integrations.vllm.connector", "kv_role": "kv_both", "kv_connector_extra_config":
         {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm", "ram": "64GiB"}}

    Raises: `ConfigError` for wrong options, when the engine starts.
    """

    connector_scheduler: Any

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Check the options early, and return False.

        If CUDA graphs are on, vLLM calls this method before it starts its processes. So wrong options stop
        the engine before weights are loaded.
        """
        checked_options(extra_config)
        return False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version(vllm_version, SINCE_CONNECTOR, "KVOffloadConnector")
        extra_config = _with_spec(vllm_config)
        options = checked_options(extra_config)
        victim_mode = options.store == ON_DEVICE_EVICTION
        if victim_mode and not vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "store", options.store, "allowed: only with vLLM's prefix caching: enable_prefix_caching"
            )
        self._recording: Recording | None = None
        self._caches_uncomputed = False
        given = GIVEN.set(vllm_config)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            GIVEN.reset(given)
        if self.connector_scheduler is None:
            return
        if victim_mode and self.connector_scheduler.config.blocks_per_chunk > 1:
            raise ConfigError("block_size", options.tokens_per_chunk, ONE_BY_ONE)
        assert isinstance(self.connector_scheduler.manager, KVOffloadManager)
        scheduler_side = OnDeviceEvictionScheduler if victim_mode else KVOffloadScheduler
        self.connector_scheduler = scheduler_side.of(self.connector_scheduler)
        self._step_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._caches_uncomputed = caches_uncomputed(vllm_config)
        self._recording = recording(options, self._tokens_per_hash(), self._count_unrecorded)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        """Return vLLM's metrics for `KVOffloadSpec`.

        vLLM finds the metrics by the name of the specification, so this method sets the name in
        `vllm_config`. The constructor also does this, but inside a ``MultiConnector`` it receives another
        copy of the configuration.
        """
        _with_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)

    def _tokens_per_hash(self) -> int:
        group = self.connector_scheduler.config.kv_group_configs[0]
        return int(group.tokens_per_chunk // group.hashes_per_chunk)

    def _count_unrecorded(self) -> None:
        self.connector_scheduler.manager.metrics.counts["unrecorded_requests"] += 1

    # ---- overridden to record requests

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if self._recording is not None:
            self._recording.looked_up(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._recording is not None:
            self._recording.begins(
                request, lambda: self.get_external_cache_hit_sources(request, num_external_tokens)
            )

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if self._recording is not None:
            self._recording.finished(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if self._recording is not None:
            self._recording.finished(request)
        return super().request_finished_all_groups(request, block_ids)

    def shutdown(self) -> None:
        super().shutdown()
        if self._recording is not None:
            self._recording.recorder.close()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Start to watch vLLM's pool of GPU blocks, if the options need it.

        Priority scheduling needs the removal of uncomputed blocks (`Uncomputed`); the mode
        ``on-device-eviction`` needs to know which blocks the pool drops.
        """
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._caches_uncomputed and self.connector_scheduler is not None:
            self.connector_scheduler.remove_uncomputed(gpu_block_pool, self._step_tokens)
        if isinstance(self.connector_scheduler, OnDeviceEvictionScheduler):
            self.connector_scheduler.bind(gpu_block_pool, self._step_tokens)


def _with_spec(vllm_config: Any) -> dict[str, Any]:
    """Return `kv_connector_extra_config`. Adds `KVOffloadSpec` to it if the user names no specification."""
    extra_config: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra_config.setdefault("spec_name", "KVOffloadSpec")
    extra_config.setdefault("spec_module_path", "kvoffload.integrations.vllm")
    return extra_config
