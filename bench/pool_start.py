"""Speed at which an engine's workers allocate their shared pool, and of writes to it afterwards.

python bench/pool_start.py --capacity 4GiB --workers 2 [--replicated] [--directory DIRECTORY]

Each worker is a process; all start at once. For huge pages the directory must be on a tmpfs with huge pages:
``mount -t tmpfs -o huge=advise,size=8g none DIRECTORY``.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from kvoffload.integrations.vllm.shared import first_touch
from kvoffload.integrations.vllm.shared.pool import SCHEDULER, SharedPool
from kvoffload.node.pool_directory import SHARED_MEMORY
from kvoffload.settings.read import parse_size

GIB = 2**30


def worker(rank: int, options: dict[str, Any], threads: int, together: Barrier, results: Any) -> None:
    """Attach as one worker, then write all of its part."""
    if threads:
        first_touch.num_threads = lambda num_workers: threads
    together.wait()
    began = time.perf_counter()
    pool = SharedPool.attach(member=1 + rank, **options)
    attached = time.perf_counter()
    if not pool.wait_for_workers(600.0):
        raise TimeoutError("a worker did not attach within 600 s")
    all_have = time.perf_counter()
    if rank == 0:
        # The scheduler attaches last; then the files of the pool are unlinked.
        SharedPool.attach(member=SCHEDULER, **options).close()
    together.wait()
    written_from = time.perf_counter()
    num_workers = options["num_members"] - 1
    memory = pool.part(rank if pool.num_parts > 1 else 0)
    for slot in range(pool.num_slots) if pool.num_parts > 1 else range(rank, pool.num_slots, num_workers):
        ctypes.memset(memory[slot].ctypes.data, 1, pool.part_bytes)
    results.put((attached - began, all_have - began, time.perf_counter() - written_from, huge_gib()))
    together.wait()
    pool.close()


def huge_gib() -> float:
    """Read the machine's shared memory in huge pages, in GiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("ShmemHugePages:")) * 1024 / GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capacity", default="4GiB")
    parser.add_argument("--part-bytes", default="640KiB")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of each worker; default: as in an engine"
    )
    parser.add_argument(
        "--reserve-only", action="store_true", help="do not touch pages, as before Linux 5.14"
    )
    parser.add_argument("--replicated", action="store_true", help="one part for all workers, as with MLA")
    parser.add_argument("--directory", type=Path, default=SHARED_MEMORY)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    capacity_bytes = parse_size("--capacity", given.capacity)
    if given.reserve_only:
        first_touch.advise = lambda *advice: errno.EINVAL
    options = {
        "num_members": 1 + given.workers,
        "num_parts": 1 if given.replicated else given.workers,
        "part_bytes": parse_size("--part-bytes", given.part_bytes),
        "capacity_bytes": capacity_bytes,
        "directory": given.directory,
    }
    context, gib = multiprocessing.get_context("fork"), capacity_bytes / GIB
    speeds: dict[str, list[float]] = {"attached": [], "all workers": [], "then written": []}
    huge = 0.0
    for number in range(given.rounds):
        together, results = context.Barrier(given.workers), context.SimpleQueue()
        engine = options | {"engine_id": f"bench-{os.getpid()}-{number}"}
        processes = [
            context.Process(target=worker, args=(rank, engine, given.threads, together, results))
            for rank in range(given.workers)
        ]
        for process in processes:
            process.start()
        times = [results.get() for _ in processes]
        for process in processes:
            process.join()
        for name, column in zip(speeds, zip(*times, strict=True), strict=False):
            speeds[name].append(gib / max(column))
        huge = max(huge, *(sample[3] for sample in times))
    threads = given.threads or first_touch.num_threads(given.workers)
    print(
        f"{gib:g} GiB in {given.directory}, {given.workers} workers of {threads} threads, medians of", end=" "
    )
    print(f"{given.rounds} rounds; {huge:.2f} GiB in huge pages; several memory nodes:", end=" ")
    print("yes" if first_touch.has_several_nodes() else "no")
    for name, rates in speeds.items():
        print(f"{name:>14}: {statistics.median(rates):6.2f} GiB/s ({min(rates):.2f} to {max(rates):.2f})")


if __name__ == "__main__":
    main()
