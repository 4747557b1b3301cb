"""Targets of `hazard`, checked against a sweep.

Owns the rows of a sweep and the targets. Each target is checked on every swept trace, capacity and device,
with admission ``all``. Places that were not swept are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

FLAGSHIP, YARDSTICK = "hazard", "lru"
ON_COMPUTE, VICTIM = "on-compute", "on-device-eviction"
TOLERANCE = 0.005
WIDE_GAP = 0.05
SMALLEST_GAP = 0.001


@dataclass(frozen=True)
class Row:
    """One replay. `hits`: of device and tier together; `added`: of the tier alone; both per reference."""

    trace: str
    device: str
    store: str
    capacity: str
    policy: str
    admission: str
    hits: float
    added: float
    writes: float
    optimum: float | None


class Rows:
    """Rows of a sweep, indexed by trace, device, store, capacity, policy and admission rule."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {
            (row.trace, row.device, row.store, row.capacity, row.policy, row.admission): row for row in rows
        }
        self.traces = list(dict.fromkeys(row.trace for row in rows))

    def devices(self, trace: str) -> list[str]:
        """Return the swept devices of a trace, as typed."""
        return list(dict.fromkeys(row.device for row in self._rows.values() if row.trace == trace))

    def find(
        self, trace: str, device: str, store: str, capacity: str, policy: str, admission: str = "all"
    ) -> Row | None:
        """Return a row, or None if it was not swept."""
        return self._rows.get((trace, device, store, capacity, policy, admission))

    def optimum(self, trace: str, device: str, store: str, capacity: str) -> float | None:
        """Return the optimum's hits at a place, or None if unknown."""
        for row in self._rows.values():
            if (row.trace, row.device, row.store, row.capacity) == (trace, device, store, capacity):
                return row.optimum
        return None

    def contestants(self, trace: str, device: str, store: str) -> list[tuple[str, str]]:
        """Return the swept policies and admission rules: the yardstick first, the flagship last."""
        pairs = {
            (row.policy, row.admission)
            for row in self._rows.values()
            if (row.trace, row.device, row.store) == (trace, device, store)
        }
        rank = {YARDSTICK: -1, FLAGSHIP: 1}
        return sorted(pairs, key=lambda pair: (rank.get(pair[0], 0), pair[0], pair[1] != "all", pair[1]))

    def gap_closed(self, row: Row) -> float | None:
        """Return the closed share of the gap between LRU, with admission ``all``, and the optimum."""
        lru = self.find(row.trace, row.device, row.store, row.capacity, YARDSTICK)
        if lru is None or row.optimum is None or row.optimum - lru.hits < SMALLEST_GAP:
            return None
        return (row.hits - lru.hits) / (row.optimum - lru.hits)


@dataclass(frozen=True)
class Verdict:
    """One target at one place. `margin`: excess over the target, in its unit; negative if missed."""

    place: str
    margin: float

    @property
    def is_reached(self) -> bool:
        # Tolerates rounding: a margin of 0 is reached.
        return self.margin >= -1e-9


Judge = Callable[[Rows, str, str, str], Verdict | None]


def _not_below_lru(store: str) -> Judge:
    def judge(rows: Rows, trace: str, device: str, capacity: str) -> Verdict | None:
        flagship = rows.find(trace, device, store, capacity, FLAGSHIP)
        lru = rows.find(trace, device, store, capacity, YARDSTICK)
        if flagship is None or lru is None:
            return None
        return Verdict(_place(device, capacity), flagship.hits - lru.hits + TOLERANCE)

    return judge


def _gap(capacities: tuple[str, ...], least: float, is_alone: bool) -> Judge:
    def judge(rows: Rows, trace: str, device: str, capacity: str) -> Verdict | None:
        flagship = rows.find(trace, device, ON_COMPUTE, capacity, FLAGSHIP)
        if flagship is None or capacity not in capacities or (device == "0") != is_alone:
            return None
        closed = rows.gap_closed(flagship)
        return None if closed is None else Verdict(_place(device, capacity), closed - least)

    return judge


