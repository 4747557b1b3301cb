"""Pages in a Valkey server and in a bucket: sharing, attach and detach, reset, a lost server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import servers
from support.servers import KINDS, TierServer
from support.sglang_pools import PAGE, Stand

MakeStand = Callable[..., Stand]
TOKENS = range(8 * PAGE)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierServer]:
    with servers.running(request.param, tmp_path / "server") as running:
        yield running


def stored(engine: Stand, seed: int = 1) -> list[bytes]:
    """Write `TOKENS` until all pages are stored."""
    pages: list[bytes] = []

    def attempt() -> bool:
        assert not pages or engine.storage.clear(), "the next pages have other bytes"
        pages[:] = engine.write(TOKENS, seed)
        return engine.stored_tokens == len(TOKENS)

    servers.until_stored(attempt)
    return pages


@pytest.mark.parametrize("kind", ["mha", "mamba"])
def test_two_engines_share_pages(stand: MakeStand, server: TierServer, kind: str) -> None:
    first, second = (stand(tiers=[server.url], kind=kind, deadline="60s") for _ in range(2))
    written = stored(first)
    assert first.stored_tokens == len(TOKENS)
    assert second.read(TOKENS) == written
    assert second.read(range(4 * PAGE)) == ([] if kind == "mamba" else written[:4]), "no state after page 4"


def test_pages_remain_after_detach_and_attach(stand: MakeStand, server: TierServer) -> None:
    sglang = stand(tiers=[server.url], deadline="60s")
    written = stored(sglang)
    sglang.controller.detach_storage_backend()
    assert sglang.storage is None
    sglang.attach()
    assert sglang.read(TOKENS) == written


def test_a_reset_holds_for_all_engines_and_after_attach(stand: MakeStand, server: TierServer) -> None:
    first, second = (stand(tiers=[server.url], deadline="60s") for _ in range(2))
    stored(first)
    assert second.query(TOKENS).storage_hit_count == len(TOKENS)
    assert first.storage.clear() is True
    assert first.read(TOKENS) == []
    assert second.read(TOKENS) == [], "the known pages belong to the old epoch"
    again = stored(first, seed=2)
    second.close()
    assert stand(tiers=[server.url], deadline="60s").read(TOKENS) == again


def test_a_lost_server_is_a_miss_and_a_failed_reset(stand: MakeStand, server: TierServer) -> None:
    sglang = stand(tiers=[server.url], deadline="3s")
    stored(sglang)
    assert sglang.stored_tokens == len(TOKENS)
    server.server.stop()
    assert sglang.read(TOKENS) == []
    sglang.write(range(1000, 1000 + PAGE))
    assert sglang.stored_tokens == 0
    assert sglang.storage.clear() is False


def test_a_disk_before_a_server(stand: MakeStand, server: TierServer, tmp_path: Path) -> None:
    tiers = [f"disk:{tmp_path / 'kv'}:64MiB", server.url]
    first = stand(tiers=tiers, deadline="60s")
    written = stored(first)
    first.close()
    shutil.rmtree(tmp_path / "kv")
    assert stand(tiers=tiers, deadline="60s").read(TOKENS) == written
