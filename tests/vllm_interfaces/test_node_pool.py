"""Engines that may share a machine's pool, and the reasons why other engines may not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.integrations.vllm.shared import node_pool
from kvoffload.integrations.vllm.shared.options import parse_options
from kvoffload.node.pool_directory import PoolDirectory

Join = Callable[..., "PoolDirectory | None"]


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """A function that joins as an engine; `why` is the reason why its blocks cannot be kept."""
    joined: list[PoolDirectory] = []
    producer = SimpleNamespace(not_kept=lambda named: "")
    monkeypatch.setattr(node_pool, "Producer", SimpleNamespace(of=lambda *args, **keywords: producer))
    monkeypatch.setattr(node_pool, "fingerprint", lambda producer: "a model")
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def call(
        engine: str,
        *,
        vllm: str = "0.32.0",
        algorithm: str = "sha256",
        why: str = "",
        extension: str = "",
        sleeps: bool = False,
        **options: Any,
    ) -> PoolDirectory | None:
        producer.not_kept = lambda named: why
        facts: Any = SimpleNamespace(engine_id=engine, identity={"vllm": vllm}, blocks_per_chunk=1)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        )
        given = {"ram": "1GiB,shared=node,keep=60"} | options
        pool = node_pool.join_node_pool(
            parse_options(given), facts, config, sees_requests=True, root=tmp_path
        )
        if pool is not None:
            joined.append(pool)
        return pool

    yield call
    for pool in joined:
        pool.close()


def test_engines_with_equal_blocks_share(join: Join) -> None:
    first, second = join("one"), join("two")
    assert first is not None
    assert second is not None
    assert (first.path, first.number) == (second.path, 0)
    assert second.number == 1


def test_engines_with_different_shares_share(join: Join) -> None:
    first, second = join("one", ram="1GiB,shared=node,share=512MiB"), join("two", ram="1GiB,shared=node")
    assert first is not None
    assert second is not None
    assert first.path == second.path


def test_processes_of_an_engine_have_one_number(join: Join) -> None:
    scheduler, worker = join("one"), join("one")
    assert scheduler is not None
    assert worker is not None
    assert (scheduler.path, scheduler.number) == (worker.path, worker.number)


def test_a_difference_is_named(join: Join, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvoffload"):
        first, second = join("one", policy="lru"), join("two", policy="arc")
    assert first is not None
    assert second is not None
    assert first.path != second.path
    assert f"not shared with the pool {first.path.name.rsplit('-', 1)[-1]}: policy differs" in caplog.text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"vllm": "0.25.0"}, "set PYTHONHASHSEED to a number"),
        ({"algorithm": "xxhash"}, "--prefix-caching-hash-algo is xxhash; allowed: sha256, sha256_cbor"),
        ({"extension": "mine.Extension"}, "with worker_extension_cls the weights may change"),
        ({"sleeps": True}, "with enable_sleep_mode the weights may change"),
        ({"why": "the scales differ"}, "the scales differ"),
    ],
)
def test_an_engine_that_cannot_share_logs_the_reason(
    join: Join,
    given: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    assert join("one", **given) is None
    assert "RAM is NOT shared: " in caplog.text
    assert reason in caplog.text
    assert "this engine has its own pool of 1 GiB" in caplog.text


def test_ram_of_one_engine_joins_nothing(join: Join, tmp_path: Path) -> None:
    assert join("one", ram="1GiB") is None
    assert list(tmp_path.iterdir()) == []
