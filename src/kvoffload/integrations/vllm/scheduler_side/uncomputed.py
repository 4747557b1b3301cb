"""Removes blocks from the GPU's cache that vLLM has cached but never computed.

vLLM caches the blocks of a step when it schedules the step. With ``--scheduling-policy priority`` it may
afterwards preempt a request that is scheduled in the same step. The request's new blocks are never computed,
but stay in the GPU's cache (docs/upstream.md). Later requests would use these blocks, and kvoffload would
store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Uncomputed:
    """Removes uncomputed blocks from the GPU's cache. To find them, records how many tokens of each running
    request were computed up to the last step.

    Args:
        block_pool: vLLM's pool of the GPU's blocks.
        group_tokens: mapping: number of a KV group -> number of tokens in its blocks.
        tokens_per_hash: number of tokens that each block hash of a request covers.
        step_tokens: largest number of tokens that one step computes.

    Thread: the scheduler's. Cost: a dictionary entry for each request of a step.
    """

    def __init__(
        self, block_pool: Any, group_tokens: Mapping[int, int], tokens_per_hash: int, step_tokens: int
    ) -> None:
        self._pool, self._group_tokens = block_pool, group_tokens
        self._tokens_per_hash, self._step_tokens = tokens_per_hash, step_tokens
        self._num_computed: dict[str, int] = {}

    def end_step(self, scheduler_output: Any, statuses: Mapping[str, Any]) -> None:
        """Process a step after its scheduling. Call this before any block of the step is stored.

        Args:
            statuses: vLLM's state of each request.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in (scheduler_output.preempted_req_ids or set()) - scheduled.keys():
            num_computed = self._num_computed.pop(request_id, None)
            if num_computed is not None and request_id in statuses:
                self._evict(statuses[request_id].req.block_hashes, num_computed)
        for request_id, num_tokens in scheduled.items():
            if (status := statuses.get(request_id)) is not None:
                # Draft tokens may be rejected, so only known tokens count.
                end = status.req.num_computed_tokens + num_tokens
                self._num_computed[request_id] = min(end, status.req.num_tokens)
        for request_id in scheduler_output.finished_req_ids or ():
            self._num_computed.pop(request_id, None)

    def _evict(self, hashes: Any, num_computed: int) -> None:
        """Remove the blocks that the last step of a preempted request may have cached, after the request's
        first `num_computed` tokens.

        Removes every block with one of these keys, even if the cache has several.
        """
        end = min(len(hashes) * self._tokens_per_hash, num_computed + self._step_tokens)
        for group, num_tokens in self._group_tokens.items():
            for number in range(num_computed // num_tokens, end // num_tokens):
                block_hash = hashes[(number + 1) * num_tokens // self._tokens_per_hash - 1]
                evicted = set[int]()
                while cached := self._pool.get_cached_block(block_hash, [group]):
                    if cached[0].block_id in evicted:  # never in vLLM 0.32 and 0.33; else an endless loop
                        break
                    evicted.add(cached[0].block_id)
                    self._pool.evict_blocks({cached[0].block_id})
