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
from typing import Any

import msgspec

from kvoffload._version import __version__
from kvoffload.core.plans import ON_COMPUTE, ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.plan.clock import InTime, clock_of, rests_on
from kvoffload.plan.evidence import Evidence, gather
from kvoffload.plan.fleet import SERVER_BYTES_PER_BYTE, Fleet, Purchase
from kvoffload.plan.prices import MEANING, Server, flattened
from kvoffload.plan.rows import SERVER_POLICY, Cell, Measured, PlanRow, Setup, difference, measured, nothing
from kvoffload.plan.sample import check_sample, scaled, sessions_in
from kvoffload.plan.search import Behind, Space, confirm, search
from kvoffload.plan.targets import Choice, Target, best_of_each, choose, frontier
from kvoffload.plan.waits import choose_by_wait
from kvoffload.plan.words import answer, cannot_tell, searched_on
from kvoffload.sweep.bootstrap import RESAMPLES
from kvoffload.sweep.grid import Grid, incompatible
from kvoffload.sweep.journal import SweepJournal
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, Work
from kvoffload.sweep.task import TraceSource
from kvoffload.sweep.workers import Workers

STORES = (ON_COMPUTE, ON_DEVICE_EVICTION)
_CONFIRMED = 8
"""Rows that are measured on all sessions after a search on a sample, about."""
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
        ceiling, by_gpus: what caches without limit save, and the GPUs' own memory. ceiling_apart: as the
            ceiling, of engines that share nothing; below it only where servers were looked at.
        footprint_bytes: what would hold all blocks of all replicas.
        frontier: the purchases that save more than every cheaper one, cheapest first.
        purchases: the best row of each purchase that was measured; rows: every row. Of a long recording those
            that were measured on all of it.
        one_in: a long recording was searched on one of so many sessions; 1: on all. sampled: the rows of
            that search.
        over_time: what is saved in each window.
        in_time: how long users wait; null without a machine, with servers, and where the recording has no
            times.
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
    ceiling_apart: float
    by_gpus: float
    footprint_bytes: int
    currency: str
    frontier: list[PlanRow]
    purchases: list[PlanRow]
    rows: list[PlanRow]
    one_in: int = 1
    sampled: list[PlanRow] = []
    over_time: list[Window]
    in_time: InTime | None = None
    assumptions: list[Assumption]
    cannot_tell: list[str]
    vllm: str = ""
    seed: int
    resamples: int
    version: str = __version__

    @property
    def has_servers(self) -> bool:
        """Whether servers were looked at."""
        return any(row.servers for row in self.rows)

    def to_json(self) -> bytes:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True)
class Setups:
    """The ways to use what is bought that are tried, each list as typed in a sweep. What cannot be is a
    `ConfigError`."""

    stores: tuple[str, ...] = STORES
    policies: tuple[str, ...] = ("lru", "hazard")
    admissions: tuple[str, ...] = ("all", "tinylfu")
    ssd_policies: tuple[str, ...] = ("lru",)
    ssd_admissions: tuple[str, ...] = ("all", "reuse:2")
    server_admissions: tuple[str, ...] = ("all", "reuse:2")

    def __post_init__(self) -> None:
        for policies, admissions in (
            (self.policies, self.admissions),
            (self.ssd_policies, self.ssd_admissions),
            ((SERVER_POLICY,), self.server_admissions),
        ):
            Grid(policies, admissions, ("1",), ("1",), self.stores)

    @property
    def of_ram(self) -> list[Setup]:
        """Those of RAM alone."""
        every = itertools.product(self.stores, self.policies, self.admissions)
        return [Setup(*one) for one in every if incompatible(*one[1:]) is None]

    @property
    def with_ssds(self) -> list[Setup]:
        """Those with SSDs."""
        every = itertools.product(self.of_ram, self.ssd_policies, self.ssd_admissions)
        return [replace(ram, ssd_policy=policy, ssd_admission=rule) for ram, policy, rule in every
                if incompatible(policy, rule) is None]  # fmt: skip

    @property
    def with_servers(self) -> list[Setup]:
        """Those with servers."""
        every = itertools.product(self.of_ram, self.server_admissions)
        return [replace(ram, server_admission=rule) for ram, rule in every
                if incompatible(SERVER_POLICY, rule) is None]  # fmt: skip


