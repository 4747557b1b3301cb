"""Timed replay: runs a trace through simulated engines and the real manager, in simulated time.

`replay_in_time` compares a run with offloading to a run without.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvoffload._version import __version__
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.routing import SESSION, route
from kvoffload.simulate.arrivals import AtOnce, Recorded, Shares
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import Engine, check_room
from kvoffload.simulate.event_queue import Events
from kvoffload.simulate.offload import NoOffload, Offload, VictimOffload
from kvoffload.simulate.outcome import outcome_of
from kvoffload.simulate.pool import DevicePool
from kvoffload.simulate.ram import Ram
from kvoffload.simulate.report import TimedOutcome, TimedReport
from kvoffload.traces.trace import Trace

NO_TIERS_TO_SHARE = "tiers behind separate RAM need a single engine: leave out tiers, or set shared-ram"
Progress = Callable[[int], None]
"""Function that is called about 200 times per run, with the number of requests that have ended."""


def run_in_time(
    trace: Trace,
    timing: Timing,
    device_blocks: int,
    config: ReplayConfig | None = None,
    progress: Progress = lambda requests: None,
    *,
    instances: int = 1,
    routing: str = SESSION,
) -> TimedOutcome:
    """Run a trace once. If `config` is None, the run has no offloading.

    If `config` has several engines with separate RAM, they share the tier behind RAM. Then the disk speed of
    `timing.machine` is the speed of each engine's connection to this tier.

    Args:
        instances, routing: number of engines, and the rule that assigns requests to them (`replay.routing`).
            They are ignored unless `config` is None.

    Deterministic. Cost and errors are the same as for `replay_in_time`.
    """
    _check(trace, timing, device_blocks, config)
    if config is not None:
        instances, routing = config.instances, config.routing
    events = Events()
    whole = AtOnce(trace, timing.at_once) if timing.at_once else Recorded(trace, timing.load)
    engine_of = route(trace, instances, routing)
    requests_of = [np.flatnonzero(engine_of == number) for number in range(instances)]
    shares = Shares(whole, [requests.tolist() for requests in requests_of])
    ram = Ram(trace, config, timing, events) if config is not None and config.shared_ram else None
    first: Ram | None = None  # RAM of the first engine; the other engines share its tiers
    engines, offloads = list[Engine](), list[NoOffload]()

    def report(ended: int) -> None:
        progress(sum(engine.num_ended for engine in engines))

    for requests, arrivals in zip(requests_of, shares.of_engines, strict=True):
        own = trace if instances == 1 else trace.of_requests(requests)
        pool = DevicePool(device_blocks)
        engine = Engine(own, timing, events, pool, arrivals)
        offload = NoOffload()
        if config is not None:
            kind = VictimOffload if config.store == ON_DEVICE_EVICTION else Offload
            own_ram = ram or Ram(own, config, timing, events, trace, first)
            first = first or own_ram
            offload = kind(own, config, timing, events, pool, engine.wake, own_ram)
        engine.begin(offload, report)
        engines.append(engine)
        offloads.append(offload)
    shares.begin(events)
    events.run()
    for engine in engines:
        engine.check_ended()
    return outcome_of(trace, engines, offloads, shared_ram=ram is not None)


def replay_in_time(
    trace: Trace,
    config: ReplayConfig,
    timing: Timing,
    progress: Progress = lambda requests: None,
    without: TimedOutcome | None = None,
) -> TimedReport:
    """Run a trace with offloading and without, and compare the two runs.

    Args:
        progress: called with the number of ended requests of both runs together.
        without: outcome of the run without offloading, if the caller already has it. None: this function also
            runs it.

    Deterministic, because no real clock is read. Cost: O(log n) per request and O(1) per step, plus the cost
    of manager and pool. Raises: `ConfigError` if the machine lacks a required quantity, if a tier cannot be
    simulated, if the longest request does not fit on the device, or if options exclude each other.
    """
    device_blocks, offset = config.device_blocks, 0
    _check(trace, timing, device_blocks, config)
    if config.tiers and config.instances > 1 and not config.shared_ram:
        raise ConfigError("instances", config.instances, NO_TIERS_TO_SHARE)
    if without is None:
        offset = trace.requests
        without = run_in_time(
            trace, timing, device_blocks, None, progress, instances=config.instances, routing=config.routing
        )
    done = run_in_time(trace, timing, device_blocks, config, lambda requests: progress(offset + requests))
    machine = timing.machine
    break_even = machine.break_even_tokens(timing.block_bytes / trace.block_tokens)
    return TimedReport(
        trace=trace.name,
        share_outside_blocks=trace.share_outside_blocks,
        policy=config.policy if isinstance(config.policy, str) else config.policy.__name__,
        admission=config.admission,
        store=config.store,
        capacity_blocks=config.capacity_blocks,
        device_blocks=device_blocks,
        block_bytes=timing.block_bytes,
        block_tokens=trace.block_tokens,
        machine=machine,
        load=timing.load,
        at_once=timing.at_once,
        max_running=timing.max_running,
        step_tokens=timing.step_tokens,
        with_offload=done,
        without=without,
        gpu_seconds_saved=without.prefill_s - done.prefill_s,
        speed_up=_ratio(without.seconds, done.seconds),
        ttft_p50_ratio=_ratio(without.ttft_s.p50, done.ttft_s.p50),
        ttft_p90_ratio=_ratio(without.ttft_s.p90, done.ttft_s.p90),
        break_even_tokens=break_even if math.isfinite(break_even) else None,
        instances=config.instances,
        routing=config.routing if config.instances > 1 else "",
        shared_ram=config.shared_ram,
        version=__version__,
    )


def _check(trace: Trace, timing: Timing, device_blocks: int, config: ReplayConfig | None) -> None:
    timing.machine.check(has_ram=config is not None, has_disk=config is not None and bool(config.tiers))
    check_room(trace, device_blocks)
    if config is None:
        return
    if config.device_blocks != device_blocks:
        raise ConfigError("device_blocks", device_blocks, f"allowed: {config.device_blocks}, as in config")
    if config.shared_ram and config.machines > 1:
        raise ConfigError("machines", config.machines, "a timed replay simulates one host: allowed: 1")
    if config.instances > 1 and not config.shared_ram and len(config.tiers) > 1:
        why = "several engines with separate RAM share one tier at most"
        raise ConfigError("tiers", "+".join(map(str, config.tiers)), why)
    if config.decode_tokens_per_s or config.queue_requests:
        raise ConfigError(
            "decode_tokens_per_s or queue_requests",
            config.decode_tokens_per_s or config.queue_requests,
            "a timed replay simulates queue and decode: leave both out",
        )


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
