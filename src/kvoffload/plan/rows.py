"""One row of a plan: a purchase, how it is used, what that saves, what it costs, and whether it can be.

Owns the columns, and the limits of hardware. A plan measures with the replays of a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvoffload.plan.evidence import Evidence, together
from kvoffload.plan.fleet import NOTHING, Fleet, Purchase
from kvoffload.sweep.bootstrap import Interval, Sums
from kvoffload.sweep.grid import Point
from kvoffload.sweep.task import Measurement
from kvoffload.tiers.options import NO_TIERS, SizedTierOptions, parse_tiers

_A_DAY_S = 86_400


@dataclass(frozen=True, order=True)
class Setup:
    """How a purchase is used. `ssd_policy` and `ssd_admission` are empty without SSDs."""

    store: str
    policy: str
    admission: str
    ssd_policy: str = ""
    ssd_admission: str = ""

    def __str__(self) -> str:
        if not self.store:
            return "nothing is bought"
        ram = self.policy if self.admission == "all" else f"{self.policy} with {self.admission}"
        ssd = "" if self.ssd_admission in ("", "all") else f"; SSD takes {self.ssd_admission}"
        ssd += "" if self.ssd_policy in ("", "lru") else f", {self.ssd_policy}"
        return f"{ram}, {self.store}{ssd}"


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A purchase, used in one way. Shares are of the prefill: of the trace's block references.

    Attributes:
        ram_modules, ssd_drives: for each host. ram_bytes, ssd_bytes: of all hosts.
        price: of all hosts.
        store, policy, admission: how RAM is used; empty for the row that buys nothing.
        ssd_policy, ssd_admission: what leaves SSDs, what may enter them; empty without.
        device_blocks, ram_blocks, ssd_blocks: of each replica, as they were replayed.
        saved: what need not be computed, by GPUs' own memory, RAM and SSDs together (prefix-hit ratio).
        saved_low, saved_high, correlation: its interval (`bootstrap.Interval`); null for too few requests.
        by_gpus, by_ram, by_ssds: the same by place; they add up to `saved`.
        of_ceiling: `saved` over what caches without limit save; null if that is nothing.
        optimum: `saved` of the best policy at this place.
        gpus_worth: GPUs that would compute what RAM and SSDs save; null if no speed or no times are known.
        gpu_hours_a_day: the same in hours.
        ram_write_bytes_per_s, load_bytes_per_s, ssd_write_bytes_per_s, ssd_read_bytes_per_s: in the mean;
            null without times.
        busy: what these are multiplied by for the busiest minute.
        drive_writes_a_day: capacities written to a drive; ssd_life_years: until it is worn out. Null without.
        feasible: whether it can be; why_not: what is against it, in words.
        ttft_p90_s: nine of ten requests wait no longer for their first token; null where that was not timed.
        one_in: it was measured on one of so many sessions; 1: on all.
    """

    ram_modules: int
    ssd_drives: int
    ram_bytes: int
    ssd_bytes: int
    price: float
    store: str
    policy: str
    admission: str
    ssd_policy: str
    ssd_admission: str
    device_blocks: int
    ram_blocks: int
    ssd_blocks: int
    saved: float
    saved_low: float | None
    saved_high: float | None
    correlation: float | None
    by_gpus: float
    by_ram: float
    by_ssds: float
    of_ceiling: float | None
    optimum: float
    gpus_worth: float | None
    gpu_hours_a_day: float | None
    ram_write_bytes_per_s: float | None
    load_bytes_per_s: float | None
    ssd_write_bytes_per_s: float | None
    ssd_read_bytes_per_s: float | None
    busy: float
    drive_writes_a_day: float | None
    ssd_life_years: float | None
    feasible: bool
    why_not: str
    ttft_p90_s: float | None = None
    one_in: int = 1

    @property
    def purchase(self) -> Purchase:
        """What is bought."""
        return Purchase(self.ram_modules, self.ssd_drives)

    @property
    def setup(self) -> Setup:
        """How it is used."""
        return Setup(self.store, self.policy, self.admission, self.ssd_policy, self.ssd_admission)


@dataclass(frozen=True)
class Measured:
    """A row, and its hits in each window: what it is compared by."""

    row: PlanRow
    hits: Sums


@dataclass(frozen=True)
class Cell:
    """A purchase and how it is used: what is measured for one row."""

    purchase: Purchase
    setup: Setup

    def points(self, fleet: Fleet, evidence: Evidence) -> list[Point]:
        """The replays: one for each replica that gets requests."""
        ram, ssd = fleet.blocks(fleet.ram_bytes(self.purchase)), fleet.blocks(fleet.ssd_bytes(self.purchase))
        device, setup, found = fleet.device_blocks, self.setup, list[Point]()
        for number, trace in enumerate(evidence.traces):
            tiers = NO_TIERS
            if self.purchase.drives:
                # What holds every block evicts none: larger is the same.
                blocks = min(ssd, trace.unique_blocks)
                tiers = f"{blocks},policy={setup.ssd_policy},admission={setup.ssd_admission}"
            options = tuple(one for one in parse_tiers("tiers", tiers) if isinstance(one, SizedTierOptions))
            found.append(
                Point(number, setup.policy, setup.admission, setup.store, str(ram), ram, str(device), device,
                      tiers, options)
            )  # fmt: skip
        return found


def nothing(fleet: Fleet, evidence: Evidence) -> Measured:
    """The row of what is there already: the GPUs' own memory."""
    return _measured(Cell(NOTHING, Setup("", "", "")), [], fleet, evidence, evidence.device_hits)


