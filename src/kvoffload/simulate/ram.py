"""RAM of a timed replay: the real manager, and the tiers behind RAM with their disks.

Serves one engine, or several engines that share it. Owns the links of the disks. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.replay.engines import EngineParts
from kvoffload.replay.replay import ReplayConfig, quotas_for, slots_needed
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.simulate.config import Timing
from kvoffload.simulate.event_queue import Events, Link
from kvoffload.simulate.report import TimedTierReport
from kvoffload.simulate.timed_tier import TimedTier
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.simulated import NoMemory
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, names_of
from kvoffload.tiers.write_budget import WriteBudget, budget_of_recording
from kvoffload.traces.trace import Trace

_LONGEST_BACKLOG_S = 30.0
"""A tier does not keep up if its queued writes would take longer than this, in seconds, at the end of a
run."""


class Ram:
    """The RAM of one engine, or the RAM pool of several engines (`ReplayConfig.shared_ram`).

    Args:
        trace: the requests of all engines that use this RAM.
        whole: the requests of all engines that use the tiers behind this RAM; None for `trace`.
        beside: RAM of another engine. This RAM shares the tiers of `beside`; None: it has its own tiers.

    Attributes:
        manager: the manager of this RAM.
        links: links of the disks.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        timing: Timing,
        events: Events,
        whole: Trace | None = None,
        beside: Ram | None = None,
    ) -> None:
        self._whole = trace if whole is None else whole
        self._trace, self._events, self._opened = trace, events, list[TimedTier]()
        self._wakes, self.links, self._writes = list[Callable[[], None]](), list[Link](), list[Link]()
        self._parts: EngineParts | None = None
        num_slots = slots_needed(trace, config.pool_blocks)
        self._tiered: TieredManager | None = None
        self.manager: AnyManager
        if config.tiers:
            self._opened = [self._open(number, tier, timing) for number, tier in enumerate(config.tiers)]
            if beside is not None:
                for own, first in zip(self._opened, beside._opened, strict=True):
                    own.share(first)
            self.manager = self._tiered = self._with_tiers(num_slots, config, timing)
        else:
            self.manager = OffloadingManager(num_slots, **config.manager_options(num_slots))
        if config.shared_ram:
            self._parts = EngineParts(self.manager, config.admission, config.instances)

    def _with_tiers(self, num_slots: int, config: ReplayConfig, timing: Timing) -> TieredManager:
        manager = TieredManager(
            num_slots,
            ram=NoMemory(num_slots),
            tiers=self._opened,
            deadline_s=timing.deadline_s,
            recompute_s_per_block=timing.machine.value("prefill_s_per_token") * self._trace.block_tokens,
            clock=lambda: self._events.now,
            **config.manager_options(num_slots),
        )
        for name, options, opened in zip(names_of(config.tiers), config.tiers, self._opened, strict=True):
            if quotas := config.tier_tenants.get(name):
                num_blocks = opened.stats().capacity
                manager.set_tier_tenants(opened.name, quotas_for(num_blocks, options.num_blocks, quotas))
        return manager

    def _open(self, number: int, options: TierOptions, timing: Timing) -> TimedTier:
        """Open a tier on one simulated disk, or on several striped disks."""
        if not isinstance(options, SizedTierOptions):
            raise ConfigError(
                "tiers", str(options), "this tier cannot be simulated; allowed: disk:..., simulated:..."
            )
        name = options.name if number == 0 else f"{options.name} {number + 1}"
        num_disks = len(getattr(options, "path", ())) or 1
        machine = timing.machine
        reads, writes = (
            Link(
                self._events,
                f"{name} {direction}",
                num_disks * machine.value(f"disk_{direction}_bytes_per_s"),
                machine.value(f"disk_{direction}_latency_s"),
            )
            for direction in ("read", "write")
        )
        self.links += [reads, writes]
        self._writes.append(writes)
        return TimedTier(
            slots_needed(self._whole, options.num_blocks),
            name=name,
            events=self._events,
            reads=reads,
            writes=writes,
            moved_bytes=timing.block_bytes,
            wake=self.wake,
            key_bytes=KEY_BYTES,
            policy=options.policy,
            admission=options.admission,
            write_budget=self._write_budget(options, timing),
        )

    def _write_budget(self, options: TierOptions, timing: Timing) -> WriteBudget | None:
        """Create the write budget of a tier, in blocks and simulated time."""
        max_bytes = getattr(options, "max_write_bytes_per_day", None)
        max_blocks = getattr(options, "max_write_blocks_per_day", None)
        if max_bytes is not None:
            max_blocks = max_bytes / timing.block_bytes
        if max_blocks is None:
            return None
        return budget_of_recording(max_blocks, lambda: self._events.now)

    def join(self, wake: Callable[[], None]) -> int:
        """Add an engine; returns its number.

        Args:
            wake: called at the end of each job for which a request may wait.
        """
        self._wakes.append(wake)
        return len(self._wakes) - 1

    def manager_of(self, engine: int) -> AnyManager:
        """Return the manager for a call of this engine."""
        if self._parts is not None:
            self._parts.switch_to(engine)
        return self.manager

    def wake(self) -> None:
        """Wake all engines."""
        for wake in self._wakes:
            wake()

    def poll(self) -> None:
        """Handle the jobs that tiers have ended."""
        if self._tiered is not None:
            self._tiered.poll()

    @property
    def counts(self) -> dict[str, int]:
        """The counters not_worth, no_room and gave_up of `TimedOutcome`; empty without tiers."""
        if self._tiered is None:
            return {}
        counts = self._tiered.counts
        return {"not_worth": counts.not_worth, "no_room": counts.no_room, "gave_up": counts.gave_up}

    def tiers(self, num_loaded: int, stores: Link) -> list[TimedTierReport]:
        """Return the reports of all tiers until now, RAM first.

        Args:
            num_loaded: number of loaded blocks. Reported as the hits of RAM if there are no tiers behind RAM.
            stores: link of the copies to RAM.
        """
        stats, hits = self.manager.stats(), [num_loaded]
        rows = [("ram", stats.stored, stats.evicted, stats.dropped, stores)]
        if (tiered := self._tiered) is not None:
            hits, lost = tiered.hit_blocks, tiered.counts.not_offered
            below = zip(tiered.tier_names, tiered.tier_stats(), self._writes, strict=True)
            rows += [(name, tier.written, tier.evicted, lost, link) for name, tier, link in below]
        return [
            TimedTierReport(
                name=name,
                hit_blocks=num_hits,
                written=written,
                evicted=evicted,
                not_offered=not_offered,
                keeps_up=link.seconds_waiting <= _LONGEST_BACKLOG_S and not (not_offered and name != "ram"),
            )
            for num_hits, (name, written, evicted, not_offered, link) in zip(hits, rows, strict=True)
        ]
