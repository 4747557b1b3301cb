"""Assumptions of a timed replay: machine, engine and load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoffload.errors import ConfigError, Problems
from kvoffload.simulate.machine import Machine


@dataclass(frozen=True)
class Timing:
    """A machine, an engine and a load; a trace records none of them.

    Attributes:
        machine: speeds.
        block_bytes: KV bytes of a block of the trace.
        max_running: most requests in progress (vLLM: ``--max-num-seqs``).
        step_tokens: most prompt tokens of a step (vLLM: ``--max-num-batched-tokens``).
        load: density of session starts, as a multiple of the recorded density.
        at_once: number of requests that clients keep in progress; 0: requests arrive at recorded times.
        deadline_s: longest time that a request waits for tiers behind RAM, as in production.

    Raises: `ConfigError`, all problems at once.
    """

    machine: Machine
    block_bytes: int
    max_running: int = 256
    step_tokens: int = 8192
    load: float = 1.0
    at_once: int = 0
    deadline_s: float = 2.0

    def __post_init__(self) -> None:
        problems = Problems("simulation")
        for name in ("block_bytes", "max_running", "step_tokens"):
            with problems:
                if not _is_whole(getattr(self, name)) or getattr(self, name) < 1:
                    raise ConfigError(name, getattr(self, name), "allowed: a whole number, 1 or more")
        with problems:
            if not _is_whole(self.at_once) or self.at_once < 0:
                raise ConfigError(
                    "at_once", self.at_once, "allowed: a number of requests, or 0 for recorded times"
                )
        for name in ("load", "deadline_s"):
            with problems:
                value = getattr(self, name)
                if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                    raise ConfigError(name, value, "allowed: a number more than 0")
        with problems:
            if self.at_once and self.load != 1.0:
                raise ConfigError(
                    "load", self.load, "at_once replaces the recorded times: set load or at_once"
                )
        problems.check()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
