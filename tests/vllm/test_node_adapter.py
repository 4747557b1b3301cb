"""Our manager behind vLLM's interface for several engines on one pool, without engines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.node.pool_directory import SHARED_MEMORY, PoolDirectory
from support.vllm_world import MISS, PENDING, World, base, key

SHARED = {"ram": {"size": "1GiB", "shared": "node"}}
PATH = [key(number) for number in range(4)]


@pytest.fixture
def engine() -> Iterator[Callable[..., World]]:
    """A function that starts an engine on one pool of 16 blocks."""
    root = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
    made: list[World] = []
    directories: list[PoolDirectory] = []

    def start(**options: Any) -> World:
        directory = PoolDirectory.join({"test": 1}, f"engine-{len(made)}", keep_s=60.0, root=root)
        directories.append(directory)
        made.append(World(root, 16, directory, **(SHARED | options)))
        return made[-1]

    yield start
    for world, directory in zip(made, directories, strict=True):
        world.close()
        directory.close()
    shutil.rmtree(root)


def test_an_engine_finds_the_blocks_of_another(engine: Callable[..., World]) -> None:
    first, second = engine(), engine()
    assert first.serve("first", PATH) == (0, PATH)
    assert second.serve("second", PATH) == (4, [])
    assert second.manager.core.stats().stored == 4
    assert (first.manager.core.counters().stored, second.manager.core.counters().stored) == (4, 0)
    first.check()
    second.check()


def test_damage_by_another_engine_is_a_miss(engine: Callable[..., World]) -> None:
    first, second = engine(), engine()
    first.serve("first", PATH)
    slot = first.manager.core.slots_of([PATH[2]])[0]
    first.pool.part(0)[slot, 100] ^= 1
    assert second.serve("second", PATH) == (2, [PATH[2]]), "only the damaged block is stored again"


def test_a_block_that_another_engine_writes_is_awaited_until_the_deadline(
    engine: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvoffload.integrations.vllm.scheduler_side.lookups.time.monotonic", lambda: now[0])
    first, second = engine(), engine(tier_deadline_s=2.0)
    first.store(first.request("first", PATH), PATH)
    ctx = second.request("second", PATH)
    assert second.manager.lookup(PATH[0], ctx) is PENDING
    now[0] += 1.9
    assert second.manager.lookup(PATH[0], ctx) is PENDING
    now[0] += 0.2
    assert second.manager.lookup(PATH[0], ctx) is MISS


def test_a_reset_keeps_the_slots_of_transfers_that_still_run(engine: Callable[..., World]) -> None:
    """Otherwise a late copy of one engine would overwrite blocks of another before their checksums."""
    first, second = engine(), engine()
    ctx = first.request("first", PATH)
    writing = first.store(ctx, PATH).store_spec.block_ids.tolist()
    loading = first.request("load", [key(7)])
    second.serve("other", [key(7)])
    assert first.hits(loading, [key(7)]) == 1
    pinned = first.manager.prepare_load([key(7)], loading).block_ids.tolist()
    first.manager.reset_cache()
    plenty = [key(100 + number) for number in range(16)]
    busy = {*writing, *pinned}
    stored = second.store(second.request("second", plenty), plenty)
    assert busy.isdisjoint(stored.store_spec.block_ids.tolist())
    assert len(stored.keys_to_store) == 16 - len(busy)
    assert first.manager.core.stats().condemned == len(busy)
    second.manager.complete_store(set(stored.keys_to_store), second.request("second", plenty))
    # A transfer that began after the reset has ended, so all earlier transfers have ended.
    assert first.serve("third", [key(200)]) == (0, [key(200)])
    assert first.manager.core.stats().condemned == 0
    assert not first.manager.broken


def test_a_reset_by_another_engine_between_lookup_and_load(engine: Callable[..., World]) -> None:
    """The load fails, its request is computed, and offloading continues."""
    first, second = engine(), engine()
    first.serve("first", PATH)
    ctx = first.request("second", PATH)
    assert first.hits(ctx, PATH) == 4
    second.manager.reset_cache()
    assert first.manager.prepare_load(PATH, ctx).block_ids.tolist() == [-1] * 4
    first.manager.complete_load(set(PATH), ctx)
    assert first.hits(ctx, PATH) == 0
    first.manager.on_request_finished(ctx)
    assert first.serve("third", PATH) == (0, PATH)
    assert second.serve("fourth", PATH) == (4, [])
    first.check()


def test_requests_with_an_adapter_use_no_shared_pool(engine: Callable[..., World]) -> None:
    first, second = engine(), engine()
    first.serve("first", PATH)
    ctx = second.request("adapter", PATH)
    second.manager.note_adapter("adapter")
    assert second.manager.lookup(PATH[0], ctx) is MISS
    assert second.manager.lookup_prefix(PATH, ctx) == (0, False)
    assert second.manager.prepare_store([key(50)], ctx).keys_to_store == []
    second.manager.on_request_finished(ctx)
    assert second.manager.lookup(key(50), second.request("r", [key(50)])) is MISS


def test_keys_of_another_length_are_refused_once(engine: Callable[..., World]) -> None:
    """The pool's keys have 36 bytes: the engine continues without offloading."""
    first = engine()
    short = base.make_offload_key(bytes(8), 0)
    assert first.manager.lookup(short, first.request("r", [short])) is MISS
    assert first.manager.broken


def test_a_block_that_was_stored_again_is_verified_again(engine: Callable[..., World]) -> None:
    first, second = engine(), engine()
    first.serve("first", PATH)
    ctx = first.request("second", PATH)
    assert first.hits(ctx, PATH) == 4
    second.manager.core.discard(PATH)
    second.serve("third", PATH)
    slots = first.manager.core.slots_of(PATH)
    first.pool.part(0)[slots[0], 100] ^= 1
    assert first.hits(ctx, PATH) == 0, "the new block is damaged"
    first.manager.on_request_finished(ctx)
    assert not first.manager.broken


def test_an_engine_that_stops_after_an_error_releases_its_pins(engine: Callable[..., World]) -> None:
    first, second = engine(), engine()
    second.serve("first", PATH)
    storing, loading, checking = (first.request(name, keys) for name, keys in (
        ("store", [key(50)]), ("load", PATH[:1]), ("check", PATH[1:])
    ))  # fmt: skip
    first.store(storing, [key(50)])
    assert first.hits(loading, PATH[:1]) == 1
    first.manager.prepare_load(PATH[:1], loading)
    assert first.hits(checking, PATH[1:]) == 3
    first.manager.stop_after_error("test")
    assert first.manager.broken
    first.manager.complete_store({key(50)}, storing)
    first.manager.complete_load({PATH[0]}, loading)
    stats = second.manager.core.stats()
    assert (stats.writing, stats.condemned, stats.ready - stats.evictable) == (0, 0, 0)
    assert second.serve("again", PATH) == (4, [])
    assert second.serve("and again", [key(50)]) == (1, [])
