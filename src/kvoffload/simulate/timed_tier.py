"""A disk tier in simulated time. It decides as a real tier does, and its jobs take as long as on a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffload.core.plans import StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.simulate.event_queue import Events, Link
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import JobResult, Mask
from kvoffload.tiers.simulated import SimulatedTier
from kvoffload.transfer import Blocks, Rows


class TimedTier(SimulatedTier):
    """A `SimulatedTier` whose jobs end when a simulated link has moved their bytes.

    Reads and writes have separate links. A block cannot be read while it is being written.

    Args:
        name: name of the tier in reports.
        moved_bytes: number of bytes that a link moves to read or write one block.
        wake: called each time a job has ended.
        options: keyword arguments of `SimulatedTier`.

    Attributes:
        reads, writes: links of the disk, one for each direction.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        name: str,
        events: Events,
        reads: Link,
        writes: Link,
        moved_bytes: int,
        wake: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(capacity_blocks, **options)
        self.name, self._events, self._wake = name, events, wake
        self.reads, self.writes, self._moved_bytes = reads, writes, moved_bytes

    def share(self, first: TimedTier) -> None:
        """Use the blocks and the write budget of another engine's tier from now on, but keep separate jobs.

        Call this method before any other method.
        """
        self._manager, self._purse = first._manager, first._purse

    def contains(self, keys: Keys, request: object | None = None) -> Mask:
        if isinstance(request, RequestContext):
            request.extend(keys)  # Protects these blocks from eviction by this request's writes.
        readable: Mask = self._manager.ready_slots_of(keys) >= 0
        return readable

    def submit_read(self, keys: Keys, pool: Blocks, rows: Rows) -> int:
        ok = self._manager.ready_slots_of(keys) >= 0
        num_blocks = int(np.count_nonzero(ok))
        self._counts.read += num_blocks
        return self._begin(self.reads, num_blocks, ok, lambda: None)

    def begin_write(self, plan: StorePlan) -> int:
        """Begin to write accepted blocks. They become readable when the link has moved their bytes."""
        ok = np.ones(len(plan), np.bool_)
        return self._begin(self.writes, len(plan), ok, lambda: self._manager.complete_store(plan))

    def _begin(self, link: Link, num_blocks: int, ok: Mask, done: Callable[[], None]) -> int:
        self._next_job += 1
        job, since = self._next_job, self._events.now

        def end() -> None:
            done()
            self._ended.append(JobResult(job, ok, self._events.now - since))
            self._wake()

        link.submit(num_blocks * self._moved_bytes, end)
        return job
