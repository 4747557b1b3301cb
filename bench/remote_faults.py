"""Duration of a scheduler's calls while a shared tier's server, or the network to it, fails.

    .venv/bin/python bench/remote_faults.py [--seconds 4] [--only valkey|cluster|s3] [--fault hangs ...]

A manager with RAM and a shared tier runs steps like a scheduler, every 2 ms: `lookup` for each of up to four
requests, loads and stores, one `poll`. A third of the requests has a new path, the others a path that another
machine stored. Each fault begins after a healthy second and lasts `--seconds`; the measurement ends two
seconds later. Servers and the proxies with the faults run in other processes. In a cluster, one of three
masters has the fault.

Prints for each fault and for `lookup` and `poll`:

    calls           their number
    p50, p99        wall time in ms
    ours            wall time without the time in which the thread waited for a processor
    CPU             CPU time of the thread
    wait            the longest wait of a request, and how far it exceeded the deadline
    served          the share of requested blocks that came from RAM or the tier

The reasons of calls that took more than 2 ms of wall time: `taken`: the processor was given to others; `gc`:
Python's garbage collection; `cpu`: our own work; `waited`: another of our threads held the interpreter's
lock.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.core.plans import LookupResult
from kvoffload.core.request import RequestContext
from kvoffload.tiering.tiered_manager import TieredManager
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.spec import TierOptions, TierOwner
from support.fault_proxy import FaultProxy

BLOCK_BYTES, PATH_BLOCKS, NUM_PATHS = 64 << 10, 32, 24
CAPACITY, OBJECT_BYTES = 6 * PATH_BLOCKS, 8 * BLOCK_BYTES
STEP_S, ARRIVAL_STEPS, MOST_REQUESTS = 0.002, 8, 4
DEADLINE_S = 2.0
LONG_NS = 2_000_000
WARM_S, AFTER_S = 1.0, 2.0
FAULT_AGAIN_S = 0.1
"""Interval after which a fault is repeated: a connection is cut again, another byte is flipped."""


# ---- faults


def swapped(replies: list[bytes]) -> list[bytes]:
    return replies[::-1]


def doubled(replies: list[bytes]) -> list[bytes]:
    return [replies[0], *replies]


def http(status: str, length: int = 6) -> dict[str, Any]:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    return {"answer": head.encode() + b"sorry\n"}


Making = Callable[[random.Random], dict[str, Any]]
EVERYWHERE: dict[str, Making] = {
    "none": lambda chance: {},
    "latency of 20 ms": lambda chance: {"delay_s": 0.02},
    "20 MB/s": lambda chance: {"bytes_per_s": 20e6},
    "20 kB/s": lambda chance: {"bytes_per_s": 20e3},
    "hangs": lambda chance: {"hang": True},
    "refuses": lambda chance: {"refuse": True, "cut_after": 0},
    "cuts": lambda chance: {"cut_after": chance.randrange(1 << 20)},
    "flips bytes": lambda chance: {"flip_at": chance.randrange(1 << 18)},
}
RESP_ONLY: dict[str, Making] = {
    "swaps replies": lambda chance: {"replies": swapped},
    "doubles replies": lambda chance: {"replies": doubled},
}
HTTP_ONLY: dict[str, Making] = {
    "500": lambda chance: http("500 Internal Server Error"),
    "503": lambda chance: http("503 Slow Down"),
    "403": lambda chance: http("403 Forbidden"),
    "a length of 10^15": lambda chance: http("200 OK", 10**15),
    "partial bodies": lambda chance: http("200 OK", 1 << 20),
}
BY_PROXY = EVERYWHERE | RESP_ONLY | HTTP_ONLY
SIGNALS = ["SIGSTOP", "SIGKILL"]


def pass_on(pipe: Any, ports: list[int]) -> None:
    """Run proxies for these ports, in another process; the first has the fault received from `pipe`."""
    proxies = [FaultProxy(port) for port in ports]
    pipe.send([proxy.port for proxy in proxies])
    chance, name = random.Random(1), "none"
    while name:
        proxies[0].set(**BY_PROXY[name](chance))
        if name == "refuses":
            proxies[0].drop_connections()
        if pipe.poll(FAULT_AGAIN_S):
            name = pipe.recv()
    os._exit(0)


@contextmanager
def proxied(ports: list[int]) -> Iterator[tuple[list[int], Callable[[str], None]]]:
    """Run proxies; yields their ports, and a function that sets the fault of the first."""
    own_end, proxy_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=pass_on, args=(proxy_end, ports), daemon=True
    )
    process.start()
    try:
        yield own_end.recv(), own_end.send
    finally:
        own_end.send("")
        process.join()


# ---- measurement


@dataclass
class Calls:
    """Times of all calls of one kind, and the reasons of long calls."""

    wall_ns: list[int] = field(default_factory=list)
    ours_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        cells = [f"{len(self.wall_ns):6,}", f"{np.median(self.wall_ns) / 1e6:.3f}"]
        for took_ns in (self.wall_ns, self.ours_ns, self.cpu_ns):
            cells += [f"{np.percentile(took_ns, 99) / 1e6:.3f}", f"{max(took_ns) / 1e6:.2f}"]
        return " | ".join(cells)


class Watch:
    """Measures calls, and counts the reasons of long calls."""

    def __init__(self) -> None:
        self.calls = {"lookup": Calls(), "poll": Calls()}
        self.gc_ns = self.longest_gc_ns = 0
        self._gc_begun = 0
        self.is_on = False
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, _: object) -> None:
        if phase == "start":
            self._gc_begun = time.perf_counter_ns()
        else:
            took = time.perf_counter_ns() - self._gc_begun
            self.gc_ns += took
            self.longest_gc_ns = max(self.longest_gc_ns, took)

    def call(self, kind: str, do: Callable[..., Any], *args: Any) -> Any:
        queued, gc_ns = self._queued_ns(), self.gc_ns
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = do(*args)
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        if self.is_on:
            calls, own = self.calls[kind], max(cpu, wall - (self._queued_ns() - queued))
            calls.wall_ns.append(wall)
            calls.ours_ns.append(own)
            calls.cpu_ns.append(cpu)
            if wall > LONG_NS:
                calls.why[reason(own, cpu, self.gc_ns - gc_ns)] += 1
        return result

    def _queued_ns(self) -> int:
        """Total time in which this thread waited for a processor."""
        return int(os.pread(self._schedule, 99, 0).split()[1])

    def close(self) -> None:
        os.close(self._schedule)
        gc.callbacks.remove(self._collecting)


def reason(ours_ns: int, cpu_ns: int, gc_ns: int) -> str:
    if ours_ns <= LONG_NS:
        return "taken"
    if gc_ns > LONG_NS // 2:
        return "gc"
    return "cpu" if cpu_ns > LONG_NS else "waited"


# ---- the scheduler


def keys_of(path: int) -> list[bytes]:
    return [path.to_bytes(4, "big") + block.to_bytes(32, "big") for block in range(PATH_BLOCKS)]


class Machine:
    """RAM with a shared tier behind it, and a scheduler that requests paths."""

    def __init__(self, described: TierOptions | None) -> None:
        self.ram = MemoryTier(CAPACITY, BLOCK_BYTES, verify=False)
        tiers = [] if described is None else [described.open(TierOwner(BLOCK_BYTES, 36, "bench"))]
        self.manager = TieredManager(
            CAPACITY, key_bytes=36, ram=self.ram, tiers=tiers, deadline_s=DEADLINE_S, max_in_flight=0.5
        )
        self.watch = Watch()
        self.asked = self.served = 0
        self.longest_wait_s = 0.0
        self._chance, self._next_new = random.Random(7), NUM_PATHS
        self._active: list[tuple[RequestContext, list[bytes], float]] = []
        self._step = 0

    def fill(self) -> None:
        """Store all paths, as another machine."""
        for path in range(NUM_PATHS):
            ctx = self.manager.begin_request("fill", keys_of(path))
            self._store(ctx, keys_of(path))
            self.manager.finish_request(ctx)
            assert self.manager.settle(60.0)

    def run(self, seconds: float, is_counted: bool) -> None:
        self.watch.is_on = is_counted
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._one_step(now, is_counted)
            time.sleep(max(0.0, now + STEP_S - time.monotonic()))

    def close(self) -> None:
        self.watch.close()
        self.manager.close(0.0)

    def _one_step(self, now: float, is_counted: bool) -> None:
        if self._step % ARRIVAL_STEPS == 0 and len(self._active) < MOST_REQUESTS:
            path = self._chance.randrange(NUM_PATHS)
            if self._chance.random() < 1 / 3:
                path, self._next_new = self._next_new, self._next_new + 1
            self._active.append((self.manager.begin_request("r", keys_of(path)), keys_of(path), now))
        self._step += 1
        waiting = []
        for ctx, keys, begun in self._active:
            hits = self.watch.call("lookup", self.manager.lookup, keys, ctx)
            if hits.stopped_by is LookupResult.RETRY:
                waiting.append((ctx, keys, begun))
                continue
            if is_counted:
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - begun)
                self.asked += len(keys)
                self.served += hits.num_ready
            plan = self.manager.prepare_load(keys[: hits.num_ready], ctx)
            for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
                assert self.ram.pool[slot, :36].tobytes() == key, "a wrong block was served"
            self.manager.complete_load(plan)
            self._store(ctx, keys[hits.num_ready :])
            self.manager.finish_request(ctx)
        self._active = waiting
        self.watch.call("poll", self.manager.poll)

    def _store(self, ctx: RequestContext, keys: list[bytes]) -> None:
        plan = self.manager.prepare_store(keys, ctx)
        if plan is None:
            return
        for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
            self.ram.pool[slot, :36] = np.frombuffer(key, np.uint8)
        self.manager.complete_store(plan)


HEAD = """
| | calls | p50 | p99 | longest | ours p99 | longest | CPU p99 | longest | wait, s | past deadline | served |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def report(name: str, machine: Machine) -> None:
    watch, waited = machine.watch, machine.longest_wait_s
    past = f"{1e3 * max(0.0, waited - DEADLINE_S):.0f} ms"
    served = f"{100 * machine.served / max(1, machine.asked):.0f} %"
    for kind, calls in watch.calls.items():
        if calls.wall_ns:
            cells = f"{waited:.3f} | {past} | {served}" if kind == "lookup" else "| |"
            print(f"| {name}: {kind} | {calls.text()} | {cells} |", flush=True)
    why = {kind: dict(calls.why) for kind, calls in watch.calls.items() if calls.why}
    if why:
        print(f"<!-- over 2 ms: {why}; longest collection {watch.longest_gc_ns / 1e6:.2f} ms -->", flush=True)


