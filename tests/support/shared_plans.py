"""A recording, a server and a measured row, for plans of engines that share servers or RAM."""

from __future__ import annotations

from typing import Any

from kvoffload.plan.evidence import Evidence
from kvoffload.plan.fleet import Fleet, Purchase
from kvoffload.plan.prices import Server
from kvoffload.plan.rows import Cell, Measured, Setup, measured
from kvoffload.simulate.machine import Machine
from kvoffload.structures.draws import whole_numbers
from kvoffload.sweep.measuring import Measuring
from kvoffload.sweep.workers import LocalWorkers
from support.plan_rows import MIB
from support.simulated_machine import machine

NOTHING_IN = "reuse:1000"
"""Admission rule that refuses every block, so that a server is useless."""
REQUESTS = 200
STEP_S = 10


def server(price: float = 50, slots: int = 1, memory: str = "1GiB", **settings: Any) -> Server:
    """Return a large and cheap server."""
    return Server(memory=memory, price=price, slots=slots, **settings)


def by_hand() -> Machine:
    """Return a machine that prefills one block a second and copies four blocks a second."""
    rates = ("load_bytes_per_s", "store_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
    return machine(prefill_s_per_token=1 / 512, copy_latency_s=0.1, **dict.fromkeys(rates, 4.0 * MIB))


def asked_twice() -> tuple[list[tuple[int, int]], int]:
    """Return chains of two blocks for two engines, and the number of repeated chains.

    A chain is new at one engine, and is repeated at most once, at the other engine.
    """
    engines = whole_numbers(REQUESTS, 2, seed=0).tolist()
    chains, waiting, again = list[tuple[int, int]](), list[tuple[int, int]](), 0
    for number, engine in enumerate(engines):
        if engine == 1 and waiting:
            chains.append(waiting.pop(0))
            again += 1
        else:
            chains.append((2 * number, 2 * number + 1))
            waiting += chains[-1:] if engine == 0 else []
    return chains, again


def row_of(evidence: Evidence, of: Fleet, purchase: Purchase, setup: Setup) -> Measured:
    """Measure a row of a plan."""
    cell = Cell(purchase, setup)
    measuring = Measuring(evidence.replayed, LocalWorkers(1))
    return measured(cell, measuring.measure(cell.points(of, evidence)), of, evidence)
