"""A purchase in time: how long users wait for first tokens with it and without, on the engines' machine.

Owns which engine is timed, and what its machine is once drives are bought. The simulation is `simulate`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import NOTHING, Fleet
from kvoffload.plan.rows import Cell, Measured, PlanRow
from kvoffload.replay.replay import ReplayConfig
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import check_room
from kvoffload.simulate.machine import QUANTITIES, Machine, Quantity
from kvoffload.simulate.report import TimedOutcome
from kvoffload.simulate.timed import run_in_time
from kvoffload.sweep.journal import SweepJournal
from kvoffload.sweep.measuring import OnProgress, Progress
from kvoffload.sweep.task import code_digests, load

_FORMAT = 1
"""Of a timed replay in the journal."""


class InTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a timed replay of one engine found: the busiest, where there are several.

    Attributes:
        machine: of that engine, with the SSDs that are bought for it; each number with its source.
        engines: that get requests; requests: that the timed one gets.
        max_running, step_tokens, load: as in `Timing`; `load` is the fleet's scale.
        with_offload: as recommended; without: the GPUs alone. Equal where nothing is bought.
        ram_break_even_tokens: from how many tokens on a load from RAM, alone on the machine, beats computing;
            null if never. ssd_break_even_tokens: from SSDs; null also where none are bought.
    """

    machine: Machine
    engines: int
    requests: int
    max_running: int
    step_tokens: int
    load: float
    with_offload: TimedOutcome
    without: TimedOutcome
    ram_break_even_tokens: float | None
    ssd_break_even_tokens: float | None