# ---- three kinds of servers


@dataclass
class Kind:
    """A running server of one kind.

    Attributes:
        described: options of the tier, through the proxies.
        tell: sets the fault of the first proxy.
        server: receives signals.
    """

    described: TierOptions
    tell: Callable[[str], None]
    server: Any

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        if name == "SIGSTOP":
            with self.server.stopped():
                yield
        elif name == "SIGKILL":
            self.server.stop()
            yield
            self.server.start()
        else:
            self.tell(name)
            yield
            self.tell("none")


@contextmanager
def one_server(directory: Path) -> Iterator[Kind]:
    from support.valkey_server import running

    with running(directory) as server, proxied([server.port]) as ((port,), tell):
        yield Kind(ValkeyOptions(url=f"valkey://127.0.0.1:{port}/bench"), tell, server)


@contextmanager
def cluster(directory: Path) -> Iterator[Kind]:
    """Run three masters, each with a replica."""
    from support.valkey_server import clustered

    whole = ("--cluster-require-full-coverage", "no")
    with clustered(directory, *whole) as made, proxied([node.port for node in made.servers]) as (ports, tell):
        for server, port in zip(made.servers, ports, strict=True):
            server.execute("CONFIG", "SET", "cluster-announce-port", str(port))
        announced = {*ports[: made.num_masters]}
        made.wait(lambda: all({node[2][1] for node in server.ask("CLUSTER", "SLOTS")} == announced
                              for server in made.servers))  # fmt: skip
        nodes = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        yield Kind(ValkeyOptions(url=f"valkey+cluster://{nodes}/bench"), tell, made.servers[0])


