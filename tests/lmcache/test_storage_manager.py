"""LMCache's own storage manager, L1 memory and controllers, with our adapter as L2."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvoffload.tiers.waiting import wait_until
from support import servers
from support.servers import KINDS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lmcache_storage.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example, which makes a storage manager with our adapter."""
    spec = importlib.util.spec_from_file_location("lmcache_storage", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["disk", *KINDS])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield f"disk:{tmp_path / 'kv'}:64MiB"
        return
    with servers.running(request.param, tmp_path / "server", "60s") as running:
        yield running.url


def test_objects_in_a_tier_are_loaded_after_a_restart(example: ModuleType, tier: str) -> None:
    written: list[bytes] = []
    before = 0

    def attempt() -> bool:
        """Offer all objects to an empty L1. LMCache passes on the objects that the tier lacks."""
        nonlocal before
        first = example.storage_of(tier, deadline="60s")
        objects = first.reserve_write(example.KEYS, example.LAYOUT)
        assert len(objects) == len(example.KEYS)
        written.clear()
        for number, key in enumerate(example.KEYS):
            data = torch.randint(
                0, 256, (objects[key].get_size(),), generator=torch.Generator().manual_seed(number)
            )
            objects[key].raw_data[: len(data)] = data.to(torch.uint8)
            written.append(bytes(objects[key].byte_array))
        first.finish_write(example.KEYS)
        ((_, adapter),) = first.l2_adapters()

        def counts() -> dict[str, int]:
            (tier_counts,) = adapter.report_status()["tiers"].values()
            return {name: tier_counts.get(name, 0) for name in ("written", "failed")}

        assert wait_until(lambda: before + sum(counts().values()) >= len(example.KEYS), 60.0), counts()
        first.close()
        before += counts()["written"]
        return counts()["failed"] == 0

    servers.until_stored(attempt)
    second = example.storage_of(tier, deadline="60s")
    handle = second.submit_prefetch_task(example.SPEC)
    assert second.wait_prefetch_status(handle, 60.0)
    result = second.query_prefetch_status(handle)
    assert result.l2_hit_count == len(example.KEYS)
    with second.read_prefetched_results(example.KEYS) as loaded:
        assert [bytes(obj.byte_array) for obj in loaded] == written
    second.close()
