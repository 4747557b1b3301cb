"""How long a scheduler's calls take while a shared tier's server, or the network to it, fails.

    .venv/bin/python bench/remote_faults.py [--seconds 4] [--only valkey|cluster|s3] [--fault hangs ...]

A manager with RAM and a tier behind it is driven as by a scheduler: a step every 2 ms, `lookup` for each of
up to four requests, loads and stores as they are due, one `poll`. Of three requests one asks for a path that
is new, two for one that another machine has stored. Each fault begins after a healthy second, lasts
`--seconds`, and is watched for two more after its end. Servers, and the proxies with the faults, are other
processes; in a cluster the fault is that of one of three masters.

Prints for each fault, of all calls of `lookup` and `poll`: how many there were, what they took in ms on the
clock; on the clock less what the thread could run but the kernel had given its processor to others ("ours");
and of its own CPU time; how long a request waited at most, and how far that was past its deadline; and the
share of blocks asked for that came from RAM or the tier. Of calls over 2 ms on the clock it says why: `taken`
would not have been over 2 ms if the processor had not been taken; of the others `cpu` is our own work, `gc`
Python's garbage collection, and `waited` for the interpreter's lock, which another of our threads had.
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
"""After so long bytes are counted anew: a connection is cut, a byte flipped, again and again."""


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
    """Another process: proxies in front of these ports; the first has the fault that it is told of."""
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
    """Where the proxies listen, and a function that tells the first of a fault."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=pass_on, args=(theirs, ports), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours.send
    finally:
        ours.send("")
        process.join()


# ---- what is measured


@dataclass
class Calls:
    """What the calls of one kind took."""

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
    """Times calls, and notes why those took long that did."""

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
        found = do(*args)
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        if self.is_on:
            calls, ours = self.calls[kind], max(cpu, wall - (self._queued_ns() - queued))
            calls.wall_ns.append(wall)
            calls.ours_ns.append(ours)
            calls.cpu_ns.append(cpu)
            if wall > LONG_NS:
                calls.why[reason(ours, cpu, self.gc_ns - gc_ns)] += 1
        return found

    def _queued_ns(self) -> int:
        """For how long this thread could run and no processor ran it, since it began."""
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


# ---- what is driven


def keys_of(path: int) -> list[bytes]:
    return [path.to_bytes(4, "big") + block.to_bytes(32, "big") for block in range(PATH_BLOCKS)]


class Machine:
    """RAM, a shared tier behind it, and a scheduler that asks for paths."""

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
        """What another machine has stored."""
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
            found = self.watch.call("lookup", self.manager.lookup, keys, ctx)
            if found.stopped_by is LookupResult.RETRY:
                waiting.append((ctx, keys, begun))
                continue
            if is_counted:
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - begun)
                self.asked += len(keys)
                self.served += found.num_ready
            plan = self.manager.prepare_load(keys[: found.num_ready], ctx)
            for key, slot in zip(plan.keys, plan.slots.tolist(), strict=True):
                assert self.ram.pool[slot, :36].tobytes() == key, "a wrong block was served"
            self.manager.complete_load(plan)
            self._store(ctx, keys[found.num_ready :])
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
            more = f"{waited:.3f} | {past} | {served}" if kind == "lookup" else "| |"
            print(f"| {name}: {kind} | {calls.text()} | {more} |", flush=True)
    why = {kind: dict(calls.why) for kind, calls in watch.calls.items() if calls.why}
    if why:
        print(f"<!-- over 2 ms: {why}; longest collection {watch.longest_gc_ns / 1e6:.2f} ms -->", flush=True)


# ---- the three kinds


@dataclass
class Kind:
    """An engine of one kind, started.

    Attributes:
        described: the tier, through the proxies. tell: the first proxy, of a fault. server: who gets signals.
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
    """Three masters, each with a replica."""
    from support.valkey_server import clustered

    whole = ("--cluster-require-full-coverage", "no")
    with clustered(directory, *whole) as made, proxied([one.port for one in made.servers]) as (ports, tell):
        for server, port in zip(made.servers, ports, strict=True):
            server.execute("CONFIG", "SET", "cluster-announce-port", str(port))
        announced = {*ports[: made.num_masters]}
        made.wait(lambda: all({one[2][1] for one in server.ask("CLUSTER", "SLOTS")} == announced
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
    parser.add_argument("--fault", nargs="*", help="only these")
    parser.add_argument("--switch-interval", type=float, default=sys.getswitchinterval(), help="Python's, s")
    given = parser.parse_args()
    sys.setswitchinterval(given.switch_interval)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
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