@contextmanager
def bucket(directory: Path) -> Iterator[Kind]:
    from support.s3_server import BUCKET, KEY_ID, SECRET, Rclone, running

    os.environ.update(AWS_ACCESS_KEY_ID=KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET)
    with running(Rclone, directory) as server, proxied([server.port]) as ((port,), tell):
        place: dict[str, Any] = {
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "pack": OBJECT_BYTES,
        }
        yield Kind(S3Options(url=f"s3://{BUCKET}/bench", **place), tell, server)


KINDS = {"valkey": one_server, "cluster": cluster, "s3": bucket}
FAULTS = {
    "valkey": [*EVERYWHERE, *RESP_ONLY, *SIGNALS],
    "cluster": [*EVERYWHERE, *RESP_ONLY, *SIGNALS],
    "s3": [*EVERYWHERE, *HTTP_ONLY, *SIGNALS],
}


def measure(kind: Kind, fault: str, seconds: float) -> None:
    writer = Machine(kind.described)
    writer.fill()
    writer.close()
    machine = Machine(kind.described)
    machine.run(WARM_S, is_counted=False)
    with kind.fault(fault):
        machine.run(seconds, is_counted=True)
    machine.run(AFTER_S, is_counted=True)
    report(fault, machine)
    machine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", choices=[*KINDS])
    parser.add_argument("--fault", nargs="*", help="faults to measure; default: all")
    parser.add_argument(
        "--switch-interval",
        type=float,
        default=sys.getswitchinterval(),
        help="Python's switch interval in seconds",
    )
    given = parser.parse_args()
    sys.setswitchinterval(given.switch_interval)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    gc.collect()
    gc.freeze()  # as vLLM does after the start of an engine
    print(HEAD)
    alone = Machine(None)
    alone.run(given.seconds, is_counted=True)
    report("no tier", alone)
    alone.close()
    for name in [given.only] if given.only else KINDS:
        print(f"\n{name}, load {os.getloadavg()[0]:.1f}\n{HEAD}", flush=True)
        for fault in given.fault or FAULTS[name]:
            with tempfile.TemporaryDirectory() as directory, KINDS[name](Path(directory)) as kind:
                measure(kind, fault, given.seconds)


if __name__ == "__main__":
    main()
