"""The jobs of requests: load a prefix, store blocks, finish, flush, close.

Jobs are coroutines on the thread that owns the manager. A job asks the manager for a plan, such as the slots
to load, and waits for tiers. Other threads copy and verify the bytes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.cache.copy_threads import CopyThreads
from kvoffload.cache.owner import Limit
from kvoffload.core.hints import Hints
from kvoffload.core.plans import LookupResult, ManagerStats
from kvoffload.core.request import RequestContext
from kvoffload.errors import GoneError, MisuseError
from kvoffload.node.node_manager import NodeManager
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.contract import Mask, TierStats
from kvoffload.tiers.memory import MemoryTier
from kvoffload.transfer.device_pins import DevicePins
from kvoffload.transfer.parts import Parts

_log = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int64]

_WAITS = (LookupResult.RETRY, LookupResult.HIT_PENDING)
_ATTEMPTS = 3
"""Largest number of lookups in one load. A load repeats the lookup if a block is damaged in RAM, because a
tier may have a copy. With shared RAM it also repeats the lookup if another process has evicted a block after
the lookup."""
_COPY_THREADS = 2
_UPDATE_PAUSE_S = 0.1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.005
_LONGEST_DRAIN_PAUSE_S = 0.1
"""Longest pause between two calls of the manager's `drain`, while a reset waits for the tiers. Each call also
repeats the reset of the tiers that failed to forget their blocks."""


class CacheStats(NamedTuple):
    """Counters of a `KVCache`.

    Attributes:
        hit_tokens: number of loaded tokens for each source. The sources are ``ram`` and the names of the
            tiers.
        ram: counters of RAM. If RAM is shared, each counter is the sum over all processes.
        tiers: counters of each tier, by name.
    """

    hit_tokens: dict[str, int]
    ram: ManagerStats
    tiers: dict[str, TierStats]


class Observer(Protocol):
    """A collector of metrics, such as `kvoffload.metrics.Collector`. The owner's thread calls its methods."""

    def count(self, metric: str, number: int = 1) -> None:
        """Add `number` to `metric`, a metric that the manager does not count."""

    def update(self) -> None:
        """Read the current counters of the manager."""


class Work:
    """The state of one request, shared by its jobs. The jobs of a request run one after another.

    Args:
        num_resets: value of `Jobs.num_resets` when the request began.
    """

    def __init__(self, hints: Hints, num_resets: int) -> None:
        self.hints, self.num_resets = hints, num_resets
        self.turn = asyncio.Lock()
        self.ctx: RequestContext | None = None
        self.finished = False


