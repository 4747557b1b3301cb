"""A guard around any tier: an exception that a call raises becomes a miss and a counted failure.

Owns the back-off from a tier that raises, and the end of its jobs. Does not know what a tier keeps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import (
    NO_JOB,
    GroupedTier,
    JobResult,
    Mask,
    SecondaryTier,
    SharedTier,
    TierStats,
)
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks, Rows

T = TypeVar("T")

_RESTS_AFTER = 3
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 60.0
_JOBS_END_WITHIN_S = 10.0


@dataclass
class _Call:
    """Failures in a row of one method, and how long the tier rests after the next one."""

    num_failures: int = 0
    rest_s: float = _FIRST_REST_S


class GuardedTier(SharedTier, GroupedTier):
    """A tier whose methods raise no `Exception`; in all else it behaves as the wrapped tier.

    It has the methods of all kinds of tiers. Around a tier that is not shared or not grouped, the methods of
    `SharedTier` or `GroupedTier` answer as a tier that knows all its blocks and keeps no groups.

    - A call that raises answers as a tier that has nothing and takes nothing: blocks are misses, and
      `submit_read`, as `submit_write`, returns `NO_JOB`.
    - After three failures in a row of one method the tier rests: it is not asked, and takes nothing, for 1 s,
      then 2 s, up to 60 s, until that method succeeds. Jobs in flight are still collected.
    - If `finished` raises, results may be lost. Jobs that were in flight then and have not ended 10 s later
      are ended: the tier is closed, so that nothing writes to their rows, and they are reported as failed.
      After that the tier is not used again. If `close` raises too, the jobs do not end and keep their rows.
    - If `clear` raises, the tier may still have blocks from before the reset: it is not asked until a
      repeated `clear` has succeeded.

    Args:
        tier: any tier. The guard owns it from now on.
        clock: monotonic seconds.

    Attributes:
        inner: the wrapped tier.
        shared: True if machines share the wrapped tier.

    Thread: as the tier. Cost: one Python call and one dictionary access more for each call.
    """

    def __init__(self, tier: SecondaryTier, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner, self._clock = tier, clock
        self.name, self.identity = tier.name, tier.identity
        self.block_bytes, self.stored_bytes = tier.block_bytes, tier.stored_bytes
        self._shared = tier if isinstance(tier, SharedTier) else None
        self._grouped = tier if isinstance(tier, GroupedTier) else None
        self.shared = self._shared is not None
        self.probe_timeout_s = self._shared.probe_timeout_s if self._shared else 0.0
        self.measured_read = self._shared.measured_read if self._shared else None
        self.group_blocks = self._grouped.group_blocks if self._grouped else 1
        self._failing: dict[str, _Call] = {}
        self._rests_until = 0.0
        self._must_clear = self._is_closed = False
        # Job -> its number of rows. Jobs whose results may be lost, and since when.
        self._open: dict[int, int] = {}
        self._doubtful: set[int] = set()
        self._doubtful_since = 0.0
        self._ended: list[JobResult] = []
        self._num_errors = self._num_failed = self._num_dropped = 0
        self._last_stats = TierStats()
        self._log = RateLimitedLog("kvoffload.tiers")

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return self._ask("begin_request", None, self.inner.begin_request, request_id)

    def follow(self, request: object, path: Keys) -> None:
        if request is not None and self._grouped is not None:
            self._ask("follow", None, self._grouped.follow, request, path)

    def finish_request(self, request: object, path: Keys) -> None:
        if request is not None and not self._is_closed:
            self._call("finish_request", None, self.inner.finish_request, request, path)

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        return self._mask("contains", self.inner.contains, keys, request)

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        if self._shared is None:
            return np.zeros(len(keys), np.bool_)
        return self._mask("unknown", self._shared.unknown, keys, request)

    def cut(self, keys: Keys, room: int) -> int:
        count = min(room, len(keys))
        return count if self._grouped is None else self._ask("cut", count, self._grouped.cut, keys, room)

    def submit_probe(self, keys: Keys) -> int:
        if self._shared is None:
            return NO_JOB
        job = self._ask("submit_probe", NO_JOB, self._shared.submit_probe, keys, num_blocks=len(keys))
        return self._begun(job, len(keys))

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        """As `SecondaryTier.submit_read`; `NO_JOB` if the tier does not begin it."""
        read = self.inner.submit_read
        job = self._ask("submit_read", NO_JOB, read, keys, pool, rows, num_blocks=len(keys))
        return self._begun(job, len(keys))

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        nothing = (NO_JOB, np.zeros(len(keys), np.bool_))
        if self._rests():
            self._num_dropped += len(keys)
            return nothing
        write = self.inner.submit_write
        job, taken = self._call(
            "submit_write", nothing, write, keys, pool, rows, request, num_blocks=len(keys)
        )
        return self._begun(job, int(np.count_nonzero(taken))), taken

    @property
    def queue_room(self) -> int:
        """As `SecondaryTier.queue_room`; without bound while the tier takes nothing: offers are dropped."""
        return self._ask("queue_room", sys.maxsize, lambda: self.inner.queue_room)

    def finished(self) -> list[JobResult]:
        if not self._is_closed:
            nothing: list[JobResult] = []
            for result in self._call("finished", nothing, self.inner.finished):
                self._take_in(result)
            self._doubt()
        ended, self._ended = self._ended, []
        return ended

    def delete(self, keys: Keys) -> int:
        return self._ask("delete", 0, self.inner.delete, keys)

    def clear(self) -> None:
        self._must_clear = True
        self._clear()

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        nothing: list[tuple[list[bytes], bool]] = []
        if self._shared is None or self._is_closed:
            return nothing
        return self._call("take_changes", nothing, self._shared.take_changes)

    def drain(self, timeout_s: float) -> bool:
        """As `SecondaryTier.drain`; False also while a `clear` has failed, and once the tier is closed."""
        if self._must_clear:
            self._clear()
        if self._must_clear or self._is_closed:
            return False
        return self._call("drain", False, self.inner.drain, timeout_s)

    def stats(self) -> TierStats:
        """As `SecondaryTier.stats`, with the blocks of calls that raised; the last known if it raises."""
        if not self._is_closed:
            self._last_stats = self._call("stats", self._last_stats, self.inner.stats)
        found = self._last_stats
        return replace(
            found,
            failed=found.failed + self._num_failed,
            dropped=found.dropped + self._num_dropped,
            errors=found.errors + self._num_errors,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._call("close", None, self.inner.close)

    # ---- inside

    def _ask(
        self, method: str, otherwise: T, call: Callable[..., T], *arguments: object, num_blocks: int = 0
    ) -> T:
        """Call a method of the tier unless it rests."""
        if self._rests():
            return otherwise
        return self._call(method, otherwise, call, *arguments, num_blocks=num_blocks)

    def _call(
        self, method: str, otherwise: T, call: Callable[..., T], *arguments: object, num_blocks: int = 0
    ) -> T:
        """Call a method of the tier; `otherwise` if it raises."""
        try:
            found = call(*arguments)
        except Exception as error:
            self._failed(method, num_blocks, error)
            return otherwise
        if self._failing:
            self._failing.pop(method, None)
        return found

    def _mask(self, method: str, call: Callable[..., Mask], keys: Keys, request: object | None) -> Mask:
        nothing = np.zeros(len(keys), np.bool_)
        found = self._ask(method, nothing, call, keys, request)
        if found.shape != nothing.shape:
            self._failed(method, 0, ValueError(f"{found.shape} answers for {len(keys)} blocks"))
            return nothing
        return found

    def _rests(self) -> bool:
        """Whether the tier is not to be asked now."""
        if self._is_closed:
            return True
        if self._rests_until and self._clock() < self._rests_until:
            return True
        self._rests_until = 0.0
        if self._must_clear:
            self._clear()
        return self._must_clear

    def _failed(self, method: str, num_blocks: int, error: Exception) -> None:
        self._num_errors += 1
        self._num_failed += num_blocks
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        done = {"submit_probe": "asked for", "submit_read": "read", "submit_write": "written"}.get(method)
        what = f"{method} failed" if done is None else f"{num_blocks} blocks were not {done}"
        self._log.warn(
            f"{method} {id(self)}",
            "tier %s: %s: %s: %s%s",
            self.name,
            what,
            type(error).__name__,
            error,
            where,
        )
        failing = self._failing.setdefault(method, _Call())
        failing.num_failures += 1
        if failing.num_failures >= _RESTS_AFTER and self._clock() >= self._rests_until:
            self._rests_until = self._clock() + failing.rest_s
            text = "tier %s: it is not used for %.0f s: %s has failed %d times in a row"
            self._log.warn(f"rest {id(self)}", text, self.name, failing.rest_s, method, failing.num_failures)
            failing.rest_s = min(2.0 * failing.rest_s, _LONGEST_REST_S)

    def _begun(self, job: int, num_rows: int) -> int:
        if job != NO_JOB:
            self._open[job] = num_rows
        return job

    def _take_in(self, result: JobResult) -> None:
        num_rows = self._open.pop(result.job, None)
        self._doubtful.discard(result.job)
        if num_rows is None:
            self._failed("finished", 0, KeyError(f"job {result.job} is not in flight"))
        elif result.ok.shape != (num_rows,):
            self._failed("finished", num_rows, ValueError(f"{result.ok.shape} results for {num_rows} blocks"))
            self._ended.append(JobResult(result.job, np.zeros(num_rows, np.bool_), result.seconds))
        else:
            self._ended.append(result)

    def _doubt(self) -> None:
        """After `finished` has raised: note the jobs in flight, and end them if they do not end."""
        now = self._clock()
        if "finished" in self._failing and not self._doubtful:
            self._doubtful, self._doubtful_since = {*self._open}, now
        if not self._doubtful or now - self._doubtful_since < _JOBS_END_WITHIN_S:
            return
        self._doubtful.clear()
        self._is_closed = True
        num_errors = self._num_errors
        self._call("close", None, self.inner.close)
        text = "tier %s: %d jobs have not ended since `finished` failed; it is closed and not used any more"
        self._log.error(f"closed {id(self)}", text, self.name, len(self._open))
        if self._num_errors == num_errors:  # nothing writes to their rows any more
            self._num_failed += sum(self._open.values())
            self._ended += [
                JobResult(job, np.zeros(count, np.bool_), 0.0) for job, count in self._open.items()
            ]
            self._open.clear()

    def _clear(self) -> None:
        if self._is_closed:
            return
        self._must_clear = not self._call("clear", False, self._cleared)

    def _cleared(self) -> bool:
        self.inner.clear()
        return True
