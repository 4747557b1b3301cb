"""Times to first token with and without a purchase, simulated on the machine of one engine.

Chooses the engines to time, and adds purchased drives or servers to the machine. The simulation is in
`simulate`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import NOTHING, Fleet
from kvoffload.plan.rows import Cell, Measured, PlanRow
from kvoffload.replay.config import ReplayConfig
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import check_room
from kvoffload.simulate.machine import Machine, Quantity
from kvoffload.simulate.report import TimedOutcome
from kvoffload.simulate.timed import run_in_time
from kvoffload.sweep.journal import SweepJournal
from kvoffload.sweep.measuring import OnProgress, Progress
from kvoffload.sweep.task import code_digests, load
from kvoffload.traces.trace import Trace

_FORMAT = 2
"""Format of a timed replay in the journal."""
_SERVER_LATENCY_S = 0.001
"""Assumed latency of a server, without the transfer of the bytes: a round trip and the server's work."""


class InTime(msgspec.Struct, frozen=True, kw_only=True):
    """Timed replays of the busiest engine or, if engines share servers or RAM, of all engines.

    Attributes:
        machine: the engine's machine with the source of each number. The machine's disk stands for the
            purchased SSDs, or for the connection to the servers.
        engines: number of engines that get requests.
        all_engines: True if all engines were timed together.
        requests: number of requests of the timed engines.
        max_running, step_tokens, load: as in `Timing`; `load` is `Fleet.scale`.
        with_offload: the run with the recommended purchase.
        without: the run with the GPUs alone. Equal to `with_offload` if nothing is purchased.
        ram_break_even_tokens, ssd_break_even_tokens, server_break_even_tokens: length of the shortest prompt
            that an idle machine loads faster than it computes. Null if there is no such prompt, or if the
            purchase has no SSD or server.
    """

    machine: Machine
    engines: int
    all_engines: bool = False
    requests: int
    max_running: int
    step_tokens: int
    load: float
    with_offload: TimedOutcome
    without: TimedOutcome
    ram_break_even_tokens: float | None
    ssd_break_even_tokens: float | None
    server_break_even_tokens: float | None = None

    @property
    def is_one_of_several(self) -> bool:
        """True if only the busiest of several engines was timed."""
        return self.engines > 1 and not self.all_engines


