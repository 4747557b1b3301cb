"""A plan: what to buy for a fleet of engines, from a recording of what it is asked.

Owns the order of things: what is checked before any work, what is kept, what the answer holds. The search is
`plan.search`, the columns `plan.rows`, the choice `plan.targets`, the sentences `plan.words`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvoffload._version import __version__
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.plan.clock import InTime, clock_of, rests_on
from kvoffload.plan.evidence import Evidence, gather
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.prices import MEANING, flattened
from kvoffload.plan.rows import Cell, Measured, PlanRow, Setup, difference, measured, nothing
from kvoffload.plan.search import Space, search
from kvoffload.plan.targets import Choice, Target, best_of_each, choose, frontier
from kvoffload.plan.waits import choose_by_wait
from kvoffload.plan.words import answer, cannot_tell
from kvoffload.sweep.bootstrap import RESAMPLES
from kvoffload.sweep.grid import Grid, why_not
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, Work
from kvoffload.sweep.task import TraceSource

STORES = (ON_COMPUTE, ON_DEVICE_EVICTION)
_BEYOND_BUDGET = 2
"""How many times the budget is still looked at: what more money would bring is worth knowing."""


class Assumption(msgspec.Struct, frozen=True):
    """What the answer rests on and the recording does not tell: its value, and where that is from."""

    name: str
    value: str
    source: str


class Window(msgspec.Struct, frozen=True):
    """What is saved in one window (`bootstrap.window_sums`): as recommended, and by the GPUs alone."""

    chosen: float
    by_gpus: float


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan found: the keys of its JSON object.

    Attributes:
        words: the answer, in sentences.
        outcome: ``BUY``, ``BUY_NOTHING``, ``NOT_REACHED``.
        chosen, smaller, larger, most: rows, as in `targets.Choice`.
        needed: the share that must be saved; null without such a target.
        needed_ttft_p90_s: how long nine of ten requests are to wait at most; null without such a target.
        ceiling, by_gpus: what caches without limit save, and the GPUs' own memory.
        footprint_bytes: what would hold all blocks of all replicas.
        frontier: the purchases that save more than every cheaper one, cheapest first.
        purchases: the best row of each purchase that was measured; rows: every row.
        over_time: what is saved in each window.
        in_time: how long users wait; null without a machine, and where the recording has no times.
        assumptions, cannot_tell: what the answer rests on, and what it leaves open.
        vllm: what each engine is to be started with; empty where RAM is not bought.
        seed, resamples, version: as in a sweep's rows.
    """

    trace: str
    requests: int
    block_refs: int
    duration_s: float
    outcome: str
    words: list[str]
    chosen: PlanRow
    smaller: PlanRow | None
    larger: PlanRow | None
    most: PlanRow
    needed: float | None
    needed_ttft_p90_s: float | None = None
    ceiling: float
    by_gpus: float
    footprint_bytes: int
    currency: str
    frontier: list[PlanRow]
    purchases: list[PlanRow]
    rows: list[PlanRow]
    over_time: list[Window]
    in_time: InTime | None = None
    assumptions: list[Assumption]
    cannot_tell: list[str]
    vllm: str = ""
    seed: int
    resamples: int
    version: str = __version__

    def to_json(self) -> bytes:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True)
class Setups:
    """The ways to use RAM and SSDs that are tried, each list as typed in a sweep. What cannot be is a
    `ConfigError`."""

    stores: tuple[str, ...] = STORES
    policies: tuple[str, ...] = ("lru", "hazard")
    admissions: tuple[str, ...] = ("all", "tinylfu")
    ssd_policies: tuple[str, ...] = ("lru",)
    ssd_admissions: tuple[str, ...] = ("all", "reuse:2")

    def __post_init__(self) -> None:
        for policies, admissions in (
            (self.policies, self.admissions),
            (self.ssd_policies, self.ssd_admissions),
        ):
            Grid(policies, admissions, ("1",), ("1",), self.stores)

    @property
    def of_ram(self) -> list[Setup]:
        """Those without SSDs."""
        every = itertools.product(self.stores, self.policies, self.admissions)
        return [Setup(*one) for one in every if why_not(*one[1:]) is None]

    @property
    def with_ssds(self) -> list[Setup]:
        """Those with SSDs."""
        every = itertools.product(self.of_ram, self.ssd_policies, self.ssd_admissions)
        return [replace(ram, ssd_policy=policy, ssd_admission=rule) for ram, policy, rule in every
                if why_not(policy, rule) is None]  # fmt: skip