class Clock:
    """Times rows of a plan without servers, each once; what the journal has is not done again. A tier that
    engines share is not in the clock: it times one of them.

    The engine that has most block references is timed. Where the fleet has `scale` times the requests of the
    recording, its sessions begin so much more densely, with whole caches: queues depend on how many come.

    Args:
        machine: of one engine, without what is bought (`Fleet.machine`).
        journal: None keeps nothing.
        on_progress: is told how far timed replays are.

    Raises: `ConfigError` at construction if a request does not fit the GPUs of an engine. Cost: as
    `run_in_time`, for each row that is new.
    """

    def __init__(
        self,
        machine: Machine,
        fleet: Fleet,
        evidence: Evidence,
        journal: SweepJournal | None = None,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        self._machine, self._fleet, self._evidence = machine, fleet, evidence
        self._journal, self._on_progress, self._num_timed = journal, on_progress, 0
        refs = [trace.block_refs for trace in evidence.traces]
        self._busiest = refs.index(max(refs))
        self._trace = load(evidence.traces[self._busiest].source)
        self._whole = replace(fleet, scale=1.0)
        self._known: dict[Cell, TimedOutcome] = {}
        try:
            check_room(self._trace, self._whole.device_blocks)
        except ConfigError as error:
            blocks = f"an engine's GPUs have {self._whole.device_blocks:,} blocks"
            raise ConfigError("kv-per-gpu", fleet.kv_bytes_per_gpu, f"{blocks}; {error.allowed}") from None

    def outcome(self, row: PlanRow, later: int = 0) -> TimedOutcome:
        """The timed replay of a row; that of a row which buys nothing is of the GPUs alone.

        `later`: how many others are expected to follow, for an estimate of the time.
        """
        found = self.known(row)
        if found is None:
            config = self._config(row)
            timing, requests, done = self._timing(row), self._trace.requests, self._num_timed
            rows, before = done + 1 + later, done * self._trace.requests

            def told(ended: int) -> None:
                now = done + ended // requests
                self._on_progress(Progress(now, rows, before + ended, rows * requests, "timed replays"))

            told(0)
            found = run_in_time(self._trace, timing, self._whole.device_blocks, config, told)
            self._num_timed += 1
            told(requests)
            self._known[Cell(row.purchase, row.setup)] = found
            if self._journal is not None:
                self._journal.add_timed(self._key(row), found)
        return found

    def known(self, row: PlanRow) -> TimedOutcome | None:
        """The timed replay of a row if it has been made, by this run or by an earlier one."""
        if row.servers:
            return None
        cell = Cell(row.purchase, row.setup)
        if cell not in self._known and self._journal is not None:
            kept = self._journal.timed.get(self._key(row))
            if kept is not None:
                self._known[cell] = kept
        return self._known.get(cell)

    def told(self, one: Measured) -> Measured:
        """The same row, with how long users wait if that is known."""
        found = self.known(one.row)
        if found is None:
            return one
        return replace(one, row=msgspec.structs.replace(one.row, ttft_p90_s=found.ttft_s.p90))

    def compared(self, row: PlanRow, nothing: PlanRow) -> InTime:
        """A row beside the one that buys nothing."""
        timing, bytes_per_token = self._timing(row), self._fleet.block_bytes / self._trace.block_tokens
        from_ram = timing.machine.break_even_tokens(bytes_per_token)
        from_ssds = math.inf
        if row.ssd_drives:
            from_ssds = timing.machine.break_even_tokens(bytes_per_token, from_disk=True)
        return InTime(
            machine=timing.machine,
            engines=len(self._evidence.traces),
            requests=self._trace.requests,
            max_running=timing.max_running,
            step_tokens=timing.step_tokens,
            load=timing.load,
            with_offload=self.outcome(row, later=1),
            without=self.outcome(nothing),
            ram_break_even_tokens=from_ram if math.isfinite(from_ram) else None,
            ssd_break_even_tokens=from_ssds if math.isfinite(from_ssds) else None,
        )

    def _config(self, row: PlanRow) -> ReplayConfig | None:
        cell = Cell(row.purchase, row.setup)
        if cell.purchase == NOTHING:
            return None
        return cell.points(self._whole, self._evidence)[self._busiest].config

    def _key(self, row: PlanRow) -> str:
        """What a timed replay is known by: all that it depends on."""
        config, source = self._config(row), self._evidence.traces[self._busiest].source
        code = [] if config is None else code_digests(config)
        parts = ["timed", _FORMAT, source.digest, code, self._timing(row), self._whole.device_blocks, config]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _timing(self, row: PlanRow) -> Timing:
        return Timing(self._with_drives(row.ssd_drives), self._fleet.block_bytes, load=self._fleet.scale)

    def _with_drives(self, drives: int) -> Machine:
        """The machine with an engine's part of so many drives in each host."""
        if not drives:
            return self._machine
        fleet, ssd = self._fleet, self._fleet.prices.ssd
        part = fleet.hosts * drives / fleet.replicas
        rates: dict[str, Quantity] = {}
        for what, announced in (("read", ssd.read_bytes_per_s), ("write", ssd.write_bytes_per_s)):
            name = f"disk_{what}_bytes_per_s"
            found: Quantity | None = getattr(self._machine, name)
            assert found is not None, "checked by Fleet"
            if announced < found.value:
                found = Quantity.assumed(announced, f"ssd.{what}_per_s, below the machine's")
            many = f"{found.source}; times {part:g}, the drives of an engine"
            rates[name] = Quantity(found.value * part, found.p10 * part, found.p90 * part, many)
        return msgspec.structs.replace(self._machine, **rates)


def clock_of(
    fleet: Fleet, evidence: Evidence, journal: SweepJournal | None, on_progress: OnProgress
) -> Clock | None:
    """A clock; None where no machine is known, or the recording has no times."""
    if fleet.machine is None or not evidence.duration_s:
        return None
    return Clock(fleet.machine, fleet, evidence, journal, on_progress)


def rests_on(found: InTime) -> Iterator[tuple[str, str, str]]:
    """What times rest on besides the rest of a plan: names, values, and where they are from."""
    machine = found.machine
    yield "machine", machine.name, f"of an engine, given; model: {machine.model or 'not said'}"
    for name in QUANTITIES:
        number: Quantity | None = getattr(machine, name)
        if number is not None:
            yield name, f"{number.value:.4g}", number.source
    if found.engines > 1:
        who = f"the one of {found.engines} with most blocks, {found.requests:,} requests"
        yield "timed engine", who, "the others wait less, if they are alike"
    yield "requests at a time", f"{found.max_running:,}", "assumed, of an engine"
    yield "tokens a step", f"{found.step_tokens:,}", "assumed, of an engine"
    if found.load != 1:
        yield "sessions in time", f"begun {found.load:g} times as densely", "scale; with whole caches"
