"""The canary on real servers: every planted fault is found, and no sound server raises an alarm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support.faulty_connectors import FAULT_FILE, FAULTS
from support.run_cli import kvoffload
from support.vllm_api_server import Server, running

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SOUND_RUNS = int(os.environ.get("KVOFFLOAD_SOUND_RUNS", "2"))
"""For each server, without a fault; 200 in `make soak`."""
SMALL = ("--token-ids", "10:1000", "--num-prompts", "12", "--chunk-tokens", "128", "--quiet")
"""The model's tokenizer knows no English."""


def run(server: Server, *options: str) -> tuple[int, dict[str, Any]]:
    done = kvoffload("canary", server.url, *SMALL, "--format", "json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def faulty(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, dtype: str, **options: Any
) -> Iterator[tuple[Server, Path]]:
    """A server whose connector has the fault named in a file, and this file."""
    fault = tmp_path / "fault"
    fault.write_text("none")
    monkeypatch.setenv(FAULT_FILE, str(fault))
    transfer = {"kv_connector": connector, "kv_connector_module_path": "support.faulty_connectors"}
    # 64 blocks: concurrent prompts fit, and a few fillers push them out. Prefill in chunks of two blocks.
    flags = {"--dtype": dtype, "--num-gpu-blocks-override": 64, "--max-num-batched-tokens": 64}
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with running(
        model,
        tmp_path / "log",
        connector=transfer,
        flags=flags,
        environment=environment,
        ram="64MiB",
        **options,
    ) as (server, _):
        yield server, fault


def check_sound(server: Server, count: int) -> None:
    """Sound servers raise no alarm, one seed after the other."""
    for seed in range(1, count + 1):
        code, report = run(server, "--seed", str(seed), *(() if seed % 2 else ("--may-reset",)))
        assert code == 0, (seed, report)
        assert report["verdict"] in ("equal", "within-noise"), (seed, report)


@pytest.mark.parametrize(
    ("model", "connector", "dtype"),
    [
        ("hybrid", "FaultyKVOffloadConnector", "float32"),
        ("llama", "FaultyKVOffloadConnector", "bfloat16"),
        ("llama", "FaultyOffloadingConnector", "float32"),
    ],
)
def test_every_fault_is_found_and_no_sound_server_raises_an_alarm(
    model: str,
    connector: str,
    dtype: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(model)
    with faulty(path, tmp_path, monkeypatch, connector, dtype) as (server, fault):
        check_sound(server, NUM_SOUND_RUNS)
        for name in FAULTS:
            fault.write_text(name)
            code, report = run(server)
            assert (code, report["verdict"]) == (1, "different"), (name, report)
            assert report["differences"][0]["phase"].startswith("from the tiers"), (name, report)
        fault.write_text("none")
        check_sound(server, 1)
