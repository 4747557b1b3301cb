"""Rows of a plan. A row is a purchase with its setup, savings and price, and the limits that it exceeds.

Defines the columns and the hardware limits. Measurements are replays, as in a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from kvoffload.plan.evidence import Evidence, together
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.routing import SESSION
from kvoffload.sweep.bootstrap import Interval, Sums
from kvoffload.sweep.grid import Point
from kvoffload.sweep.task import Measurement
from kvoffload.text import duration
from kvoffload.tiers.kinds.simulated import SimulatedOptions

_A_DAY_S = 86_400
WEAR = "SSD wear"
"""Short name of the limit for drive writes per day."""
SERVER_POLICY = "lru"
"""Eviction policy of servers, which choose their victims themselves (docs/cluster.md)."""


@dataclass(frozen=True, order=True)
class Setup:
    """Store mode, policies and admission rules of a purchase.

    Attributes:
        ssd_policy, ssd_admission: policy and rule of the SSDs; empty without SSDs.
        server_admission: rule of the servers; empty without servers.
        ssd_write_budget: drive writes per day to which the SSD tier limits itself; 0: no limit.
        shared_ram: True if the engines of a host share one RAM pool. Only a setup without SSDs may share RAM.
    """

    store: str
    policy: str
    admission: str
    ssd_policy: str = ""
    ssd_admission: str = ""
    server_admission: str = ""
    ssd_write_budget: float = 0.0
    shared_ram: bool = False

    def __str__(self) -> str:
        if not self.store:
            return "nothing is bought"
        ram = self.policy if self.admission == "all" else f"{self.policy} with {self.admission}"
        ssd = "" if self.ssd_admission in ("", "all") else f"; SSD takes {self.ssd_admission}"
        ssd += "" if self.ssd_policy in ("", "lru") else f", {self.ssd_policy}"
        if self.ssd_write_budget:
            plural = "" if self.ssd_write_budget == 1 else "s"
            ssd += f", within {self.ssd_write_budget:g} drive write{plural} a day"
        server = "" if self.server_admission in ("", "all") else f"; servers take {self.server_admission}"
        pool = ", shared RAM" if self.shared_ram else ""
        return f"{ram}, {self.store}{pool}{ssd}{server}"


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """Output line of a purchase with one setup. Savings are shares of the prefill, in block references.

    Attributes:
        ram_modules, ssd_drives: number of RAM modules and of SSDs per host.
        servers: number of servers of the fleet.
        ram_bytes, ssd_bytes, server_bytes, price: totals over all hosts and servers.
        store, policy, admission: setup of RAM; empty for the row without a purchase.
        ssd_policy, ssd_admission, server_admission: setup of SSDs and servers; empty without them.
        ssd_write_budget: drive writes per day to which the SSD tier limits itself; 0: no limit.
        shared_ram: True if the engines of a host share one RAM pool. The pool has `ram_blocks` for each
            engine.
        device_blocks, ram_blocks, ssd_blocks: capacity of each replica in blocks, as replayed.
        server_blocks: capacity of all servers in blocks, as replayed.
        saved: share of the prefill that is saved (prefix-hit ratio).
        saved_low, saved_high, correlation: interval of `saved` (`bootstrap.Interval`); null for too few
            requests.
        by_gpus, by_ram, by_ssds, by_servers: savings by place; they add up to `saved`.
        of_ceiling: `saved` divided by the savings of unlimited caches; null if these are 0.
        optimum: upper bound of `saved` for any policy; with servers, the savings of unlimited caches.
        gpus_worth: number of GPUs whose work the purchase saves; null without speeds or times.
        gpu_hours_a_day: `gpus_worth` in GPU-hours per day.
        ram_write_bytes_per_s, load_bytes_per_s, ssd_write_bytes_per_s, ssd_read_bytes_per_s,
            server_write_bytes_per_s, server_read_bytes_per_s: mean rates of the fleet; null without times.
        busy: traffic of the busiest minute, divided by the mean traffic.
        drive_writes_a_day: bytes written to a drive per day, as a multiple of the drive's capacity; null
            without SSDs.
        ssd_life_years: years until a drive is worn out; null without SSDs.
        feasible: True if the row exceeds no limit.
        why_not: the exceeded limits as sentences.
        exceeds: short names of the exceeded limits: ``SSD wear, budget``.
        ttft_p90_s: 90th percentile of the time to first token; null if it was not simulated.
        one_in: the row was measured on ``1 / one_in`` of the sessions.
    """

    ram_modules: int
    ssd_drives: int
    servers: int
    ram_bytes: int
    ssd_bytes: int
    server_bytes: int
    price: float
    store: str
    policy: str
    admission: str
    ssd_policy: str
    ssd_admission: str
    server_admission: str
    device_blocks: int
    ram_blocks: int
    ssd_blocks: int
    server_blocks: int
    saved: float
    saved_low: float | None
    saved_high: float | None
    correlation: float | None
    by_gpus: float
    by_ram: float
    by_ssds: float
    by_servers: float
    of_ceiling: float | None
    optimum: float
    gpus_worth: float | None
    gpu_hours_a_day: float | None
    ram_write_bytes_per_s: float | None
    load_bytes_per_s: float | None
    ssd_write_bytes_per_s: float | None
    ssd_read_bytes_per_s: float | None
    server_write_bytes_per_s: float | None
    server_read_bytes_per_s: float | None
    busy: float
    drive_writes_a_day: float | None
    ssd_life_years: float | None
    feasible: bool
    why_not: str
    ttft_p90_s: float | None = None
    one_in: int = 1
    exceeds: str = ""
    ssd_write_budget: float = 0.0
    shared_ram: bool = False

    @property
    def purchase(self) -> Purchase:
        return Purchase(self.ram_modules, self.ssd_drives, self.servers)

    @property
    def setup(self) -> Setup:
        return Setup(self.store, self.policy, self.admission, self.ssd_policy, self.ssd_admission,
                     self.server_admission, self.ssd_write_budget, self.shared_ram)  # fmt: skip

    @property
    def write_budget_bytes(self) -> int:
        """Bytes per day that the write budgets of all engines allow; 0: no limit."""
        return round(self.ssd_write_budget * self.ssd_bytes)

    @property
    def is_worn(self) -> bool:
        """True if the writes to SSDs would exceed the drives' rating."""
        return WEAR in self.exceeds.split(", ")


