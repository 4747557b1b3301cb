"""Cost of rotating a call recording: ``python bench/call_rotation.py [--policy P] [--blocks N]``.

A manager serves requests of 16 blocks while its recorder's thread begins new parts of the recording. Prints:

    longest_ms   median and maximum of the longest request in periods of 0.2 s, with and without rotation
    start_ms     wall time to start a cut's process, in the recorder's thread
    state_s      CPU time to encode the state, in the cut's process
    replay_us    CPU time to replay a call, in the cut's process

A cut starts the real process and kills it at once; its state was computed before, by a replay of the calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from control_plane_batches import kvoffload_life, requests
from kvoffload.calls import parts
from kvoffload.calls.cut import CutProcess
from kvoffload.calls.file_format import FrameReader, FrameWriter, Header
from kvoffload.calls.recorded import RecordedManager
from kvoffload.calls.recorder import CallRecorder
from kvoffload.calls.replay import CallReplay
from kvoffload.calls.state import encode

PERIOD_S, ROUNDS, KEY_BYTES = 0.2, 10, 32
HEADERS: list[Header] = []
STATE = bytearray()
STARTS_MS: list[float] = []


class Started(CutProcess):
    """A cut that starts and kills its process, and writes a result computed before."""

    def __init__(self, part: Path, beginning: Path) -> None:
        start = time.perf_counter()
        super().__init__(part, beginning)
        STARTS_MS.append((time.perf_counter() - start) * 1e3)
        self._process.kill()
        header = replace(HEADERS[0], part=len(STARTS_MS) + 1, has_state=True)
        with beginning.open("wb") as file:
            file.write(FrameWriter().header(header))
            file.write(STATE)

    def poll(self) -> str | None:
        return ""


def recorded(path: Path, policy: str, blocks: int, start_cut: type[CutProcess]) -> RecordedManager:
    recorder = CallRecorder(path, 1 << 34, start_cut=start_cut)
    manager = RecordedManager(blocks, recorder=recorder, key_bytes=KEY_BYTES, policy=policy)
    for keys in requests(1024, blocks // 1024 + 2, "fill"):
        kvoffload_life(manager, [bytes(bytearray(key)) for key in keys], False)
    return manager


def longest_ms(manager: RecordedManager, stream: itertools.chain[list[bytes]]) -> float:
    """Serve requests for a period; return the time of the longest."""
    longest, end = 0.0, time.perf_counter() + PERIOD_S
    for keys in stream:
        new_keys = [bytes(bytearray(key)) for key in keys]
        start = time.perf_counter()
        kvoffload_life(manager, new_keys, False)
        stop = time.perf_counter()
        longest = max(longest, stop - start)
        if stop > end:
            break
    return longest * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="hazard")
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args()
    usual = parts.PARTS
    with tempfile.TemporaryDirectory() as folder:
        manager = recorded(Path(folder) / "first.calls", options.policy, options.blocks, Started)
        manager.end_recording()
        with FrameReader(manager.recorder.path) as reader:
            replay = CallReplay(reader)
            start = time.thread_time()
            num_calls = replay.run().num_calls
            replayed = time.thread_time()
            state = encode(replay.state())
            encoded = time.thread_time()
            HEADERS.append(reader.header)
            STATE.extend(FrameWriter().state(state))
        del replay, manager
        manager = recorded(Path(folder) / "second.calls", options.policy, options.blocks, Started)
        stream = itertools.chain(requests(16, 200_000, "serve"))
        without, during = [], []
        for _ in range(ROUNDS):
            without.append(longest_ms(manager, stream))
            parts.PARTS = 1 << 40
            during.append(longest_ms(manager, stream))
            parts.PARTS = usual
        manager.end_recording()
        num_parts = len(parts.parts_of(manager.recorder.path))
    result = {
        "policy": options.policy,
        "blocks": options.blocks,
        "parts": num_parts,
        "state_bytes": len(STATE),
        "state_s": round(encoded - replayed, 3),
        "replay_us": round((replayed - start) / num_calls * 1e6, 1),
        "start_ms": [round(statistics.median(STARTS_MS), 2), round(max(STARTS_MS), 2)],
        "longest_ms_without": [round(statistics.median(without), 2), round(max(without), 2)],
        "longest_ms_during": [round(statistics.median(during), 2), round(max(during), 2)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
