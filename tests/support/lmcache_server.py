"""A real ``lmcache server`` whose L2 is our adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffload.tiers.waiting import wait_until
from support.launcher import Launcher, launcher
from support.timeouts import HANGS_S
from support.valkey_server import free_port

LMCACHE = ["-c", "import sys; from lmcache.cli.main import main; sys.exit(main())"]
"""Arguments of ``python`` for the command ``lmcache``."""


def environment() -> dict[str, str]:
    """Return the environment of LMCache's processes, which import kvoffload from this checkout."""
    paths = [path for path in sys.path if path.endswith("src")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
    }


def forks() -> Launcher:
    """Return the process that forks LMCache's clients, and engines with LMCache's connector."""
    return launcher(
        "support.vllm_engine",  # first: sets the number of threads before torch is imported
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "lmcache.cli.commands.bench.server_bench.command",
        "lmcache.integration.vllm.lmcache_mp_connector",
        "lmcache.v1.distributed.storage_manager",
    )


class LMCacheServer:
    """A running server on free ports, with one tier."""

    def __init__(self, tier: str, log: Path, *options: str) -> None:
        self.port, self.http_port, self.log = free_port(), free_port(), log
        adapter = json.dumps(
            {
                "type": "plugin",
                "module_path": "kvoffload.integrations.lmcache",
                "class_name": "KVOffloadAdapter",
                "adapter_params": {"tiers": [tier], "identity": "a test", "deadline": "60s"},
            }
        )
        arguments = [
            *LMCACHE, "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-port", str(self.http_port), "--disable-metrics", "--l1-size-gb", "0.1",
            "--supported-transfer-mode", "engine_driven", "--eviction-policy", "LRU",
            "--l2-adapter", adapter, *options,
        ]  # fmt: skip
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *arguments], env=environment(), stdout=out, stderr=out
            )
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
        """Return the answer of the HTTP server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/{path}", timeout=HANGS_S) as answer:
            return json.load(answer)

    @property
    def url(self) -> str:
        """The address for LMCache's clients."""
        return f"tcp://127.0.0.1:{self.port}"

    def tier(self) -> dict[str, Any]:
        """The counters of our tier, in the server's status."""
        (adapter,) = self.get("status")["storage_manager"]["l2_adapters"]
        assert adapter["type"] == "KVOffloadAdapter"
        (counts,) = adapter["tiers"].values()
        return dict(counts)

    def written(self, count: int) -> bool:
        """Wait until LMCache has passed `count` objects of a block to the tier; False if a write has failed.

        LMCache writes to L2 in the background, and does not repeat failed writes.
        """

        def ended() -> bool:
            counts = self.tier()
            return int(counts.get("written", 0) + counts.get("failed", 0)) >= count

        assert wait_until(ended, HANGS_S, 0.1), self.tier()
        return "failed" not in self.tier()

    def close(self) -> None:
        """Stop the server as an operator does."""
        self.process.terminate()
        assert self.process.wait(HANGS_S) in (0, -15), self.log.read_text()


@contextmanager
def running(tier: str, log: Path, *options: str) -> Iterator[LMCacheServer]:
    """Run a server with more options of the command line."""
    server = LMCacheServer(tier, log, *options)
    try:
        yield server
        server.close()
    finally:
        server.process.kill()
        server.process.wait()
