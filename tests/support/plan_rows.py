"""Plans of a few blocks of a MiB: what their tests buy for, from which recordings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.plan.fleet import Fleet
from kvoffload.plan.plan import Plan, PlanAnswer
from kvoffload.plan.prices import Prices, Ram, Server, Ssd
from kvoffload.plan.setups import Setups
from kvoffload.plan.targets import Target
from kvoffload.sweep.measuring import Work
from kvoffload.sweep.task import TraceSource

MIB = 2**20
PLAIN = Setups(("on-compute",), ("lru",), ("all",), ("lru",), ("all",), ("all",))
"""Whose hits are those of a textbook."""

MANY_WRITES = 1e9


def prices(
    ram: Ram | None = None, ssd: Ssd | None = None, server: Server | None = None, **others: Any
) -> Prices:
    """Modules of 5 blocks for 100, and neither SSDs nor servers."""
    ram = ram or Ram(module="5MiB", price=100, slots=40)
    return Prices(ram=ram, ssd=ssd or Ssd(slots=0), server=server or Server(slots=0), **others)


def fleet(for_sale: Prices | None = None, kv_bytes: int = 5 * MIB, gpus: int = 1, **others: Any) -> Fleet:
    """One GPU of 5 blocks of a MiB."""
    return Fleet(gpus, kv_bytes, MIB, for_sale or prices(), **others)


def drives(price: float = 10, slots: int = 1, **others: Any) -> Ssd:
    """Cheap, large, never worn out."""
    return Ssd(drive="400MiB", price=price, slots=slots, writes_per_day=MANY_WRITES, **others)


def line(time: float, ids: Sequence[int | str]) -> str:
    request = {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}
    return json.dumps(request) + "\n"


def written(path: Path, chains: Sequence[Sequence[int | str]], step_ms: float = 10_000) -> str:
    """A file with one request for each chain, in equal steps."""
    path.write_text("".join(line(round(number * step_ms), chain) for number, chain in enumerate(chains)))
    return str(path)


def kept(trace: str) -> Path:
    """Path of the rows that plans of a trace write. Their journal replays each row once for all tests."""
    return Path(trace).with_suffix(".rows.csv")


def planned(trace: str, of: Fleet | None = None, setups: Setups = PLAIN, **target: Any) -> PlanAnswer:
    source, of = TraceSource(trace, None, False), of or fleet()
    # With a machine, the answer shows the waits of all rows in the journal; a test expects only its own.
    output = kept(trace) if of.machine is None else None
    return Plan(source, of, Target(**target), setups, work=Work(jobs=1, output=output, force=True)).run()


def words(answer: PlanAnswer) -> str:
    return " ".join(answer.words)
