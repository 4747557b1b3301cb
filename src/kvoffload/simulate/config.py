"""What a timed replay assumes besides what is replayed through what: machine, engine and load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoffload.errors import ConfigError, Problems
from kvoffload.simulate.machine import Machine


@dataclass(frozen=True)
class Timing:
    """A machine, an engine on it, and how requests come. All of it is assumed: no trace says it.

    Attributes:
        machine: how fast everything is.
        block_bytes: of the KV of one block of the trace.
        max_running: requests that the engine runs at a time (vLLM: ``--max-num-seqs``).
        step_tokens: tokens of prompts that it computes in a step (``--max-num-batched-tokens``).
        load: sessions begin this many times as densely as recorded; within a session nothing changes.
        at_once: instead of recorded times, clients keep this many requests under way; 0: recorded times.
        deadline_s: the longest that a request waits for tiers behind RAM, as in production.

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
                raise ConfigError("at_once", self.at_once, "allowed: requests, or 0 for the recorded times")
        for name in ("load", "deadline_s"):
            with problems:
                value = getattr(self, name)
                if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                    raise ConfigError(name, value, "allowed: a number more than 0")
        with problems:
            if self.at_once and self.load != 1.0:
                raise ConfigError("load", self.load, "at_once says how requests come: give one of the two")
        problems.check()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