def measured(
    cell: Cell, found: Sequence[Measurement], fleet: Fleet, evidence: Evidence, budget: float | None = None
) -> Measured:
    """The row of a cell, from the measurements of its points."""
    hits = together([np.array(one.window_hits, np.int64) for one in found])
    one = _measured(cell, found, fleet, evidence, hits)
    against = limits(one.row, fleet, budget)
    row = msgspec.structs.replace(one.row, feasible=not against, why_not="; ".join(against))
    return Measured(row, hits)


def _measured(
    cell: Cell, found: Sequence[Measurement], fleet: Fleet, evidence: Evidence, hits: Sums
) -> Measured:
    refs, purchase, reports = evidence.block_refs, cell.purchase, [one.report for one in found]
    saved, interval = int(hits.sum()), evidence.interval(hits)
    tiers = [report.tiers for report in reports]
    ssd_hits = sum(one.hit_blocks for ram, *behind in tiers for one in behind)
    offload_hits = sum(report.offload_hit_blocks for report in reports)
    ssd_written = sum(one.blocks_written for ram, *behind in tiers for one in behind)
    best = sum(round(report.optimum_hit_ratio * report.block_refs) for report in reports) or saved
    worth = evidence.gpus_worth(offload_hits / refs, fleet)
    ssd_bytes = fleet.ssd_bytes(purchase)
    writes = evidence.per_second(ssd_written, fleet) if purchase.drives else None
    a_day = None if writes is None else writes * _A_DAY_S / ssd_bytes
    rated = fleet.prices.ssd
    life = rated.writes_per_day * rated.life_years / a_day if a_day else None
    row = PlanRow(
        ram_modules=purchase.modules,
        ssd_drives=purchase.drives,
        ram_bytes=fleet.ram_bytes(purchase),
        ssd_bytes=ssd_bytes,
        price=fleet.price(purchase),
        store=cell.setup.store,
        policy=cell.setup.policy,
        admission=cell.setup.admission,
        ssd_policy=cell.setup.ssd_policy,
        ssd_admission=cell.setup.ssd_admission,
        device_blocks=fleet.device_blocks,
        ram_blocks=fleet.blocks(fleet.ram_bytes(purchase)),
        ssd_blocks=fleet.blocks(ssd_bytes),
        saved=saved / refs,
        saved_low=interval and interval.low,
        saved_high=interval and interval.high,
        correlation=interval and interval.correlation,
        by_gpus=(saved - offload_hits) / refs,
        by_ram=(offload_hits - ssd_hits) / refs,
        by_ssds=ssd_hits / refs,
        of_ceiling=saved / evidence.ceiling_hits if evidence.ceiling_hits else None,
        optimum=best / refs,
        gpus_worth=worth,
        gpu_hours_a_day=None if worth is None else 24 * worth,
        ram_write_bytes_per_s=evidence.per_second(sum(one.blocks_written for one in reports), fleet),
        load_bytes_per_s=evidence.per_second(offload_hits, fleet),
        ssd_write_bytes_per_s=writes,
        ssd_read_bytes_per_s=evidence.per_second(ssd_hits, fleet) if purchase.drives else None,
        busy=evidence.busy,
        drive_writes_a_day=a_day,
        ssd_life_years=life,
        feasible=True,
        why_not="",
    )
    return Measured(row, hits)


def limits(row: PlanRow, fleet: Fleet, budget: float | None = None) -> list[str]:
    """What hardware and budget have against a row; nothing if it can be."""
    against, prices, drives = list[str](), fleet.prices, fleet.hosts * row.ssd_drives
    if budget is not None and row.price > budget:
        against.append(f"{row.price:,.0f} {prices.currency} are above the budget")
    link = fleet.gpus * prices.link_bytes_per_s
    for what, used in (("stores", row.ram_write_bytes_per_s), ("loads", row.load_bytes_per_s)):
        if used is not None and used * row.busy > link:
            against.append(f"{what} of {_rate(used * row.busy)}, and the GPUs' links take {_rate(link)}")
    if not drives:
        return against
    if row.ssd_write_bytes_per_s is None or row.ssd_read_bytes_per_s is None:
        return [*against, "the recording has no times: nobody knows what SSDs would have to write"]
    for what, used, limit in (
        ("written", row.ssd_write_bytes_per_s, prices.ssd.write_bytes_per_s),
        ("read", row.ssd_read_bytes_per_s, prices.ssd.read_bytes_per_s),
    ):
        if used * row.busy > drives * limit:
            needed, can = _rate(used * row.busy), _rate(drives * limit)
            against.append(f"{needed} {what} in the busiest minute, and the SSDs can do {can}")
    if row.drive_writes_a_day is not None and row.drive_writes_a_day > prices.ssd.writes_per_day:
        against.append(
            f"{row.drive_writes_a_day:,.1f} drive writes a day, rated for {prices.ssd.writes_per_day:g}: "
            f"SSDs last {age(row.ssd_life_years)}, not {prices.ssd.life_years:g} years"
        )
    return against


def difference(evidence: Evidence, one: Measured, other: Measured) -> Interval | None:
    """The paired interval of what one row saves minus another."""
    return evidence.draws.difference(one.hits, other.hits)


def age(years: float | None) -> str:
    """How long something lasts, as people say it: ``5.2 years``, ``12 days``."""
    if years is None or years >= 100:
        return "100 years or more"
    return f"{years:.1f} years" if years >= 0.95 else f"{365.25 * years:.0f} days"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