class Plan:
    """One plan. Use once: construct, `run`. What is impossible is a `ConfigError` before any replay.

    With an output, the rows are written there, and each finished replay is kept in ``OUTPUT.journal``, as in
    a sweep. The journal stays: another target, budget or price of the same fleet is answered from it.

    Args:
        source: the recording.
        fleet: what is bought for, and what can be bought.
        target: what it is to reach.
        setups: how what is bought may be used.
        output, force, jobs, scheduler, seed, resamples: as in a sweep.
        one_in: search on one of so many sessions, and measure on all what is answered; None: by the length of
            the recording (`plan.sample`); 1: all is searched.

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
        one_in: int | None = None,
    ) -> None:
        self._source, self.fleet, self.target, self._setups = source, fleet, target, setups or Setups()
        self._work = Work(output, force, jobs, scheduler, seed, resamples)
        self._one_in = check_sample(one_in)
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
        fleet = self.fleet
        with self._work.begun() as (workers, journal):
            work, is_shared = self._work, self._may_share
            evidence = gather(
                self._source, fleet, seed=work.seed, resamples=work.resamples, is_shared=is_shared
            )
            needed = self.target.needed(evidence, fleet)
            one_in = self._one_in or sessions_in(self._source, evidence, fleet)
            told = _Told(self, on_progress)
            whole = _Part(self, fleet, evidence, needed, told, workers, journal)
            sampled = list[Measured]()
            if one_in == 1:
                rows, choice = whole.search()
            else:
                told.after = Progress(0, _CONFIRMED, 0, _CONFIRMED * evidence.block_refs)
                of_few, few = self._sample(evidence, one_in)
                # A prompt that sessions share is met for the first time in a larger part of fewer sessions.
                less = None if needed is None else needed * few.ceiling / max(evidence.ceiling, 1e-9)
                part = _Part(self, of_few, few, less, told, workers, journal, one_in)
                sampled, found = part.search()
                told.after = Progress(0, 0, 0, 0)
                rows, choice = whole.confirm(found, sampled)
            in_time = None
            if (clock := whole.clock) is not None and not choice.chosen.row.servers:
                in_time = clock.compared(choice.chosen.row, whole.begin.row)
                rows, choice = [clock.told(one) for one in rows], choice.of_each(clock.told)
            work.write([one.row for one in (*rows, *sampled)])
        found_on = _Searched(one_in, [one.row for one in sampled])
        return self._answer(evidence, rows, choice, in_time, found_on)

    @property
    def _may_share(self) -> bool:
        """Whether servers are looked at: several share them, and nobody asks for seconds, which are not known
        of servers."""
        return self.fleet.may_share and self.target.ttft_p90_s is None

    def _sample(self, evidence: Evidence, one_in: int) -> tuple[Fleet, Evidence]:
        """The fleet for one of so many sessions, and what those say of it."""
        options: dict[str, Any] = {"seed": self._work.seed, "one_in": one_in, "is_shared": self._may_share}
        fleet = scaled(self.fleet, evidence, gather(self._source, self.fleet, **options))
        # Its GPUs are smaller as well. Fewer sessions come less evenly: the busiest minute is that of all.
        return fleet, replace(gather(self._source, fleet, **options), busy=evidence.busy)

    def space(self, evidence: Evidence, fleet: Fleet) -> Space:
        """What is searched. Raises `ConfigError` if no RAM that is for sale is a block."""
        target = self.target
        modules, drives = fleet.steps(evidence.footprint_blocks)
        if not modules:
            ram = fleet.prices.ram
            why = f"{ram.slots} of them are no block for each replica ({fleet.block_bytes:,} B a block)"
            raise ConfigError("ram.module", ram.module, why)

        def allowed(purchase: Purchase) -> bool:
            return target.budget is None or fleet.price(purchase) <= _BEYOND_BUDGET * target.budget

        setups, budget = self._setups, target.budget
        behind = [Behind("drives", drives[1:], setups.with_ssds)]
        if evidence.whole is not None:
            servers = fleet.server_steps(evidence.whole.unique_blocks)
            behind.append(Behind("servers", servers, setups.with_servers))
        lines = [Purchase(0, 0), *(its.with_ram(0, count) for its in behind for count in its.counts)]
        every = [[one._replace(modules=n) for n in range(modules[0], modules[-1] + 1)] for one in lines]
        edge = [] if budget is None else [
            max(within) for line in every if (within := [one for one in line if fleet.price(one) <= budget])
        ]  # fmt: skip
        return Space(modules, setups.of_ram, behind, allowed, edge)

    def _answer(
        self,
        evidence: Evidence,
        rows: list[Measured],
        choice: Choice,
        in_time: InTime | None,
        searched: _Searched,
    ) -> PlanAnswer:
        fleet, apart = self.fleet, functools.partial(difference, evidence)
        return PlanAnswer(
            trace=evidence.name,
            requests=evidence.requests,
            block_refs=evidence.block_refs,
            duration_s=evidence.duration_s,
            outcome=choice.outcome.name,
            words=[
                *answer(choice, rows, apart, evidence, fleet, self.target, in_time),
                *searched_on(searched.one_in, len(rows) - 1),
            ],
            chosen=choice.chosen.row,
            smaller=choice.smaller.row if choice.smaller else None,
            larger=choice.larger.row if choice.larger else None,
            most=choice.most.row,
            needed=choice.needed,
            needed_ttft_p90_s=self.target.ttft_p90_s,
            ceiling=evidence.ceiling,
            ceiling_apart=evidence.ceiling_apart,
            by_gpus=evidence.device_share,
            footprint_bytes=fleet.size_bytes(sum(trace.unique_blocks for trace in evidence.traces)),
            currency=fleet.prices.currency,
            frontier=[one.row for one in frontier(rows)],
            purchases=[one.row for one in best_of_each(rows, feasible_first=True)],
            rows=[one.row for one in rows],
            one_in=searched.one_in,
            sampled=searched.rows,
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
            assumptions=assumptions(fleet, evidence, in_time, searched.one_in),
            cannot_tell=cannot_tell(evidence, fleet, choice.chosen.row, in_time, self.target),
            seed=self._work.seed,
            resamples=self._work.resamples,
        )


@dataclass(frozen=True)
class _Searched:
    """On what a search was done, and its rows if that was a sample."""

    one_in: int
    rows: list[PlanRow]


class _Told:
    """Tells of all parts and stages of a plan together.

    Attributes:
        after: what is expected to follow the part that is measured now.
    """

    def __init__(self, plan: Plan, on_progress: OnProgress) -> None:
        self._plan, self.on_progress = plan, on_progress
        self.after = Progress(0, 0, 0, 0)
        self._rows = self._refs = 0

    def told(self, now: Progress, rows: int, later: Progress) -> None:
        """How far the `rows` rows of a stage are, and what is expected of this part after it."""
        after = self.after
        self._plan.progress = Progress(
            self._rows + now.rows_done,
            self._rows + rows + later.rows + after.rows,
            self._refs + now.refs_done,
            self._refs + now.refs + later.refs + after.refs,
        )
        self.on_progress(self._plan.progress)

    def ended(self, rows: int, refs: int) -> None:
        """A stage is done."""
        self._rows += rows
        self._refs += refs


class _Part:
    """A recording or a sample of it: measures cells of it, and chooses among their rows."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        evidence: Evidence,
        needed: float | None,
        told: _Told,
        workers: Workers,
        journal: SweepJournal | None,
        one_in: int = 1,
    ) -> None:
        self._plan, self._fleet, self._evidence, self._needed = plan, fleet, evidence, needed
        self._told, self._one_in = told, one_in
        self._measuring = Measuring(evidence.replayed, workers, journal)
        self._apart = functools.partial(difference, evidence)
        self.clock = clock_of(fleet, evidence, journal, told.on_progress)
        self.begin = nothing(fleet, evidence)

    def search(self) -> tuple[list[Measured], Choice]:
        """All rows, and the choice among them."""
        space = self._plan.space(self._evidence, self._fleet)
        rows, choice = search(space, self._measure, self._apart, self._choose, self.begin)
        return [self._marked(one) for one in rows], choice

    def confirm(self, sampled: Choice, rows: Sequence[Measured]) -> tuple[list[Measured], Choice]:
        """The same near what a sample says."""
        space = self._plan.space(self._evidence, self._fleet)
        # To guess takes no replay, and waits are known of replays only.
        guess = None if self._plan.target.ttft_p90_s is not None else self._choose
        return confirm(space, self._measure, self._choose, self.begin, sampled, rows, guess)

    def _choose(self, rows: Sequence[Measured]) -> Choice:
        most_s = self._plan.target.ttft_p90_s
        if most_s is not None and self.clock is not None:
            return choose_by_wait(rows, most_s, self.clock)
        return choose(rows, self._needed, self._apart)

    def _marked(self, one: Measured) -> Measured:
        if self._one_in == 1:
            return one
        return replace(one, row=msgspec.structs.replace(one.row, one_in=self._one_in))

    def _measure(self, cells: Sequence[Cell], later: int) -> list[Measured]:
        """As `search.Measure`."""
        fleet, evidence, budget = self._fleet, self._evidence, self._plan.target.budget
        points = [cell.points(fleet, evidence) for cell in cells]
        every = list(itertools.chain.from_iterable(points))
        expected = Progress(0, later, 0, later * evidence.block_refs)

        def told(now: Progress) -> None:
            # A cell with servers is one replay, the others are one for each replica.
            done = now.rows_done * len(cells) // max(1, len(every))
            self._told.told(replace(now, rows_done=done), len(cells), expected)

        found = iter(self._measuring.measure(every, told))
        self._told.ended(len(cells), self._measuring.progress.refs)
        return [
            measured(cell, list(itertools.islice(found, len(its))), fleet, evidence, budget)
            for cell, its in zip(cells, points, strict=True)
        ]


