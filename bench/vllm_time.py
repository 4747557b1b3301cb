"""The timed replay compared with real engines: hits, and times relative to no offloading.

    KVOFFLOAD_TRACES=... .venv-vllm/bin/python bench/vllm_time.py [--rounds 1] [--requests 200]

Trace, model, engines and turns are as in `bench/vllm_engine.py`. One more engine, without offloading,
computes single prompts of several lengths, before and after the others. Their times give the costs of a step,
of a token and of attention (`calibration.fit`), and the speed of generation. Copies are measured with the
product's kernels. The timed replay uses only these measurements, the sizes of the engines, and the limit of
two requests at a time.

Times are CPU seconds, because engines compute in one thread, and CPU seconds do not depend on other work of
the machine. Times to first token are not compared, because they do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import vllm_engine as bench
from kvoffload.calibration.copy_speed import memory_copies
from kvoffload.calibration.fit import fit_prefill
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.simulate.arrivals import AtOnce
from kvoffload.simulate.config import Timing
from kvoffload.simulate.engine import Engine
from kvoffload.simulate.event_queue import Events
from kvoffload.simulate.machine import Machine, Quantity
from kvoffload.simulate.offload import VictimOffload
from kvoffload.simulate.pool import DevicePool
from kvoffload.simulate.timed import run_in_time
from kvoffload.traces.trace import Trace

STEP_TOKENS = 8 * bench.BLOCK_TOKENS
LENGTHS = (1, 2, 4, 8, 12, 16, 24, 32)
SIDES = {
    "no offload": None,
    "ours lru": ("lru", "on-compute"),
    "ours hazard": ("hazard", "on-compute"),
    "ours victim lru": ("lru", "on-device-eviction"),
    "ours victim hazard": ("hazard", "on-device-eviction"),
}


def measure(options: argparse.Namespace) -> None:
    """Measure prompts in a separate process: for each line of stdin, write the times of all prompts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = bench.Side(options.model, None, options)
    bench.AT_ONCE, side.clock = 1, time.process_time
    side.replay("warm-up", [bench.prompt_of(list(range(-5, 0))) for _ in range(3)])
    print("ready", file=answers, flush=True)
    fresh = -1000
    for _ in sys.stdin:
        samples = []
        for blocks in LENGTHS * 3:
            fresh -= blocks
            result = side.replay(f"m{fresh}", [bench.prompt_of(list(range(fresh, fresh + blocks)))])
            generating = (result["seconds"] - result["ttft"][0]) / (bench.ANSWER_TOKENS - 1)
            samples.append((blocks * bench.BLOCK_TOKENS, result["ttft"][0], generating))
        print(json.dumps(samples), file=answers, flush=True)


class Measuring(bench.Process):
    """Engine that measures single prompts."""

    script = __file__

    def times(self) -> list[Any]:
        """Return (tokens, seconds to the first token, seconds of a further token) of every prompt."""
        assert self._process.stdin is not None
        print("", file=self._process.stdin, flush=True)
        samples: list[Any] = json.loads(self.answer())
        return samples


def machine_of(times: list[Any]) -> Machine:
    """Fit the machine of the timed replay to measurements."""
    tokens, seconds, generating = zip(*times, strict=True)
    step_s, linear, squared = fit_prefill(tokens, seconds, STEP_TOKENS)
    block = bench.scale_of("cpu").block_bytes
    bytes_per_s = memory_copies(block, 64, 20)["memory_copy_bytes_per_s"].value
    values = {
        "prefill_s_per_token": linear,
        "prefill_s_per_token_squared": squared,
        "step_s": step_s,
        "decode_tokens_per_s": 1.0 / statistics.median(generating),
        "load_bytes_per_s": bytes_per_s,
        "store_bytes_per_s": bytes_per_s,
        "copy_latency_s": 1e-3,
    }
    quantities = {name: Quantity(value, value, value, "measured") for name, value in values.items()}
    return msgspec.structs.replace(Machine(name="here"), **quantities)


def trace_of(requests: list[list[int]]) -> Trace:
    """Convert the cut to a trace with the engine's blocks, without times."""
    ids = list(dict.fromkeys(block for blocks in requests for block in blocks))
    codes = {block: code for code, block in enumerate(ids)}
    return Trace(
        name="cut",
        block_tokens=bench.BLOCK_TOKENS,
        block_ids=np.array(ids, np.int64),
        refs=np.array([codes[block] for blocks in requests for block in blocks], np.int32),
        offsets=np.cumsum([0, *map(len, requests)]).astype(np.int64),
        timestamps_ms=np.zeros(len(requests), np.int64),
        output_tokens=np.full(len(requests), bench.ANSWER_TOKENS, np.int64),
    )


