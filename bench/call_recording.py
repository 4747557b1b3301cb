"""Cost of recording a manager's calls: ``python bench/call_recording.py [--policy lru] [--format json]``.

Two managers serve the same requests in turns in one process; one of them records. Ratios are valid on other
machines, absolute times are not. The *life* of a request: begin, look up, load the hits, store the misses,
finish. The caches are full, and the first 60 % of a request's blocks begin an earlier request. Keys are lists
of new ``bytes``, made outside the timed region. Times are CPU time of the thread that calls the manager,
medians of 60 turns. The recorder's thread, which compresses and writes, is listed separately.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from control_plane_batches import LENGTHS, kvoffload_life, requests
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.core.manager import OffloadingManager

CAPACITY, KEY_BYTES = 100_000, 32
TURN_BLOCKS, TURNS = 4_096, 60
GOAL = 0.03


def measure(length: int, plain: OffloadingManager, recorded: RecordedManager) -> dict[str, Any]:
    """Measure the CPU time of requests of one length, with and without recording."""
    count = max(4, TURN_BLOCKS // length)
    spent: dict[int, list[int]] = {id(plain): [], id(recorded): []}
    writer = 0
    stream = requests(length, TURNS * count, "calls")
    before = recorded.recorder.path.stat().st_size
    for turn in range(TURNS):
        batch = list(itertools.islice(stream, count))
        for manager in (plain, recorded) if turn % 2 == 0 else (recorded, plain):
            copies = [[bytes(bytearray(key)) for key in keys] for keys in batch]
            process, thread = time.process_time_ns(), time.thread_time_ns()
            for keys in copies:
                kvoffload_life(manager, keys, False)
            thread = time.thread_time_ns() - thread
            spent[id(manager)].append(thread)
            writer += time.process_time_ns() - process - thread
    lives = TURNS * count
    return {
        "blocks": length,
        "plain_us": statistics.median(spent[id(plain)]) / count / 1e3,
        "recorded_us": statistics.median(spent[id(recorded)]) / count / 1e3,
        "overhead": statistics.median(spent[id(recorded)]) / statistics.median(spent[id(plain)]) - 1.0,
        "writer_us": writer / lives / 1e3,
        "bytes": (recorded.recorder.path.stat().st_size - before) / lives,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = OffloadingManager(CAPACITY, key_bytes=KEY_BYTES, policy=options.policy)
        recorder = CallRecorder(Path(folder) / "bench.calls", 1 << 34)
        recorded = RecordedManager(CAPACITY, recorder=recorder, key_bytes=KEY_BYTES, policy=options.policy)
        for keys in requests(1024, 2 * CAPACITY // 1024, "fill"):
            for manager in (plain, recorded):
                kvoffload_life(manager, [bytes(bytearray(key)) for key in keys], False)
        rows = [measure(length, plain, recorded) for length in LENGTHS]
        recorded.end_recording()
        if recorder.ended != "closed":
            sys.exit(f"the recording ended early: {recorder.ended}")
    if options.format == "json":
        print(json.dumps({"policy": options.policy, "goal": GOAL, "lives": rows}, indent=2))
        return
    print(f"policy {options.policy}; us of CPU a request; goal: overhead of at most {GOAL:.0%}")
    print(f"{'blocks':>7} {'plain':>9} {'recorded':>9} {'overhead':>9} {'writer':>9} {'bytes':>8}")
    for row in rows:
        print(
            f"{row['blocks']:>7} {row['plain_us']:>9.2f} {row['recorded_us']:>9.2f} {row['overhead']:>9.1%} "
            f"{row['writer_us']:>9.2f} {row['bytes']:>8.0f}"
        )


if __name__ == "__main__":
    main()
