"""A real ``lmcache server`` with our adapter, driven by LMCache's own benchmark client over shared memory.

The client stores the KV of requests, reads it back and compares checksums. A second server over the same
storage has an empty L1, so all its hits come from our tier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import servers
from support.lmcache_server import LMCACHE, LMCacheServer, environment, forks, running
from support.servers import KINDS

REQUESTS = 3


def bench(server: LMCacheServer) -> str:
    """Run LMCache's client; return its report."""
    program = [
        *LMCACHE, "bench", "server", "--rpc-url", server.url,
        "--url", f"http://127.0.0.1:{server.http_port}", "--mode", "cpu", "--num-blocks", "256",
        "--kvcache-shape-spec", "(2,256,16,2,64):bfloat16:2", "--block-size", "16",
        "--end", str(REQUESTS), "--interval", "0",
    ]  # fmt: skip
    done = forks().run(program, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def tier_of(kind: str, directory: Path) -> Iterator[str]:
    if kind == "disk":
        yield f"disk:{directory}:256MiB"
        return
    with servers.running(kind, directory, "60s") as server:
        yield server.url


@pytest.mark.parametrize("kind", ["disk", *KINDS])
def test_a_second_server_serves_the_kv_of_the_first(kind: str, tmp_path: Path) -> None:
    stored = dict[str, str]()

    def attempt() -> bool:
        with running(tier, tmp_path / "log") as first:
            report = bench(first)
            hits = hits_of(report)
            assert report.count("CHECKSUM MATCH OK") == sum(hit < 2 for hit in hits), "one for each store"
            stored.update(sums_of(report))
            return first.written(2 * REQUESTS - sum(hits))

    with tier_of(kind, tmp_path / "tier") as tier:
        servers.until_stored(attempt)
        with running(tier, tmp_path / "log") as second:
            report = bench(second)
            assert hits_of(report) == [2] * REQUESTS
            assert sums_of(report) == stored
            assert second.tier()["read"] >= 2 * REQUESTS


def hits_of(report: str) -> list[int]:
    """Return the number of hits, of two chunks, at the first lookup of each request."""
    hits = [int(count) for count in re.findall(r"cold\] LOOKUP: (\d)/2 chunks hit", report)]
    assert len(hits) == REQUESTS, report
    return hits


def sums_of(report: str) -> dict[str, str]:
    """Return the checksum of each request's KV."""
    sums = dict(re.findall(r"\[seq (\d+)/\w+\] CHECKSUM: (\w+)", report))
    assert len(sums) == REQUESTS, report
    return sums
