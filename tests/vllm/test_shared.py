"""Real engines that share a server: blocks of one are hits or misses of another, also during outages."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.valkey.login import PASSWORD
from kvoffload.tiers.valkey.resp import Login
from support import s3_server
from support.valkey_server import Server, clustered, redis, running, self_signed
from support.vllm_traffic import PATIENCE_S, Expected

pytest.importorskip("vllm.v1", reason="vllm is not installed here: `make test-vllm` builds an environment")

pytestmark = pytest.mark.filterwarnings("ignore")

FOUR = 4
"""Prompts of nine whole blocks each; RAM has room for 48 blocks, and the engine for two prompts."""


def engine_before(start_engine: Callable[..., Any], model: Path, url: str, **options: Any) -> Any:
    """Start an engine with empty RAM in front of the tier at `url`."""
    tier = {"url": url, "timeout": PATIENCE_S, "probe_timeout": PATIENCE_S, **options}
    return start_engine(model, {"ram": "6MiB", "tiers": [tier], "tier_deadline_s": PATIENCE_S})


def compute(expected: Expected, *place: Any, **options: Any) -> None:
    """Let an engine compute a prompt, then close it."""
    engine = engine_before(*place, **options)
    expected.check(engine, 1)
    engine.drain()
    assert engine.manager.core.settle(PATIENCE_S)
    assert engine.manager.core.tier_stats()[0].written == 9
    engine.close()


def find(expected: Expected, *place: Any, **options: Any) -> None:
    """Check that another engine answers the prompt from the tier."""
    engine = engine_before(*place, **options)
    expected.check(engine, 1)
    engine.drain()
    assert engine.manager.core.hit_blocks == [0, 9]
    engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def machine(start_engine: Callable[..., Any], server: Server) -> Callable[..., Any]:
    """A function that starts an engine with empty RAM in front of the server; default: long deadlines."""

    def start(model: Path, **options: Any) -> Any:
        return engine_before(start_engine, model, f"{server.url}/engines", **options)

    return start


@pytest.fixture(scope="module")
def computed(
    on_llama: Expected, llama: Path, machine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    """Answers to prompts whose blocks a closed engine has left in the server."""
    cache = pytest.MonkeyPatch()
    cache.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    engine = machine(llama)
    for prompt, answer in zip(on_llama.prompts[:FOUR], on_llama.answers, strict=False):
        assert engine.tokens([prompt])[0] == answer
        engine.drain()
        assert engine.manager.core.settle(PATIENCE_S)
    assert engine.manager.core.tier_stats()[0].written == FOUR * 9
    engine.close()
    cache.undo()
    return on_llama


def test_the_first_request_of_an_engine_hits_blocks_of_another(
    computed: Expected, llama: Path, machine: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The other engine has a copy of the model in another directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = machine(Path(shutil.copytree(llama, tmp_path / "copy")))
    computed.check(engine, 1)
    engine.drain()
    assert engine.manager.core.hit_blocks == [0, 9]
    computed.check(engine, FOUR)
    engine.drain()
    assert sum(engine.manager.core.hit_blocks) >= 9 * (FOUR - 1)
    engine.close()


def test_an_engine_on_an_empty_machine_hits_blocks_in_a_bucket(
    on_llama: Expected, start_engine: Callable[..., Any], llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An object has three blocks of 128 KiB, a prompt has nine blocks."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "s3").mkdir()
    with s3_server.running(s3_server.Rclone, tmp_path / "s3") as bucket:
        url = f"s3://{s3_server.BUCKET}/engines?endpoint={bucket.endpoint}&region=us-east-1"
        compute(on_llama, start_engine, llama, url, pack="384KiB")
        find(on_llama, start_engine, llama, url, pack="384KiB")


def test_over_tls_with_a_password_from_the_environment_or_a_file(
    on_llama: Expected, start_engine: Callable[..., Any], llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pem, key = self_signed(tmp_path)
    files = ("--tls-cert-file", pem, "--tls-key-file", key, "--tls-ca-cert-file", pem)
    options = (*files, "--tls-auth-clients", "no", "--requirepass", "hunter2")
    login = Login(password="hunter2", tls=ssl.create_default_context(cafile=pem))
    with running(tmp_path, *options, login=login, program=redis()) as server:
        url = f"{server.url}/engines"
        with monkeypatch.context() as environment:
            environment.setenv(PASSWORD, "hunter2")
            compute(on_llama, start_engine, llama, url, ca=pem)
        (tmp_path / "password").write_text("hunter2\n")
        find(on_llama, start_engine, llama, url, ca=pem, password_file=str(tmp_path / "password"))
    assert "hunter2" not in caplog.text


def test_over_a_cluster(
    on_llama: Expected, start_engine: Callable[..., Any], llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The nine blocks are on more than one of three masters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with clustered(tmp_path) as cluster:
        compute(on_llama, start_engine, llama, f"{cluster.url}/engines")
        assert sum(bool(master.blocks()) for master in cluster.masters) > 1
        find(on_llama, start_engine, llama, f"{cluster.url}/engines")


def test_engines_of_other_weights_get_nothing(
    computed: Expected, llama: Path, machine: Callable[..., Any]
) -> None:
    engine = machine(llama, identity="retrained")
    computed.check(engine, 1)
    engine.drain()
    assert engine.manager.core.hit_blocks == [0, 0]
    engine.close()


def test_damage_changes_nothing_but_the_hit_rate(
    computed: Expected, llama: Path, machine: Callable[..., Any], server: Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, name in enumerate(server.names()[::2]):
        server.execute("SETRANGE", name, str(64 + 997 * number), b"\x5a" * 50)
    engine = machine(llama)
    computed.check(engine, FOUR)
    assert engine.manager.core.tier_stats()[0].mismatches > 0
    engine.close()


def test_a_server_that_hangs_and_dies_costs_hits_and_nothing_else(
    computed: Expected, llama: Path, machine: Callable[..., Any], server: Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = machine(llama, timeout="300ms", probe_timeout="200ms")
    with server.stopped():
        assert engine.tokens(computed.prompts[:FOUR]) == computed.answers[:FOUR]
    server.stop()
    engine.forget_device()
    assert engine.tokens(computed.prompts[FOUR : 2 * FOUR]) == computed.answers[FOUR : 2 * FOUR]
    assert engine.manager.broken is False
    engine.close()
