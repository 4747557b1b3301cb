"""Several tiers as one: each key belongs to one of them, and all of them work at once.

Owns which key belongs to which tier, and the jobs that are divided among them. Does not know what a tier
keeps.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, MisuseError
from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import (
    NO_JOB,
    JobResult,
    Mask,
    SecondaryTier,
    TierStats,
    checked_rows,
    key_digests,
)
from kvoffload.tiers.rate_limited_log import RateLimitedLog
from kvoffload.transfer import Blocks, Rows


@dataclass(eq=False)
class _Request:
    """The records that the tiers keep of one request."""

    records: list[object]


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


class StripedTier(SecondaryTier):
    """Tiers side by side, of any kind: disks, simulated ones, your own.

    A key belongs to one of them, by highest random weight (Thaler and Ravishankar, "Using name-based mappings
    to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998): the tiers' identities decide, not
    their order. A tier that is added takes its share of the keys from the others, and no other key moves.
    Each sees its share of every prefix, in order. A tier that fails or hangs costs only its own blocks, also
    if it raises an exception instead of beginning its part of a job; if none begins, it passes the first on.

    Args:
        tiers: of one block size. This tier owns them from now on: `close` closes them.

    Attributes:
        identity: that of the first tier.
        stored_bytes: the largest of the tiers'.

    Thread: one, as for its tiers. Cost: a digest a key and a weight for each tier; 50 ns a key with four.
    Raises: `ConfigError` for no tiers, tiers of different `block_bytes` or equal identity, and for those that
        write blocks in groups.
    """

    def __init__(self, tiers: Sequence[SecondaryTier]) -> None:
        identities = [tier.identity for tier in tiers]
        sizes = [tier.block_bytes for tier in tiers]
        if not tiers:
            raise ConfigError("tiers", [], "allowed: one tier or more")
        if len({*sizes}) > 1:
            raise ConfigError("tiers", f"blocks of {sizes} bytes", "allowed: blocks of one size")
        if len({*identities}) < len(identities):
            raise ConfigError("tiers", f"identities {identities}", "allowed: each tier once")
        if (groups := max(tier.group_blocks for tier in tiers)) > 1:
            raise ConfigError("tiers", f"groups of {groups}", "neighbours are parted here; give pack=0")
        self._tiers = list(tiers)
        self._identities = np.array(identities, np.uint64)
        self.name = "+".join(dict.fromkeys(tier.name for tier in tiers))
        self.identity, self.block_bytes = identities[0], sizes[0]
        self.stored_bytes = max(tier.stored_bytes for tier in tiers)
        self.written_before = sum((Counter(tier.written_before) for tier in tiers), Counter[int]())
        self.shared = any(tier.shared for tier in tiers)
        self.probe_timeout_s = max(tier.probe_timeout_s for tier in tiers)
        # (number of a tier, that tier's job) -> the whole job, and the rows of it that this part has.
        self._parts: dict[tuple[int, int], tuple[_Job, npt.NDArray[np.int64]]] = {}
        self._results: list[JobResult] = []
        self._next_job = self._num_refused = 0
        self._log = RateLimitedLog("kvoffload.striped")

    # ---- requests

    def begin_request(self, request_id: str) -> object:
        return _Request([tier.begin_request(request_id) for tier in self._tiers])

    def finish_request(self, request: object, path: Keys) -> None:
        homes = self._homes(path)
        for number, record in enumerate(self._records(request)):
            self._tiers[number].finish_request(record, path.take(homes == number))

    # ---- blocks

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        records, found = self._records(request), np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            found[at] = tier.contains(keys.take(at), records[number])
        return found

    def unknown(self, keys: Keys, request: object | None = None) -> Mask:
        records, found = self._records(request), np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            found[at] = tier.unknown(keys.take(at), records[number])
        return found

    def submit_probe(self, keys: Keys) -> int:
        begun = [(number, tier.submit_probe(keys.take(at)), at) for number, tier, at in self._shares(keys)]
        parts = [part for part in begun if part[1] != NO_JOB]
        return self._begin(len(keys), parts) if parts else NO_JOB

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        checked, parts, refused = checked_rows(keys, pool, rows, self.block_bytes), [], _Refused()
        for number, tier, at in self._shares(keys):
            try:
                parts.append((number, tier.submit_read(keys.take(at), pool, checked[at]), at))
            except Exception as error:
                refused.add(error, len(at))
        self._pass_on(refused, has_begun=bool(parts))
        return self._begin(len(keys), parts)

    def submit_write(
        self, keys: Keys, pool: Blocks, rows: Rows, request: object | None = None
    ) -> tuple[int, Mask]:
        checked, parts, refused = checked_rows(keys, pool, rows, self.block_bytes), [], _Refused()
        records, taken = self._records(request), np.zeros(len(keys), np.bool_)
        for number, tier, at in self._shares(keys):
            try:
                part, taken[at] = tier.submit_write(keys.take(at), pool, checked[at], records[number])
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
        for number, tier in enumerate(self._tiers):
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
        for tier in self._tiers:
            tier.clear()

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        # Every tier is asked, even if one hangs.
        drained = [tier.drain(max(0.0, deadline - time.monotonic())) for tier in self._tiers]
        return all(drained)

    @property
    def queue_room(self) -> int:
        return min(tier.queue_room for tier in self._tiers)

    def stats(self) -> TierStats:
        """As `SecondaryTier.stats`, summed. There is no write budget if a tier has none."""
        counts = [vars(tier.stats()) for tier in self._tiers]
        total: dict[str, int | None] = {}
        for counter in fields(TierStats):
            values = [count[counter.name] for count in counts]
            total[counter.name] = None if None in values else sum(values)
        total["failed"] = (total["failed"] or 0) + self._num_refused
        return TierStats(**total)  # type: ignore[arg-type]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for tier in self._tiers:
                stack.callback(tier.close)

    # ---- inside

    def _homes(self, keys: Keys) -> npt.NDArray[np.intp]:
        """The number of each key's tier. It must never change: blocks on disks depend on it."""
        weights = key_digests(keys)[:, None] ^ self._identities
        weights *= np.uint64(0x9E3779B97F4A7C15)
        weights ^= weights >> np.uint64(32)
        weights *= np.uint64(0xD6E8FEB86659FD93)
        homes: npt.NDArray[np.intp] = np.argmax(weights, axis=1)
        return homes

    def _shares(self, keys: Keys) -> list[tuple[int, SecondaryTier, npt.NDArray[np.int64]]]:
        """The tiers that have a share of these keys: number, tier, rows of the share."""
        homes = self._homes(keys)
        numbers = np.unique(homes).tolist()
        return [(number, self._tiers[number], np.flatnonzero(homes == number)) for number in numbers]

    def _records(self, request: object | None) -> Sequence[object | None]:
        if request is None:
            return [None] * len(self._tiers)
        if not isinstance(request, _Request):
            raise MisuseError(f"this tier has no such request: {request!r}")
        return request.records

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