@dataclass(frozen=True)
class Measured:
    """A row, and its hits in each window of the recording, from which intervals are computed."""

    row: PlanRow
    hits: Sums


@dataclass(frozen=True)
class Cell:
    """A purchase with a setup: the input of one measurement."""

    purchase: Purchase
    setup: Setup

    def points(self, fleet: Fleet, evidence: Evidence) -> list[Point]:
        """Create the inputs of this cell's replays.

        If replicas share servers or RAM, one replay covers all replicas. Otherwise each replica has a replay.
        Replicas without requests are left out.
        """
        setup = self.setup
        # Capacity for more than all unique blocks makes no difference.
        if self.purchase.servers:
            assert evidence.whole is not None, "servers need a shared trace"
            blocks = min(fleet.server_blocks(self.purchase), evidence.whole.unique_blocks)
            tier = SimulatedOptions(
                capacity=str(blocks), policy=SERVER_POLICY, admission=setup.server_admission
            )
            return [self._point(fleet, len(evidence.traces), tier, fleet.replicas)]
        if setup.shared_ram:
            assert evidence.whole is not None, "shared RAM needs a shared trace"
            return [self._point(fleet, len(evidence.traces), None, fleet.replicas)]
        if not self.purchase.drives:
            return [self._point(fleet, number) for number in range(len(evidence.traces))]
        ssd = fleet.blocks(fleet.ssd_bytes(self.purchase))
        points, max_writes = [], self.max_writes_per_day(fleet)
        for number, trace in enumerate(evidence.traces):
            capacity = str(min(ssd, trace.unique_blocks))
            # A budget that grows with time is 0 if all requests of the replica arrive at one time.
            budget = max_writes if trace.duration_s or max_writes is None else 0.0
            tier = SimulatedOptions(
                capacity=capacity,
                policy=setup.ssd_policy,
                admission=setup.ssd_admission,
                max_write_blocks_per_day=budget,
            )
            points.append(self._point(fleet, number, tier))
        return points

    def max_writes_per_day(self, fleet: Fleet) -> float | None:
        """Compute a replica's write budget in blocks per day, divided by the scale; None without a budget."""
        written = self.setup.ssd_write_budget * fleet.ssd_bytes(self.purchase)
        return written / (fleet.replicas * fleet.block_bytes * fleet.scale) if written else None

    def _point(
        self, fleet: Fleet, trace: int, tier: SimulatedOptions | None = None, instances: int = 1
    ) -> Point:
        setup = self.setup
        config = ReplayConfig(
            capacity_blocks=fleet.blocks(fleet.ram_bytes(self.purchase)),
            policy=setup.policy,
            admission=setup.admission,
            device_blocks=fleet.device_blocks,
            store=setup.store,
            tiers=() if tier is None else (tier,),
            instances=instances,
            routing=fleet.routing if instances > 1 else SESSION,
            shared_ram=setup.shared_ram,
            machines=fleet.hosts if setup.shared_ram else 1,
        )
        return Point(trace, config, str(config.capacity_blocks), str(config.device_blocks))

    def window_hits(self, measurements: Sequence[Measurement]) -> Sums:
        """Return the hits of all replicas in each window. `measurements`: results for the `points`."""
        if self.purchase.servers or self.setup.shared_ram:
            return together([np.array(hits, np.int64) for hits in measurements[0].instance_window_hits])
        return together([np.array(measurement.window_hits, np.int64) for measurement in measurements])