def simulated(trace: Trace, machine: Machine, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Replay each side with and without a clock."""
    timing = Timing(
        machine, bench.scale_of("cpu").block_bytes, step_tokens=STEP_TOKENS, at_once=bench.AT_ONCE
    )
    rows = {}
    for name, offload in SIDES.items():
        config = None
        plain = Replay(trace, ReplayConfig(1, device_blocks=options.gpu_blocks)).run()
        untimed = plain.device_hit_blocks / trace.block_refs
        if offload is not None:
            config = ReplayConfig(
                options.ram_blocks, offload[0], device_blocks=options.gpu_blocks, store=offload[1]
            )
            untimed = Replay(trace, config).run().prefix_hit_ratio
        report = run_in_time(trace, timing, options.gpu_blocks, config)
        rows[name] = {
            "untimed": untimed,
            "hit_ratio": report.hit_ratio,
            "seconds": report.seconds,
        }
    return rows


class AtDrop(VictimOffload):
    """Victim tier that stores a block as soon as the device evicts it, as in a replay without a clock."""

    def dropped(self, codes: Sequence[int]) -> None:
        """Store dropped blocks at once."""
        if codes and (plan := self.manager.prepare_store(self._of([*codes][::-1]))) is not None:
            self._copy(plan)

    def scheduled(self) -> None:
        """Offer nothing: blocks are stored on eviction."""


def why(trace: Trace, machine: Machine, options: argparse.Namespace) -> None:
    """Print, step by step, why a victim tier has more hits in a replay without a clock."""
    timing = Timing(
        machine, bench.scale_of("cpu").block_bytes, step_tokens=STEP_TOKENS, at_once=bench.AT_ONCE
    )
    blocks, most = options.gpu_blocks, np.maximum(np.diff(trace.offsets) - 1, 0)
    for policy in ("lru", "hazard"):
        config = ReplayConfig(options.ram_blocks, policy, device_blocks=blocks, store="on-device-eviction")
        plain = Replay(trace, config)
        steps = {"without a clock": plain.run().prefix_hit_ratio}
        hits = np.minimum(plain.hits_per_request, most).sum()
        steps["the last block is computed"] = hits / trace.block_refs
        for name, kind in (("in time, stored when dropped", AtDrop), ("in time", VictimOffload)):
            events, pool = Events(), DevicePool(blocks)
            engine = Engine(trace, timing, events, pool, AtOnce(trace, timing.at_once))
            offload = kind(trace, config, timing, events, pool, engine.wake)
            engine.begin(offload, lambda ended: None)
            events.run()
            engine.check_ended()
            steps[name] = (engine.device_hits + offload.hits()) / trace.block_refs
        print(f"{policy}: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in steps.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_options(parser)
    parser.add_argument("--save", type=Path, help="file to write the measurements to")
    parser.add_argument("--again", type=Path, help="file of --save: simulate with these measurements")
    parser.add_argument("--why", action="store_true", help="explain the hits of a victim tier")
    options = parser.parse_args()
    if options.side:
        measure(options)
        return
    options.only, options.keyed = [*SIDES], False
    if options.again:
        times, rows = json.loads(options.again.read_text())
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = bench.tiny().write_llama(Path(directory) / "model")
            measuring = Measuring("no offload", model, options)
            measuring.answer()
            times = measuring.times()
            rows = bench.summary(bench.run(options), options.rounds)
            times += measuring.times()
            measuring.close()
            measuring.wait()
        if options.save:
            options.save.write_text(json.dumps([times, rows]))
    machine = machine_of(times)
    for name in ("prefill_s_per_token", "prefill_s_per_token_squared", "step_s", "decode_tokens_per_s"):
        print(f"{name} {machine.value(name):.4g}")
    trace = trace_of(bench.cut(options.trace, options.requests, options.longest))
    if options.why:
        why(trace, machine, options)
    predictions = simulated(trace, machine, options)
    print("| side | hit ratio: engine | in time | without | tokens/s: engine | in time | speed-up: engine "
          "| in time |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    tokens = trace.block_refs * trace.block_tokens
    base = next(row for row in rows if row["side"] == "no offload")
    for row in rows:
        prediction = predictions[row["side"]]
        cells = [
            row["side"],
            *(f"{ratio:.3f}" for ratio in (row["hit_ratio"], prediction["hit_ratio"], prediction["untimed"])),
            f"{row['tokens_per_cpu_s']:,.0f}",
            f"{tokens / prediction['seconds']:,.0f}",
            f"{row['tokens_per_cpu_s'] / base['tokens_per_cpu_s']:.2f}",
            f"{predictions['no offload']['seconds'] / prediction['seconds']:.2f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
