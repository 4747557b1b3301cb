"""RAM of a timed replay: the real manager, and the tiers behind RAM with their disks.

One RAM serves one engine, or several engines that share the RAM. Owns the links that stand for the disks.
Does not know how engines work.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig, quotas_for, slots_needed
from kvoffload.replay.engines import EngineParts
from kvoffload.replay.members import make_ram_manager
from kvoffload.replay.trace_keys import KEY_BYTES
from kvoffload.simulate.config import Timing
from kvoffload.simulate.event_queue import Events, Link
from kvoffload.simulate.report import LinkReport, TimedTierReport, combined_links
from kvoffload.simulate.timed_tier import TimedTier
from kvoffload.tiering.tiered_manager import AnyManager, TieredManager
from kvoffload.tiers.simulated import NoMemory
from kvoffload.tiers.spec import SizedTierOptions, TierOptions, names_of
from kvoffload.tiers.write_budget import WriteBudget, budget_of_recording
from kvoffload.traces.trace import Trace

_LONGEST_BACKLOG_S = 30.0
"""If a tier's queued writes at the end of a run would take longer than this, the tier does not keep up."""


class Ram:
    """The RAM of one engine, or the RAM pool of several engines (`ReplayConfig.shared_ram`).

    Each engine of a pool has its own manager and its own tiers behind RAM, but all of them share the last
    tier and its disk if one simulated tier stands for it (`may_be_shared`).

    Args:
        trace: the requests of all engines that use this RAM.
        whole: the requests of all engines that use the tiers behind this RAM. None: the same as `trace`.
        beside: RAM of another engine, if this RAM is to share the blocks of its tiers. None: the tiers have
            blocks of their own.

    Attributes:
        manager: the manager of the first engine.
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
        self._trace, self._config, self._timing, self._events = trace, config, timing, events
        self._wakes, self._members = list[Callable[[], None]](), list[TieredManager]()
        # One list of tiers per engine. If engines share a tier, each has a `TimedTier` with the same blocks.
        self._tiers = list[list[TimedTier]]()
        self._parts: EngineParts | None = None
        num_slots = slots_needed(trace, config.pool_blocks)
        self.manager: AnyManager
        if config.tiers:
            for _ in range(config.engines_of_pool):
                self._open_tiers(beside)
                self._members.append(self._with_tiers(num_slots))
            self.manager = self._members[0]
        else:
            self.manager = OffloadingManager(num_slots, **config.manager_options(num_slots))
        if config.shared_ram:
            self._parts = EngineParts(self.manager, config.admission, config.instances)

    def _open_tiers(self, beside: Ram | None) -> None:
        options = self._config.tiers
        first = self._tiers[0][-1] if self._tiers and self._config.shares_last_tier else None
        firsts = [None] * (len(options) - 1) + [first]
        opened = [self._open(*of_tier) for of_tier in zip(names_of(options), options, firsts, strict=True)]
        if first is not None:
            opened[-1].share(first)
        if beside is not None:
            for own, of_other in zip(opened, beside._tiers[0], strict=True):
                own.share(of_other)
        self._tiers.append(opened)

    def _with_tiers(self, num_slots: int) -> TieredManager:
        config, timing = self._config, self._timing
        manager = TieredManager(
            num_slots,
            ram=NoMemory(num_slots),
            tiers=self._tiers[-1],
            deadline_s=timing.deadline_s,
            recompute_s_per_block=timing.machine.value("prefill_s_per_token") * self._trace.block_tokens,
            clock=lambda: self._events.now,
            make_ram_manager=make_ram_manager(self._members),
            **config.manager_options(num_slots),
        )
        for options, opened in zip(config.tiers, self._tiers[-1], strict=True):
            if quotas := config.tier_tenants.get(opened.name):
                num_blocks = opened.stats().capacity
                manager.set_tier_tenants(opened.name, quotas_for(num_blocks, options.num_blocks, quotas))
        return manager

    def _open(self, name: str, options: TierOptions, first: TimedTier | None) -> TimedTier:
        """Open a simulated tier: on the disk of the tier `first`, or on its own disk or striped disks."""
        if not isinstance(options, SizedTierOptions):
            raise ConfigError(
                "tiers", str(options), "this tier cannot be simulated; allowed: disk:..., simulated:..."
            )
        num_disks = len(getattr(options, "path", ())) or 1
        if first is not None:
            reads, writes = first.reads, first.writes
        else:
            reads, writes = (self._link(name, direction, num_disks) for direction in ("read", "write"))
        return TimedTier(
            slots_needed(self._whole, options.num_blocks),
            name=name,
            events=self._events,
            reads=reads,
            writes=writes,
            moved_bytes=self._timing.block_bytes,
            wake=self.wake,
            key_bytes=KEY_BYTES,
            policy=options.policy,
            admission=options.admission,
            write_budget=self._write_budget(options),
        )

    def _link(self, name: str, direction: str, num_disks: int) -> Link:
        value = self._timing.machine.value
        rate, latency_s = value(f"disk_{direction}_bytes_per_s"), value(f"disk_{direction}_latency_s")
        return Link(self._events, f"{name} {direction}", num_disks * rate, latency_s)

    def _write_budget(self, options: TierOptions) -> WriteBudget | None:
        """Create a tier's write budget, in blocks and in simulated time; None if writes have no limit."""
        max_bytes = getattr(options, "max_write_bytes_per_day", None)
        max_blocks = getattr(options, "max_write_blocks_per_day", None)
        if max_bytes is not None:
            max_blocks = max_bytes / self._timing.block_bytes
        if max_blocks is None:
            return None
        return budget_of_recording(max_blocks, lambda: self._events.now)

    def join(self, wake: Callable[[], None]) -> int:
        """Add an engine; returns its number.

        Args:
            wake: function that wakes the engine; called when a job ends for which one of its requests may be
                waiting.
        """
        self._wakes.append(wake)
        return len(self._wakes) - 1

    def manager_of(self, engine: int) -> AnyManager:
        """Return the manager for the next call of this engine.

        If engines share RAM, the call also makes the manager of RAM use this engine's admission rule and
        queue.
        """
        if self._parts is None:
            return self.manager
        self._parts.switch_to(engine)
        return self._members[engine] if self._members else self.manager

    def wake(self) -> None:
        """Wake all engines that use this RAM."""
        for wake in self._wakes:
            wake()

    def poll(self) -> None:
        """Let the managers process the tiers' jobs that have ended."""
        for engine, member in enumerate(self._members):
            if self._parts is not None:
                self._parts.switch_to(engine)
            member.poll()

    @property
    def counts(self) -> dict[str, int]:
        """Counters ``not_worth``, ``no_room`` and ``gave_up`` of `TimedOutcome`; empty with RAM alone."""
        names = ("not_worth", "no_room", "gave_up") if self._members else ()
        return {name: sum(getattr(member.counts, name) for member in self._members) for name in names}

    def links(self) -> list[LinkReport]:
        """Return two reports for each tier behind RAM: the link of its reads, and the link of its writes.

        A report combines the links of all engines that use this RAM.
        """
        return [
            combined_links([link.report() for link in direction])
            for tiers in self._levels()
            for direction in ([tier.reads for tier in tiers], [tier.writes for tier in tiers])
        ]

    def tiers(self, num_loaded: int, stores: Link) -> list[TimedTierReport]:
        """Return a report of each tier, RAM first. Counters cover all engines that use this RAM.

        Args:
            num_loaded: number of hits in RAM. It is ignored if there are tiers behind RAM, because managers
                with tiers count their hits.
            stores: the link from the device to RAM.
        """
        stats, hits = self.manager.stats(), [num_loaded]
        rows = [("ram", stats.stored, stats.evicted, stats.dropped, [stores])]
        if members := self._members:
            hits = [sum(blocks) for blocks in zip(*(member.hit_blocks for member in members), strict=True)]
            lost = sum(member.counts.not_offered for member in members)
            for tiers in self._levels():
                counters = [tier.stats() for tier in tiers]
                written = sum(tier_stats.written for tier_stats in counters)
                evicted = sum(tier_stats.evicted for tier_stats in counters)
                rows.append((tiers[0].name, written, evicted, lost, [tier.writes for tier in tiers]))
        return [
            TimedTierReport(
                name=name,
                hit_blocks=num_hits,
                written=written,
                evicted=evicted,
                not_offered=not_offered,
                keeps_up=all(link.seconds_waiting <= _LONGEST_BACKLOG_S for link in links)
                and not (not_offered and name != "ram"),
            )
            for num_hits, (name, written, evicted, not_offered, links) in zip(hits, rows, strict=True)
        ]

    def _levels(self) -> list[list[TimedTier]]:
        """Return, for each tier behind RAM, the list of its instances in the engines that use this RAM.

        If the engines share the tier, the list has only one instance.
        """
        levels = [list(of_level) for of_level in zip(*self._tiers, strict=True)]
        if levels and self._config.shares_last_tier:
            del levels[-1][1:]
        return levels
