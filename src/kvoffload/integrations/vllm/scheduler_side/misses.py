"""Counts the blocks that requests look up but do not load, by the reason of the miss.

A request is counted when it begins, with the blocks of its last lookup. So every looked-up block is either
loaded or counted under one reason. Owns the lookups of each request. The manager knows the reasons of absent
blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvoffload.core.miss_reasons import BEHIND_A_GAP, PAUSED
from kvoffload.core.miss_record import MissRecord, by_reason
from kvoffload.integrations.vllm.scheduler_side.lookups import Request, positions_of
from kvoffload.tiering.tiered_manager import AnyManager

_MOST_SAMPLES = 256


@dataclass(eq=False, slots=True)
class Asked:
    """The blocks that a request has looked up in one step.

    Attributes:
        request: the request in our manager; None if the request may not use the cache.
        context: vLLM's record of the request.
        prefixes: for each KV group, the looked-up prefix and its number of ready blocks.
        singles: blocks that were looked up one by one; True for a hit.
        loaded: blocks whose load has begun.
        reason: the reason of blocks that were ready but not loaded. If `request` is None, the reason of all
            blocks. If it is empty, `Misses` chooses the reason.
    """

    step: int
    request: Request | None
    context: Any
    prefixes: dict[bytes, tuple[list[bytes], int]] = field(default_factory=dict)
    singles: dict[bytes, bool] = field(default_factory=dict)
    loaded: Sequence[bytes] = ()
    reason: str = ""


class Misses:
    """Counts looked-up blocks and missed blocks of requests, when the requests begin.

    Args:
        usual_reason: in a model with one KV group, the reason of blocks that were ready but not loaded.

    Attributes:
        num_lookups: looked-up blocks since the last report.
        counts: missed blocks by reason since the last report, without the manager's counts.

    Thread: the scheduler's. Cost: a microsecond for each request, and `count_misses` for each missed block.
    """

    def __init__(self, usual_reason: str) -> None:
        self._usual_reason = usual_reason
        self._asked: dict[str, Asked] = {}
        self._begun: list[str] = []
        self.num_lookups = 0
        self.counts: Counter[str] = Counter()
        self._manager_before: Counter[str] = Counter()

    def asked(self, step: int, context: Any, request: Request | None = None) -> Asked:
        """Return the record of a request's lookups in this step. Drops the record of an earlier step."""
        asked = self._asked.get(context.req_id)
        if asked is None or asked.step != step:
            asked = self._asked[context.req_id] = Asked(step, request, context)
        return asked

    def load(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Record a load. The request begins in this step."""
        if (asked := self._asked.get(request_id)) is not None:
            asked.loaded = keys
            self._begun.append(request_id)

    def begins(self, request_id: str) -> None:
        """Record that a request begins in this step."""
        if request_id in self._asked:
            self._begun.append(request_id)

    def count_begun(self, manager: AnyManager | None, request_ids: Iterable[str] = ()) -> None:
        """Count the misses of `request_ids` and of the requests that are recorded as begun.

        `manager`: None while offloading is paused.
        """
        begun, self._begun = self._begun, []
        for request_id in (*begun, *request_ids):
            if (asked := self._asked.pop(request_id, None)) is not None:
                self._count(asked, manager)

    def forget(self, request_id: str) -> None:
        """Forget the lookups of a request that has ended."""
        self._asked.pop(request_id, None)

    def take(self, manager: AnyManager | None) -> tuple[int, Counter[str]]:
        """Return two counts since the last call: looked-up blocks, and missed blocks by reason."""
        num_lookups, self.num_lookups = self.num_lookups, 0
        counts, self.counts = self.counts, Counter()
        if manager is not None:
            total = Counter(by_reason(manager.miss_counts))
            counts += total - self._manager_before
            self._manager_before = total
        return num_lookups, counts

    def attach(self, manager: AnyManager) -> None:
        """Report the misses of a new manager from now on. The manager's earlier misses do not count."""
        self._manager_before = Counter(by_reason(manager.miss_counts))

    # ---- inside

    def _count(self, asked: Asked, manager: AnyManager | None) -> None:
        rest = _rest_of_path(asked)
        num_asked = _num_asked(asked) if rest is None else rest[1]
        num_loaded, num_missed = len(asked.loaded), 0
        reason = asked.reason or (self._usual_reason if rest is not None else BEHIND_A_GAP)
        if manager is None:
            reason = PAUSED
        elif asked.request is not None and rest is not None:
            asked.request.num_skipped, asked.request.asked_end = rest[0], sum(rest)
            num_missed = _count_rest(asked, manager, *rest)
        elif asked.request is not None:
            # The path of several KV groups, before any block is computed.
            asked.request.num_skipped, asked.request.asked_end = -1, asked.request.ctx.length
            for keys in _missing(asked):
                num_missed += manager.count_misses(asked.request.ctx, 0, keys)
        self.num_lookups += max(num_asked, num_loaded + num_missed)
        if num_asked > num_loaded + num_missed:
            self.counts[reason] += num_asked - num_loaded - num_missed


class Reach:
    """Measures for how long a `MissRecord` remembers an event.

    Args:
        now_s: the time at which the record is created.
    """

    def __init__(self, now_s: float) -> None:
        self._samples = deque([(0, now_s)])
        self._interval_s = 1.0

    def seconds(self, record: MissRecord, now_s: float) -> float:
        """Return the mean time in seconds that the record remembers an event; at most the record's age."""
        samples, entered = self._samples, record.num_entered
        if now_s - samples[-1][1] >= self._interval_s:
            samples.append((entered, now_s))
        if len(samples) > _MOST_SAMPLES:
            self._samples = samples = deque(islice(samples, 0, None, 2))
            self._interval_s *= 2
        while len(samples) > 1 and samples[1][0] <= entered - record.num_entries:
            samples.popleft()
        return now_s - samples[0][1]


def _rest_of_path(asked: Asked) -> tuple[int, int] | None:
    """Return the path position of the first looked-up block, and the number of looked-up blocks.

    If blocks were looked up one by one, the number includes all later blocks of the path. Returns None if the
    path is unknown or has several KV groups.
    """
    positions = positions_of(asked.context)
    if not positions or len(asked.prefixes) > 1 or (asked.prefixes and asked.singles):
        return None
    size = positions[next(iter(positions))]
    first = next(iter(asked.singles), None)
    num_asked = None
    for keys, _ in asked.prefixes.values():
        first, num_asked = keys[0], len(keys)
    is_one_group = size > 0 and positions[next(reversed(positions))] == size * len(positions)
    if not is_one_group or first not in positions:
        return None
    start = positions[first] // size - 1
    return start, num_asked or len(positions) - start


def _count_rest(asked: Asked, manager: AnyManager, start: int, count: int) -> int:
    """Count the misses among `count` blocks of the path from position `start`. Skips the loaded blocks."""
    assert asked.request is not None
    ctx, skipped = asked.request.ctx, start + len(asked.loaded)
    if ctx.length == start + count:
        return manager.count_misses(ctx, skipped)
    # The path has grown since the first lookup, or the lookup was limited.
    return manager.count_misses(ctx, 0, list(islice(positions_of(asked.context), skipped, start + count)))


def _num_asked(asked: Asked) -> int:
    prefixes = sum(len(keys) for keys, _ in asked.prefixes.values())
    # Blocks that were looked up ahead have no entry.
    ahead = 0 if asked.prefixes else sum(key not in asked.singles for key in asked.loaded)
    return prefixes + len(asked.singles) + ahead


def _missing(asked: Asked) -> list[list[bytes]]:
    """Return the looked-up blocks that were not ready: a list for each prefix, then the single blocks."""
    singles = [key for key, is_hit in asked.singles.items() if not is_hit]
    return [keys[num_ready:] for keys, num_ready in asked.prefixes.values()] + [singles]