class Plan:
    """One plan. Use once: construct, `run`. What is impossible is a `ConfigError` before any replay.

    With an output, the rows are written there, and each finished replay is kept in ``OUTPUT.journal``, as in
    a sweep. The journal stays: another target, budget or price of the same fleet is answered from it.

    Args:
        source: the recording.
        fleet: what is bought for, and what can be bought.
        target: what it is to reach.
        setups: how RAM and SSDs may be used.
        output, force, jobs, scheduler, seed, resamples: as in a sweep.

    Attributes:
        fleet, target: as given.
        progress: how far it is; also when it was interrupted. How much is left is an estimate.
    """

    def __init__(
        self,
        source: TraceSource,
        fleet: Fleet,
        target: Target,
        setups: Setups | None = None,
        *,
        output: Path | None = None,
        force: bool = False,
        jobs: int | None = None,
        scheduler: str | None = None,
        seed: int = 0,
        resamples: int = RESAMPLES,
    ) -> None:
        self._source, self.fleet, self.target, self._setups = source, fleet, target, setups or Setups()
        self._work = Work(output, force, jobs, scheduler, seed, resamples)
        self.progress = Progress(0, 0, 0, 0)

    @property
    def journal_path(self) -> Path | None:
        """Where finished replays are kept."""
        return self._work.journal_path

    def run(self, on_progress: OnProgress = lambda progress: None) -> PlanAnswer:
        """Search, write the output, and say what came of it.

        Raises: `ConfigError` for a target above the ceiling, RAM too small for a block, an output that cannot
        be written; `TraceError`; `SweepError` if a replay failed. What had been finished is kept.
        """
        fleet, target = self.fleet, self.target
        with self._work.begun() as (workers, journal):
            evidence = gather(self._source, fleet, seed=self._work.seed, resamples=self._work.resamples)
            clock = clock_of(fleet, evidence, journal, on_progress)
            needed = target.needed(evidence, fleet)

            def chosen(found: Sequence[Measured]) -> Choice:
                if clock is not None and target.ttft_p90_s is not None:
                    return choose_by_wait(found, target.ttft_p90_s, clock)
                return choose(found, needed, apart)

            stages = _Stages(self, Measuring(evidence.traces, workers, journal), evidence, on_progress)
            apart = functools.partial(difference, evidence)
            begin = nothing(fleet, evidence)
            rows, choice = search(self._space(evidence), stages.measure, apart, chosen, begin)
            in_time = None
            if clock is not None:
                in_time = clock.compared(choice.chosen.row, begin.row)
                rows, choice = [clock.told(one) for one in rows], choice.of_each(clock.told)
            self._work.write([one.row for one in rows])
        return self._answer(evidence, rows, choice, in_time)

    def _space(self, evidence: Evidence) -> Space:
        fleet, target = self.fleet, self.target
        modules, drives = fleet.steps(evidence.footprint_blocks)
        if not modules:
            ram = fleet.prices.ram
            why = f"{ram.slots} of them are no block for each replica ({fleet.block_bytes:,} B a block)"
            raise ConfigError("ram.module", ram.module, why)

        def allowed(purchase: Purchase) -> bool:
            return target.budget is None or fleet.price(purchase) <= _BEYOND_BUDGET * target.budget

        every = [[Purchase(n, d) for n in range(modules[0], modules[-1] + 1)] for d in drives]
        budget = target.budget
        edge = [] if budget is None else [
            max(within) for line in every if (within := [one for one in line if fleet.price(one) <= budget])
        ]  # fmt: skip
        return Space(modules, drives, self._setups.of_ram, self._setups.with_ssds, allowed, edge)

    def _answer(
        self, evidence: Evidence, rows: list[Measured], choice: Choice, in_time: InTime | None
    ) -> PlanAnswer:
        fleet, apart = self.fleet, functools.partial(difference, evidence)
        return PlanAnswer(
            trace=evidence.name,
            requests=evidence.requests,
            block_refs=evidence.block_refs,
            duration_s=evidence.duration_s,
            outcome=choice.outcome.name,
            words=answer(choice, rows, apart, evidence, fleet, self.target, in_time),
            chosen=choice.chosen.row,
            smaller=choice.smaller.row if choice.smaller else None,
            larger=choice.larger.row if choice.larger else None,
            most=choice.most.row,
            needed=choice.needed,
            needed_ttft_p90_s=self.target.ttft_p90_s,
            ceiling=evidence.ceiling,
            by_gpus=evidence.device_share,
            footprint_bytes=fleet.size_bytes(sum(trace.unique_blocks for trace in evidence.traces)),
            currency=fleet.prices.currency,
            frontier=[one.row for one in frontier(rows)],
            purchases=[one.row for one in best_of_each(rows, feasible_first=True)],
            rows=[one.row for one in rows],
            over_time=[
                Window(chosen / max(refs, 1), alone / max(refs, 1))
                for chosen, alone, refs in zip(
                    choice.chosen.hits.tolist(),
                    evidence.device_hits.tolist(),
                    evidence.refs.tolist(),
                    strict=True,
                )
            ],
            in_time=in_time,
            assumptions=assumptions(fleet, evidence, in_time),
            cannot_tell=cannot_tell(evidence, fleet, choice.chosen.row, in_time, self.target),
            seed=self._work.seed,
            resamples=self._work.resamples,
        )


