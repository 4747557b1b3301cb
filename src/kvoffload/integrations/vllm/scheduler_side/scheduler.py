"""The scheduler side of vLLM's connector, with four changes.

1. A whole prefix is looked up in one call.
2. The manager is notified when a request arrives, waits and ends.
3. A step examines only the requests that complete a chunk in it.
4. In the mode ``on-device-eviction`` blocks are stored when the GPU is about to drop them, not when they are
   computed.

This module decides which blocks are offered, and when. kvoffload's manager decides which offered blocks are
stored. vLLM owns the transfers, and the fences that delay the reuse of blocks until their transfer ends. vLLM
has no hook for these changes, so the classes override private methods of vLLM (`_maximal_prefix_lookup`,
`_build_store_jobs`), and replace the class of vLLM's request states. tests/vllm_interfaces has the signatures
in every version of vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import islice
from types import MappingProxyType, SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, RequestOffloadingContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.core.window import Window
from kvoffload.integrations.vllm.scheduler_side.hints import arrival_hints, finish_hints
from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
from kvoffload.integrations.vllm.scheduler_side.uncomputed import Uncomputed
from kvoffload.integrations.vllm.shared.patches import take_over, watch_evictions

_NONE: Mapping[int, Any] = MappingProxyType({})
NO_REQUEST = ""
"""Id of a request that does not exist in vLLM, to which the stores of dropped blocks belong. It is empty,
because the ids of vLLM's requests never are."""


class RequestState(RequestOffloadState):
    """vLLM's state of a request, for which a step without a new block is cheap.

    vLLM's own method goes through all block hashes of the request in every step.
    """

    __slots__ = ()

    def update_offload_keys(self) -> None:
        """Add the keys of chunks that have become complete."""
        num_hashes = len(self.req.block_hashes)
        for group, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            if group.hashes_per_chunk * (len(state.offload_keys) + 1) <= num_hashes:
                super().update_offload_keys()
                return


class KVOffloadScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side with three additions: lookups of whole prefixes, hints for the manager, and steps
    that skip requests without a new chunk."""

    manager: KVOffloadManager
    _uncomputed: Uncomputed | None = None

    @classmethod
    def of(cls, plain: OffloadingConnectorScheduler) -> Any:
        """Return a scheduler side of this class with the state of `plain`, which vLLM has just created."""
        return take_over(cls, plain)

    def remove_uncomputed(self, block_pool: Any, step_tokens: int) -> None:
        """From now on, remove uncomputed blocks from the cache of this pool (see `Uncomputed`).

        Args:
            step_tokens: largest number of tokens that one step computes.
        """
        group_tokens = {group.group_idx: group.tokens_per_block for group in self.config.kv_group_configs}
        tokens_per_hash = self.config.tokens_per_hash
        self._uncomputed = Uncomputed(block_pool, group_tokens, tokens_per_hash, step_tokens)

    def on_new_request(self, request: Any) -> None:
        """Pass a new request's hints to the manager, and protect its blocks while the request is queued."""
        self.manager.add_hints(request.request_id, arrival_hints(request))
        if getattr(request, "lora_request", None) is not None:
            self.manager.note_adapter(request.request_id)
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        status.__class__ = RequestState
        status.update_offload_keys()
        self.manager.expect(status.req_context)

    def update_state_after_alloc(self, request: Any, *arguments: Any) -> None:
        """End the protection of a queued request's blocks, because the request now begins."""
        self.manager.withdraw(request.request_id)
        super().update_state_after_alloc(request, *arguments)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Build the jobs of a scheduled step, and protect the blocks of preempted requests again.

        A reset preempts running requests, and the same step may begin loads for these requests. But vLLM
        asserts that a preempted request has only stores in flight. So this method removes the requests that
        have loads from the set of preempted requests. This is safe, because such requests have no store in
        flight.
        """
        if self._uncomputed is not None:
            self._uncomputed.end_step(scheduler_output, self._req_status)
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            loading = {job.req_id for job in self._current_batch_load_jobs.values()}
            if not loading.isdisjoint(preempted):
                scheduler_output = copy(scheduler_output)  # the worker needs the complete set
                scheduler_output.preempted_req_ids = preempted = preempted - loading
            for request_id in preempted - scheduler_output.num_scheduled_tokens.keys():
                if (status := self._req_status.get(request_id)) is not None:
                    self.manager.expect(status.req_context)
        return super().build_connector_meta(scheduler_output)

    def _update_req_states(self, scheduler_output: Any) -> None:
        """Add the new blocks of a step to the block lists of the requests.

        Clears the block lists of requests that vLLM schedules as new, because vLLM reports all blocks of such
        a request. A request with streaming input is new again when its next input begins. vLLM's connector
        then appends all blocks to the blocks of the earlier inputs, and stores blocks under wrong keys.
        """
        for new in scheduler_output.scheduled_new_reqs:
            if (status := self._req_status.get(new.req_id)) is not None:
                for group_state in status.group_states:
                    group_state.block_ids.clear()
        super()._update_req_states(scheduler_output)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Count a hit's tokens per source (RAM, disk or another tier). Returns a mapping: source -> number of
        tokens.

        If no tier has promoted a block for the request, all tokens come from RAM, so that no lookup is
        needed. vLLM's own method would look up each block, which takes a fifth of the CPU time of a step with
        long hits.
        """
        context = self._req_status[request.request_id].req_context
        covered = any(group.sliding_window_size_in_chunks is None for group in self.config.kv_group_configs)
        if num_external_tokens and covered and not self.manager.has_promoted_for(context):
            return {CacheHitSource.HOST: num_external_tokens}
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def request_finished(self, request: Any) -> Any:
        """Pass the finish reason to the manager. vLLM ends the request there later, after its last offer."""
        self.manager.add_hints(request.request_id, finish_hints(request))
        return super().request_finished(request)

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        """Return the jobs of `store_jobs`. Overrides vLLM's method."""
        return self.store_jobs(scheduler_output)

    def store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        """Return the store jobs of a step, by number.

        vLLM's method examines each scheduled request. While requests generate answers, few of them complete a
        chunk in a step, so this method hides the others from vLLM's method.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        finished = scheduler_output.finished_req_ids or ()  # a new request may have the id of an aborted one
        offering = {
            name: tokens
            for name, tokens in scheduled.items()
            if name in finished or self._may_offer(name, tokens)
        }
        if len(offering) < len(scheduled):
            scheduler_output = copy(scheduler_output)  # the worker needs the complete dictionary
            scheduler_output.num_scheduled_tokens = offering
        return super()._build_store_jobs(scheduler_output)

    def _may_offer(self, request_id: str, step_tokens: int) -> bool:
        """Return False only if the request has no chunk to offer after a step of `step_tokens` tokens."""
        status = self._req_status[request_id]
        most_tokens = status.req.num_computed_tokens + step_tokens
        if self.config.offload_prompt_only:
            most_tokens = min(most_tokens, status.req.num_prompt_tokens)
        for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            first = state.next_stored_chunk_idx
            if len(state.offload_keys) > first and most_tokens // group.tokens_per_chunk > first:
                return True
        return False

    def _maximal_prefix_lookup(
        self, keys: Iterable[bytes], req_context: Any, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        """Return the number of ready blocks before the first block that is not ready.

        Returns None if vLLM should look up again later. Overrides vLLM's loop over blocks.
        """
        wanted = list(keys)
        num_ready, wait = self.manager.lookup_prefix(wanted, req_context)
        if self._events_tracker.self_describing_enabled:
            for row, key in enumerate(wanted[:num_ready]):
                self._events_tracker.record_lookup(req, group_config, start_chunk_idx + row, key)
        return None if wait else num_ready


class OnDeviceEvictionScheduler(KVOffloadScheduler):
    """Stores blocks that the GPU is about to drop.

    vLLM reuses blocks from the head of its list of free blocks. The *window* is the head of this list, with
    the blocks that the next step may reuse. After each step this class offers the blocks of the window,
    warmest first. They are copied in the background and stay free: nothing is pinned, and the GPU's own cache
    works as before. If vLLM reuses a block during its copy, vLLM's fence delays the reuse, as for blocks of
    finished requests.

    - If fewer blocks are free than the window should contain, a block may be computed and dropped within two
      steps. Running requests then store computed blocks at once, as in the mode ``on-compute``.
    - If a step reuses more blocks than the window contains, for example to load a long prefix, some blocks
      are dropped without an offer. The manager counts these blocks.
    - vLLM takes blocks from the head of the list and adds freed blocks at both ends, so each step moves the
      window. A request that begins may also take cached blocks out of the middle of the list. Then the whole
      window is scanned again.

    Attributes:
        window: number of blocks at the head of the free list that are offered. It adapts to the number of
            dropped blocks per step.

    Cost: O(blocks that the step took or freed), and O(window) in a step in which a request begins.
    """

    def bind(self, block_pool: Any, step_tokens: int) -> None:
        """Begin to watch vLLM's pool of GPU blocks.

        Args:
            step_tokens: largest number of tokens that one step computes.
        """
        self._pool, groups = block_pool, self.config.kv_group_configs
        step_blocks = sum(-(-step_tokens // group.tokens_per_block) for group in groups)
        self.window = Window(step_blocks, max(1, block_pool.num_gpu_blocks // 2))
        self._rows = {group.group_idx: row for row, group in enumerate(groups)}
        # Cached blocks of the window at the last scan: block number -> (block, key at the scan).
        self._offered = OrderedDict[int, tuple[Any, Any]]()
        self._must_rescan = False
        self._num_dropped, self._dropped_unoffered = 0, dict[bytes, None]()
        no_request = SimpleNamespace(
            request_id=NO_REQUEST, kv_transfer_params=None, is_finished=lambda: False
        )
        self._req_status[NO_REQUEST] = RequestOffloadState(
            config=self.config,
            req=no_request,
            req_context=ReqContext(NO_REQUEST),
            offloading_context=RequestOffloadingContext(),
        )
        watch_evictions(block_pool, self._on_drop)

    def update_state_after_alloc(self, request: Any, *arguments: Any) -> None:
        """Make the next scan cover the whole window, because the request may take blocks from its middle."""
        self._must_rescan = True
        super().update_state_after_alloc(request, *arguments)

    def store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        """Return the store jobs of a step: blocks that the GPU is about to drop."""
        self._process_drops()
        at_once: dict[int, Any] = {}
        if self._pool.get_num_free_blocks() < self.window.size:
            at_once = super().store_jobs(scheduler_output)
        return at_once | self._store_next_victims()

    def _on_drop(self, number: int, key: Any) -> None:
        self._num_dropped += 1
        if not self._was_offered(number, key):
            self._dropped_unoffered[bytes(key)] = None

    def _was_offered(self, number: int, key: Any) -> bool:
        # Keys are compared by identity. A rewritten block has a new key object, even if the bytes are equal.
        entry = self._offered.get(number)
        return entry is not None and entry[1] is key

    def _process_drops(self) -> None:
        """Adapt the window to the number of blocks that the GPU has dropped since the last step.

        Also reports to the manager the blocks that were dropped without an offer.
        """
        if not self._num_dropped:
            return
        self.window.adapt(self._num_dropped)
        if self._dropped_unoffered:
            self.manager.keep_dropped(list(self._dropped_unoffered)[::-1])
        self._num_dropped = 0
        self._dropped_unoffered.clear()

    def _store_next_victims(self) -> dict[int, Any]:
        """Return store jobs for the blocks that the GPU drops next."""
        fresh: dict[int, list[tuple[int, bytes]]] = {}
        for block, key in self._new_in_window():
            group = self._group_of(block, key)
            if group is not None:
                fresh.setdefault(group, []).append((block.block_id, bytes(key)))
        jobs: dict[int, Any] = {}
        for group, victims in fresh.items():
            # The free list begins with the coldest block; the manager wants the warmest first.
            block_of = {key: block_id for block_id, key in reversed(victims)}
            output = self.manager.store_dropped(list(block_of))
            if output is None:
                # The manager cannot store the blocks now: offer them again at the next scan.
                for block_id in block_of.values():
                    del self._offered[block_id]
                self._must_rescan = True
            elif output.keys_to_store:
                job_id = self._generate_job_id()
                jobs[job_id] = self._job(job_id, self._rows[group], output, block_of)
        return jobs

    def _new_in_window(self) -> list[tuple[Any, Any]]:
        """Return the cached blocks that have entered the window since the last call, in its order."""
        queue, offered = self._pool.free_block_queue, self._offered
        # vLLM frees blocks without a key to the head of the list.
        num_uncached, first = 0, None
        for block in islice(queue.iter_blocks_after(None), self.window.size):
            if block.block_hash is not None:
                first = block
                break
            num_uncached += 1
        if first is None and not self._must_rescan:
            return []
        if self._must_rescan or first is None or not self._was_offered(first.block_id, first.block_hash):
            self._offered, self._must_rescan = OrderedDict(), False
            return self._add_cached(islice(queue.iter_blocks_after(None), self.window.size), offered)
        while next(iter(offered)) != first.block_id:
            offered.popitem(last=False)
        last, _ = offered[next(reversed(offered))]
        return self._add_cached(
            islice(queue.iter_blocks_after(last), max(0, self.window.size - num_uncached - len(offered)))
        )

    def _add_cached(
        self, blocks: Iterable[Any], known: Mapping[int, tuple[Any, Any]] = _NONE
    ) -> list[tuple[Any, Any]]:
        """Add the blocks with a key to the offered blocks; return added blocks that are not in `known`."""
        fresh, offered = [], self._offered
        for block in blocks:
            key = block.block_hash
            if key is not None:
                number = block.block_id
                offered[number] = entry = block, key
                if number not in known or known[number][1] is not key:
                    fresh.append(entry)
        return fresh

    def _group_of(self, block: Any, key: Any) -> int | None:
        """Return the KV group of a cached block; None if this mode does not store the block."""
        group = int.from_bytes(key[-4:], "big")
        row = self._rows.get(group)
        if row is None or block.is_null or self.config.kv_group_configs[row].requires_cow_source:
            return None
        is_partial = (block.block_hash_num_tokens or 0) % self.config.kv_group_configs[row].tokens_per_block
        return None if is_partial else group

    def _job(self, job_id: int, row: int, output: Any, block_of: dict[bytes, int]) -> TransferJob:
        """Create a store job, and register it so that vLLM's fence delays the reuse of its GPU blocks."""
        blocks = [block_of[key] for key in output.keys_to_store]
        for block_id in blocks:
            self._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        self._jobs[job_id] = TransferJobStatus(
            req_id=NO_REQUEST,
            pending_count=self.config.num_workers,
            keys=set(output.keys_to_store),
            is_store=True,
            fenced_block_ids=blocks,
        )
        self._req_status[NO_REQUEST].transfer_jobs.add(job_id)
        sizes = [0] * len(self.config.kv_group_configs)
        sizes[row] = len(blocks)
        source = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=[0] * len(sizes))
        return TransferJob(req_id=NO_REQUEST, src_spec=source, dst_spec=output.store_spec)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._offered.clear()
        self._dropped_unoffered.clear()
        self._num_dropped = 0
