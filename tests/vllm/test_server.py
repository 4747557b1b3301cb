"""vLLM's OpenAI server, run like users do: processes, HTTP, streams, metrics, and a kill."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffload.calibration import server_speed as calibration

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support.vllm_api_server import kill, ours_in_shared_memory, running, typed
from support.vllm_traffic import PATIENCE_S, Expected

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

FOUR = 4
"""Prompts of nine whole blocks each; the engine has room for two of them."""
BLOCK_BYTES = 4 * 2 * 2 * 64 * 32 * 4
"""Bytes of a block: keys and values of 4 layers, 2 heads, 64 numbers and 32 tokens, in float32."""


def test_a_second_life_answers_from_the_disk_of_the_first(
    llama: Path, on_llama: Expected, tmp_path: Path
) -> None:
    """A server killed under load leaves nothing in memory; the next server loads its blocks from disk."""
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    tier = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "32MiB"}
    options = {"tiers": [tier], "tier_deadline_s": PATIENCE_S}
    with running(llama, tmp_path / "first.log", own_worker=True, **options) as (server, process):
        assert not ours_in_shared_memory(tmp_path), "the pool no longer has a name"
        with ThreadPoolExecutor(FOUR) as clients:
            for _ in range(4):
                assert [*clients.map(server.stream, prompts)] == answers
        server.serve_until("vllm:kvoffload_tier_written_total", 36, prompts)
        metrics = server.serve_until("vllm:kvoffload_stored_blocks_total", 36, prompts)
        assert metrics["vllm:kvoffload_tier_written_total"] == 36
        assert metrics["vllm:kvoffload_stored_blocks_total"] == 36
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics["vllm:kvoffload_capacity_blocks"] == 128
        assert metrics["vllm:kvoffload_ready_blocks"] == 36
        assert metrics["vllm:kv_offload_load_bytes_total"] > 0
        assert metrics["vllm:kv_offload_load_time_total"] > 0
        assert metrics["vllm:kv_offload_store_bytes_total"] == 36 * BLOCK_BYTES
        assert metrics["vllm:kvoffload_policy_state:target_t1_blocks"] >= 0
        greeting = (tmp_path / "first.log").read_text()
        assert re.search(
            r"kvoffload: 128 blocks of 32 tokens, room for 4,096 tokens in 16 MiB; policy arc", greeting
        )
        with ThreadPoolExecutor(FOUR) as clients:
            cut_off = [clients.submit(server.stream, prompt) for prompt in prompts]
            kill(process)
        for future, answer in zip(cut_off, answers, strict=True):
            tokens = [] if future.exception() else future.result()
            assert tokens == answer[: len(tokens)], "a stream has ended with a wrong token"
    assert not ours_in_shared_memory(tmp_path)
    with running(llama, tmp_path / "second.log", **options) as (server, _):
        assert [server.stream(prompt) for prompt in prompts] == answers
        metrics = server.serve_until("vllm:kvoffload_tier_hits_total", 36, prompts)
        assert metrics["vllm:kvoffload_tier_hits_total"] == 36
    assert not ours_in_shared_memory(tmp_path)


def test_two_workers_share_each_block(llama: Path, on_llama: Expected, tmp_path: Path) -> None:
    """Each worker has half of the heads; blocks are verified. Answers equal the ones of a single worker."""
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    with running(llama, tmp_path / "server.log", workers=2, verify="always") as (server, _):
        assert not ours_in_shared_memory(tmp_path)
        with ThreadPoolExecutor(FOUR) as clients:
            for _ in range(3):
                assert [*clients.map(server.stream, prompts)] == answers
        metrics = server.metrics()
        assert metrics["vllm:kvoffload_hit_blocks_total"] > 0
        assert metrics.get("vllm:kvoffload_verification_failures_total", 0) == 0
    assert not ours_in_shared_memory(tmp_path)


def test_calibrate_measures_a_server(llama: Path, tmp_path: Path) -> None:
    """Prompts are token ids, have the intended number of tokens and hit no cache; answers are streamed."""
    with running(llama, tmp_path / "server.log") as (server, _):
        measured = calibration.Server(server.url)
        assert (measured.model, measured.max_tokens) == ("m", 512)
        before = server.metrics()
        times = calibration.time_server(measured, (64, 128, 256, 400, 2048), 1)
        after = server.metrics()
    # The tiny model's time is mostly noise, so no speed is fitted to it.
    ((order, seconds),) = times.rounds
    assert sorted(order) == [64, 128, 256, 400]
    assert min(seconds) > 0
    assert min(times.decode_rates) > 0
    computed, hits = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
    assert after[computed] - before.get(computed, 0) == 64 + 64 + 128 + 256 + 400
    assert after[hits] == before.get(hits, 0)


def test_the_command_of_the_readme_works_in_a_shell(llama: Path, on_llama: Expected, tmp_path: Path) -> None:
    """Runs the README's command with another model, and with a size that fits every machine.

    The server starts new interpreters, as for users; the servers of other tests are forked.
    """
    line = typed("README.md")
    assert "--ram 64GiB" in line
    prompts, answers = on_llama.prompts[:FOUR], on_llama.answers[:FOUR]
    line = line.replace("64GiB", "16MiB")
    with running(llama, tmp_path / "server.log", line=line, fresh=True) as (server, _):
        for _ in range(3):
            assert [server.stream(prompt) for prompt in prompts] == answers
        server.serve_until("vllm:kvoffload_hit_blocks_total", 1, prompts)