def assumptions(
    fleet: Fleet, evidence: Evidence, in_time: InTime | None = None, one_in: int = 1
) -> list[Assumption]:
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
    if one_in > 1:
        source = "by the length of the recording, or given; the rows of the answer are of all sessions"
        found.append(Assumption("searched on", f"one of {one_in:,} sessions", source))
    if fleet.tokens_per_s:
        source = "the machine's, without attention to what is before"
        if fleet.prefill_tokens_per_s:
            source = "given; not measured here" + ("; waits are the machine's" if in_time else "")
        found.append(Assumption("prefill", f"{fleet.tokens_per_s:,g} tokens/s a GPU", source))
    if in_time is not None:
        found += itertools.starmap(Assumption, rests_on(in_time))
    found.append(Assumption("prices", f"in {prices.currency}, {prices.date}", prices.source))
    shares = evidence.whole is not None
    found += _of_sharing(fleet, is_looked_at=shares)
    for name, value in flattened(prices).items():
        if name not in ("currency", "source", "date") and (shares or not name.startswith("server.")):
            unit = f" {prices.currency}" if name.endswith("price") else ""
            found.append(Assumption(name, f"{value}{unit}", MEANING[name]))
    return found


def _of_sharing(fleet: Fleet, *, is_looked_at: bool) -> list[Assumption]:
    """What is taken for true of servers; where they are for sale and not looked at, why."""
    if is_looked_at:
        source = "Valkey's own, and measured there; what one engine has stored the others find at once"
        return [Assumption("servers", f"lru, {SERVER_BYTES_PER_BYTE:g} bytes for a byte of blocks", source)]
    if not fleet.prices.server.slots or fleet.prices.server == Server():
        return []
    alone, in_seconds = "one engine shares with nobody", "they are not timed, and seconds were asked for"
    return [Assumption("servers", "not looked at", alone if fleet.replicas == 1 else in_seconds)]
