"""A real ``lmcache server`` with our adapter, driven by LMCache's own benchmark client over shared memory.

The client stores the KV of requests, reads it back and compares checksums. A second server over the same
storage has an empty L1, so all its hits come from our tier.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import servers
from support.servers import KINDS
from support.timeouts import HANGS_S
from support.valkey_server import free_port

REQUESTS = 3
LMCACHE = [
    sys.executable,
    "-W",
    "ignore",
    "-c",
    "import sys; from lmcache.cli.main import main; sys.exit(main())",
]


def environment() -> dict[str, str]:
    paths = [path for path in sys.path if path.endswith("src")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
    }


class LMCacheServer:
    """A running server on free ports."""

    def __init__(self, tier: str, log: Path) -> None:
        self.port, self.http_port, self.log = free_port(), free_port(), log
        adapter = json.dumps(
            {
                "type": "plugin",
                "module_path": "kvoffload.integrations.lmcache",
                "class_name": "KVOffloadAdapter",
                "adapter_params": {"tiers": [tier], "identity": "a test", "deadline": "60s"},
            }
        )
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *LMCACHE, "server", "--host", "127.0.0.1", "--port", str(self.port),
                    "--http-port", str(self.http_port), "--disable-metrics", "--l1-size-gb", "0.1",
                    "--supported-transfer-mode", "engine_driven", "--eviction-policy", "LRU",
                    "--l2-adapter", adapter,
                ],
                env=environment(), stdout=out, stderr=out,
            )  # fmt: skip
        until = time.monotonic() + HANGS_S
        while True:
            try:
                self.get("healthcheck")
                return
            except OSError:
                assert self.process.poll() is None, log.read_text()
                assert time.monotonic() < until
                time.sleep(0.2)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/{path}", timeout=HANGS_S) as answer:
            return json.load(answer)

    def tier(self) -> dict[str, Any]:
        """The counters of our tier, in the server's status."""
        (adapter,) = self.get("status")["storage_manager"]["l2_adapters"]
        assert adapter["type"] == "KVOffloadAdapter"
        (counts,) = adapter["tiers"].values()
        return dict(counts)

    def bench(self) -> str:
        """Run LMCache's client; return its report."""
        done = subprocess.run(
            [
                *LMCACHE, "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{self.port}",
                "--url", f"http://127.0.0.1:{self.http_port}", "--mode", "cpu", "--num-blocks", "256",
                "--kvcache-shape-spec", "(2,256,16,2,64):bfloat16:2", "--block-size", "16",
                "--end", str(REQUESTS), "--interval", "0",
            ],
            env=environment(), capture_output=True, text=True, timeout=HANGS_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(HANGS_S) in (0, -15), self.log.read_text()


@contextmanager
def running(tier: str, log: Path) -> Iterator[LMCacheServer]:
    server = LMCacheServer(tier, log)
    try:
        yield server
        server.close()
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def tier_of(kind: str, directory: Path) -> Iterator[str]:
    if kind == "disk":
        yield f"disk:{directory}:256MiB"
        return
    with servers.running(kind, directory) as server:
        yield server.url


@pytest.mark.parametrize("kind", ["disk", *KINDS])
def test_a_second_server_serves_the_kv_of_the_first(kind: str, tmp_path: Path) -> None:
    with tier_of(kind, tmp_path / "tier") as tier:
        with running(tier, tmp_path / "log") as first:
            report = first.bench()
            stored = sums_of(report)
            assert report.count("cold] LOOKUP: 0/2 chunks hit") == REQUESTS
            assert report.count("CHECKSUM MATCH OK") == REQUESTS
            until = time.monotonic() + HANGS_S
            while first.tier().get("written", 0) < 2 * REQUESTS:  # LMCache writes to L2 in the background
                assert time.monotonic() < until
                time.sleep(0.1)
        with running(tier, tmp_path / "log") as second:
            report = second.bench()
            assert report.count("cold] LOOKUP: 2/2 chunks hit") == REQUESTS
            assert sums_of(report) == stored
            assert second.tier()["read"] >= 2 * REQUESTS


def sums_of(report: str) -> dict[str, str]:
    """The checksum of each request's KV."""
    sums = dict(re.findall(r"\[seq (\d+)/\w+\] CHECKSUM: (\w+)", report))
    assert len(sums) == REQUESTS, report
    return sums