def nothing(fleet: Fleet, evidence: Evidence) -> Measured:
    """Create the row without a purchase: no caches but the GPUs' own."""
    return _measured(Cell(NOTHING, Setup("", "", "")), [], fleet, evidence, evidence.device_hits)


def measured(
    cell: Cell,
    measurements: Sequence[Measurement],
    fleet: Fleet,
    evidence: Evidence,
    budget: float | None = None,
) -> Measured:
    """Create the table row of a purchase with a setup.

    Args:
        cell: the purchase and the setup.
        measurements: results of the replays of `cell.points`, in order.
        budget: limit for the price. A row with a higher price is infeasible.
    """
    hits = cell.window_hits(measurements)
    row = _measured(cell, measurements, fleet, evidence, hits).row
    exceeded = limits(row, fleet, budget)
    why_not = "; ".join(limit.text for limit in exceeded)
    names = ", ".join(dict.fromkeys(limit.name for limit in exceeded))
    return Measured(msgspec.structs.replace(row, feasible=not exceeded, why_not=why_not, exceeds=names), hits)


def _measured(
    cell: Cell, measurements: Sequence[Measurement], fleet: Fleet, evidence: Evidence, hits: Sums
) -> Measured:
    refs, purchase = evidence.block_refs, cell.purchase
    reports = [measurement.report for measurement in measurements]
    tier_reports = [tier for report in reports for tier in report.tiers[1:]]
    saved, interval = int(hits.sum()), evidence.interval(hits)
    tier_hits = sum(tier.hit_blocks for tier in tier_reports)
    offload_hits = sum(report.offload_hit_blocks for report in reports)
    reads = evidence.per_second(tier_hits, fleet)
    writes = evidence.per_second(sum(tier.blocks_written for tier in tier_reports), fleet)
    best = sum(round(report.optimum_hit_ratio * report.block_refs) for report in reports) or saved
    worth = evidence.gpus_worth(offload_hits / refs, fleet)
    ssd_bytes = fleet.ssd_bytes(purchase)
    a_day = None if writes is None or not ssd_bytes else writes * _A_DAY_S / ssd_bytes
    rated = fleet.prices.ssd
    life = rated.writes_per_day * rated.life_years / a_day if a_day else None
    row = PlanRow(
        ram_modules=purchase.modules,
        ssd_drives=purchase.drives,
        servers=purchase.servers,
        ram_bytes=fleet.ram_bytes(purchase),
        ssd_bytes=ssd_bytes,
        server_bytes=fleet.server_bytes(purchase),
        price=fleet.price(purchase),
        **asdict(cell.setup),
        device_blocks=fleet.device_blocks,
        ram_blocks=fleet.blocks(fleet.ram_bytes(purchase)),
        ssd_blocks=fleet.blocks(ssd_bytes),
        server_blocks=fleet.server_blocks(purchase),
        saved=saved / refs,
        saved_low=interval and interval.low,
        saved_high=interval and interval.high,
        correlation=interval and interval.correlation,
        by_gpus=(saved - offload_hits) / refs,
        by_ram=(offload_hits - tier_hits) / refs,
        by_ssds=tier_hits / refs if purchase.drives else 0.0,
        by_servers=tier_hits / refs if purchase.servers else 0.0,
        of_ceiling=saved / evidence.ceiling_hits if evidence.ceiling_hits else None,
        optimum=best / refs,
        gpus_worth=worth,
        gpu_hours_a_day=None if worth is None else 24 * worth,
        ram_write_bytes_per_s=evidence.per_second(sum(report.blocks_written for report in reports), fleet),
        load_bytes_per_s=evidence.per_second(offload_hits, fleet),
        ssd_write_bytes_per_s=writes if purchase.drives else None,
        ssd_read_bytes_per_s=reads if purchase.drives else None,
        server_write_bytes_per_s=writes if purchase.servers else None,
        server_read_bytes_per_s=reads if purchase.servers else None,
        busy=evidence.busy,
        drive_writes_a_day=a_day,
        ssd_life_years=life,
        feasible=True,
        why_not="",
    )
    return Measured(row, hits)


