"""Base classes of tiers that distribute blocks over member tiers, and split each job by member.

Subclasses decide which member gets a key.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

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
from kvoffload.transfer import Blocks, Rows

Member = TypeVar("Member", bound=SecondaryTier)


@dataclass(eq=False)
class _DividedRequest:
    """The members' records of one request, by member number."""

    request_id: str
    records: dict[int, object]


@dataclass(eq=False)
class _DividedJob:
    """A job that is split among members. `remaining` counts the members that have not finished their part."""

    number: int
    ok: Mask
    remaining: int
    seconds: float = 0.0
    stale: Mask | None = None


class DividedTier(SecondaryTier, Generic[Member]):
    """A tier that assigns each key to one member. A key without a member counts as absent.

    If a member fails or hangs, its blocks are misses; the blocks of other members are not affected. Members
    must not raise.

    Thread: one. This thread also calls the members.
    """

    def __init__(self) -> None:
        # (member, its job) -> the divided job, and the member's rows of that job.
        self._parts: dict[tuple[int, int], tuple[_DividedJob, npt.NDArray[np.int64]]] = {}
        self._results: list[JobResult] = []
        self._next_job = 0

    @abstractmethod
    def members(self) -> Mapping[int, Member]:
        """Return all members by number, including former members that still have jobs in flight.

        A new member never gets the number of a former member.
        """

    @abstractmethod
    def shares(self, keys: Keys) -> list[tuple[int, Member, npt.NDArray[np.int64]]]:
        """Split a batch of keys; returns (number, member, rows of the batch) for each member with keys."""

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        records = {number: tier.begin_request(request_id) for number, tier in self.members().items()}
        return _DividedRequest(request_id, records)

    def finish_request(self, request: object, path: Keys) -> None:
        shares = {number: rows for number, _, rows in self.shares(path)}
        no_rows = np.empty(0, np.int64)
        for number, tier in self.members().items():
            tier.finish_request(self._record(request, number, tier), path.take(shares.get(number, no_rows)))

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        present = np.zeros(len(keys), np.bool_)
        for number, tier, rows in self.shares(keys):
            present[rows] = tier.contains(_take(keys, rows), self._record(request, number, tier))
        return present

    def missed(self, keys: Keys) -> None:
        for _, tier, rows in self.shares(keys):
            tier.missed(_take(keys, rows))

    def read_room(self, keys: Keys) -> int:
        room = len(keys)
        for _, tier, rows in self.shares(keys):
            if (count := tier.read_room(_take(keys, rows))) < len(rows):
                room = min(room, int(rows[count]))
        return room

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked = checked_rows(keys, pool, rows, self.block_bytes)
        shares = self.shares(keys)
        begun = [
            (number, tier.submit_read(_take(keys, at), pool, checked[at]), at) for number, tier, at in shares
        ]
        return self._begin(len(keys), begun)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        checked, begun = checked_rows(keys, pool, rows, self.block_bytes), []
        accepted = np.zeros(len(keys), np.bool_)
        for number, tier, at in self.shares(keys):
            record = self._record(request, number, tier)
            job, accepted[at] = tier.submit_write(_take(keys, at), pool, checked[at], record)
            begun.append((number, job, at[accepted[at]]))
        if not accepted.any():
            return NO_JOB, accepted
        # The result has one row for each accepted block.
        row_of = np.cumsum(accepted) - 1
        count = int(np.count_nonzero(accepted))
        return self._begin(count, [(number, job, row_of[at]) for number, job, at in begun]), accepted

    def finished(self) -> list[JobResult]:
        for number, tier in self.members().items():
            for result in tier.finished():
                job, rows = self._parts.pop((number, result.job))
                job.ok[rows] = result.ok
                if result.stale is not None:
                    job.stale = np.zeros(len(job.ok), np.bool_) if job.stale is None else job.stale
                    job.stale[rows] = result.stale
                job.seconds = max(job.seconds, result.seconds)
                job.remaining -= 1
                if job.remaining == 0:
                    self._results.append(JobResult(job.number, job.ok, job.seconds, job.stale))
        results, self._results = self._results, []
        return results

    def delete(self, keys: Keys) -> int:
        return sum(tier.delete(keys.take(rows)) for _, tier, rows in self.shares(keys))

    def clear(self) -> None:
        for tier in self.members().values():
            tier.clear()

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        # Every member is drained, even after one hung.
        drained = [tier.drain(max(0.0, deadline - time.monotonic())) for tier in self.members().values()]
        return all(drained)

    @property
    def queue_room(self) -> int:
        return min(tier.queue_room for tier in self.members().values())

    def stats(self) -> TierStats:
        return sum_of(tier.stats() for tier in self.members().values())

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for tier in self.members().values():
                stack.callback(tier.close)

    # ---- inside

    def _record(self, request: object | None, number: int, tier: SecondaryTier) -> object | None:
        if request is None:
            return None
        if not isinstance(request, _DividedRequest):
            raise MisuseError(f"this tier has no such request: {request!r}")
        if number not in request.records:  # the member has joined later
            request.records[number] = tier.begin_request(request.request_id)
        return request.records[number]

    def _begin(self, count: int, begun: list[tuple[int, int, npt.NDArray[np.int64]]]) -> int:
        """Register a job of `count` blocks; return its number.

        Args:
            begun: for each member: the member's number, its job, and the indices of its blocks in the batch.
        """
        parts = [(number, job, rows) for number, job, rows in begun if job != NO_JOB]
        job = _DividedJob(self._next_job, np.zeros(count, np.bool_), len(parts))
        self._next_job += 1
        self._parts.update({(number, part): (job, rows) for number, part, rows in parts})
        if not parts:
            self._results.append(JobResult(job.number, job.ok, 0.0))
        return job.number


class DividedSharedTier(DividedTier[SharedTier], SharedTier):
    """A `DividedTier` of tiers that machines share."""

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        unknown = np.zeros(len(keys), np.bool_)
        for number, tier, rows in self.shares(keys):
            unknown[rows] = tier.unknown(_take(keys, rows), self._record(request, number, tier))
        return unknown

    def submit_probe(self, keys: Keys) -> int:
        shares = self.shares(keys)
        begun = [(number, tier.submit_probe(_take(keys, rows)), rows) for number, tier, rows in shares]
        return self._begin(len(keys), begun) if any(job != NO_JOB for _, job, _ in begun) else NO_JOB

    def take_changes(self) -> list[tuple[list[bytes], bool]]:
        return [change for tier in self.members().values() for change in tier.take_changes()]


def _take(keys: Keys, rows: npt.NDArray[np.int64]) -> Keys:
    """Return these rows of the keys, in order. If all rows are selected, return `keys` without a copy."""
    return keys if len(rows) == len(keys) else keys.take(rows)


def sum_of(several: Iterable[TierStats]) -> TierStats:
    """Sum the counters of tiers. `write_budget_bytes` is None if a tier has no budget."""
    counts, total = [vars(stats) for stats in several], dict[str, Any]()
    for counter in fields(TierStats):
        values = [count[counter.name] for count in counts]
        total[counter.name] = None if None in values else sum(values)
    return TierStats(**total)