class Clock:
    """Timed replays of a plan's rows, cached in memory and in the journal.

    For a row with servers or shared RAM, all engines are timed together; for other rows, only the engine with
    the most block references. Shared RAM is timed only if there is a single host.

    Untimed replays divide the sizes of caches by the fleet's `scale`. Timed replays instead multiply the
    arrival rate of sessions by `scale`, because queues depend on the arrival rate.

    Args:
        machine: machine of one engine, without purchases (`Fleet.machine`).
        journal: journal of timed replays. None: timed replays are cached in memory only.
        on_progress: receives the progress of timed replays.

    Raises: `ConfigError` at construction if a request does not fit on the GPUs of an engine.
    Cost: `run_in_time` for each new row.
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
        self._known: dict[tuple[Cell, bool], TimedOutcome] = {}
        for of_all in (False, True) if evidence.whole is not None else (False,):
            self._check_room(self._trace_of(of_all))

    def can_time(self, row: PlanRow) -> bool:
        """Return True unless the row has shared RAM and the engines are on several hosts."""
        return not (row.shared_ram and self._fleet.hosts > 1)

    def outcome(self, row: PlanRow, later: int = 0, *, of_all: bool = False) -> TimedOutcome:
        """Return the timed replay of a row. A row without a purchase is replayed on the GPUs alone.

        Args:
            later: number of timed replays that will follow, for the progress.
            of_all: True to time all engines, even if they share neither servers nor RAM.
        """
        of_all |= _shares(row)
        outcome = self.known(row, of_all=of_all)
        if outcome is None:
            config, trace = self._config(row), self._trace_of(of_all)
            timing, requests, done = self.timing_of(row), trace.requests, self._num_timed
            rows, before = done + 1 + later, done * requests

            def report(ended: int) -> None:
                now = done + ended // requests
                self._on_progress(Progress(now, rows, before + ended, rows * requests, "timed replays"))

            report(0)
            engines = self._fleet.replicas if of_all else 1
            outcome = run_in_time(
                trace, timing, self._whole.device_blocks, config, report,
                instances=engines, routing=self._fleet.routing,
            )  # fmt: skip
            self._num_timed += 1
            report(requests)
            self._known[Cell(row.purchase, row.setup), of_all] = outcome
            if self._journal is not None:
                self._journal.add_timed(self.cache_key(row, of_all), outcome)
        return outcome

    def known(self, row: PlanRow, *, of_all: bool = False) -> TimedOutcome | None:
        """Return the cached timed replay of a row, from memory or the journal; None if it is not cached."""
        of_all |= _shares(row)
        cell = Cell(row.purchase, row.setup), of_all
        if cell not in self._known and self._journal is not None:
            kept = self._journal.timed.get(self.cache_key(row, of_all))
            if kept is not None:
                self._known[cell] = kept
        return self._known.get(cell)

    def with_wait(self, measured: Measured) -> Measured:
        """Add the time to first token to a row whose timed replay is cached; return other rows unchanged."""
        outcome = self.known(measured.row)
        if outcome is None:
            return measured
        return replace(measured, row=msgspec.structs.replace(measured.row, ttft_p90_s=outcome.ttft_s.p90))

    def compared(self, row: PlanRow, nothing: PlanRow) -> InTime:
        """Compare the timed replays of `row` and of `nothing`, which is the row without a purchase."""
        timing, bytes_per_token = self.timing_of(row), self._fleet.block_bytes / self._trace.block_tokens
        of_all = _shares(row)
        from_ram = timing.machine.break_even_tokens(bytes_per_token)
        from_below = math.inf
        if row.ssd_drives or row.servers:
            from_below = timing.machine.break_even_tokens(bytes_per_token, from_disk=True)
        below = from_below if math.isfinite(from_below) else None
        return InTime(
            machine=timing.machine,
            engines=len(self._evidence.traces),
            all_engines=of_all,
            requests=self._trace_of(of_all).requests,
            max_running=timing.max_running,
            step_tokens=timing.step_tokens,
            load=timing.load,
            with_offload=self.outcome(row, later=1),
            without=self.outcome(nothing, of_all=of_all),
            ram_break_even_tokens=from_ram if math.isfinite(from_ram) else None,
            ssd_break_even_tokens=below if row.ssd_drives else None,
            server_break_even_tokens=below if row.servers else None,
        )

    def _check_room(self, trace: Trace) -> None:
        fleet, num_blocks = self._fleet, self._whole.device_blocks
        try:
            check_room(trace, num_blocks)
        except ConfigError as error:
            if fleet.gpu_blocks:
                raise ConfigError("gpu-tokens", f"{num_blocks} blocks", error.allowed) from None
            blocks = f"an engine's GPUs have {num_blocks:,} blocks"
            raise ConfigError("kv-per-gpu", fleet.kv_bytes_per_gpu, f"{blocks}; {error.allowed}") from None

    def _trace_of(self, of_all: bool) -> Trace:
        """Return the requests of all engines if `of_all` is True, else of the busiest engine."""
        if not of_all:
            return self._trace
        assert self._evidence.whole is not None, "engines share something"
        return load(self._evidence.whole.source)

    def _config(self, row: PlanRow) -> ReplayConfig | None:
        cell = Cell(row.purchase, row.setup)
        if cell.purchase == NOTHING:
            return None
        points = cell.points(self._whole, self._evidence)
        return points[0 if _shares(row) else self._busiest].config

    def cache_key(self, row: PlanRow, of_all: bool) -> str:
        """Cache key: a hash of everything that the timed replay depends on."""
        config, source = self._config(row), self._evidence.traces[self._busiest].source
        if of_all and self._evidence.whole is not None:
            source = self._evidence.whole.source
        code, timing = code_digests(config), self.timing_of(row)
        parts = ["timed", _FORMAT, source.digest, code, timing, self._whole.device_blocks, config]
        if of_all:
            parts += [self._fleet.replicas, self._fleet.routing]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def timing_of(self, row: PlanRow) -> Timing:
        """Return the assumptions of a row's timed replay, with the speeds of its drives or servers."""
        machine = self._with_servers(row) if row.servers else self._with_drives(row.ssd_drives)
        return Timing(machine, self._fleet.block_bytes, load=self._fleet.scale)

    def _with_servers(self, row: PlanRow) -> Machine:
        """Return the machine with its disk replaced by a connection to the servers.

        The network bandwidth of hosts and servers is divided equally among the engines. Engines that share a
        RAM pool have one connection.
        """
        fleet, server = self._fleet, self._fleet.prices.server
        links, user = (fleet.hosts, "a pool") if row.shared_ram else (fleet.replicas, "an engine")
        of_host = server.host_link_bytes_per_s * fleet.hosts / links
        of_servers = server.link_bytes_per_s * row.servers / links
        source = f"servers: {user}'s share of the links of hosts and servers"
        rate = Quantity.assumed(min(of_host, of_servers), source)
        latency = Quantity.assumed(_SERVER_LATENCY_S, "servers: a round trip and the server's work")
        return msgspec.structs.replace(
            self._machine,
            disk_read_bytes_per_s=rate,
            disk_write_bytes_per_s=rate,
            disk_read_latency_s=latency,
            disk_write_latency_s=latency,
        )

    def _with_drives(self, drives: int) -> Machine:
        """Return the machine with one engine's share of the drives, for `drives` drives in each host."""
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


def _shares(row: PlanRow) -> bool:
    """Return True if the engines of a row share servers or RAM."""
    return bool(row.servers or row.shared_ram)


def clock_of(
    fleet: Fleet, evidence: Evidence, journal: SweepJournal | None, on_progress: OnProgress
) -> Clock | None:
    """Create a clock. Returns None if the fleet has no machine, or if the recording has no times."""
    if fleet.machine is None or not evidence.duration_s:
        return None
    return Clock(fleet.machine, fleet, evidence, journal, on_progress)
