"""Audits of stored blocks: chooses requests, pins the blocks to compare, and counts the workers' findings.

An audited request is computed although RAM holds its blocks. When the engine then offers the computed blocks,
the workers compare them with the stored blocks. Owns the choice of requests and the pins of their blocks. The
caller decides what to do if blocks differ.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.core.plans import LoadPlan
from kvoffload.integrations.vllm.scheduler_side.inflight import InFlight
from kvoffload.integrations.vllm.scheduler_side.lookups import Request
from kvoffload.integrations.vllm.shared.options import AuditOptions
from kvoffload.integrations.vllm.shared.pool import CLOSE, DIFFERENT, EQUAL, UNJUDGED, SharedPool
from kvoffload.tiering.tiered_manager import AnyManager

RESULTS = {
    EQUAL: "equal",
    CLOSE: "close",
    UNJUDGED: "unjudged",
    DIFFERENT: "different",
    0: "not_compared",
}
_MOST_DUE = 65536


class Difference(NamedTuple):
    """A stored block that differs from the computed block.

    `difference` is the largest relative difference of a run of values (`transfer.difference`); the run is
    in `group` and `tensor`.
    """

    key: bytes
    difference: float
    group: int
    tensor: int

    def __str__(self) -> str:
        return (
            f"stored block {self.key.hex()} differs from the computed one by {self.difference:.3g} times its "
            f"values, most in tensor {self.tensor} of KV group {self.group}"
        )


class Audited(NamedTuple):
    """Blocks of an offer that are compared with the blocks in RAM: their positions (`rows`) in the offer, and
    the plan that pins the blocks in RAM.
    """

    rows: npt.NDArray[np.intp]
    plan: LoadPlan


class Audits:
    """The audits of an engine.

    Attributes:
        num_requests: number of audited requests.
        results: mapping from each result of a comparison (`RESULTS`) to its number of blocks.
        largest: largest difference so far that was small enough to count as rounding.

    Thread: the scheduler's. Cost: a checksum of the request's id, only for requests with hits.
    """

    def __init__(self, options: AuditOptions, manager: AnyManager, pool: SharedPool) -> None:
        self._options, self._manager, self._pool = options, manager, pool
        self._num_first = options.first
        self._due: dict[bytes, None] = {}
        self._comparing: set[bytes] = set()
        self._pinned: InFlight[LoadPlan] = InFlight()
        self.num_requests = 0
        self.results: Counter[str] = Counter()
        self.largest = 0.0

    def takes(self, request: Request, request_id: str, keys: Iterable[bytes]) -> bool:
        """Return True if this request is audited. Call this only for requests with hits.

        The first call for a request decides, and all later calls return the same.

        Args:
            keys: keys of the blocks to compare, used if the request's path is unknown.
        """
        if request.is_audited is None:
            request.is_audited = self._num_first > 0 or _share_of(request_id) < self._options.share
            if request.is_audited:
                self._num_first = max(0, self._num_first - 1)
                self.num_requests += 1
                self._due.update(dict.fromkeys(request.path or keys))
                while len(self._due) > _MOST_DUE:
                    del self._due[next(iter(self._due))]
        return request.is_audited

    def pin(self, offered: Sequence[bytes]) -> Audited | None:
        """Pin the blocks of an offer that are to be compared and that are ready in RAM.

        Returns None if there are no such blocks.
        """
        rows = [row for row, key in enumerate(offered) if key in self._due and key not in self._comparing]
        if not rows:
            return None
        plan, ready = self._manager.pin_ready([offered[row] for row in rows])
        if not len(plan):
            return None
        self._comparing.update(plan.keys)
        return Audited(np.array(rows, np.intp)[ready], plan)

    def unpin(self, plan: LoadPlan) -> None:
        """Undo `pin`. Called if vLLM will repeat the offer later."""
        self._comparing.difference_update(plan.keys)
        self._manager.unpin(plan)

    def begin(self, plan: LoadPlan, keys: Collection[bytes], request_id: str) -> None:
        """Record that the workers compare these blocks during a store of this request."""
        self._pinned.add(plan, keys, request_id)
        for key in keys:
            self._due.pop(key, None)

    def end(self, request_id: str, keys: Collection[bytes], *, success: bool) -> list[Difference]:
        """End the comparisons of a finished store; return the differences. A failed store has none."""
        differences = []
        for plan in self._pinned.take(request_id, keys):
            findings = self._pool.take_findings(plan.slots)
            if not success:
                findings["result"] = 0
            for key, finding in zip(plan.keys, findings, strict=True):
                result = int(finding["result"])
                self.results[RESULTS[result]] += 1
                if result == DIFFERENT:
                    place = int(finding["group"]), int(finding["tensor"])
                    differences.append(Difference(key, float(finding["difference"]), *place))
                elif result == CLOSE:
                    self.largest = max(self.largest, float(finding["difference"]))
            self._comparing.difference_update(plan.keys)
            self._manager.unpin(plan)
        return differences

    def reset(self) -> list[LoadPlan]:
        """Forget all comparisons before a reset of the manager; return the plans that pin their blocks."""
        self._due.clear()
        self._comparing.clear()
        return self._pinned.drain()


def _share_of(request_id: str) -> float:
    """Map a request's id to a number in [0, 1), which is compared with the share of audited requests.

    Equal ids give equal numbers, so no state is needed to choose requests.
    """
    return zlib.crc32(request_id.encode()) / 2**32
