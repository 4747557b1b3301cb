"""Offloading in a timed replay: decisions of the real manager, with copies in simulated time.

Three classes have the same methods and differ in the blocks that they offer to the manager. `NoOffload`
offers none, `Offload` offers blocks as soon as they are computed, and `VictimOffload` offers blocks that the
device will drop soon, as the vLLM connector does. The manager decides which of the offered blocks are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvoffload.core.plans import LookupResult, StorePlan
from kvoffload.core.request import RequestContext
from kvoffload.core.window import Window
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.simulate.config import Timing
from kvoffload.simulate.event_queue import Events, Link
from kvoffload.simulate.pool import DevicePool
from kvoffload.simulate.ram import Ram
from kvoffload.simulate.report import LinkReport, TimedTierReport
from kvoffload.structures.keys import Keys
from kvoffload.tiering.tiered_manager import AnyManager
from kvoffload.traces.trace import Trace


class NoOffload:
    """Offloading of an engine that does not offload, and base class of the others.

    Attributes:
        counts: the counters ``not_worth``, ``no_room``, ``gave_up`` and ``lost`` of `TimedOutcome`. A counter
            that cannot occur may be absent.
    """

    def begin(self, request: int) -> RequestContext | None:
        """Register a request that has arrived; returns its context, or None if there is no offloading."""
        return None

    def lookup(self, request: int, ctx: RequestContext | None, first: int, end: int) -> int | None:
        """Return how many of the request's blocks from `first` on can be loaded, without a gap, before `end`.

        None means that the number is not known yet; the caller must then look up again later.
        """
        return 0

    def load(
        self, request: int, ctx: RequestContext | None, first: int, end: int, done: Callable[[], None]
    ) -> None:
        """Load the blocks ``first:end`` of a request that starts. When they are loaded, `done` is called."""
        done()

    def store(self, request: int, ctx: RequestContext | None, first: int, end: int) -> bool:
        """Offer the computed blocks ``first:end`` of a request to RAM.

        Returns False if the blocks were not taken, so that the caller must offer them again later.
        """
        return True

    def finish(self, request: int, ctx: RequestContext | None) -> None:
        """Finish a request."""

    def dropped(self, codes: Sequence[int]) -> None:
        """Record that the device has evicted these blocks, coldest first."""

    def scheduled(self) -> None:
        """Called each time after the engine has scheduled a step."""

    def poll(self) -> None:
        """Called each time before the engine schedules a step."""

    @property
    def counts(self) -> dict[str, int]:
        return {}

    def hits(self) -> int:
        """Return the number of block references that were loaded so far."""
        return 0

    def links(self) -> list[LinkReport]:
        """Return reports of all links, with the counters until now."""
        return []

    def tiers(self) -> list[TimedTierReport]:
        """Return reports of all tiers, RAM first, with the counters until now."""
        return []


class Offload(NoOffload):
    """Offers blocks to RAM as soon as they are computed.

    Args:
        wake: called when a job ends for which a request may be waiting.
        ram: the RAM to use, which other engines may share. None: a new RAM is created.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        timing: Timing,
        events: Events,
        pool: DevicePool,
        wake: Callable[[], None],
        ram: Ram | None = None,
    ) -> None:
        self._trace, self._keys = trace, TraceKeys(trace)
        self._offsets: list[int] = trace.offsets.tolist()
        self._block_bytes, self._pool, self._events = timing.block_bytes, pool, events
        machine = timing.machine
        latency_s = machine.value("copy_latency_s")
        self._loads = Link(events, "load", machine.value("load_bytes_per_s"), latency_s)
        self._stores = Link(events, "store", machine.value("store_bytes_per_s"), latency_s)
        self._num_loaded = self._lost = 0
        self._ram = ram or Ram(trace, config, timing, events)
        self._number = self._ram.join(wake)

    @property
    def manager(self) -> AnyManager:
        """The manager of this engine (`Ram.manager_of`), prepared for one call. Get it anew for each call."""
        return self._ram.manager_of(self._number)

    def begin(self, request: int) -> RequestContext:
        hints = self._trace.hints_of(request).at_begin
        ctx = self.manager.begin_request(str(request), self._path(request), hints=hints)
        self.manager.expect(ctx)
        return ctx

    def lookup(self, request: int, ctx: RequestContext | None, first: int, end: int) -> int | None:
        if first >= end:
            return 0
        lookup = self.manager.lookup(self._path(request, first, end), ctx)
        if lookup.stopped_by in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            return None
        return lookup.num_ready

    def load(
        self, request: int, ctx: RequestContext | None, first: int, end: int, done: Callable[[], None]
    ) -> None:
        assert ctx is not None
        self.manager.withdraw(ctx)
        # Also for 0 blocks, because a victim tier must report the request to its policy.
        plan = self.manager.prepare_load(self._path(request, first, end), ctx)
        self._num_loaded += end - first

        def loaded() -> None:
            self.manager.complete_load(plan)
            done()

        if first == end:
            loaded()
        else:
            self._loads.submit((end - first) * self._block_bytes, loaded)

    def store(self, request: int, ctx: RequestContext | None, first: int, end: int) -> bool:
        if first >= end:
            return True
        plan = self.manager.prepare_store(self._path(request, first, end), ctx)
        if plan is None:
            return False
        self._copy(plan)
        return True

    def finish(self, request: int, ctx: RequestContext | None) -> None:
        assert ctx is not None
        self.manager.finish_request(ctx, hints=self._trace.hints_of(request).at_end)

    def poll(self) -> None:
        self._ram.poll()

    @property
    def counts(self) -> dict[str, int]:
        return {"lost": self._lost} | self._ram.counts

    def hits(self) -> int:
        return self._num_loaded

    def links(self) -> list[LinkReport]:
        return [self._loads.report(), self._stores.report(), *self._ram.links()]

    def tiers(self) -> list[TimedTierReport]:
        return self._ram.tiers(self._num_loaded, self._stores)

    def _path(self, request: int, first: int = 0, end: int | None = None) -> Keys:
        begin, last = self._offsets[request : request + 2]
        return self._keys.of_blocks(self._trace.refs[begin + first : last if end is None else begin + end])

    def _copy(self, plan: StorePlan) -> None:
        """Begin to copy the blocks of a plan to RAM. When the copy ends, the blocks become ready in RAM."""

        def copied() -> None:
            self.manager.complete_store(plan)
            self._ram.wake()

        if len(plan):
            self._stores.submit(len(plan) * self._block_bytes, copied)
        else:
            self.manager.complete_store(plan)


