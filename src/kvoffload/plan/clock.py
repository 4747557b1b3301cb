"""Times to first token with a purchase and without, simulated on the machine of one engine.

Owns the choice of the engine, and its machine with purchased drives. The simulation is in `simulate`.
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
from kvoffload.text import duration

_FORMAT = 1
"""Format of a timed replay in the journal."""


class InTime(msgspec.Struct, frozen=True, kw_only=True):
    """Timed replays of one engine, the busiest of several.

    Attributes:
        machine: the engine's machine with the purchased SSDs; each number has its source.
        engines: number of engines that get requests.
        requests: requests of the timed engine.
        max_running, step_tokens, load: as in `Timing`; `load` is the fleet's scale.
        with_offload, without: runs with the recommended purchase and with the GPUs alone. Equal without a
            purchase.
        ram_break_even_tokens, ssd_break_even_tokens: shortest prompt for which loading is faster than
            computing on an idle machine; null if there is none, or no SSD.
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
    """Timed replays of a plan's rows, cached in memory and in the journal.

    The engine with the most block references is timed. Rows with servers or shared RAM are not timed, because
    one engine alone cannot show the load of what engines share. A fleet's `scale` multiplies the arrival rate
    of sessions and leaves the caches at full size, because queues depend on the arrival rate.

    Args:
        machine: machine of one engine, without purchases (`Fleet.machine`).
        journal: None keeps nothing.
        on_progress: receives the progress of timed replays.

    Raises: `ConfigError` at construction if a request does not fit on the GPUs of an engine. Cost:
    `run_in_time` for each new row.
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
        """Return the timed replay of a row; without a purchase, the GPUs run alone.

        `later`: number of timed replays expected to follow, for the progress.
        """
        outcome = self.known(row)
        if outcome is None:
            config = self._config(row)
            timing, requests, done = self._timing(row), self._trace.requests, self._num_timed
            rows, before = done + 1 + later, done * self._trace.requests

            def report(ended: int) -> None:
                now = done + ended // requests
                self._on_progress(Progress(now, rows, before + ended, rows * requests, "timed replays"))

            report(0)
            outcome = run_in_time(self._trace, timing, self._whole.device_blocks, config, report)
            self._num_timed += 1
            report(requests)
            self._known[Cell(row.purchase, row.setup)] = outcome
            if self._journal is not None:
                self._journal.add_timed(self._key(row), outcome)
        return outcome

    def known(self, row: PlanRow) -> TimedOutcome | None:
        """Return the timed replay of a row if this run or an earlier one has made it."""
        if row.servers or row.shared_ram:
            return None
        cell = Cell(row.purchase, row.setup)
        if cell not in self._known and self._journal is not None:
            kept = self._journal.timed.get(self._key(row))
            if kept is not None:
                self._known[cell] = kept
        return self._known.get(cell)

    def with_wait(self, measured: Measured) -> Measured:
        """Add the time to first token to a row, if it is known."""
        outcome = self.known(measured.row)
        if outcome is None:
            return measured
        return replace(measured, row=msgspec.structs.replace(measured.row, ttft_p90_s=outcome.ttft_s.p90))

    def compared(self, row: PlanRow, nothing: PlanRow) -> InTime:
        """Compare a row with the row without a purchase."""
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
        """Cache key: a hash of everything that the timed replay depends on."""
        config, source = self._config(row), self._evidence.traces[self._busiest].source
        code = [] if config is None else code_digests(config)
        parts = ["timed", _FORMAT, source.digest, code, self._timing(row), self._whole.device_blocks, config]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _timing(self, row: PlanRow) -> Timing:
        return Timing(self._with_drives(row.ssd_drives), self._fleet.block_bytes, load=self._fleet.scale)

    def _with_drives(self, drives: int) -> Machine:
        """Return the machine with an engine's share of `drives` drives per host."""
        if not drives:
            return self._machine
        fleet, ssd = self._fleet, self._fleet.prices.ssd
        share = fleet.hosts * drives / fleet.replicas
        rates: dict[str, Quantity] = {}
        for direction, rated in (("read", ssd.read_bytes_per_s), ("write", ssd.write_bytes_per_s)):
            name = f"disk_{direction}_bytes_per_s"
            rate: Quantity | None = getattr(self._machine, name)
            assert rate is not None, "checked by Fleet"
            if rated < rate.value:
                rate = Quantity.assumed(rated, f"ssd.{direction}_per_s, below the machine's")
            source = f"{rate.source}; times {share:g}, the drives of an engine"
            rates[name] = Quantity(rate.value * share, rate.p10 * share, rate.p90 * share, source)
        return msgspec.structs.replace(self._machine, **rates)


def clock_of(
    fleet: Fleet, evidence: Evidence, journal: SweepJournal | None, on_progress: OnProgress
) -> Clock | None:
    """Create a clock; None without a machine, or without times in the recording."""
    if fleet.machine is None or not evidence.duration_s:
        return None
    return Clock(fleet.machine, fleet, evidence, journal, on_progress)


def timing_assumptions(timed: InTime) -> Iterator[tuple[str, str, str]]:
    """List the assumptions of timed replays: names, values and sources."""
    machine = timed.machine
    yield "machine", machine.name, f"of an engine, given; model: {machine.model or 'unknown'}"
    for name in QUANTITIES:
        number: Quantity | None = getattr(machine, name)
        if number is not None:
            yield name, _with_unit(name, number.value), number.source
    if timed.engines > 1:
        engine = f"the busiest of {timed.engines}, with {timed.requests:,} requests"
        yield "timed engine", engine, "other engines wait less, if their machines are equal"
    yield "requests at a time", f"{timed.max_running:,}", "assumed, of an engine"
    yield "tokens a step", f"{timed.step_tokens:,}", "assumed, of an engine"
    if timed.load != 1:
        yield "arrival rate", f"{timed.load:g} times the recording's", "scale; with full-size caches"


def _with_unit(name: str, value: float) -> str:
    """Format a quantity of a machine, whose name ends with its unit: ``50.4 GB/s``, ``5 ms``."""
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith(("tokens_per_s", "_squared")):
        return f"{value:.4g}"
    return duration(value)
