"""Report of a timed replay: a run with offloading, a run without offloading, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffload.replay.report import sums_of
from kvoffload.simulate.machine import Machine
from kvoffload.text import Report

_OVERLOADED = 3.0
"""A run is overloaded if requests wait, on average, this many times longer than their service takes."""


OVERLOADED = "Requests arrive faster than the GPUs compute: waits depend on the length of the recording."
"""Sentence that warns about an overloaded run (`TimedOutcome.is_overloaded`)."""


def break_even_sentence(place: str, tokens: float | None) -> str:
    """Describe from which prompt length on loading from `place` is faster than computing.

    Args:
        place: name of the tier, such as RAM.
        tokens: this prompt length in tokens; None if loading is never faster.
    """
    if tokens is None:
        return f"Loading from {place} never beats computing on this machine."
    if round(tokens) <= 1:
        return f"Loading from {place} beats computing at any length."
    return f"Loading from {place} beats computing from {round(tokens):,} tokens on."


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of a time that was measured for each request, in seconds; 0 without requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Distribution:
        """Compute mean and percentiles. Percentiles are observed values, not interpolated."""
        if len(seconds) == 0:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99), method="inverted_cdf").tolist()
        return cls(float(seconds.mean()), p50, p90, p99)


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one link: copies in one direction, or reads or writes of one disk.

    Attributes:
        name: ``load`` (RAM to device), ``store`` (device to RAM), ``TIER read``, ``TIER write``.
        jobs, bytes_moved: number of jobs, and number of bytes that they moved.
        busy_s: time for which the link was in use, in seconds.
        busy_share: share of the run's duration for which the link was in use.
        waited_s: sum of the times that jobs waited in the queue, in seconds.
        most_bytes_waiting: largest number of bytes that were in the queue at one time, including the running
            job.
        bytes_left: bytes that were still in the queue when the last request ended.
    """

    name: str
    jobs: int
    bytes_moved: int
    busy_s: float
    busy_share: float
    waited_s: float
    most_bytes_waiting: int
    bytes_left: int


def combined_links(links: Sequence[LinkReport]) -> LinkReport:
    """Combine the reports of several links with the same name.

    `busy_share` is the mean over the links, `most_bytes_waiting` is the maximum, and other counters are sums.
    """
    return LinkReport(
        name=links[0].name,
        **sums_of(links, "jobs", "bytes_moved", "busy_s", "waited_s", "bytes_left"),
        busy_share=sum(link.busy_share for link in links) / len(links),
        most_bytes_waiting=max(link.most_bytes_waiting for link in links),
    )


class TimedTierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tier, in blocks.

    Attributes:
        name: ``ram``, or the tier's name (`kvoffload.tiers.spec.names_of`).
        hit_blocks: blocks that requests loaded from this tier.
        written, evicted: blocks written to the tier, and blocks evicted from it. Blocks written to RAM
            include promotions.
        not_offered: for RAM, blocks that were not stored because all slots were in use. For a tier behind
            RAM, blocks that RAM evicted before a tier could write them; all tiers behind RAM report the same
            sum.
        keeps_up: True if the tier writes fast enough: at most 30 s of writes were queued when the last
            request ended, and, for a tier behind RAM, `not_offered` is 0.
    """

    name: str
    hit_blocks: int
    written: int
    evicted: int
    not_offered: int
    keeps_up: bool


class TimedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run of a trace on a machine.

    Attributes:
        requests: number of requests. All of them are served, even if they wait long.
        seconds: time from the first arrival to the end of the last request.
        device_hit_blocks: number of block references found on the device.
        offload_hit_blocks: number of block references loaded from RAM, including blocks promoted from tiers
            behind it.
        hit_ratio: ``device_hit_blocks + offload_hit_blocks``, divided by the number of block references.
        prefill_s: total duration of the steps that computed prompt tokens, in seconds.
        prefill_tokens: number of prompt tokens that were computed.
        device_busy_share: share of the run's duration for which the device was busy.
        ttft_s: time from a request's arrival to its first token.
        waiting_s: the part of `ttft_s` before the request was scheduled.
        loading_s: the part of `ttft_s` in which the request's blocks were loaded.
        most_waiting: largest number of requests that waited in the queue of one engine at the same time.
        not_worth: number of blocks in tiers behind RAM that were not read, because computing them was
            expected to be faster.
        no_room: number of blocks in tiers behind RAM that were not read, because RAM had no room for them.
        gave_up: number of requests that reached the deadline while they waited for a tier.
        lost: number of blocks that the device dropped before a victim tier could store them.
        links: reports of the links; empty without offloading.
        tiers: reports of the tiers, RAM first; empty without offloading.
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

    def misses(self) -> list[str]:
        """Return a sentence for each reason why hits were lost, with the number of blocks or requests."""
        counts = (
            (self.not_worth, "blocks in tiers were not read, because computing them was faster"),
            (self.no_room, "blocks in tiers found no room in RAM"),
            (self.gave_up, "requests stopped waiting for a tier"),
            (self.lost, "blocks left the GPU before they could be stored"),
        )
        return [f"{number:,} {text}" for number, text in counts if number]

    @property
    def is_overloaded(self) -> bool:
        """True if requests arrived much faster than they could be served.

        In an overloaded run the queue grows to the end, so waiting times depend on the length of the trace.
        """
        return self.waiting_s.mean > _OVERLOADED * (self.ttft_s.mean - self.waiting_s.mean)


class TimedReport(Report, frozen=True, kw_only=True):
    """Comparison of two runs of a trace, with and without offloading. Fields are keys of its JSON object.

    Attributes:
        trace, policy, admission, store, capacity_blocks, device_blocks: name of the trace, and the
            configuration as in `ReplayConfig`.
        block_bytes, block_tokens: size of a block in bytes and in tokens.
        machine: the assumed or measured speeds, each with its source.
        load, at_once, max_running, step_tokens: as in `Timing`.
        with_offload, without: results of the run with offloading, and of the run without.
        gpu_seconds_saved: `prefill_s` without offloading minus `prefill_s` with offloading.
        speed_up: duration of the run without offloading, divided by the duration with offloading. With
            `at_once` this is also the ratio of the throughputs.
        ttft_p50_ratio, ttft_p90_ratio: the 50th and 90th percentile of the time to first token, each without
            offloading, divided by the same percentile with offloading.
        break_even_tokens: prompt length, in tokens, from which on an idle machine loads the KV cache from RAM
            faster than it computes it; null if loading is never faster.
        instances, routing, shared_ram: as in `ReplayReport`. Sizes and `max_running` apply to each engine.
            Totals are sums over all engines, and shares of time are means over all engines.
        share_outside_blocks: share of the prompt tokens that are in no full block; null if it is unknown.
        version: version of kvoffload.
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
    instances: int = 1
    routing: str = ""
    shared_ram: bool = False
    share_outside_blocks: float | None = None
    version: str