class VictimOffload(Offload):
    """Offers blocks to RAM shortly before the device drops them, as the vLLM connector does.

    Each time after the engine has scheduled a step, the free blocks that the device will evict next are
    offered, warmest first. They are called the window (`core.window`). If the device drops a block before it
    was in the window, the block is lost. While there are fewer free blocks than the window should contain,
    blocks are offered as soon as they are computed.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, timing: Timing, *rest: Any) -> None:
        super().__init__(trace, config, timing, *rest)
        self._window = Window(-(-timing.step_tokens // trace.block_tokens), max(1, config.device_blocks // 2))
        self._offered = dict[int, None]()
        self._num_dropped, self._unseen, self._seen_version = 0, list[int](), -1

    def store(self, request: int, ctx: RequestContext | None, first: int, end: int) -> bool:
        if self._pool.num_available >= self._window.size:
            return False
        return super().store(request, ctx, first, end)

    def dropped(self, codes: Sequence[int]) -> None:
        self._num_dropped += len(codes)
        self._unseen += [code for code in codes if code not in self._offered]

    def scheduled(self) -> None:
        if self._num_dropped:
            self._window.adapt(self._num_dropped)
            if self._unseen:
                self._lost += self.manager.keep(self._of(self._unseen[::-1]))
            self._num_dropped = 0
            self._unseen.clear()
        if self._pool.version != self._seen_version:
            self._seen_version = self._pool.version
            self._offer_window()

    def _offer_window(self) -> None:
        window = self._pool.next_to_leave(self._window.size)
        fresh = [code for code in window if code not in self._offered]
        self._offered = dict.fromkeys(window)
        if not fresh:
            return
        plan = self.manager.prepare_store(self._of(fresh[::-1]))
        if plan is None:
            for code in fresh:
                del self._offered[code]
            self._seen_version = -1
        else:
            self._copy(plan)

    def _of(self, codes: list[int]) -> Keys:
        return self._keys.of_blocks(np.array(codes, np.int32))
