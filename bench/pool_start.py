"""How long the workers of an engine take to have the memory of their pool, and how fast it then is.

python bench/pool_start.py --capacity 4GiB --workers 2 [--replicated] [--directory DIRECTORY]

Each worker is a process; all begin at once. For huge pages the directory must be on a tmpfs that gives them:
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
    """One worker: attach, and then write all of its part."""
    if threads:
        first_touch.num_threads = lambda num_workers: threads
    together.wait()
    began = time.perf_counter()
    pool = SharedPool.attach(member=1 + rank, **options)
    attached = time.perf_counter()
    if not pool.wait_for_workers(600.0):
        raise TimeoutError("a worker has not come")
    all_have = time.perf_counter()
    if rank == 0:
        # With the scheduler all are there, and nothing has a name any more.
        SharedPool.attach(member=SCHEDULER, **options).close()
    together.wait()
    written_from = time.perf_counter()
    num_workers = options["num_members"] - 1
    part = pool.part(rank if pool.num_parts > 1 else 0)
    for slot in range(pool.num_slots) if pool.num_parts > 1 else range(rank, pool.num_slots, num_workers):
        ctypes.memset(part[slot].ctypes.data, 1, pool.part_bytes)
    results.put((attached - began, all_have - began, time.perf_counter() - written_from, huge_gib()))
    together.wait()
    pool.close()


def huge_gib() -> float:
    """Shared memory of the machine in huge pages."""
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
        "--threads", type=int, default=0, help="of each worker; by default as an engine has it"
    )
    parser.add_argument("--reserve-only", action="store_true", help="do not touch, as before Linux 5.14")
    parser.add_argument("--replicated", action="store_true", help="one part for all workers, as MLA has it")
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
        huge = max(huge, *(found[3] for found in times))
    threads = given.threads or first_touch.num_threads(given.workers)
    print(
        f"{gib:g} GiB in {given.directory}, {given.workers} workers of {threads} threads, medians of", end=" "
    )
    print(f"{given.rounds} rounds; {huge:.2f} GiB in huge pages; several memory nodes:", end=" ")
    print("yes" if first_touch.has_several_nodes() else "no")
    for name, found in speeds.items():
        print(f"{name:>14}: {statistics.median(found):6.2f} GiB/s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