class Jobs:
    """The jobs of one cache.

    Args:
        manager: the manager of RAM and tiers. After `__init__` only the owner's thread may use the manager.
        ram: the memory of RAM's slots.
        block_tokens: tokens of a block, for the counters.
        close_ram: function that `close` calls last, to close RAM. If it is None, `close` calls `ram.close`.

    Attributes:
        manager: the manager, for the owner's thread only.
        ram: the memory of RAM's slots.
        pins: pins RAM for the engine's CUDA device, until `close`. Any thread may use it.
        num_resets: number of resets so far. Any thread may read it.

    Thread: the owner's, except `__init__`.
    """

    def __init__(
        self,
        manager: TieredManager,
        ram: MemoryTier,
        block_tokens: int,
        close_ram: Callable[[], None] | None = None,
    ) -> None:
        self.manager = manager
        self._close_ram = close_ram or ram.close
        self.ram, self._block_tokens = ram, block_tokens
        self._observer: Observer | None = None
        self.pins = DevicePins()
        self._threads = CopyThreads(_COPY_THREADS)
        self._polling: asyncio.Task[None] | None = None
        self.num_resets = 0

    async def load(
        self, work: Work, keys: Keys, first: int, parts: Parts, ids: BlockIds, limit: Limit
    ) -> int:
        """Load the leading blocks of `keys`, except the first `first` blocks, into the engine's blocks `ids`.

        Returns the number of leading blocks that are present, including the `first` skipped blocks. If a
        block in RAM is damaged, the load looks for a copy in the tiers. Without a sound copy, the prefix ends
        before this block.
        """
        async with work.turn:
            ctx = self._begun(work, keys)
            self.manager.restart_wait(ctx)
            present = first
            self._count("lookup_blocks", len(keys) - first)
            for _ in range(_ATTEMPTS):
                rest = keys[present:]
                num_ready = await self._num_ready(rest, ctx, limit)
                if num_ready == 0:
                    break
                try:
                    plan = self.manager.prepare_load(rest[:num_ready], ctx)
                except GoneError:
                    continue
                rows, damaged = ids[present : present + num_ready], np.empty(0, np.intp)
                try:
                    copy = functools.partial(self._copy_out, plan.keys, plan.slots, parts, rows)
                    sound = await self._threads.run(copy)
                    damaged = np.flatnonzero(~sound)
                    self._count("verification_failures", len(damaged))
                except BaseException:
                    self._count("failed_load_blocks", num_ready)
                    raise
                finally:
                    self.manager.complete_load(plan, damaged)
                if not len(damaged):
                    present += num_ready
                    break
                present += int(damaged[0])
            if self._observer is not None and present < len(keys):
                self.manager.count_misses(ctx, present, keys[present:])
            self._poll()
            return present

    async def store(self, work: Work, keys: Keys, parts: Parts, ids: BlockIds) -> int:
        """Copy the blocks of `keys` that RAM lacks from the engine's blocks `ids` into RAM.

        Returns the number of stored blocks.

        A request that began before a reset stores nothing, because its KV may come from the old weights.
        """
        async with work.turn:
            ctx = self._begun(work, keys)
            if work.num_resets != self.num_resets:
                return 0
            plan = self.manager.prepare_store(keys, ctx)
            if plan is None:
                return 0
            rows, arrived = ids[plan.rows], False
            try:
                if len(plan):
                    copy = functools.partial(self._copy_in, plan.keys, plan.slots, parts, rows)
                    await self._threads.run(copy)
                arrived = True
            finally:
                self.manager.complete_store(plan, success=arrived)
                self._poll()
            return len(plan)

    async def finish(self, work: Work, keys: Keys) -> None:
        """Finish a request, after its other jobs. A second call does nothing."""
        async with work.turn:
            if not work.finished:
                ctx = self._begun(work, keys)
                work.finished = True
                self.manager.finish_request(ctx)
                self._poll()

    async def flush(self, limit: Limit) -> bool:
        """Write all blocks of RAM to the tiers that lack them; see `TieredManager.flush`."""
        num_lost = self.manager.num_lost()
        self.manager.offer_all()
        pause_s = _SHORTEST_PAUSE_S
        # In short slices, so that other jobs run in between, and an interrupt of the caller ends the wait.
        while self.manager.poll() or not self.manager.drain(_LONGEST_PAUSE_S):
            if not limit.left_s():
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return self.manager.num_lost() == num_lost

    async def reset(self, limit: Limit) -> bool:
        """Forget every block in RAM and in the tiers.

        Returns False if a tier has not confirmed the reset in time, or if the lock of shared RAM was not free
        in time.
        """
        self.num_resets += 1
        self.manager.reset()
        pause_s = _SHORTEST_PAUSE_S
        while not self.manager.drain(_LONGEST_PAUSE_S):  # in short slices, so that other jobs run in between
            if not limit.left_s():
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_DRAIN_PAUSE_S)
            self.manager.poll()
        self._poll()
        ram = self.manager.ram_manager
        return not (isinstance(ram, NodeManager) and ram.has_deferred_reset)

    async def observe(self, observer: Observer) -> None:
        """Call `observer.update` now, ten times a second while tiers have jobs, and after the last job."""
        self._observer = observer
        observer.update()

    async def stats(self) -> CacheStats:
        """Return the counters."""
        names = ["ram", *self.manager.tier_names]
        tokens = [self._block_tokens * blocks for blocks in self.manager.hit_blocks]
        return CacheStats(
            dict(zip(names, tokens, strict=True)),
            self.manager.stats(),
            dict(zip(names[1:], self.manager.tier_stats(), strict=True)),
        )

    async def close(self, limit: Limit) -> None:
        """Wait for the running jobs, flush, and close the tiers and RAM."""
        jobs = asyncio.all_tasks() - {asyncio.current_task(), self._polling}
        if jobs:
            await asyncio.wait(jobs)
        try:
            await self.flush(limit)
            self._update()
        finally:
            self.manager.close()
            if self._polling is not None:
                self._polling.cancel()
            self._threads.close()
            try:
                self.pins.close()
            finally:
                self._close_ram()

    # ---- private

    def _begun(self, work: Work, keys: Keys) -> RequestContext:
        if work.finished:
            raise MisuseError("this request has finished")
        if work.ctx is None:
            work.ctx = self.manager.begin_request("", keys, hints=work.hints)
        return work.ctx

    async def _num_ready(self, keys: Keys, ctx: RequestContext, limit: Limit) -> int:
        """Return the number of leading blocks that are ready in RAM. Waits for loads from tiers and for
        stores in flight.
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            self.manager.poll()
            result = self.manager.lookup(keys, ctx)
            if result.stopped_by not in _WAITS or not limit.left_s():
                return result.num_ready
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _poll(self) -> None:
        """Start a task that polls the manager until the tiers' jobs have ended.

        Do nothing if the task runs already.
        """
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_until_idle())

    async def _poll_until_idle(self) -> None:
        updated_s = time.monotonic()
        while self.manager.poll():
            await asyncio.sleep(_LONGEST_PAUSE_S)
            if (now := time.monotonic()) - updated_s >= _UPDATE_PAUSE_S:
                updated_s = now
                self._update()
        self._update()

    def _count(self, metric: str, number: int) -> None:
        if self._observer is not None:
            self._observer.count(metric, number)

    def _update(self) -> None:
        if self._observer is None:
            return
        try:
            self._observer.update()
        except Exception:
            _log.exception("the metrics are no longer updated")
            self._observer = None

    def _copy_out(self, keys: Keys, slots: npt.NDArray[np.int32], parts: Parts, rows: BlockIds) -> Mask:
        """Verify blocks and copy the sound blocks to the engine. Thread: any."""
        sound = np.empty(len(slots), np.bool_)
        for batch in self._chunks(len(slots), parts):
            sound[batch] = good = self.ram.verify_slots(keys[batch], slots[batch])
            if good.any():
                parts.load(self.ram.pool, slots[batch][good], rows[batch][good])
        return sound

    def _copy_in(self, keys: Keys, slots: npt.NDArray[np.int32], parts: Parts, rows: BlockIds) -> None:
        """Copy blocks from the engine and compute their checksums. Thread: any."""
        self.ram.erase(slots)
        for batch in self._chunks(len(slots), parts):
            parts.store(rows[batch], self.ram.pool, slots[batch])
            self.ram.seal(keys[batch], slots[batch])

    def _chunks(self, count: int, parts: Parts) -> list[slice]:
        """Divide `count` blocks into chunks of `parts.chunk_bytes`."""
        step = max(1, parts.chunk_bytes // self.ram.block_bytes)
        return [slice(begin, begin + step) for begin in range(0, count, step)]
