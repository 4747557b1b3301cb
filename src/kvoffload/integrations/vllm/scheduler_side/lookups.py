"""Lookups for an engine that asks for one block after another.

Owns the order of a lookup: first the manager, then the verification of the block. To save time, also looks up
blocks before the engine asks for them. Errors propagate to the caller.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any

from vllm.v1.kv_offload.base import LookupResult as VLLMResult

from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.integrations.vllm.scheduler_side.verification import Checks, Verifier
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager

BEFORE_ANY_STEP = -1
_FIRST_REACH, _LONGEST_REACH = 16, 4096

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_VLLM_HIT, _VLLM_MISS = VLLMResult.HIT, VLLMResult.MISS
_ANSWERS = {result: VLLMResult[result.name] for result in LookupResult}


@dataclass(eq=False)
class Request:
    """A request in kvoffload's manager.

    Attributes:
        path: the keys that vLLM had recorded at the first lookup.
        reach: number of following keys to look up in advance at the next hit.
        checks: pending and finished verifications of the request's blocks.
        begun_step: number of the last step in which vLLM may have begun the request; None while the request
            waits.
        waits_since: number of the last step in which the request was certainly waiting, after it was
            preempted or looked up again.
        was_preempted: True if the request was preempted. vLLM does not report in which step the request
            resumes.
        pending_since_s: time of the first lookup that found a block which another engine was writing, in
            monotonic seconds; None before.
        is_audited: True if the request is computed although RAM holds its blocks; None before the first hit.
        num_skipped: number of leading blocks that were not looked up; -1: unknown.
        asked_end: position after the last looked-up block; -1: unknown.
    """

    ctx: RequestContext
    path: list[bytes]
    reach: int = _FIRST_REACH
    checks: Checks = field(default_factory=Checks)
    begun_step: int | None = None
    waits_since: int | None = None
    was_preempted: bool = False
    pending_since_s: float | None = None
    is_audited: bool | None = None
    num_skipped: int = -1
    asked_end: int = -1

    def may_run(self, step: int) -> bool:
        """Return True if the request may have begun before this step and may still run.

        vLLM does not report when a preempted request resumes. If the GPU's cache holds the prompt, the
        request resumes without a lookup.
        """
        if self.begun_step is not None:
            return self.begun_step < step
        return self.waits_since is not None and self.waits_since < step - 1

    def wait_again(self, step: int) -> None:
        """Record that vLLM will look up the request again, after a preemption or failed load in `step`."""
        self.waits_since = step
        self.begun_step, self.was_preempted = None, True


class Lookups:
    """Looks up single blocks and prefixes.

    vLLM's own connector looks up each block in a separate call, and the overhead of a call is as large as the
    lookup itself. To save this overhead, a hit makes this class look up the following blocks of the path in
    one batch, and keep the results for the next calls. The results are valid only until the manager changes,
    so any call that changes the manager must set `ahead` to an empty list. With tiers or verification nothing
    is looked up ahead, because then a result is valid only for one request.

    Args:
        deadline_s: longest time to wait for a block that another engine is writing, in seconds. None if no
            other engine shares the pool.

    Attributes:
        ahead: keys of blocks that are known to be ready. The key that vLLM will look up next is the last.
    """

    def __init__(
        self, manager: AnyManager, verifier: Verifier | None, deadline_s: float | None = None
    ) -> None:
        self._manager, self._verifier, self._deadline_s = manager, verifier, deadline_s
        self._tiered = isinstance(manager, TieredManager)
        self.ahead: list[bytes] = []
        self._ahead_of: Request | None = None

    def block(self, key: bytes, request: Request) -> VLLMResult:
        """Return the state of a block for this request."""
        state = self._manager.lookup_key(key, request.ctx if self._tiered else None)
        if state is _HIT:
            if self._verifier is not None:
                state = self._verifier.lookup(key, request.checks, request.ctx)
            elif request.reach and not self._tiered:
                self._look_ahead(key, request)
        elif state is LookupResult.HIT_PENDING and self._deadline_s is not None:
            now = time.monotonic()
            request.pending_since_s = request.pending_since_s or now
            if now - request.pending_since_s > self._deadline_s:
                state = _MISS
        # No dictionary for the common results: hashing an enum member runs Python code.
        return _VLLM_HIT if state is _HIT else _VLLM_MISS if state is _MISS else _ANSWERS[state]

    def prefix(self, keys: list[bytes], request: Request) -> tuple[int, bool]:
        """Return the number of ready blocks before the first block that is not ready, and a flag.

        The flag is True if this first block may be ready soon, so that vLLM should look up again later.
        """
        if self._verifier is None:
            prefix = self._manager.lookup(keys, request.ctx)
            return prefix.num_ready, prefix.stopped_by in (LookupResult.HIT_PENDING, LookupResult.RETRY)
        num_ready, wait = 0, False
        for key in keys:  # starts the verification of the whole prefix
            answer = self.block(key, request)
            if answer is _VLLM_MISS:
                break
            wait = wait or answer is not _VLLM_HIT
            num_ready += not wait
        return num_ready, wait

    def _look_ahead(self, key: bytes, request: Request) -> None:
        following = islice(dropwhile(lambda other: other is not key, request.path), 1, None)
        wanted: list[Any] = list(islice(following, request.reach))
        request.reach = min(4 * request.reach, _LONGEST_REACH)
        if self.ahead and self._ahead_of is request:
            # vLLM asks in another order, for instance because of several KV groups.
            request.reach, self.ahead = 0, []
        elif wanted:
            num_ready = self._manager.lookup(wanted, request.ctx).num_ready
            self.ahead, self._ahead_of = wanted[:num_ready][::-1], request


def positions_of(req_context: Any) -> dict[bytes, int]:
    """Return vLLM's mapping from the keys of a request to their positions; empty if it has none."""
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


def path_of(req_context: Any) -> list[bytes]:
    """Return the keys that vLLM has recorded for a request, in the order of their tokens."""
    positions = positions_of(req_context)
    return sorted(positions, key=positions.__getitem__)
