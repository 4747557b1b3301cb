"""Two vLLM servers that share a machine's pool: tokens as without offloading, hits across engines, kills."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvoffload.node.pool_directory import PoolStatus, locked, pools

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support.vllm_api_server import Server, kill, running
from support.vllm_traffic import PATIENCE_S, Expected

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

FOUR = 4
"""Prompts of nine whole blocks each; an engine has room for two of them."""
HITS, STORED = "vllm:kvoffload_hit_blocks_total", "vllm:kvoffload_stored_blocks_total"
SHARED = {"ram": {"size": "16MiB", "shared": "node", "keep": "10min"}}


def pools_of(model: Path) -> list[PoolStatus]:
    return [pool for pool in pools() if str(model) in str(pool.facts)]


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the tiny model; its path names the pools of the test."""
    path = tmp_path / "model"
    shutil.copytree(llama, path)
    yield path
    for pool in pools_of(path):
        with locked(pool.path.parent):
            shutil.rmtree(pool.path)


@contextlib.contextmanager
def server_of(
    model: Path, log: Path, flags: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Server, Any]]:
    """Run a server with its own engine id on the pool of the model."""
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm", "policy": "arc"}
    connector = {"engine_id": log.stem, "kv_connector_extra_config": {**extra, **SHARED, **options}}
    environment = {"PYTHONHASHSEED": "0"}
    with running(model, log, connector=connector, environment=environment, flags=flags) as pair:
        yield pair


def test_two_servers_share_one_pool(model: Path, on_llama: Expected, tmp_path: Path) -> None:
    """The second server's first request hits; a kill leaves the other correct; a restarted server hits."""
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    with server_of(model, tmp_path / "second.log") as (second, _):
        with server_of(model, tmp_path / "first.log") as (first, process):
            assert [first.stream(prompt) for prompt in prompts] == answers
            first.serve_until(STORED, 9 * FOUR, prompts[:1])
            [pool] = pools_of(model)
            assert len(pool.pids) == 2
            assert second.stream(prompts[0]) == answers[0]
            assert second.serve_until(HITS, 9, prompts[:1]).get(STORED, 0) == 0, "nothing was computed again"
            with ThreadPoolExecutor(2 * FOUR) as clients:
                cut_off = [clients.submit(first.stream, prompt) for prompt in prompts]
                served = [clients.submit(second.stream, prompt) for prompt in prompts]
                kill(process)
                assert [future.result() for future in served] == answers
            for future, answer in zip(cut_off, answers, strict=True):
                tokens = [] if future.exception() else future.result()
                assert tokens == answer[: len(tokens)], "a stream has ended with a wrong token"
        with ThreadPoolExecutor(FOUR) as clients:
            for _ in range(3):
                assert [*clients.map(second.stream, prompts)] == answers
    deadline = time.monotonic() + PATIENCE_S
    while [pool.pids for pool in pools_of(model)] != [[]]:  # an engine may end after its server
        assert time.monotonic() < deadline, pools_of(model)
        time.sleep(0.1)
    with server_of(model, tmp_path / "third.log") as (third, _):
        assert third.stream(prompts[0]) == answers[0]
        third.serve_until(HITS, 9, prompts[:1])
    for log in tmp_path.glob("*.log"):
        assert "shared in the pool" in log.read_text()
        assert "internal error" not in log.read_text()


def test_data_parallel_ranks_share_one_pool(model: Path, on_llama: Expected, tmp_path: Path) -> None:
    """An odd number of prompts takes turns, so that in the next round each rank gets the other's prompts."""
    prompts, answers = on_llama.prompts[:5], on_llama.answers[:5]
    with server_of(model, tmp_path / "ranks.log", flags={"--data-parallel-size": 2}) as (server, _):
        [pool] = pools_of(model)
        assert len(pool.pids) == 2
        for _ in range(3):
            assert [server.stream(prompt) for prompt in prompts] == answers
        metrics = server.serve_until(HITS, 9 * 5, prompts)
        assert metrics[STORED] == 9 * 5, "each block was stored once, by either rank"
