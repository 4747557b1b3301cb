"""The canary on real servers: it finds every planted fault, and raises no alarm on a sound server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")
from support.faulty_connectors import FAULT_FILE, FAULTS, changed
from support.run_cli import kvoffload
from support.vllm_api_server import Server, running
from support.vllm_needs import OWN_CONNECTORS, needs

# vLLM's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SOUND_RUNS = int(os.environ.get("KVOFFLOAD_SOUND_RUNS", "1"))
"""Sound runs for each server; 200 in `make soak`."""


def fifth(number: int) -> list[str]:
    """Return a fifth of the faults, because a run takes 5 s. `make soak` tests all faults on every server."""
    return FAULTS if NUM_SOUND_RUNS > 1 else FAULTS[number::5]


_RAM = {"cpu_bytes_to_use": 64 << 20}
_NATIVE = {"spec_name": "NativeSpec", "spec_module_path": "support.cpu_transfers", **_RAM}
_DISK = {"kv_offload_backend": "disk", "disk_capacity_bytes": 64 << 20, "use_page_cache": True}
SMALL = (
    *("--token-ids", "10:1000", "--num-prompts", "8", "--answer-tokens", "8"),
    *("--chunk-tokens", "128", "--quiet"),
)
"""Options for a model whose tokenizer knows no English."""


def run(server: Server, *options: str) -> tuple[int, dict[str, Any]]:
    done = kvoffload("canary", server.url, *SMALL, "--format", "json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def faulty(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connector: str,
    dtype: str,
    extra: dict[str, Any] | None,
) -> Iterator[tuple[Server, Path]]:
    """Run a server whose connector has the fault named in a file; yields the server and this file.

    Args:
        extra: options of vLLM's connectors; None for our specification.
    """
    fault = tmp_path / "fault"
    fault.write_text("none")
    monkeypatch.setenv(FAULT_FILE, str(fault))
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_connector_module_path": "support.faulty_connectors",
    }
    if extra is not None:
        transfer["kv_connector_module_path"] = "support.faulty_cpu_connectors"
        disk = {"disk_path": str(tmp_path / "disk")} if "kv_offload_backend" in extra else {}
        transfer["kv_connector_extra_config"] = {**extra, **disk}
    # 64 blocks: concurrent prompts fit, and a few fillers evict them. Prefill in chunks of two blocks.
    flags = {"--dtype": dtype, "--num-gpu-blocks-override": 64, "--max-num-batched-tokens": 64}
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with running(
        model,
        tmp_path / "log",
        connector=transfer,
        flags=flags,
        environment=environment,
        ram="64MiB",
    ) as (server, _):
        yield server, fault


def check_sound(server: Server, seeds: range) -> None:
    """Check that a sound server raises no alarm with any seed. Even seeds reset the device's cache."""
    for seed in seeds:
        code, report = run(server, "--seed", str(seed), *(() if seed % 2 else ("--may-reset",)))
        assert code == 0, (seed, report)
        assert report["verdict"] in ("equal", "within-noise"), (seed, report)


def check(server: Server, fault: Path, faults: list[str]) -> None:
    """Check that each fault changes bytes and is found, and that sound runs before and after are silent."""
    check_sound(server, range(1, NUM_SOUND_RUNS + 1))
    for name in faults:
        fault.write_text(name)
        code, report = run(server)
        assert changed(fault)[name] > 0, name
        assert (code, report["verdict"]) == (1, "different"), (name, report)
        assert report["differences"][0]["phase"].startswith("from the tiers"), (name, report)
    fault.write_text("none")
    check_sound(server, range(2, 3))
    assert set(changed(fault)) == set(faults), "no other load was changed"


WITHOUT_OUR_CODE = [
    ("llama", "FaultySimpleCPUOffloadConnector", "bfloat16", fifth(2), _RAM),
    ("hybrid", "FaultySimpleCPUOffloadConnector", "float32", fifth(3), _DISK),
    ("hybrid", "FaultyNativeConnector", "float32", fifth(4), _NATIVE),
]
"""vLLM's own schedulers, managers and workers; only streams and copies of CUDA are replaced."""


@pytest.mark.parametrize(
    ("model", "connector", "dtype", "faults", "extra"),
    [
        ("hybrid", "FaultyKVOffloadConnector", "float32", FAULTS, None),
        ("llama", "FaultyKVOffloadConnector", "bfloat16", fifth(0), None),
        ("llama", "FaultyOffloadingConnector", "float32", fifth(1), None),
        *(pytest.param(*case, marks=needs(*OWN_CONNECTORS)) for case in WITHOUT_OUR_CODE),
    ],
)
def test_every_fault_is_found_and_no_sound_server_raises_an_alarm(
    model: str,
    connector: str,
    dtype: str,
    faults: list[str],
    extra: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(model)
    with faulty(path, tmp_path, monkeypatch, connector, dtype, extra) as (server, fault):
        check(server, fault, faults)