class _Stages:
    """Measures the cells of one stage of a search after the other, and tells of all of them together."""

    def __init__(self, plan: Plan, measuring: Measuring, evidence: Evidence, on_progress: OnProgress) -> None:
        self._plan, self._measuring, self._evidence = plan, measuring, evidence
        self._on_progress = on_progress
        self._rows = self._refs = 0

    def measure(self, cells: Sequence[Cell], later: int) -> list[Measured]:
        """As `search.Measure`."""
        fleet, evidence, budget = self._plan.fleet, self._evidence, self._plan.target.budget
        replicas, later_refs = len(evidence.traces), later * evidence.block_refs

        def told(now: Progress) -> None:
            self._plan.progress = Progress(
                self._rows + now.rows_done // replicas, self._rows + len(cells) + later,
                self._refs + now.refs_done, self._refs + now.refs + later_refs,
            )  # fmt: skip
            self._on_progress(self._plan.progress)

        found = self._measuring.measure([one for cell in cells for one in cell.points(fleet, evidence)], told)
        self._rows += len(cells)
        self._refs += self._measuring.progress.refs
        return [
            measured(cell, found[n * replicas : (n + 1) * replicas], fleet, evidence, budget)
            for n, cell in enumerate(cells)
        ]


def assumptions(fleet: Fleet, evidence: Evidence, in_time: InTime | None = None) -> list[Assumption]:
    """What the answer rests on and the recording does not tell."""
    block, prices = f"{fleet.block_bytes:,} B", fleet.prices
    found = [
        Assumption("block", block, "bytes of a token (--model) times the recording's tokens per block"),
        Assumption("GPUs", f"{fleet.gpus} with {fleet.kv_bytes_per_gpu:,} B for blocks each", "given"),
        Assumption("engines", f"{fleet.replicas}, requests by {fleet.routing}",
                   "given; each has its part of GPUs, RAM and SSDs, and shares none of it"),
        Assumption("GPU cache", "lru", "vLLM's own; requests end when they are served"),
        Assumption("load", f"{fleet.load:g}x the recording's", "given; sessions stay whole"),
        Assumption("traffic", f"{fleet.scale:g} times the recording's", "given; of sessions like these"),
        Assumption("rate", f"as in these {evidence.duration_s / 3600:,.1f} hours, day and night",
                   "the recording; that it goes on so is assumed"),
        Assumption("busiest minute", f"{evidence.busy:.1f} times the mean",
                   "the recording's references; writes and reads are taken to follow them"),
        Assumption("replicas alike", "writes and loads are spread evenly", "assumed"),
    ]  # fmt: skip
    if fleet.tokens_per_s:
        source = "the machine's, without attention to what is before"
        if fleet.prefill_tokens_per_s:
            source = "given; not measured here" + ("; waits are the machine's" if in_time else "")
        found.append(Assumption("prefill", f"{fleet.tokens_per_s:,g} tokens/s a GPU", source))
    if in_time is not None:
        found += itertools.starmap(Assumption, rests_on(in_time))
    found.append(Assumption("prices", f"in {prices.currency}, {prices.date}", prices.source))
    for name, value in flattened(prices).items():
        if name not in ("currency", "source", "date"):
            unit = f" {prices.currency}" if name.endswith("price") else ""
            found.append(Assumption(name, f"{value}{unit}", MEANING[name]))
    return found
