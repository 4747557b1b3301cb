"""What a timed replay found: with offloading, without it, and what lies between."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.simulate.machine import Machine

_OVERLOADED = 3.0
"""Times as long as they are served requests wait, on average, where more comes than can be served."""


class Distribution(msgspec.Struct, frozen=True):
    """Seconds of all requests, summed up. All 0 for no requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Distribution:
        """Of these; each percentile is a value that occurs."""
        if len(seconds) == 0:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99), method="inverted_cdf").tolist()
        return cls(float(seconds.mean()), p50, p90, p99)


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one queue of the machine did: copies in one direction, or reads or writes of one disk.

    Attributes:
        name: ``load`` (RAM to device), ``store`` (device to RAM), ``TIER read``, ``TIER write``.
        jobs, bytes_moved: all of them. busy_s: how long it moved bytes; busy_share: of the whole run.
        waited_s: of all jobs, the time from when they were submitted to when they began.
        most_bytes_waiting: the longest that its queue ever was, with the job under way.
        bytes_left: what it had not done when the last request ended.
    """

    name: str
    jobs: int
    bytes_moved: int
    busy_s: float
    busy_share: float
    waited_s: float
    most_bytes_waiting: int
    bytes_left: int


class TimedTierReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier did, in blocks.

    Attributes:
        name: ``ram``, or the tier's; of several alike with a number.
        hit_blocks: loaded by requests from here.
        written, evicted: of RAM also what came up from below.
        not_offered: left RAM before a tier could take them, which writes slower than blocks come: of all
            tiers together, as the manager counts them. Of RAM: offered while all slots were in use.
        keeps_up: nothing of that, and its queue of writes was empty, or no longer than half a minute's work,
            when the last request ended.
    """

    name: str
    hit_blocks: int
    written: int
    evicted: int
    not_offered: int
    keeps_up: bool


class TimedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a trace on a machine.

    Attributes:
        requests: all of them; each is served, however late.
        seconds: from the first arrival to the end of the last request.
        device_hit_blocks, offload_hit_blocks: block references that were not computed, by where they were;
            hit_ratio: the share of both.
        prefill_s: how long the device computed prompts. prefill_tokens: tokens in full blocks that it
            computed. device_busy_share: steps of any kind, of the whole run.
        ttft_s: from the arrival of a request to its first token. waiting_s: of that, until it got a place
            and room in the device; loading_s: until what was loaded for it was there (0 for the others).
        most_waiting: requests in the queue at its longest.
        not_worth: blocks in tiers that were left alone, because to read them was expected to take longer
            than to compute them ("do no harm"). no_room: that RAM had no room for. gave_up: requests that
            stopped waiting for a tier. lost: blocks that a victim tier was not offered in time.
        links, tiers: what was how busy; RAM first. Empty without offloading.
    """

    requests: int
    seconds: float
    device_hit_blocks: int
    offload_hit_blocks: int
    hit_ratio: float
    prefill_s: float
    prefill_tokens: int
    device_busy_share: float
    ttft_s: Distribution
    waiting_s: Distribution
    loading_s: Distribution
    most_waiting: int
    not_worth: int = 0
    no_room: int = 0
    gave_up: int = 0
    lost: int = 0
    links: list[LinkReport] = []
    tiers: list[TimedTierReport] = []

    @property
    def is_overloaded(self) -> bool:
        """Whether more came than could be served: then waits say how long that lasted."""
        return self.waiting_s.mean > _OVERLOADED * (self.ttft_s.mean - self.waiting_s.mean)


class TimedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A trace on a machine with offloading and without; the fields are the keys of its JSON object.

    Attributes:
        trace, policy, admission, store, capacity_blocks, device_blocks: what was replayed through what.
        block_bytes, block_tokens: of a block.
        machine: its numbers, each with its source.
        load: how much closer sessions were packed than recorded. at_once: requests that clients kept under
            way instead, whatever the recorded times; 0: recorded times.
        max_running, step_tokens: of the engine.
        with_offload, without: the two runs.
        gpu_seconds_saved: of computing prompts. speed_up: how much sooner all was done (with `at_once`, the
            ratio of throughputs).
        ttft_p50_ratio, ttft_p90_ratio: of time to first token, without over with: more than 1 is better.
        break_even_tokens: from how many tokens on a load from RAM, alone on the machine, beats computing;
            None if never.
        version: of kvoffload.
    """

    trace: str
    policy: str
    admission: str
    store: str
    capacity_blocks: int
    device_blocks: int
    block_bytes: int
    block_tokens: int
    machine: Machine
    load: float
    at_once: int
    max_running: int
    step_tokens: int
    with_offload: TimedOutcome
    without: TimedOutcome
    gpu_seconds_saved: float
    speed_up: float
    ttft_p50_ratio: float
    ttft_p90_ratio: float
    break_even_tokens: float | None
    version: str

    def to_json(self) -> bytes:
        """One JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
