"""A wrapper of any tier that counts the tier's exceptions, and turns them into misses.

Owns the back-off from a failing tier. Ends the jobs of a tier that does not report results.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from kvoffload.core.tenants import Quota, TenantStats
from kvoffload.errors import check_integer, finite
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import (
    NO_JOB,
    GroupedTier,
    JobResult,
    Mask,
    OwnerOf,
    SecondaryTier,
    SharedTier,
    TierStats,
)
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.tiers.waiting import Backoff
from kvoffload.transfer import Blocks, Rows

T = TypeVar("T")

_MAX_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_JOBS_END_WITHIN_S = 10.0


@dataclass
class _Failures:
    """Number of consecutive failures of one method, and the back-off after them."""

    count: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))


class GuardedTier(SharedTier, GroupedTier):
    """A wrapper that passes calls to the wrapped tier, but raises nothing, except errors of `set_tenants`.

    The guard has the methods of every kind of tier. If the wrapped tier is not shared, `unknown` is False for
    every block. If the wrapped tier has no groups, the guard reports groups of one block.

    - If a call raises, the call's blocks are misses, and no job begins (`NO_JOB`). A result that breaks the
      contract of tiers, such as a mask of the wrong length, counts as an exception.
    - After three consecutive failures of one method the guard does not call the tier for 1 s. Each further
      failure of the method doubles the pause, up to 60 s; a success of the method resets the pause. During a
      pause, the results of jobs in flight are still collected.
    - If `finished` raises, results may be lost. The guard waits 10 s for the jobs in flight. If some have not
      ended by then, the guard closes the tier for good and reports all unfinished jobs as failed. If `close`
      raises, too, the jobs keep their rows, and end only when `close` succeeds; `finished` repeats `close`,
      after pauses of 1 to 60 s.
    - If `submit_read`, `submit_write` or `submit_probe` returns something else than a new job number, the
      guard closes the tier in the same way, but without the wait.
    - If `clear` raises, the tier may still have blocks from before the reset. The guard then repeats `clear`,
      for the last time in `close`. Until `clear` succeeds, the guard finds, reads and writes no blocks.

    Args:
        tier: any tier. The guard owns it from now on.
        clock: monotonic seconds.

    Attributes:
        inner: the wrapped tier.
        shared: True if machines share the wrapped tier.

    Thread: the thread of the wrapped tier. Cost: one Python call and one dictionary access in addition to
    each call of the tier.
    """

    def __init__(self, tier: SecondaryTier, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner, self._clock = tier, clock
        self.name, self.identity = tier.name, tier.identity
        self.block_bytes, self.stored_bytes = tier.block_bytes, tier.stored_bytes
        self._shared = tier if isinstance(tier, SharedTier) else None
        self._grouped = tier if isinstance(tier, GroupedTier) else None
        self.shared = self._shared is not None
        self.probe_timeout_s = self._shared.probe_timeout_s if self._shared else 0.0
        self.group_blocks = self._grouped.group_blocks if self._grouped else 1
        self._failing: dict[str, _Failures] = {}
        self._paused_until = 0.0
        self._must_clear = self._is_closed = self._gave_up = self._must_close = False
        self._close_backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._close_again_at = 0.0
        self._num_rows: dict[int, int] = {}  # of each job in flight
        self._doubtful: set[int] = set()  # jobs whose results may be lost
        self._doubtful_since = 0.0
        self._ended: list[JobResult] = []
        self._num_errors = self._num_failed = self._num_dropped = 0
        self._last_stats = TierStats()
        self._log = RateLimitedLog("kvoffload.tiers")

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return self._call_unless_paused("begin_request", None, self.inner.begin_request, request_id)

    def extend_path(self, request: object, path: Keys) -> None:
        if request is not None and self._grouped is not None:
            self._call_unless_paused("extend_path", None, self._grouped.extend_path, request, path)

    def finish_request(self, request: object, path: Keys) -> None:
        if request is not None and not self._is_closed:
            self._call("finish_request", None, self.inner.finish_request, request, path)

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        return self._mask("contains", self.inner.contains, keys, request)

    def missed(self, keys: Keys) -> None:
        self._call_unless_paused("missed", None, self.inner.missed, keys)

    def set_tenants(self, quotas: Mapping[str, Quota], owner_of: OwnerOf) -> None:
        self.inner.set_tenants(quotas, owner_of)

    def tenants(self) -> dict[str, TenantStats]:
        nothing: dict[str, TenantStats] = {}
        return nothing if self._is_closed else self._call("tenants", nothing, self.inner.tenants)

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        if self._shared is None:
            return np.zeros(len(keys), np.bool_)
        return self._mask("unknown", self._shared.unknown, keys, request)

    def cut(self, keys: Keys, room: int) -> int:
        count, grouped = min(room, len(keys)), self._grouped
        if grouped is None:
            return count
        return self._call_unless_paused(
            "cut", count, lambda: check_integer("cut", grouped.cut(keys, room), count, 0)
        )

    def submit_probe(self, keys: Keys) -> int:
        if self._shared is None:
            return NO_JOB
        return self._submit("submit_probe", self._shared.submit_probe, keys)

    def read_room(self, keys: Keys) -> int:
        count = len(keys)
        return self._call_unless_paused(
            "read_room", count, lambda: check_integer("read_room", self.inner.read_room(keys), count, 0)
        )

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """Start a read; returns the job's number, or `NO_JOB` if the tier raises or is paused."""
        return self._submit("submit_read", self.inner.submit_read, keys, pool, rows)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        nothing = (NO_JOB, np.zeros(len(keys), np.bool_))
        if self._is_paused():
            self._num_dropped += len(keys)
            return nothing
        begun = self._call(
            "submit_write", nothing, self.inner.submit_write, keys, pool, rows, request, num_blocks=len(keys)
        )
        if begun is nothing:
            return nothing
        try:
            job, accepted = begun
            num_accepted = int(np.count_nonzero(_checked_mask(accepted, len(keys))))
            if num_accepted == 0 and job != NO_JOB:
                raise ValueError("a job that writes no block")
            return self._registered(job, num_accepted), accepted
        except (TypeError, ValueError) as error:
            self._note_failure("submit_write", len(keys), error)
            self._give_up("`submit_write` named no new job")
            return nothing

    @property
    def queue_room(self) -> int:
        """Room in the tier's write queue, in blocks.

        ``sys.maxsize`` during a pause, in which the guard drops all offers anyway.
        """
        return self._call_unless_paused(
            "queue_room",
            sys.maxsize,
            lambda: check_integer("queue_room", self.inner.queue_room, sys.maxsize, 0),
        )

    def finished(self) -> list[JobResult]:
        if not self._is_closed:
            nothing: list[JobResult] = []
            for result in self._call("finished", nothing, self._results):
                self._end(result)
            self._end_doubtful()
        elif self.is_stuck and self._clock() >= self._close_again_at:
            self._try_close()
            self._end_jobs_if_closed()
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Keys) -> int:
        return self._call_unless_paused("delete", 0, self.inner.delete, keys)

    def clear(self) -> None:
        self._must_clear = True
        self._try_clear()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        nothing: list[tuple[list[bytes], bool]] = []
        shared = self._shared
        if shared is None or self._is_closed:
            return nothing
        return self._call("take_changes", nothing, lambda: _checked_changes(shared.take_changes()))

    def drain(self, timeout_s: float) -> bool:
        """Wait for all jobs; returns False on time-out, if `clear` still fails, or if the tier is closed."""
        if self._must_clear:
            self._try_clear()
        if self._must_clear or self._is_closed:
            return False
        return self._call("drain", False, self.inner.drain, timeout_s)

    def stats(self) -> TierStats:
        """Return the tier's counters plus the guard's counts of failures.

        If the tier's `stats` raises, the tier's last counters are used.
        """
        if not self._is_closed:
            self._last_stats = self._call("stats", self._last_stats, self._inner_stats)
        stats = self._last_stats
        return replace(
            stats,
            failed=stats.failed + self._num_failed,
            dropped=stats.dropped + self._num_dropped,
            errors=stats.errors + self._num_errors,
        )

    def close(self) -> None:
        if not self._is_closed:
            if self._must_clear:
                self._try_clear()  # last chance: a later process would find blocks from before the reset
            self._is_closed = True
            self._try_close()
        elif self._must_close:
            self._try_close()

    @property
    def is_stuck(self) -> bool:
        """True if the guard has given up the tier, but `close` has failed and jobs keep their rows."""
        return self._gave_up and self._must_close and bool(self._num_rows)

    # ---- calls

    def _call_unless_paused(
        self, method: str, default: T, call: Callable[..., T], *arguments: object, num_blocks: int = 0
    ) -> T:
        if self._is_paused():
            return default
        return self._call(method, default, call, *arguments, num_blocks=num_blocks)

    def _call(
        self, method: str, default: T, call: Callable[..., T], *arguments: object, num_blocks: int = 0
    ) -> T:
        try:
            answer = call(*arguments)
        except Exception as error:
            self._note_failure(method, num_blocks, error)
            return default
        if self._failing:
            self._failing.pop(method, None)
        return answer

    def _mask(self, method: str, call: Callable[..., Mask], keys: Keys, request: object | None) -> Mask:
        nothing = np.zeros(len(keys), np.bool_)
        return self._call_unless_paused(
            method, nothing, lambda: _checked_mask(call(keys, request), len(keys))
        )

    def _submit(self, method: str, call: Callable[..., int], keys: Keys, *arguments: object) -> int:
        job = self._call_unless_paused(method, NO_JOB, call, keys, *arguments, num_blocks=len(keys))
        try:
            return self._registered(job, len(keys))
        except TypeError as error:
            self._note_failure(method, len(keys), error)
            self._give_up(f"`{method}` named no new job")
            return NO_JOB

    def _registered(self, job: object, num_rows: int) -> int:
        """Record a job in flight, unless it is `NO_JOB`; return its number.

        Raises: `TypeError` if `job` is not a number, or if a job with this number is already in flight.
        """
        if not isinstance(job, (int, np.integer)) or job in self._num_rows:
            raise TypeError(f"{job!r} is no new job")
        if job != NO_JOB:
            self._num_rows[int(job)] = num_rows
        return int(job)

    def _results(self) -> list[JobResult]:
        results = self.inner.finished()
        for result in results:
            if not isinstance(result, JobResult) or not isinstance(result.job, (int, np.integer)):
                raise TypeError(f"{result!r} is no result of a job")
        return results

    def _inner_stats(self) -> TierStats:
        stats = self.inner.stats()
        if not isinstance(stats, TierStats):
            raise TypeError(f"{stats!r} where TierStats should be")
        return stats

    # ---- failures

    def _is_paused(self) -> bool:
        """Return True while the tier must not be called. After a pause, retries a failed `clear`."""
        if self._is_closed or (self._paused_until and self._clock() < self._paused_until):
            return True
        self._paused_until = 0.0
        if self._must_clear:
            self._try_clear()
        return self._must_clear

    def _note_failure(self, method: str, num_blocks: int, error: Exception) -> None:
        self._num_errors += 1
        self._num_failed += num_blocks
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        verb = {"submit_probe": "probed", "submit_read": "read", "submit_write": "written"}.get(method)
        effect = f"{method} failed" if verb is None else f"{num_blocks} blocks were not {verb}"
        text = "tier %s: %s: %s: %s%s"
        self._log.warn(f"{method} {id(self)}", text, self.name, effect, type(error).__name__, error, place)
        failures = self._failing.setdefault(method, _Failures())
        failures.count += 1
        if failures.count >= _MAX_FAILURES and self._clock() >= self._paused_until:
            pause_s = failures.backoff.next_s()
            self._paused_until = self._clock() + pause_s
            text = "tier %s: not used for %.0f s, because %s failed %d times in a row"
            self._log.warn(f"pause {id(self)}", text, self.name, pause_s, method, failures.count)

    def _end(self, result: JobResult) -> None:
        """Accept the result of a job. A result without a job in flight counts as a failure."""
        num_rows = self._num_rows.pop(result.job, None)
        self._doubtful.discard(result.job)
        if num_rows is None:
            self._note_failure("finished", 0, KeyError(f"job {result.job} is not in flight"))
            return
        try:
            _check_result(result, num_rows)
        except (TypeError, ValueError) as error:
            self._note_failure("finished", num_rows, error)
            result = JobResult(result.job, np.zeros(num_rows, np.bool_), 0.0)
        self._ended.append(result)

    def _end_doubtful(self) -> None:
        """Close the tier if jobs are still in flight 10 s after `finished` has raised."""
        now = self._clock()
        if "finished" in self._failing and not self._doubtful:
            self._doubtful, self._doubtful_since = {*self._num_rows}, now
        if not self._doubtful or now - self._doubtful_since < _JOBS_END_WITHIN_S:
            return
        self._doubtful.clear()
        self._give_up(f"{len(self._num_rows)} jobs did not end after `finished` failed")

    def _give_up(self, why: str) -> None:
        """Close the tier for good, and end its jobs as failed."""
        self._gave_up = True
        self.close()
        self._log.error(f"closed {id(self)}", "tier %s: closed for good, because %s", self.name, why)
        self._end_jobs_if_closed()

    def _end_jobs_if_closed(self) -> None:
        """End the jobs as failed if `close` has succeeded: nothing accesses their rows any more."""
        if not self._must_close:
            self._num_failed += sum(self._num_rows.values())
            self._ended += [
                JobResult(job, np.zeros(count, np.bool_), 0.0) for job, count in self._num_rows.items()
            ]
            self._num_rows.clear()

    def _try_close(self) -> None:
        self._must_close = not self._call("close", False, self._close_inner)
        self._close_again_at = self._clock() + self._close_backoff.next_s()

    def _close_inner(self) -> bool:
        self.inner.close()
        return True

    def _try_clear(self) -> None:
        if not self._is_closed:
            self._must_clear = not self._call("clear", False, self._clear_inner)

    def _clear_inner(self) -> bool:
        self.inner.clear()
        return True


def _checked_mask(mask: Mask, count: int) -> Mask:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"{type(mask).__name__} where a mask of {count} blocks should be")
    if mask.shape != (count,):
        raise ValueError(f"{mask.shape} answers for {count} blocks")
    return mask


def _check_result(result: JobResult, num_rows: int) -> None:
    _checked_mask(result.ok, num_rows)
    if result.stale is not None:
        _checked_mask(result.stale, num_rows)
    if not finite(result.seconds) >= 0.0:
        raise ValueError(f"a job of {result.seconds!r} seconds")


def _checked_changes(changes: list[tuple[list[bytes], bool]]) -> list[tuple[list[bytes], bool]]:
    for keys, _ in changes:
        if not all(isinstance(key, bytes) for key in keys):
            raise TypeError("changed blocks are no keys")
    return changes
