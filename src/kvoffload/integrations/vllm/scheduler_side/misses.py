"""Counts the blocks that requests look up but do not load, by the reason of the miss.

A request is counted when it begins; if it was looked up several times, only the last lookup counts. So every
looked-up block is either loaded or counted as a miss with one reason. Owns the lookups of each request. The
manager knows why a block is absent.
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
class LookupRecord:
    """The blocks that a request has looked up in one step.

    Attributes:
        request: the request in kvoffload's manager; None if the request must not use the cache.
        context: vLLM's record of the request.
        prefixes: mapping: KV group -> (looked-up prefix, number of its ready blocks).
        singles: mapping: key of a block that was looked up alone -> True for a hit.
        loaded: keys of blocks whose load has begun.
        reason: reason for the misses of ready blocks that were not loaded or, if `request` is None, of all
            blocks. If it is empty, `Misses` chooses a reason.
    """

    step: int
    request: Request | None
    context: Any
    prefixes: dict[bytes, tuple[list[bytes], int]] = field(default_factory=dict)
    singles: dict[bytes, bool] = field(default_factory=dict)
    loaded: Sequence[bytes] = ()
    reason: str = ""


class Misses:
    """Counts the blocks that requests look up and the blocks that they miss, when the requests begin.

    Args:
        usual_reason: reason of the misses for blocks that were ready but not loaded, in a model with one KV
            group.

    Attributes:
        num_lookups: number of looked-up blocks since the start.
        counts: mapping: reason -> number of missed blocks since the start, without the misses that the
            manager counts itself (`count_misses`).

    Thread: the scheduler's. Cost: a microsecond for each request, and `count_misses` for each missed block.
    """

    def __init__(self, usual_reason: str) -> None:
        self._usual_reason = usual_reason
        self._records: dict[str, LookupRecord] = {}
        self._begun: list[str] = []
        self.num_lookups = 0
        self.counts: Counter[str] = Counter()
        self._manager_before: Counter[str] = Counter()

    def record_of(self, step: int, context: Any, request: Request | None = None) -> LookupRecord:
        """Return the record of a request's lookups in this step. Replaces the record of an earlier step."""
        record = self._records.get(context.req_id)
        if record is None or record.step != step:
            record = self._records[context.req_id] = LookupRecord(step, request, context)
        return record

    def load(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Record that a request loads these blocks, and therefore begins in this step."""
        if (record := self._records.get(request_id)) is not None:
            record.loaded = keys
            self._begun.append(request_id)

    def begins(self, request_id: str) -> None:
        """Record that a request begins in this step."""
        if request_id in self._records:
            self._begun.append(request_id)

    def count_begun(self, manager: AnyManager | None, request_ids: Iterable[str] = ()) -> None:
        """Count the misses of requests that have begun: `request_ids`, and the requests recorded by `load`
        and `begins`.

        Args:
            manager: the manager that knows the reasons; None while offloading is paused.
        """
        begun, self._begun = self._begun, []
        for request_id in (*begun, *request_ids):
            if (record := self._records.pop(request_id, None)) is not None:
                self._count(record, manager)

    def forget(self, request_id: str) -> None:
        """Forget the lookups of a request that has ended."""
        self._records.pop(request_id, None)

    def by_reason(self, manager: AnyManager) -> Counter[str]:
        """Return the number of missed blocks since the start, by reason."""
        return self.counts + Counter(by_reason(manager.miss_counts)) - self._manager_before

    def attach(self, manager: AnyManager) -> None:
        """Use a new manager: `by_reason` then includes the misses that this manager counts from now on."""
        self._manager_before = Counter(by_reason(manager.miss_counts))

    # ---- inside

    def _count(self, record: LookupRecord, manager: AnyManager | None) -> None:
        span = _rest_of_path(record)
        num_looked_up = _num_looked_up(record) if span is None else span[1]
        num_loaded, num_missed = len(record.loaded), 0
        reason = record.reason or (self._usual_reason if span is not None else BEHIND_A_GAP)
        if manager is None:
            reason = PAUSED
        elif record.request is not None and span is not None:
            record.request.num_skipped, record.request.asked_end = span[0], sum(span)
            num_missed = _count_rest(record, manager, *span)
        elif record.request is not None:
            # The path of several KV groups, before any block is computed.
            record.request.num_skipped, record.request.asked_end = -1, record.request.ctx.length
            for keys in _missing(record):
                num_missed += manager.count_misses(record.request.ctx, 0, keys)
        self.num_lookups += max(num_looked_up, num_loaded + num_missed)
        if num_looked_up > num_loaded + num_missed:
            self.counts[reason] += num_looked_up - num_loaded - num_missed


class Reach:
    """Measures for how long a `MissRecord` remembers an event before newer events replace it.

    Args:
        now_s: time at which the record was created.
    """

    def __init__(self, now_s: float) -> None:
        self._samples = deque([(0, now_s)])
        self._interval_s = 1.0

    def seconds(self, record: MissRecord, now_s: float) -> float:
        """Return for how many seconds the record remembers an event; at most the age of the record."""
        samples, entered = self._samples, record.num_entered
        if now_s - samples[-1][1] >= self._interval_s:
            samples.append((entered, now_s))
        if len(samples) > _MOST_SAMPLES:
            self._samples = samples = deque(islice(samples, 0, None, 2))
            self._interval_s *= 2
        while len(samples) > 1 and samples[1][0] <= entered - record.num_entries:
            samples.popleft()
        return now_s - samples[0][1]


def _rest_of_path(record: LookupRecord) -> tuple[int, int] | None:
    """Return the path position of the first looked-up block, and the number of looked-up blocks.

    If vLLM looked up one block after another, all blocks of the path from the first one on count as looked
    up. Returns None if the path is unknown or has several KV groups.
    """
    positions = positions_of(record.context)
    if not positions or len(record.prefixes) > 1 or (record.prefixes and record.singles):
        return None
    size = positions[next(iter(positions))]
    first = next(iter(record.singles), None)
    num_looked_up = None
    for keys, _ in record.prefixes.values():
        first, num_looked_up = keys[0], len(keys)
    is_one_group = size > 0 and positions[next(reversed(positions))] == size * len(positions)
    if not is_one_group or first not in positions:
        return None
    start = positions[first] // size - 1
    return start, num_looked_up or len(positions) - start


def _count_rest(record: LookupRecord, manager: AnyManager, start: int, count: int) -> int:
    """Count the misses among `count` blocks of the path from position `start` on, without loaded blocks."""
    assert record.request is not None
    ctx, skipped = record.request.ctx, start + len(record.loaded)
    if ctx.length == start + count:
        return manager.count_misses(ctx, skipped)
    # The path has grown since the first lookup, or the lookup was limited.
    return manager.count_misses(ctx, 0, list(islice(positions_of(record.context), skipped, start + count)))


def _num_looked_up(record: LookupRecord) -> int:
    prefixes = sum(len(keys) for keys, _ in record.prefixes.values())
    # Blocks that were looked up ahead have no entry.
    ahead = 0 if record.prefixes else sum(key not in record.singles for key in record.loaded)
    return prefixes + len(record.singles) + ahead


def _missing(record: LookupRecord) -> list[list[bytes]]:
    """Return the keys that were not ready: a list for each looked-up prefix, then one for single lookups."""
    singles = [key for key, is_hit in record.singles.items() if not is_hit]
    return [keys[num_ready:] for keys, num_ready in record.prefixes.values()] + [singles]
