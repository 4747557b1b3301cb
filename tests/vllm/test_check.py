"""``replay --check`` compares the replay of a real server's recording with the server's metrics."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import kvoffload
from support.vllm_api_server import running
from support.vllm_needs import CONNECTOR, needs
from support.vllm_traffic import Expected

pytestmark = [pytest.mark.filterwarnings("ignore"), needs(*CONNECTOR)]

RAM_BLOCKS, GPU_BLOCKS, BLOCK_BYTES = 40, 23, 128 << 10
CONNECTOR_OF_OURS = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.integrations.vllm.connector",
}


def replayed(recording: Path, server: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Run ``replay --check`` with the server's set-up; return the exit code and the check."""
    done = kvoffload(
        "replay", recording, "--no-data", "--quiet", "--policy", "lru", "--capacity", str(RAM_BLOCKS),
        "--device-blocks", str(GPU_BLOCKS), "--check", server, "--format", "json", *options,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["check"]


def test_a_replay_predicts_the_server(llama: Path, on_llama: Expected, tmp_path: Path) -> None:
    """Serve one request at a time: only the blocks of the running answer differ, which a replay omits."""
    rng, path, begin = random.Random(37), tmp_path / "kv.jsonl", tmp_path / "metrics"
    with running(
        llama, tmp_path / "log", connector=CONNECTOR_OF_OURS,
        policy="lru", record=str(path), ram=RAM_BLOCKS * BLOCK_BYTES,
    ) as (server, _):  # fmt: skip
        for number in range(24):
            server.stream(on_llama.prompts[rng.randrange(6)])
            if number == 5:
                begin.write_text(server.get("/metrics"))
        _, check = replayed(path, server.url)
        rows = {row["name"]: row for row in check["rows"]}
        assert rows["requests"]["server"] == rows["requests"]["predicted"] == 24
        assert rows["prompt tokens"]["difference"] == 0
        on_gpu, in_ram = rows["hits on the GPU"], rows["hits in RAM"]
        assert in_ram["server"] > 0.1
        assert abs(on_gpu["difference"]) < 0.06
        assert abs(on_gpu["difference"] + in_ram["difference"]) < 0.02
        assert check["settings"] == []
        code, check = replayed(path, server.url, "--capacity", "20")
        assert (code, check["verdict"]) == (1, "different")
        assert check["settings"] == ["RAM: the server has 40 blocks, predicted are 20: --capacity 40"]
        _, check = replayed(path, server.url, "--bytes-per-token", str(BLOCK_BYTES // 32))
        prices = tmp_path / "prices.toml"
        prices.write_text('[ram]\nmodule = "1MiB"\nslots = 8\n[ssd]\nslots = 0\n')
        done = kvoffload(
            "plan", path, "--gpus", "1", "--gpu-tokens", str(32 * GPU_BLOCKS), "--prices", prices, "--quiet",
            "--bytes-per-token", str(BLOCK_BYTES // 32), "--stores", "on-compute", "--admissions", "all",
            "--jobs", "1", "--check", server.url, "--format", "json",
        )  # fmt: skip
        answer = json.loads(done.stdout)
        assert answer["check"] == check
        assert (answer["present"]["policy"], answer["present"]["ram_blocks"]) == ("lru", RAM_BLOCKS)
        code, check = replayed(path, server.url, "--since", str(begin))
        assert (code, check["verdict"]) == (3, "not-comparable"), "the recording began earlier"