class Limit(NamedTuple):
    """An exceeded limit: its short name, and a sentence with the numbers."""

    name: str
    text: str


def limits(row: PlanRow, fleet: Fleet, budget: float | None = None) -> list[Limit]:
    """List the limits of hardware and budget that a row exceeds."""
    exceeded, prices, drives = list[Limit](), fleet.prices, fleet.hosts * row.ssd_drives
    if budget is not None and row.price > budget:
        exceeded.append(Limit("budget", f"{row.price:,.0f} {prices.currency} are above the budget"))
    link, stored = fleet.gpus * prices.link_bytes_per_s, row.ram_write_bytes_per_s
    if stored is not None:
        # RAM also writes the blocks that it reads from SSDs and servers. They do not come over the links.
        stored -= (row.ssd_read_bytes_per_s or 0.0) + (row.server_read_bytes_per_s or 0.0)
    for name, used in (("stores", stored), ("loads", row.load_bytes_per_s)):
        if used is not None and used * row.busy > link:
            text = f"{name} of {_rate(used * row.busy)} exceed the GPUs' links of {_rate(link)}"
            exceeded.append(Limit("GPU links", text))
    if row.servers:
        return [*exceeded, *_network(row, fleet)]
    if not drives:
        return exceeded
    if row.ssd_write_bytes_per_s is None or row.ssd_read_bytes_per_s is None:
        text = "the recording has no times, so the writes to SSDs per second are unknown"
        return [*exceeded, Limit("no times", text)]
    for verb, used, limit in (
        ("written", row.ssd_write_bytes_per_s, prices.ssd.write_bytes_per_s),
        ("read", row.ssd_read_bytes_per_s, prices.ssd.read_bytes_per_s),
    ):
        if used * row.busy > drives * limit:
            needed, most = _rate(used * row.busy), _rate(drives * limit)
            exceeded.append(
                Limit("SSD speed", f"{needed} {verb} in the busiest minute exceed the SSDs' {most}")
            )
    if row.drive_writes_a_day is not None and row.drive_writes_a_day > prices.ssd.writes_per_day:
        text = (
            f"{row.drive_writes_a_day:,.1f} drive writes a day, rated for {prices.ssd.writes_per_day:g}: "
            f"SSDs last {age(row.ssd_life_years)}, not {prices.ssd.life_years:g} years"
        )
        exceeded.append(Limit(WEAR, text))
    return exceeded


def _network(row: PlanRow, fleet: Fleet) -> list[Limit]:
    """List the limits of network bandwidth, of servers and of hosts, that a row exceeds."""
    server = fleet.prices.server
    if row.server_write_bytes_per_s is None or row.server_read_bytes_per_s is None:
        return [
            Limit("no times", "the recording has no times, so the bytes per second to servers are unknown")
        ]
    return [
        Limit(
            "network",
            f"{_rate(used * row.busy)} {direction} in the busiest minute exceed "
            f"the {owner}' network of {_rate(link)}",
        )
        for direction, used in (
            ("to servers", row.server_write_bytes_per_s),
            ("from servers", row.server_read_bytes_per_s),
        )
        for owner, link in (
            ("servers", row.servers * server.link_bytes_per_s),
            ("hosts", fleet.hosts * server.host_link_bytes_per_s),
        )
        if used * row.busy > link
    ]


def difference(evidence: Evidence, row: Measured, baseline: Measured) -> Interval | None:
    """Compute the confidence interval of a difference: savings of `row` minus savings of `baseline`.

    The interval is paired: each resample takes the same windows for both rows. None if there are too few
    windows.
    """
    return evidence.draws.difference(row.hits, baseline.hits)


def age(years: float | None) -> str:
    """Format a lifetime in years; None: unlimited."""
    return "100 years or more" if years is None or years >= 100 else duration(365.25 * 86_400 * years)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
