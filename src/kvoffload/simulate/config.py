"""Assumptions of a timed replay: machine, engine and load."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.settings.read import Count, CountOrNothing, Positive, check_fields
from kvoffload.simulate.machine import Machine


@dataclass(frozen=True)
class Timing:
    """Assumptions of a timed replay that no trace records: machine, engine and load.

    Attributes:
        machine: speeds of the machine.
        block_bytes: bytes of KV cache in one block of the trace.
        max_running: largest number of requests that one engine runs at the same time (vLLM:
            ``--max-num-seqs``).
        step_tokens: largest number of prompt tokens in a step (vLLM: ``--max-num-batched-tokens``).
        load: rate at which sessions begin, as a multiple of the recorded rate.
        at_once: number of requests that the clients keep waiting or running in total. 0: requests arrive at
            recorded times instead.
        deadline_s: longest time that a request waits for tiers behind RAM, in seconds.

    Raises: `ConfigError` if fields are wrong; the error lists all problems.
    """

    machine: Machine
    block_bytes: Count
    max_running: Count = 256
    step_tokens: Count = 8192
    load: Positive = 1.0
    at_once: CountOrNothing = 0
    deadline_s: Positive = 2.0

    def __post_init__(self) -> None:
        check_fields(self, "simulation")
        if self.at_once and self.load != 1.0:
            raise ConfigError("load", self.load, "at_once replaces the recorded times: set load or at_once")
