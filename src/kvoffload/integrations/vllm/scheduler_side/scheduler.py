"""The scheduler's side of vLLM's connector, with three changes.

A whole prefix is looked up at once. The manager hears what vLLM knows of a request: when it comes, that it
waits, and how it ends. And in the mode ``on-device-eviction`` blocks are stored when the GPU is about to drop
them, not when they have been computed. Owns which blocks are offered and when; our manager decides which are
stored, and vLLM owns transfers and their fences.
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
from kvoffload.integrations.vllm.scheduler_side.hints import known_at_arrival, known_at_end
from kvoffload.integrations.vllm.scheduler_side.manager import KVOffloadManager
from kvoffload.integrations.vllm.shared.patches import take_over, watch_evictions

_NONE: Mapping[int, Any] = MappingProxyType({})
NO_REQUEST = ""
"""Name of the request of blocks that the GPU drops; vLLM's names are never empty."""


class KVOffloadScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side, made by vLLM and taken over."""

    manager: KVOffloadManager

    @classmethod
    def of(cls, plain: OffloadingConnectorScheduler) -> Any:
        """Take over the scheduler side that vLLM has just made."""
        return take_over(cls, plain)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived, and waits for its turn: until then its blocks are expected."""
        self.manager.hear(request.request_id, known_at_arrival(request))
        if getattr(request, "lora_request", None) is not None:
            self.manager.has_adapter(request.request_id)
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        status.update_offload_keys()
        self.manager.expect(status.req_context)

    def update_state_after_alloc(self, request: Any, *arguments: Any) -> None:
        """A request begins: what there is for it is being loaded."""
        self.manager.withdraw(request.request_id)
        super().update_state_after_alloc(request, *arguments)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Build the jobs of a step that was scheduled. Requests preempted for it wait again.

        A reset under running requests preempts them, and the same step may begin their loads. vLLM then dies
        of an assertion: it expects only stores of a preempted request, and waits for them. A request that
        loads has no store under way, so it is left out of the preempted requests.
        """
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            loading = {job.req_id for job in self._current_batch_load_jobs.values()}
            if not loading.isdisjoint(preempted):
                scheduler_output = copy(scheduler_output)  # the worker needs all of them
                scheduler_output.preempted_req_ids = preempted = preempted - loading
            for request_id in preempted - scheduler_output.num_scheduled_tokens.keys():
                if (status := self._req_status.get(request_id)) is not None:
                    self.manager.expect(status.req_context)
        return super().build_connector_meta(scheduler_output)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Tokens of a hit by their source.

        A hit without promoted blocks comes from RAM, and a group of full attention covers all of its tokens.
        vLLM asks for the source of each block instead: a fifth of the CPU time of a step with long hits.
        """
        context = self._req_status[request.request_id].req_context
        covered = any(group.sliding_window_size_in_chunks is None for group in self.config.kv_group_configs)
        if num_external_tokens and covered and not self.manager.has_promoted_for(context):
            return {CacheHitSource.HOST: num_external_tokens}
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def request_finished(self, request: Any) -> Any:
        """A request has ended; the manager is told so later, when its last blocks have been offered."""
        self.manager.hear(request.request_id, known_at_end(request))
        return super().request_finished(request)

    def _maximal_prefix_lookup(
        self, keys: Iterable[bytes], req_context: Any, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        """Number of leading blocks that are ready; None: ask again."""
        wanted = list(keys)
        num_ready, wait = self.manager.lookup_prefix(wanted, req_context)
        if self._events_tracker.self_describing_enabled:
            for row, key in enumerate(wanted[:num_ready]):
                self._events_tracker.record_lookup(req, group_config, start_chunk_idx + row, key)
        return None if wait else num_ready


class OnDeviceEvictionScheduler(KVOffloadScheduler):
    """Stores blocks that the GPU is about to drop.

    The blocks that vLLM reuses next are at the head of its list of free blocks. After each step the blocks
    that the next step may take, the *window*, are offered, the warmest first, and copied in the background.
    They stay free: if a block is reused while its copy is under way, vLLM's fence for the blocks of finished
    requests applies. So nothing is pinned, and the GPU's own cache works as before.

    If fewer blocks are free than a step may take, a block can be computed and dropped between two steps. Then
    requests store at once what they have computed, as without this mode, until more blocks are free again.

    Blocks are lost if a step takes more than the window (as a long prefix from RAM does); the manager counts
    them. `window` follows the largest recent step, up to half of the GPU's blocks.

    vLLM takes blocks from the head of its list and frees them at its ends, so a step moves the window by as
    many blocks as it took. Only a request that begins can take blocks out of the middle, those that it finds
    in the GPU's cache: then the window is looked through anew.

    Attributes:
        window: the blocks at the head of the free list that are offered.

    Cost: O(blocks that the step took or freed), and O(window) in a step in which a request begins.
    """

    def bind(self, block_pool: Any, step_tokens: int) -> None:
        """Watch this pool; `step_tokens` is the most that one step computes."""
        self._pool, groups = block_pool, self.config.kv_group_configs
        step_blocks = sum(-(-step_tokens // group.tokens_per_block) for group in groups)
        self.window = Window(step_blocks, max(1, block_pool.num_gpu_blocks // 2))
        self._rows = {group.group_idx: row for row, group in enumerate(groups)}
        # The cached blocks in the window when it was last looked at: by number, each with its key then.
        self._line = OrderedDict[int, tuple[Any, Any]]()
        self._shuffled = False
        self._num_gone, self._unseen = 0, dict[bytes, None]()
        no_request = SimpleNamespace(
            request_id=NO_REQUEST, kv_transfer_params=None, is_finished=lambda: False
        )
        self._req_status[NO_REQUEST] = RequestOffloadState(
            config=self.config,
            req=no_request,
            req_context=ReqContext(NO_REQUEST),
            offloading_context=RequestOffloadingContext(),
        )
        watch_evictions(block_pool, self._drop)

    def update_state_after_alloc(self, request: Any, *arguments: Any) -> None:
        """A request begins: it may take blocks out of the middle of the free list."""
        self._shuffled = True
        super().update_state_after_alloc(request, *arguments)

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, Any]:
        self._follow_evictions()
        at_once: dict[int, Any] = {}
        if self._pool.get_num_free_blocks() < self.window.size:
            at_once = super()._build_store_jobs(scheduler_output)
        return at_once | self._store_next_victims()

    def _drop(self, number: int, key: Any) -> None:
        """The GPU drops a block."""
        self._num_gone += 1
        if not self._in_line(number, key):
            self._unseen[bytes(key)] = None

    def _in_line(self, number: int, key: Any) -> bool:
        # By identity: a block that has been written again has another key, also where the bytes are equal.
        found = self._line.get(number)
        return found is not None and found[1] is key

    def _follow_evictions(self) -> None:
        """Process the blocks that the GPU has dropped since the last step."""
        if not self._num_gone:
            return
        self.window.follow(self._num_gone)
        if self._unseen:
            self.manager.keep_dropped(list(self._unseen)[::-1])
        self._num_gone = 0
        self._unseen.clear()

    def _store_next_victims(self) -> dict[int, Any]:
        """Jobs for the blocks that the GPU drops next."""
        fresh: dict[int, list[tuple[int, bytes]]] = {}
        for block, key in self._follow_window():
            group = self._group_of(block, key)
            if group is not None:
                fresh.setdefault(group, []).append((block.block_id, bytes(key)))
        jobs: dict[int, Any] = {}
        for group, victims in fresh.items():
            # The list begins with the coldest.
            block_of = {key: block_id for block_id, key in reversed(victims)}
            output = self.manager.store_dropped(list(block_of))
            if output is None:
                # Later: they come into the window once more.
                for block_id in block_of.values():
                    del self._line[block_id]
                self._shuffled = True
            elif output.keys_to_store:
                job_id = self._generate_job_id()
                jobs[job_id] = self._job(job_id, self._rows[group], output, block_of)
        return jobs

    def _follow_window(self) -> list[tuple[Any, Any]]:
        """Cached blocks that have come into the window since the last call, in the order of the free list."""
        queue, line = self._pool.free_block_queue, self._line
        # What was never cached, or is no more, is freed to the head of the list.
        num_others, first = 0, None
        for block in islice(queue.iter_blocks_after(None), self.window.size):
            if block.block_hash is not None:
                first = block
                break
            num_others += 1
        if first is None and not self._shuffled:
            return []
        if self._shuffled or first is None or not self._in_line(first.block_id, first.block_hash):
            known, self._line, self._shuffled = line, OrderedDict(), False
            return self._enter(islice(queue.iter_blocks_after(None), self.window.size), known)
        while next(iter(line)) != first.block_id:
            line.popitem(last=False)
        last, _ = line[next(reversed(line))]
        return self._enter(
            islice(queue.iter_blocks_after(last), max(0, self.window.size - num_others - len(line)))
        )

    def _enter(
        self, blocks: Iterable[Any], known: Mapping[int, tuple[Any, Any]] = _NONE
    ) -> list[tuple[Any, Any]]:
        """Append the cached ones of these blocks to the line; returns those that are not known."""
        fresh, line = [], self._line
        for block in blocks:
            key = block.block_hash
            if key is not None:
                number = block.block_id
                line[number] = entry = block, key
                if number not in known or known[number][1] is not key:
                    fresh.append(entry)
        return fresh

    def _group_of(self, block: Any, key: Any) -> int | None:
        """The KV group of a cached block; None if it is not stored in this mode."""
        group = int.from_bytes(key[-4:], "big")
        row = self._rows.get(group)
        if row is None or block.is_null or self.config.kv_group_configs[row].requires_cow_source:
            return None
        is_part = (block.block_hash_num_tokens or 0) % self.config.kv_group_configs[row].tokens_per_block
        return None if is_part else group

    def _job(self, job_id: int, row: int, output: Any, block_of: dict[bytes, int]) -> TransferJob:
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
        self._line.clear()
        self._unseen.clear()
        self._num_gone = 0
