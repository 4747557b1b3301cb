"""The plan of a purchase for a fleet of engines. Input: a recording of the fleet's requests.

Controls the sequence of steps, and assembles the answer. The search is in `plan.search`, the columns in
`plan.rows`, the choice in `plan.targets`, the sentences in `plan.words` and `plan.open_questions`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvoffload._version import __version__
from kvoffload.check.check import Check
from kvoffload.core.plans import ON_COMPUTE
from kvoffload.errors import ConfigError
from kvoffload.plan.assumptions import Assumption, assumptions
from kvoffload.plan.clock import InTime, clock_of
from kvoffload.plan.endurance import Endurance, endurance_of
from kvoffload.plan.evidence import Evidence, gather
from kvoffload.plan.findings import Findings
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.open_questions import cannot_tell
from kvoffload.plan.payback import Payback, payback_of
from kvoffload.plan.present import Present, PresentRow
from kvoffload.plan.rows import Cell, Measured, PlanRow, Setup, difference, measured, nothing
from kvoffload.plan.sample import check_sample, scaled, sessions_in
from kvoffload.plan.search import Space, TierAxis, confirm, search
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Choice, Target, best_of_each, choose, frontier
from kvoffload.plan.waits import choose_by_wait
from kvoffload.plan.words import Section, answer
from kvoffload.sweep.journal import SweepJournal
from kvoffload.sweep.measuring import Measuring, OnProgress, Progress, Work
from kvoffload.sweep.task import TraceSource
from kvoffload.text import Report

_CONFIRMED = 8
"""Approximate number of rows that are measured on all sessions after a search on a sample."""
_BEYOND_BUDGET = 2
"""The search includes purchases up to this multiple of the budget, to show the benefit of a larger budget."""


class Window(msgspec.Struct, frozen=True):
    """Savings in one window of the recording: by the recommended row, and by the GPUs alone.

    Attributes:
        until_s: time of the window's last arrival, in seconds after the recording's first; null if unknown.
    """

    chosen: float
    by_gpus: float
    until_s: float | None = None


class PlanAnswer(Report, frozen=True, kw_only=True):
    """Answer of a plan; the fields are the keys of its JSON object.

    Attributes:
        trace, requests, block_refs, duration_s: name and size of the recording.
        outcome: ``BUY``, ``BUY_NOTHING``, ``NOT_REACHED``.
        words: the answer in sentences.
        sections: the same sentences under titles.
        chosen, smaller, larger, most: rows, as in `targets.Choice`.
        needed: share of the prefill to save; null if the target is not a share.
        needed_ttft_p90_s: limit for the 90th percentile of the time to first token; null if the target has no
            such limit.
        ceiling: savings of unlimited caches.
        ceiling_apart: savings of unlimited caches that engines do not share.
        by_gpus: savings of the GPUs alone.
        share_outside_blocks: share of the prompt tokens that are in no whole block. Savings do not count
            these tokens. Null if unknown.
        footprint_bytes: size of all blocks of all replicas.
        frontier: purchases that save more than every cheaper purchase, cheapest first.
        purchases: best row of each measured purchase.
        rows: all rows measured on all sessions.
        one_in: N if the search used a sample of one in N sessions, because the recording is long; 1 if it
            used all sessions.
        sampled: rows of the search on a sample.
        over_time: savings in each window of the recording.
        payback: value of the purchase. Null if nothing is purchased, or if the speed of the GPUs, the times
            or the price of a GPU-hour is unknown.
        endurance: savings lost because of the rating of SSDs; null if no feasible row has a write budget.
        in_time: timed replays. Null without a machine or times, or if the purchase has shared RAM on several
            hosts.
        present: set-up of a running server; null without a server.
        check: comparison of the server's metrics with the replay of this set-up; null without a server.
        assumptions, cannot_tell: assumptions and open questions of the answer.
        warnings: defects of the recording that affect the answer.
        vllm: flag for each vLLM engine; empty if no RAM is bought.
        seed, resamples, version: as in rows of a sweep.
    """

    trace: str
    requests: int
    block_refs: int
    duration_s: float
    outcome: str
    words: list[str]
    sections: list[Section] = msgspec.field(default_factory=list)
    chosen: PlanRow
    smaller: PlanRow | None
    larger: PlanRow | None
    most: PlanRow
    needed: float | None
    needed_ttft_p90_s: float | None = None
    ceiling: float
    ceiling_apart: float
    by_gpus: float
    share_outside_blocks: float | None = None
    footprint_bytes: int
    currency: str
    frontier: list[PlanRow]
    purchases: list[PlanRow]
    rows: list[PlanRow]
    one_in: int = 1
    sampled: list[PlanRow] = msgspec.field(default_factory=list)
    over_time: list[Window]
    payback: Payback | None = None
    endurance: Endurance | None = None
    in_time: InTime | None = None
    present: PresentRow | None = None
    check: Check | None = None
    assumptions: list[Assumption]
    cannot_tell: list[str]
    warnings: list[str] = msgspec.field(default_factory=list)
    vllm: str = ""
    seed: int
    resamples: int
    version: str = __version__

    @property
    def has_servers(self) -> bool:
        """True if rows with servers were measured."""
        return any(row.servers for row in self.rows)


class Plan:
    """A plan, which can be run once: construct it, then call `run`.

    Invalid options raise `ConfigError` before any replay.

    If there is an output, rows are written to this file, and finished replays to ``OUTPUT.journal``. Unlike
    the journal of a sweep, this journal is kept, because a later run with another target, budget or price can
    reuse its replays.

    Args:
        source: the recording.
        fleet: the engines and the prices.
        target: the target.
        setups: setups to try.
        work: workers, output and confidence intervals.
        one_in: the search uses one session in this many; the answer is measured on all sessions. None: the
            length of the recording decides (`plan.sample`).
        present: a running server to compare with the replay of its set-up; None: no comparison.

    Attributes:
        fleet, target: arguments.
        progress: progress of the run, also after an interruption; the total is an estimate.
    """

    def __init__(
        self,
        source: TraceSource,
        fleet: Fleet,
        target: Target,
        setups: Setups | None = None,
        *,
        work: Work | None = None,
        one_in: int | None = None,
        present: Present | None = None,
    ) -> None:
        self._source, self.fleet, self.target, self._setups = source, fleet, target, setups or Setups()
        self._work = work or Work()
        self._one_in, self._present = check_sample(one_in), present
        self.progress = Progress()

    @property
    def journal_path(self) -> Path | None:
        """Path of the journal; None without an output."""
        return self._work.journal_path

    def run(self, on_progress: OnProgress = lambda progress: None) -> PlanAnswer:
        """Search for the answer and write the output.

        Raises:
            ConfigError: the target is above the ceiling, RAM is too small for a block, or the output cannot
                be written.
            TraceError: the recording cannot be read.
            SweepError: a replay failed. The journal keeps finished replays.
        """
        fleet, work = self.fleet, self._work
        with work.begun() as (workers, journal):
            evidence = gather(
                self._source, fleet, seed=work.seed, resamples=work.resamples, is_shared=self._may_share
            )
            needed = self.target.needed(evidence, fleet)
            one_in = self._one_in or sessions_in(self._source, evidence, fleet)
            measuring = Measuring(evidence.replayed, workers, journal)
            stages = _Stages(self, on_progress)
            whole = _Search(self, fleet, evidence, needed, stages, measuring, journal)
            sampled = list[Measured]()
            if one_in == 1:
                rows, choice = whole.search()
            else:
                stages.later = Progress(0, _CONFIRMED, 0, _CONFIRMED * evidence.block_refs)
                small_fleet, sample = self._sample(evidence, one_in)
                # Sessions share prompts, and the first request for such a prompt misses. In a smaller sample
                # first requests are a larger share.
                scaled_need = (
                    None if needed is None else needed * sample.ceiling / max(evidence.ceiling, 1e-9)
                )
                measuring = Measuring(sample.replayed, workers, journal)
                search = _Search(self, small_fleet, sample, scaled_need, stages, measuring, journal)
                rows, guess = search.search()
                sampled = [_marked(row, one_in) for row in rows]
                stages.later = Progress()
                rows, choice = whole.confirm(guess, sampled, search)
            endurance, unlimited = whole.endurance(rows, choice)
            rows = [*rows, *unlimited]
            in_time = None
            row = choice.chosen.row
            if (clock := whole.clock) is not None and clock.can_time(row):
                in_time = clock.compared(choice.chosen.row, whole.begin.row)
                rows, choice = [clock.with_wait(row) for row in rows], choice.of_each(clock.with_wait)
            present = checked = None
            if self._present is not None:
                own = Measuring(evidence.traces, workers, journal)
                present, checked = self._present.compared(fleet, evidence, own)
            work.write([measured.row for measured in (*rows, *sampled)])
        findings = Findings(fleet, self.target, evidence, rows, choice, in_time, one_in, sampled, endurance)
        return msgspec.structs.replace(_answer(findings, work), present=present, check=checked)

    @property
    def _may_share(self) -> bool:
        """True if the search includes shared servers or shared RAM; with a target in seconds, never."""
        fleet = self.fleet
        return (fleet.may_share or fleet.shared_ram) and self.target.ttft_p90_s is None

    def _sample(self, evidence: Evidence, one_in: int) -> tuple[Fleet, Evidence]:
        """Take a sample of sessions. Returns the scaled-down fleet and the evidence of the sample."""
        options: dict[str, Any] = {"seed": self._work.seed, "one_in": one_in, "is_shared": self._may_share}
        fleet = scaled(self.fleet, evidence, gather(self._source, self.fleet, **options))
        # The evidence of the sample needs the scaled GPUs. `busy` comes from the whole recording, because
        # fewer sessions arrive less evenly.
        return fleet, replace(gather(self._source, fleet, **options), busy=evidence.busy)

    def space(self, evidence: Evidence, fleet: Fleet) -> Space:
        """Create the space of the search. Raises `ConfigError` if no RAM for sale holds any block."""
        target = self.target
        modules, drives = fleet.steps(evidence.footprint_blocks)
        if not modules:
            ram = fleet.prices.ram
            why = f"{ram.slots} modules hold no block of {fleet.block_bytes:,} B for each replica"
            raise ConfigError("ram.module", ram.module, why)

        def allowed(purchase: Purchase) -> bool:
            is_affordable = target.budget is None or fleet.price(purchase) <= _BEYOND_BUDGET * target.budget
            return is_affordable and fleet.holds_blocks(purchase)

        setups, budget = self._setups, target.budget
        within_rating = functools.partial(setups.within_rating, rated=fleet.prices.ssd.writes_per_day)
        tiers = [TierAxis("drives", drives[1:], setups.with_ssds, within_rating)]
        of_ram, with_servers = setups.of_ram, setups.with_servers
        if evidence.whole is not None and fleet.shared_ram:
            of_ram, with_servers = of_ram + _in_pools(of_ram), with_servers + _in_pools(with_servers)
        if evidence.whole is not None and fleet.may_share:
            servers = fleet.server_steps(evidence.whole.unique_blocks)
            tiers.append(TierAxis("servers", servers, with_servers))
        without_ram = [Purchase(0, 0), *(axis.with_ram(0, count) for axis in tiers for count in axis.counts)]
        edge = list[Purchase]()
        if budget is not None:
            for purchase in without_ram:
                line = (purchase._replace(modules=n) for n in range(modules[0], modules[-1] + 1))
                edge += [candidate for candidate in line if fleet.price(candidate) <= budget][-1:]
        return Space(modules, of_ram, tiers, allowed, edge)


def _in_pools(setups: Sequence[Setup]) -> list[Setup]:
    """Return a copy of each setup with shared RAM. Skips victim tiers, because each belongs to one device."""
    return [replace(setup, shared_ram=True) for setup in setups if setup.store == ON_COMPUTE]


def _answer(findings: Findings, work: Work) -> PlanAnswer:
    fleet, evidence, choice = findings.fleet, findings.evidence, findings.choice
    sections = answer(findings)
    ends_s = evidence.window_ends_s or [None] * len(evidence.refs)
    windows = zip(
        choice.chosen.hits.tolist(),
        evidence.device_hits.tolist(),
        evidence.refs.tolist(),
        ends_s,
        strict=True,
    )
    return PlanAnswer(
        trace=evidence.name,
        requests=evidence.requests,
        block_refs=evidence.block_refs,
        duration_s=evidence.duration_s,
        outcome=choice.outcome.name,
        words=[sentence for section in sections for sentence in section.sentences],
        sections=sections,
        chosen=findings.row,
        smaller=choice.smaller.row if choice.smaller else None,
        larger=choice.larger.row if choice.larger else None,
        most=choice.most.row,
        needed=choice.needed,
        needed_ttft_p90_s=findings.target.ttft_p90_s,
        ceiling=evidence.ceiling,
        ceiling_apart=evidence.ceiling_apart,
        by_gpus=evidence.device_share,
        share_outside_blocks=evidence.share_outside_blocks,
        footprint_bytes=fleet.size_bytes(sum(trace.unique_blocks for trace in evidence.traces)),
        currency=findings.currency,
        frontier=[best.row for best in frontier(findings.rows)],
        purchases=[best.row for best in best_of_each(findings.rows, feasible_first=True)],
        rows=[measured.row for measured in findings.rows],
        one_in=findings.one_in,
        sampled=[measured.row for measured in findings.sampled],
        over_time=[
            Window(hits / max(refs, 1), alone / max(refs, 1), end_s) for hits, alone, refs, end_s in windows
        ],
        payback=payback_of(findings),
        endurance=findings.endurance,
        in_time=findings.in_time,
        assumptions=assumptions(findings),
        cannot_tell=cannot_tell(findings),
        warnings=list(evidence.warnings),
        seed=work.seed,
        resamples=work.resamples,
    )


def _marked(measured: Measured, one_in: int) -> Measured:
    return replace(measured, row=msgspec.structs.replace(measured.row, one_in=one_in))


class _Stages:
    """Aggregates the progress of all stages of a plan.

    Attributes:
        later: work expected after the current search.
    """

    def __init__(self, plan: Plan, on_progress: OnProgress) -> None:
        self._plan, self.on_progress = plan, on_progress
        self.later = Progress()
        self._rows = self._refs = 0

    def report(self, now: Progress, rows: int, later: Progress) -> None:
        """Report the progress of a stage.

        Args:
            now: progress of the stage.
            rows: number of rows of the stage.
            later: work expected after the stage.
        """
        self._plan.progress = Progress(
            self._rows + now.rows_done,
            self._rows + rows + later.rows + self.later.rows,
            self._refs + now.refs_done,
            self._refs + now.refs + later.refs + self.later.refs,
        )
        self.on_progress(self._plan.progress)

    def end(self, rows: int, refs: int) -> None:
        self._rows += rows
        self._refs += refs


class _Search:
    """Search on a recording, or on a sample of its sessions."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        evidence: Evidence,
        needed: float | None,
        stages: _Stages,
        measuring: Measuring,
        journal: SweepJournal | None,
    ) -> None:
        self._plan, self._fleet, self._evidence, self._needed = plan, fleet, evidence, needed
        self._stages, self._measuring = stages, measuring
        self._difference = functools.partial(difference, evidence)
        self.clock = clock_of(fleet, evidence, journal, stages.on_progress)
        self.begin = nothing(fleet, evidence)

    def search(self) -> tuple[list[Measured], Choice]:
        """Search the space; returns all rows and the choice."""
        space = self._plan.space(self._evidence, self._fleet)
        return search(space, self._measure, self._difference, self._choose, self.begin)

    def confirm(
        self, sampled: Choice, rows: Sequence[Measured], sample: _Search
    ) -> tuple[list[Measured], Choice]:
        """On all sessions, check the choice that a sample gave; return all measured rows and the new choice.

        Args:
            sampled, rows: choice and rows that `sample` has found.
            sample: the search on the sample.
        """
        space = self._plan.space(self._evidence, self._fleet)

        def guess(guessed: Sequence[Measured]) -> Choice:
            # The windows of the sample are not the windows of the whole recording.
            begin, *bought = guessed
            return choose([replace(begin, hits=sample.begin.hits), *bought], self._needed, sample._difference)

        # With a limit for waits there is no guess, because waits are known only from replays.
        has_guess = self._plan.target.ttft_p90_s is None
        return confirm(
            space, self._measure, self._choose, self.begin, sampled, rows, guess if has_guess else None
        )

    def endurance(self, rows: Sequence[Measured], choice: Choice) -> tuple[Endurance | None, list[Measured]]:
        """Compute the savings lost because of the rating of SSDs. Also returns the rows measured for this."""
        return endurance_of(
            rows, choice.chosen, self._fleet, self._evidence, lambda cell: self._measure([cell], 0)[0]
        )

    def _choose(self, rows: Sequence[Measured]) -> Choice:
        most_s = self._plan.target.ttft_p90_s
        if most_s is not None and self.clock is not None:
            return choose_by_wait(rows, most_s, self.clock)
        return choose(rows, self._needed, self._difference)

    def _measure(self, cells: Sequence[Cell], later: int) -> list[Measured]:
        fleet, evidence, budget = self._fleet, self._evidence, self._plan.target.budget
        points_of = [cell.points(fleet, evidence) for cell in cells]
        points = list(itertools.chain.from_iterable(points_of))
        expected = Progress(0, later, 0, later * evidence.block_refs)

        def report(now: Progress) -> None:
            # `points` has one replay for a cell with servers or shared RAM, else one replay per replica.
            done = now.rows_done * len(cells) // max(1, len(points))
            self._stages.report(replace(now, rows_done=done), len(cells), expected)

        results = iter(self._measuring.measure(points, report))
        self._stages.end(len(cells), self._measuring.progress.refs)
        return [
            measured(cell, list(itertools.islice(results, len(own))), fleet, evidence, budget)
            for cell, own in zip(cells, points_of, strict=True)
        ]
