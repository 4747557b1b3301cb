"""CPU time of a replay per reference, against vLLM and libCacheSim: ``python bench/replay.py [--quick]``.

Replays slices of recorded traces and a synthetic chat workload, with a cache of 5 % of the blocks of each:

- kvoffload: a replay without data, every registered policy, from `Replay.run` to the last request: decisions,
  keys, counts and the hash of the decision log. The report at the end has its own line;
- vLLM's `CPUOffloadingManager` with LRU, called as by its connector. Keys are reused objects with cached
  hashes; contexts are made outside the timed region;
- libCacheSim's LRU: its Python binding in a loop over the block ids with one reused request object, the
  fastest form in Python; and `process_trace`, a loop in C over a binary file.

Whole runs take turns in one process, in changing order. A number is the median of the rounds, in CPU time of
the thread. Ratios are valid on other machines, absolute times are not. Without vLLM or libCacheSim (``pip
install libcachesim``) its rows are missing, with the reason. Recordings come from the folder
KVOFFLOAD_TRACES. ``--full`` also replays a whole agentic trace once with every policy.

Takes minutes; ``--quick``, with shorter slices, about one minute on an idle machine and three on a busy one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from control_plane import machine, progress, why_no_vllm
from control_plane_batches import leading_hits
from kvoffload.core.policy import POLICIES
from kvoffload.replay.config import ReplayConfig
from kvoffload.replay.replay import Replay
from kvoffload.replay.trace_keys import TraceKeys
from kvoffload.traces.sources import load_trace
from kvoffload.traces.trace import Trace

TRACES = {
    "agentic_3h": "agentic_coding/agentic_3h.jsonl.xz",
    "conversation_first60": "mooncake_conversation/conversation_first60.jsonl",
    "chat": "",
}
"""File of each recording; empty for a built-in workload."""
FULL = "agentic_3h"
CAPACITY_SHARE = 0.05
SLICE_REFS, QUICK_REFS = 300_000, 60_000
ROUNDS, QUICK_ROUNDS = 5, 3
REQUESTS_TIMED_TOGETHER = 64
VLLM, BINDING, NATIVE, REPORT = "vllm lru", "libcachesim lru, python", "libcachesim lru, C", "report"

ORACLE_GENERAL = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""libCacheSim's binary trace format."""

Result = dict[str, Any]


def head_of(trace: Trace, num_refs: int) -> Trace:
    """Return the leading requests of a trace, with about `num_refs` references in all."""
    requests = min(int(np.searchsorted(trace.offsets, num_refs)), trace.requests)
    refs = trace.refs[: trace.offsets[requests]]
    return dataclasses.replace(
        trace,
        block_ids=trace.block_ids[: int(refs.max()) + 1],
        refs=refs,
        offsets=trace.offsets[: requests + 1],
        timestamps_ms=trace.timestamps_ms[:requests],
        output_tokens=trace.output_tokens[:requests],
    )


def capacity_of(trace: Trace) -> int:
    return max(1, int(trace.unique_blocks * CAPACITY_SHARE))


def timed(call: Callable[[], Any]) -> int:
    start = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start


class Ours:
    """Our replay without data."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.hits = 0
        self.report_ns = 0

    def run(self, trace: Trace) -> int:
        replay = Replay(trace, ReplayConfig(capacity_of(trace), self.policy))
        served_at = 0

        def served(requests: int) -> None:
            nonlocal served_at
            served_at = time.thread_time_ns()

        start = time.thread_time_ns()
        report = replay.run(served)
        self.report_ns = time.thread_time_ns() - served_at
        self.hits = report.prefix_hit_blocks
        return served_at - start


class Theirs:
    """vLLM's manager with the same requests."""

    def __init__(self, trace: Trace) -> None:
        keys = list(TraceKeys(trace).of_blocks(np.arange(trace.unique_blocks, dtype=np.int32)))
        codes = np.split(trace.refs, trace.offsets[1:-1])
        self.requests = [[keys[code] for code in request.tolist()] for request in codes]
        self.hits = 0

    def run(self, trace: Trace) -> int:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        manager = CPUOffloadingManager(capacity_of(trace), "lru")
        hit, total_hits = LookupResult.HIT, 0

        def serve(batch: list[tuple[list[bytes], Any]]) -> None:
            nonlocal total_hits
            lookup = manager.lookup
            for keys, ctx in batch:
                manager.on_new_request(ctx)
                hits = leading_hits(lookup, hit, keys, ctx)
                total_hits += hits
                head = keys[:hits]
                manager.prepare_load(head, ctx)
                manager.complete_load(head, ctx)
                store = manager.prepare_store(keys, ctx)
                if store is not None:
                    manager.complete_store(store.keys_to_store, ctx)
                manager.on_request_finished(ctx)

        spent = 0
        for start in range(0, len(self.requests), REQUESTS_TIMED_TOGETHER):
            batch = []
            for number, keys in enumerate(self.requests[start : start + REQUESTS_TIMED_TOGETHER], start):
                ctx = ReqContext(str(number))
                for position, key in enumerate(keys):
                    ctx.set_offload_key_position(key, position)
                batch.append((keys, ctx))
            spent += timed(lambda batch=batch: serve(batch))  # type: ignore[misc]
        self.hits = total_hits
        return spent


