"""What blocks are, for an engine that asks for one after the other.

Owns the order of asking: our manager, then the verification, and what is looked up ahead of questions. Does
not contain errors: who calls does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any

from vllm.v1.kv_offload.base import LookupResult as VLLMResult

from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.integrations.vllm.verification import Checks, Verifier

_FIRST_REACH, _LONGEST_REACH = 16, 4096

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_VLLM_HIT, _VLLM_MISS = VLLMResult.HIT, VLLMResult.MISS
_ANSWERS = {result: VLLMResult[result.name] for result in LookupResult}


@dataclass(eq=False)
class Request:
    """A request in our manager.

    Attributes:
        path: its keys as vLLM had noted them when it first asked.
        reach: how many of them are looked up ahead.
        checks: its blocks that are being verified, or have been.
    """

    ctx: RequestContext
    path: list[bytes]
    reach: int = _FIRST_REACH
    checks: Checks = field(default_factory=Checks)


class Lookups:
    """Looks blocks up.

    vLLM's own connector asks block by block, and a call across costs as much as the answer. So the first
    block of a path that is a hit has those looked up at once that follow it. What is ready stays ready until
    something is done with the manager: who does it sets `ahead` to an empty list. With tiers or
    verification an answer belongs to a request, and nothing is looked up ahead.

    Attributes:
        ahead: blocks known to be ready, the one that will be asked for next at the end.
    """

    def __init__(self, manager: OffloadingManager, verifier: Verifier | None, *, tiered: bool) -> None:
        self._manager, self._verifier, self._tiered = manager, verifier, tiered
        self.ahead: list[bytes] = []
        self._asker: Request | None = None

    def one(self, key: bytes, request: Request) -> VLLMResult:
        """What a block is for this request."""
        found = self._manager.lookup_key(key, request.ctx if self._tiered else None)
        if found is _HIT:
            if self._verifier is not None:
                found = self._verifier.lookup(key, request.checks, request.ctx)
            elif request.reach and not self._tiered:
                self._look_ahead(key, request)
        # The hash of a member of an enum is Python code.
        return _VLLM_HIT if found is _HIT else _VLLM_MISS if found is _MISS else _ANSWERS[found]

    def prefix(self, keys: list[bytes], request: Request) -> tuple[int, bool]:
        """How many leading blocks are ready, and whether to ask again because the next one soon will be."""
        if self._verifier is None:
            found = self._manager.lookup(keys, request.ctx)
            return found.num_ready, found.stopped_by in (LookupResult.HIT_PENDING, LookupResult.RETRY)
        num_ready, wait = 0, False
        for key in keys:  # all checks that will be needed are begun at once
            answer = self.one(key, request)
            if answer is _VLLM_MISS:
                break
            wait = wait or answer is not _VLLM_HIT
            num_ready += not wait
        return num_ready, wait

    def _look_ahead(self, key: bytes, request: Request) -> None:
        following = islice(dropwhile(lambda one: one is not key, request.path), 1, None)
        wanted: list[Any] = list(islice(following, request.reach))
        request.reach = min(4 * request.reach, _LONGEST_REACH)
        if self.ahead and self._asker is request:
            # It asks in another order, of several KV groups perhaps.
            request.reach = 0
        elif wanted:
            num_ready = self._manager.lookup(wanted, request.ctx).num_ready
            self.ahead, self._asker = wanted[:num_ready][::-1], request


def positions_of(req_context: Any) -> dict[bytes, int]:
    """Where each block that vLLM has noted ends in its request; empty where vLLM does not tell."""
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


def path_of(req_context: Any) -> list[bytes]:
    """The keys that vLLM has noted of a request, in the order of their tokens."""
    positions = positions_of(req_context)
    return sorted(positions, key=positions.__getitem__)