def _few_writes(rows: Rows, trace: str, device: str, capacity: str) -> Verdict | None:
    flagship = rows.find(trace, device, ON_COMPUTE, capacity, FLAGSHIP)
    lru = rows.find(trace, device, ON_COMPUTE, capacity, YARDSTICK)
    if flagship is None or lru is None or flagship.optimum is None or capacity not in ("1%", "2%", "5%"):
        return None
    if flagship.optimum - lru.hits < WIDE_GAP or lru.writes == 0:
        return None
    return Verdict(_place(device, capacity), 1 / 3 - flagship.writes / lru.writes)


def _beside_device(rows: Rows, trace: str, device: str, capacity: str) -> Verdict | None:
    flagship = rows.find(trace, device, ON_COMPUTE, capacity, FLAGSHIP)
    if flagship is None or flagship.optimum is None or device != "1x":
        return None
    most = flagship.optimum - (flagship.hits - flagship.added)
    return None if most < SMALLEST_GAP else Verdict(_place(device, capacity), flagship.added / most - 0.4)


def _victim(rows: Rows, trace: str, device: str, capacity: str) -> Verdict | None:
    flagship = rows.find(trace, device, VICTIM, capacity, FLAGSHIP)
    plain = [rows.find(trace, device, store, capacity, YARDSTICK) for store in (ON_COMPUTE, VICTIM)]
    if flagship is None or None in plain:
        return None
    better = max(row.hits for row in plain if row is not None)
    return Verdict(_place(device, capacity), flagship.hits - better + TOLERANCE)


TARGETS: tuple[tuple[str, Judge], ...] = (
    ("never more than 0.5 points below LRU", _not_below_lru(ON_COMPUTE)),
    ("the same, both as victim tiers", _not_below_lru(VICTIM)),
    ("1-2 %, alone: 30 % of the gap to the optimum", _gap(("1%", "2%"), 0.3, True)),
    ("5 %, alone: 20 % of it", _gap(("5%",), 0.2, True)),
    ("1-2 %, behind a device: 30 %", _gap(("1%", "2%"), 0.3, False)),
    ("5 %, behind a device: 20 %", _gap(("5%",), 0.2, False)),
    ("1-5 %, optimum 5 points above LRU: a third of LRU's writes", _few_writes),
    ("device as large as the tier: 40 % of what the optimum adds", _beside_device),
    ("victim tier: never more than 0.5 points below the better plain mode", _victim),
)


def verdicts(
    rows: Rows, judge: Judge, trace: str, capacities: Sequence[str], devices: Sequence[str]
) -> Iterator[Verdict]:
    """Check a target on a trace; yields a verdict for each place."""
    for device in devices:
        for capacity in capacities:
            verdict = judge(rows, trace, device, capacity)
            if verdict is not None:
                yield verdict


def table_of_targets(rows: Rows, capacities: Sequence[str], devices: Sequence[str]) -> str:
    """Format targets by traces: the number of places that reach the target, and the worst missed place."""
    lines = [f"| target | {' | '.join(rows.traces)} |", f"|---|{'---|' * len(rows.traces)}"]
    for name, judge in TARGETS:
        cells = []
        for trace in rows.traces:
            judged = list(verdicts(rows, judge, trace, capacities, devices))
            missed = [verdict for verdict in judged if not verdict.is_reached]
            worst = min(missed, key=lambda verdict: verdict.margin, default=None)
            cell = f"{len(judged) - len(missed)} of {len(judged)}" if judged else "-"
            if worst is not None:
                cell = f"**{cell}**; {100 * worst.margin:+.2f} at {worst.place}"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def largest_shortfalls(rows: Rows, capacities: Sequence[str], how_many: int = 3) -> str:
    """List, by trace, the places where the flagship is farthest below LRU, in points of the hit ratio."""
    lines = []
    for trace in rows.traces:
        margins = []
        for store in (ON_COMPUTE, VICTIM):
            judge = _not_below_lru(store)
            margins += [
                (verdict.margin - TOLERANCE, f"{verdict.place}, {store}")
                for verdict in verdicts(rows, judge, trace, capacities, rows.devices(trace))
            ]
        num_below = sum(difference < 0 for difference, _ in margins)
        below = sorted(pair for pair in margins if pair[0] < 0)[:how_many]
        worst = "; ".join(f"{100 * difference:+.2f} at {place}" for difference, place in below)
        lines.append(f"- {trace}: {worst or 'none'} ({num_below} of {len(margins)} places below)")
    return "\n".join(lines)


def _place(device: str, capacity: str) -> str:
    return capacity if device == "0" else f"{capacity} behind {device}"