def libcachesim_lru(trace: Trace) -> Any:
    """libCacheSim's LRU, with a small hash table: the default of 128 MB causes page faults."""
    libcachesim: Any = importlib.import_module("libcachesim")
    capacity = capacity_of(trace)
    return libcachesim.LRU(capacity, hashpower=max(10, (2 * capacity).bit_length()))


class Binding:
    """libCacheSim's LRU in a Python loop over the references."""

    def __init__(self, trace: Trace) -> None:
        self.ids = trace.refs.tolist()
        self.hits = 0

    def run(self, trace: Trace) -> int:
        libcachesim: Any = importlib.import_module("libcachesim")
        cache = libcachesim_lru(trace)

        def serve() -> None:
            request, get, hits = libcachesim.Request(obj_size=1), cache.get, 0
            for block in self.ids:
                request.obj_id = block
                hits += get(request)
            self.hits = hits

        return timed(serve)


class Native:
    """libCacheSim's LRU over a file of the same references; loop and reader are in C."""

    def __init__(self, trace: Trace, folder: Path) -> None:
        records = np.zeros(trace.block_refs, ORACLE_GENERAL)
        records["id"], records["size"], records["next"] = trace.refs, 1, -1
        self.file = folder / f"{trace.name}.oracleGeneral"
        records.tofile(self.file)
        self.hits = 0

    def run(self, trace: Trace) -> int:
        libcachesim: Any = importlib.import_module("libcachesim")
        reader = libcachesim.TraceReader(str(self.file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim_lru(trace)
        ratios: list[float] = []
        spent = timed(lambda: ratios.append(cache.process_trace(reader)[0]))
        self.hits = round((1 - ratios[0]) * trace.block_refs)
        return spent


def measure(trace: Trace, rounds: int, with_vllm: bool, with_libcachesim: bool, folder: Path) -> Result:
    """Measure all sides on one trace: median ns per reference."""
    sides: dict[str, Any] = {policy: Ours(policy) for policy in sorted(POLICIES.names())}
    if with_vllm:
        sides[VLLM] = Theirs(trace)
    if with_libcachesim:
        sides[BINDING], sides[NATIVE] = Binding(trace), Native(trace, folder)
    spent: dict[str, list[int]] = {name: [] for name in [*sides, REPORT]}
    for turn in range(rounds + 1):
        progress(f"{trace.name}: round {turn} of {rounds}" + " (not counted)" * (turn == 0))
        for name, side in list(sides.items())[:: 1 if turn % 2 else -1]:
            gc.collect()
            ns = side.run(trace)
            if turn > 0:
                spent[name].append(ns)
        if turn > 0:
            spent[REPORT].append(sides["lru"].report_ns)
    return {
        "trace": trace.name,
        "requests": trace.requests,
        "block_refs": trace.block_refs,
        "capacity_blocks": capacity_of(trace),
        "ns_per_ref": {
            name: round(statistics.median(each) / trace.block_refs, 1) for name, each in spent.items()
        },
        "spread": {name: round(max(each) / min(each), 2) for name, each in spent.items()},
        "hits": {name: side.hits for name, side in sides.items()},
    }


def whole_trace(trace: Trace) -> dict[str, float]:
    """Measure one replay of a whole trace with its report, in seconds of CPU time, by policy."""
    seconds = {}
    for policy in sorted(POLICIES.names()):
        progress(f"{trace.name}, whole: {policy}")
        run = Ours(policy)
        seconds[policy] = round((run.run(trace) + run.report_ns) / 1e9, 2)
    return seconds


def requirements(results: list[Result]) -> list[Result]:
    """List the targets with the measured values (None: not measured)."""
    rows = []
    for result in results:
        times = result["ns_per_ref"]
        lru = times["lru"]
        own_times = {name: ns for name, ns in times.items() if name in POLICIES.names()}
        slowest = max(own_times, key=lambda name: own_times[name])
        for label, limit, baseline_ns in (
            ("vLLM's LRU, times ours", 20, times.get(VLLM)),
            ("libCacheSim's binding, times ours", 5, times.get(BINDING)),
        ):
            ratio = None if baseline_ns is None else round(baseline_ns / lru, 2)
            reached = None if ratio is None else ratio >= limit
            rows.append({"what": label, "limit": f">= {limit}", "measured": ratio, "reached": reached})
        ratio = round(own_times[slowest] / lru, 2)
        label = f"slowest policy ({slowest}), times LRU"
        rows.append({"what": label, "limit": "<= 3", "measured": ratio, "reached": ratio <= 3})
        for row in rows[-3:]:
            row["trace"] = result["trace"]
    return rows


def why_no_libcachesim() -> str | None:
    try:
        importlib.import_module("libcachesim")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def print_result(result: Result) -> None:
    times = result["ns_per_ref"]
    print(
        f"\n{result['trace']}: {result['requests']:,} requests, {result['block_refs']:,} references, "
        f"capacity {result['capacity_blocks']:,}"
    )
    print(f"  {'':26}{'ns per ref':>12}{'times LRU':>12}{'max/min':>10}{'hits':>12}")
    for name, ns in times.items():
        hits = f"{result['hits'][name]:,}" if name in result["hits"] else ""
        print(f"  {name:26}{ns:12,.1f}{ns / times['lru']:12.2f}{result['spread'][name]:10.2f}{hits:>12}")


def print_all(everything: Result) -> None:
    about = everything["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in about["packages"].items())
    print(f"Machine: {about['cpu']}, {about['cores']} cores, {about['system']}")
    print(f"Python {about['python']}, {packages}")
    print(f"Median of {everything['rounds']} rounds, CPU time of the thread, in turns.")
    for missing, reason in everything["missing"].items():
        print(f"{missing} IS MISSING ({reason})")
    for result in everything["results"]:
        print_result(result)
    print("\nHits: libCacheSim counts every cached block, the others only blocks that extend a prefix.")
    if everything["whole_s"]:
        print(f"\n{FULL}, whole, seconds of CPU time with the report:")
        for policy, seconds in everything["whole_s"].items():
            print(f"  {policy:26}{seconds:12.2f}")
    print("\nRequirements")
    for row in everything["requirements"]:
        verdict = {None: "not measured", True: "reached", False: "NOT REACHED"}[row["reached"]]
        value = "-" if row["measured"] is None else f"{row['measured']:.2f}"
        print(f"  {row['trace']:22}{row['what']:40}{row['limit']:>6}{value:>9}  {verdict}")


def traces(quick: bool, missing: dict[str, str]) -> list[Trace]:
    folder, loaded = os.environ.get("KVOFFLOAD_TRACES"), []
    for name, file in TRACES.items():
        if file and not (folder and (Path(folder) / file).exists()):
            missing[name] = "set KVOFFLOAD_TRACES to the folder of the recordings"
            continue
        progress(f"reading {name}")
        trace = load_trace(Path(str(folder)) / file if file else name)
        loaded.append(head_of(trace, QUICK_REFS if quick else SLICE_REFS))
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REFS:,} references of each trace")
    parser.add_argument("--full", action="store_true", help=f"also all of {FULL}, every policy, once")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    arguments = parser.parse_args()

    reasons = {"vllm": why_no_vllm(), "libcachesim": why_no_libcachesim()}
    missing = {name: reason for name, reason in reasons.items() if reason}
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    loaded = traces(arguments.quick, missing)
    with tempfile.TemporaryDirectory() as folder:
        results = [
            measure(trace, rounds, "vllm" not in missing, "libcachesim" not in missing, Path(folder))
            for trace in loaded
        ]
    whole: dict[str, float] = {}
    if arguments.full and FULL not in missing:
        whole = whole_trace(load_trace(Path(os.environ["KVOFFLOAD_TRACES"]) / TRACES[FULL]))
    about = machine()
    if "libcachesim" not in missing:
        about["packages"]["libcachesim"] = importlib.metadata.version("libcachesim")
    everything = {
        "machine": about,
        "rounds": rounds,
        "missing": missing,
        "results": results,
        "whole_s": whole,
        "requirements": requirements(results),
    }
    if arguments.format == "json":
        json.dump(everything, sys.stdout, indent=2)
        print()
    else:
        print_all(everything)


if __name__ == "__main__":
    main()
