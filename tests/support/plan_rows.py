"""Prices, fleets and recordings for tests of `kvoffload plan`, with blocks of 1 MiB."""

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
"""Setups whose hits can be computed by hand."""

MANY_WRITES = 1e9


def prices(
    ram: Ram | None = None, ssd: Ssd | None = None, server: Server | None = None, **settings: Any
) -> Prices:
    """Return prices: RAM modules of 5 blocks for 100, and neither SSDs nor servers."""
    ram = ram or Ram(module="5MiB", price=100, slots=40)
    return Prices(ram=ram, ssd=ssd or Ssd(slots=0), server=server or Server(slots=0), **settings)


def fleet(for_sale: Prices | None = None, kv_bytes: int = 5 * MIB, gpus: int = 1, **settings: Any) -> Fleet:
    """Return a fleet of one GPU with room for 5 blocks of 1 MiB."""
    return Fleet(gpus, kv_bytes, MIB, for_sale or prices(), **settings)


def drives(price: float = 10, slots: int = 1, **settings: Any) -> Ssd:
    """Return an SSD that is cheap and large and never wears out."""
    return Ssd(drive="400MiB", price=price, slots=slots, writes_per_day=MANY_WRITES, **settings)


def line(time: float, ids: Sequence[int | str]) -> str:
    request = {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}
    return json.dumps(request) + "\n"


def written(path: Path, chains: Sequence[Sequence[int | str]], step_ms: float = 10_000) -> str:
    """Write a recording with a request for each chain, `step_ms` apart; return its path."""
    path.write_text("".join(line(round(number * step_ms), chain) for number, chain in enumerate(chains)))
    return str(path)


def kept(trace: str) -> Path:
    """Return the path of a trace's journal, with which all tests together replay each row once."""
    return Path(trace).with_suffix(".rows.csv")


def planned(trace: str, of: Fleet | None = None, setups: Setups = PLAIN, **target: Any) -> PlanAnswer:
    source, of = TraceSource(trace, None, False), of or fleet()
    # With a machine, an answer shows the waits of all rows in the journal; a test expects only its own rows.
    output = kept(trace) if of.machine is None else None
    return Plan(source, of, Target(**target), setups, work=Work(jobs=1, output=output, force=True)).run()


def words(answer: PlanAnswer) -> str:
    return " ".join(answer.words)
