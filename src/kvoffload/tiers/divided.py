"""One tier of several, whichever has which key: jobs that are divided among them, and put together again.

Does not know who has a key, nor what a tier keeps.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.errors import MisuseError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import (
    NO_JOB,
    JobResult,
    Mask,
    SecondaryTier,
    SharedTier,
    TierStats,
    checked_rows,
)
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks, Rows

Member = TypeVar("Member", bound=SecondaryTier)


@dataclass(eq=False)
class _Request:
    """The records that the members keep of one request, by their numbers."""

    request_id: str
    records: dict[int, object]

    def of(self, number: int, tier: SecondaryTier) -> object:
        """The record of a member; begun now if it has come since."""
        if number not in self.records:
            self.records[number] = tier.begin_request(self.request_id)
        return self.records[number]


@dataclass(eq=False)
class _Job:
    number: int
    ok: Mask
    remaining: int
    seconds: float = 0.0
    stale: Mask | None = None


@dataclass(eq=False)
class _Refused:
    """The blocks of tiers that raised an exception, and the first of these."""

    first: Exception | None = None
    num_blocks: int = 0

    def add(self, error: Exception, num_blocks: int) -> None:
        self.first = self.first or error
        self.num_blocks += num_blocks


class DividedTier(SecondaryTier, Generic[Member]):
    """Each key belongs to one member, or for now to none: then it is absent, and not written.

    A member that fails or hangs costs only its own blocks, also if it raises an exception instead of
    beginning its part of a job; if none begins, the first is passed on.

    Thread: one, as for its members.
    """

    def __init__(self) -> None:
        # (number of a member, that member's job) -> the whole job, and the rows of it that this part has.
        self._parts: dict[tuple[int, int], tuple[_Job, npt.NDArray[np.int64]]] = {}
        self._results: list[JobResult] = []
        self._next_job = self._num_refused = 0
        self._log = RateLimitedLog("kvoffload.divided")

    @abstractmethod
    def _members(self) -> Mapping[int, Member]:
        """All that may have a job under way. A number never stands for another member later."""

    @abstractmethod
    def _shares(self, keys: Keys) -> list[tuple[int, Member, npt.NDArray[np.int64]]]:
        """The members that have a share of these keys: number, member, rows of the batch."""

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        records = {number: tier.begin_request(request_id) for number, tier in self._members().items()}
        return _Request(request_id, records)

    def finish_request(self, request: object, path: Keys) -> None:
        shares = {number: at for number, _, at in self._shares(path)}
        nothing = np.empty(0, np.int64)
        for number, tier in self._members().items():
            tier.finish_request(self._record(request, number, tier), path.take(shares.get(number, nothing)))

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            found[at] = tier.contains(_part(keys, at), self._record(request, number, tier))
        return found

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked, parts, refused = checked_rows(keys, pool, rows, self.block_bytes), [], _Refused()
        for number, tier, at in self._shares(keys):
            try:
                parts.append((number, tier.submit_read(_part(keys, at), pool, checked[at]), at))
            except Exception as error:
                refused.add(error, len(at))
        self._pass_on(refused, has_begun=bool(parts))
        return self._begin(len(keys), parts)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        checked, parts, refused = checked_rows(keys, pool, rows, self.block_bytes), [], _Refused()
        taken = np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            record = self._record(request, number, tier)
            try:
                part, taken[at] = tier.submit_write(_part(keys, at), pool, checked[at], record)
            except Exception as error:
                refused.add(error, len(at))
                continue
            if part != NO_JOB:
                parts.append((number, part, at[taken[at]]))
        self._pass_on(refused, has_begun=bool(parts))
        if not parts:
            return NO_JOB, taken
        # The result has one row for each block that was taken.
        row_of = np.cumsum(taken) - 1
        count = int(np.count_nonzero(taken))
        return self._begin(count, [(number, part, row_of[at]) for number, part, at in parts]), taken

    def finished(self) -> list[JobResult]:
        for number, tier in self._members().items():
            for part in tier.finished():
                job, at = self._parts.pop((number, part.job))
                job.ok[at] = part.ok
                if part.stale is not None:
                    job.stale = np.zeros(len(job.ok), np.bool_) if job.stale is None else job.stale
                    job.stale[at] = part.stale
                job.seconds = max(job.seconds, part.seconds)
                job.remaining -= 1
                if job.remaining == 0:
                    self._results.append(JobResult(job.number, job.ok, job.seconds, job.stale))
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        return sum(tier.delete(keys.take(at)) for _, tier, at in self._shares(keys))

    def clear(self) -> None:
        for tier in self._members().values():
            tier.clear()

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        # Every tier is asked, even if one hangs.
        drained = [tier.drain(max(0.0, deadline - time.monotonic())) for tier in self._members().values()]
        return all(drained)

    @property
    def queue_room(self) -> int:
        return min(tier.queue_room for tier in self._members().values())

    def stats(self) -> TierStats:
        """As `SecondaryTier.stats`, summed. There is no write budget if a tier has none."""
        counts = [vars(tier.stats()) for tier in self._members().values()]
        total: dict[str, int | None] = {}
        for counter in fields(TierStats):
            values = [count[counter.name] for count in counts]
            total[counter.name] = None if None in values else sum(values)
        total["failed"] = (total["failed"] or 0) + self._num_refused
        return TierStats(**total)  # type: ignore[arg-type]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for tier in self._members().values():
                stack.callback(tier.close)

    # ---- inside

    def _record(self, request: object | None, number: int, tier: SecondaryTier) -> object | None:
        if request is None:
            return None
        if not isinstance(request, _Request):
            raise MisuseError(f"this tier has no such request: {request!r}")
        return request.of(number, tier)

    def _pass_on(self, refused: _Refused, *, has_begun: bool) -> None:
        """Raise the first exception if no part has begun; otherwise the caller must get the job."""
        if refused.first is None:
            return
        if not has_begun:
            raise refused.first
        self._num_refused += refused.num_blocks
        name, text = type(refused.first).__name__, "tier %s: a part of it did not begin %d blocks: %s: %s"
        self._log.warn("refused", text, self.name, refused.num_blocks, name, refused.first)

    def _begin(self, count: int, parts: list[tuple[int, int, npt.NDArray[np.int64]]]) -> int:
        """Begin a job of `count` rows from parts (tier, its job there, rows); returns its number."""
        job = _Job(self._next_job, np.zeros(count, np.bool_), len(parts))
        self._next_job += 1
        self._parts.update({(number, part): (job, at) for number, part, at in parts})
        if not parts:
            self._results.append(JobResult(job.number, job.ok, 0.0))
        return job.number


class DividedSharedTier(DividedTier[SharedTier], SharedTier):
    """A `DividedTier` of tiers that machines share."""

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            found[at] = tier.unknown(_part(keys, at), self._record(request, number, tier))
        return found

    def submit_probe(self, keys: Keys) -> int:
        begun = [(number, tier.submit_probe(_part(keys, at)), at) for number, tier, at in self._shares(keys)]
        parts = [part for part in begun if part[1] != NO_JOB]
        return self._begin(len(keys), parts) if parts else NO_JOB

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        return [change for tier in self._members().values() for change in tier.take_changes()]


def _part(keys: Keys, at: npt.NDArray[np.int64]) -> Keys:
    """These rows, in their order; a copy only if they are not all."""
    return keys if len(at) == len(keys) else keys.take(at)
