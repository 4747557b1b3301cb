"""The state of blocks, for an engine that asks for one after the other.

Owns the order of a lookup (our manager, then the verification), and lookups ahead of the engine's questions.
Does not contain errors: the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any

from vllm.v1.kv_offload.base import LookupResult as VLLMResult

from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.integrations.vllm.scheduler_side.verification import Checks, Verifier
from kvoffload.tiering.manager import AnyManager

BEFORE_ANY_STEP = -1
_FIRST_REACH, _LONGEST_REACH = 16, 4096

_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_VLLM_HIT, _VLLM_MISS = VLLMResult.HIT, VLLMResult.MISS
_ANSWERS = {result: VLLMResult[result.name] for result in LookupResult}


@dataclass(eq=False)
class Request:
    """A request in our manager.

    Attributes:
        path: its keys as vLLM had recorded them when it first asked.
        reach: number of them that are looked up ahead.
        checks: its blocks that are being or have been verified.
        begun_step: the last step in which vLLM may have begun the request; None while it surely waits.
        was_preempted: it has waited again. vLLM does not report the step in which such a request resumes.
        first_step: the step of its first lookup since it waits; None before that lookup.
    """

    ctx: RequestContext
    path: list[bytes]
    reach: int = _FIRST_REACH
    checks: Checks = field(default_factory=Checks)
    begun_step: int | None = None
    was_preempted: bool = False
    first_step: int | None = None

    def is_first_lookup(self, step: int) -> bool:
        """Return True for the first lookup of a request; vLLM repeats the lookup in every step of a wait."""
        if self.first_step is None:
            self.first_step = step
        return self.first_step == step

    def may_run(self, step: int) -> bool:
        """Return True if the request may have begun before this step, and not waited since."""
        return self.begun_step is not None and self.begun_step < step

    def wait_again(self) -> None:
        """Record that the request was preempted, or that its load failed: it is looked up anew."""
        self.begun_step, self.first_step, self.was_preempted = None, None, True


class Lookups:
    """Looks blocks up.

    vLLM's own connector asks block by block, and a call costs as much as the answer. So when the first block
    of a path is a hit, the blocks after it are looked up at once. They stay ready until the manager is
    changed: any such call must set `ahead` to an empty list. With tiers or verification an answer belongs to
    one request, and nothing is looked up ahead.

    Attributes:
        ahead: blocks known to be ready; the next to be asked for is at the end.
    """

    def __init__(self, manager: AnyManager, verifier: Verifier | None, *, tiered: bool) -> None:
        self._manager, self._verifier, self._tiered = manager, verifier, tiered
        self.ahead: list[bytes] = []
        self._asker: Request | None = None

    def one(self, key: bytes, request: Request) -> VLLMResult:
        """State of a block for this request."""
        found = self._manager.lookup_key(key, request.ctx if self._tiered else None)
        if found is _HIT:
            if self._verifier is not None:
                found = self._verifier.lookup(key, request.checks, request.ctx)
            elif request.reach and not self._tiered:
                self._look_ahead(key, request)
        # Not one dictionary: hashing a member of an enum runs Python code.
        return _VLLM_HIT if found is _HIT else _VLLM_MISS if found is _MISS else _ANSWERS[found]

    def prefix(self, keys: list[bytes], request: Request) -> tuple[int, bool]:
        """How many leading blocks are ready, and whether to ask again because the next soon will be."""
        if self._verifier is None:
            found = self._manager.lookup(keys, request.ctx)
            return found.num_ready, found.stopped_by in (LookupResult.HIT_PENDING, LookupResult.RETRY)
        num_ready, wait = 0, False
        for key in keys:  # begins all the checks that will be needed
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
            # vLLM asks in another order, perhaps because of several KV groups.
            request.reach, self.ahead = 0, []
        elif wanted:
            num_ready = self._manager.lookup(wanted, request.ctx).num_ready
            self.ahead, self._asker = wanted[:num_ready][::-1], request


def positions_of(req_context: Any) -> dict[bytes, int]:
    """The end, in its request, of each block that vLLM has recorded; empty if vLLM records none."""
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return positions


def path_of(req_context: Any) -> list[bytes]:
    """The keys of a request that vLLM has recorded, in the order of their tokens."""
    positions = positions_of(req_context)
    return sorted(positions, key=positions.__getitem__)
