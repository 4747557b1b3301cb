"""Timed replay: a trace through the real manager, in simulated time.

`replay_in_time` compares two runs, with offloading and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvoffload._version import __version__
from kvoffload.core.plans import ON_DEVICE_EVICTION
from kvoffload.errors import ConfigError
from kvoffload.replay.replay import ReplayConfig
from kvoffload.simulate.arrivals import AtOnce, Recorded
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import Engine, check_room
from kvoffload.simulate.events import Events
from kvoffload.simulate.offload import NoOffload, Offload, VictimOffload
from kvoffload.simulate.pool import DevicePool
from kvoffload.simulate.report import Distribution, TimedOutcome, TimedReport
from kvoffload.traces.trace import Trace

Progress = Callable[[int], None]
"""Receives the number of ended requests, about 200 times per run."""


def run_in_time(
    trace: Trace,
    timing: Timing,
    device_blocks: int,
    config: ReplayConfig | None = None,
    progress: Progress = lambda requests: None,
) -> TimedOutcome:
    """Run a trace once. If `config` is None, the run has no offloading, and depends only on `timing` and
    `device_blocks`.

    Deterministic. Cost and errors as for `replay_in_time`.
    """
    _check(trace, timing, device_blocks, config)
    events, pool = Events(), DevicePool(device_blocks)
    arrivals = AtOnce(trace, timing.at_once) if timing.at_once else Recorded(trace, timing.load)
    engine = Engine(trace, timing, events, pool, arrivals)
    offload = NoOffload()
    if config is not None:
        kind = VictimOffload if config.store == ON_DEVICE_EVICTION else Offload
        offload = kind(trace, config, timing, events, pool, engine.wake)
    engine.run(offload, progress)
    return _outcome(trace, engine, offload)


def replay_in_time(
    trace: Trace,
    config: ReplayConfig,
    timing: Timing,
    progress: Progress = lambda requests: None,
    without: TimedOutcome | None = None,
) -> TimedReport:
    """Run a trace with offloading and without, and compare both.

    Args:
        progress: receives the number of ended requests, of both runs together.
        without: the run without offloading, if it is already known.

    Deterministic: reads no clock of this machine. Cost: O(log n) per request and O(1) per step, plus the work
    of manager and pool. Raises: `ConfigError` if the machine lacks a required number, a tier cannot be
    simulated, or the longest request does not fit on the device.
    """
    device_blocks, offset = config.device_blocks, 0
    _check(trace, timing, device_blocks, config)
    if without is None:
        without, offset = run_in_time(trace, timing, device_blocks, progress=progress), trace.requests
    done = run_in_time(trace, timing, device_blocks, config, lambda requests: progress(offset + requests))
    machine = timing.machine
    break_even = machine.break_even_tokens(timing.block_bytes / trace.block_tokens)
    return TimedReport(
        trace=trace.name,
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
        version=__version__,
    )


def _check(trace: Trace, timing: Timing, device_blocks: int, config: ReplayConfig | None) -> None:
    timing.machine.check(has_ram=config is not None, has_disk=config is not None and bool(config.tiers))
    check_room(trace, device_blocks)
    if config is not None and config.device_blocks != device_blocks:
        raise ConfigError("device_blocks", device_blocks, f"allowed: {config.device_blocks}, as in config")
    if config is not None and (config.decode_tokens_per_s or config.queue_requests):
        raise ConfigError(
            "decode_tokens_per_s or queue_requests",
            config.decode_tokens_per_s or config.queue_requests,
            "a timed replay simulates queue and decode: leave both out",
        )


def _outcome(trace: Trace, engine: Engine, offload: NoOffload) -> TimedOutcome:
    hits, refs = engine.device_hits + offload.hits(), max(1, trace.block_refs)
    seconds = engine.ended_s
    return TimedOutcome(
        requests=trace.requests,
        seconds=seconds,
        device_hit_blocks=engine.device_hits,
        offload_hit_blocks=offload.hits(),
        hit_ratio=hits / refs,
        prefill_s=engine.prefill_s,
        prefill_tokens=engine.prefill_tokens,
        device_busy_share=engine.busy_s / seconds if seconds else 0.0,
        ttft_s=Distribution.of(engine.first_token_s - engine.came_s),
        waiting_s=Distribution.of(engine.began_s - engine.came_s),
        loading_s=Distribution.of(engine.loaded_s - engine.began_s),
        most_waiting=engine.most_waiting,
        **offload.counts,
        links=engine.links,
        tiers=engine.tiers,
    )


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0
