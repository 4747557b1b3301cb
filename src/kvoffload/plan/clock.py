"""A purchase in time: how long users wait for first tokens with it and without, on the engines' machine.

Owns which engine is timed, and what its machine is once drives are bought. The simulation is `replay.timing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import NOTHING, Fleet
from kvoffload.plan.rows import Cell, PlanRow
from kvoffload.replay.timing.config import Timing
from kvoffload.replay.timing.engine import check_room
from kvoffload.replay.timing.machine import QUANTITIES, Machine, Quantity
from kvoffload.replay.timing.report import TimedOutcome
from kvoffload.replay.timing.timed import run_in_time
from kvoffload.sweep.task import load


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
    """Times rows of a plan, each once.

    The engine that has most block references is timed. Where the fleet has `scale` times the requests of the
    recording, its sessions begin so much more densely, with whole caches: queues depend on how many come.

    Args:
        machine: of one engine, without what is bought (`Fleet.machine`).

    Raises: `ConfigError` at construction if a request does not fit the GPUs of an engine. Cost: as
    `run_in_time`, for each row that is new.
    """

    def __init__(self, machine: Machine, fleet: Fleet, evidence: Evidence) -> None:
        self._machine, self._fleet, self._evidence = machine, fleet, evidence
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

    def outcome(self, row: PlanRow) -> TimedOutcome:
        """The timed replay of a row; that of a row which buys nothing is of the GPUs alone."""
        cell = Cell(row.purchase, row.setup)
        if cell not in self._known:
            config = None
            if cell.purchase != NOTHING:
                config = cell.points(self._whole, self._evidence)[self._busiest].config()
            timing = self._timing(row)
            self._known[cell] = run_in_time(self._trace, timing, self._whole.device_blocks, config)
        return self._known[cell]

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
            with_offload=self.outcome(row),
            without=self.outcome(nothing),
            ram_break_even_tokens=from_ram if math.isfinite(from_ram) else None,
            ssd_break_even_tokens=from_ssds if math.isfinite(from_ssds) else None,
        )

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


def clock_of(fleet: Fleet, evidence: Evidence) -> Clock | None:
    """A clock; None where no machine is known, or the recording has no times."""
    if fleet.machine is None or not evidence.duration_s:
        return None
    return Clock(fleet.machine, fleet, evidence)


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
